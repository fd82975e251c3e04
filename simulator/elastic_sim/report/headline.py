"""A replay in one sentence, which claims no more than its seeds allow."""

from __future__ import annotations

from collections.abc import Sequence

from elastic_sim.replay.replay import ORACLE, Mean, PolicySummary, mean_of
from elastic_sim.report import facts


def headline(found: Sequence[PolicySummary]) -> str:
    """How ours does against the oracle and against the best other policy, seed by seed."""
    real = [one for one in found if one.policy not in (ORACLE, "ceiling")]
    if not real:
        return f"The {found[0].policy} makes {found[0].samples_per_s.value:.4g} samples/s."
    ours = [one for one in real if facts.about(one.policy).ours]
    first = max(ours or real, key=lambda one: one.goodput.value)
    name = "Our policy" if ours else f"Our model of {first.policy}"
    text = (
        f"{name} makes {first.samples_per_s.value:.4g} samples/s, {percent(first.goodput.value)} of what the oracle "
        "makes with the same nodes"
    )
    others = [one for one in real if one is not first and not (ours and one in ours)]
    if not others:
        return f"{text}."
    return f"{text}; {compared(first, max(others, key=lambda one: one.goodput.value))}."


def compared(first: PolicySummary, other: PolicySummary) -> str:
    """Samples of one over those of the other, in pairs of the same seed."""
    name = other.policy if not facts.is_model(facts.about(other.policy)) else f"our model of {other.policy}"
    pairs = [(a.samples, b.samples) for a, b in zip(first.runs, other.runs, strict=True)]
    if not all(b for _, b in pairs):
        return f"{name}, the next best, makes none in some runs"
    ratio = ahead(first, other)
    word = "more" if ratio.value >= 0 else "less"
    text = f"that is {percent(abs(ratio.value))} {word} than {name}, the best of the others"
    if len(pairs) < 2:
        return text + " (one seed: no interval)"
    low, high = ratio.value - ratio.margin, ratio.value + ratio.margin
    sure = "" if low > 0 or high < 0 else ", so either may be ahead"
    return (
        f"{text} (95 % interval over {len(pairs)} seeds: {percent(low, '+')} to {percent(high, '+')}{sure})"
    )


def ahead(first: PolicySummary, other: PolicySummary) -> Mean:
    """By which part one makes more than the other, in pairs of the same seed."""
    return mean_of([a.samples / b.samples - 1 for a, b in zip(first.runs, other.runs, strict=True)])


def percent(share: float, sign: str = "") -> str:
    """91.1 %, without a break."""
    return f"{100 * share:{sign}.1f}\u00a0%"
