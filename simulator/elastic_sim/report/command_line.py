"""Command lines that repeat a replay or a sweep."""

from __future__ import annotations

import shlex
from collections.abc import Sequence

from elastic_sim.steps.scenario import Scenario


def replay_command(scenario: Scenario, policies: Sequence[str], seeds: int) -> str:
    """Return the command that repeats a replay."""
    words = ["elastic-sim", "replay"]
    if scenario.market is None:
        words.append(scenario.trace)
    words += ["--model", scenario.model, *_shared_words(scenario, policies, seeds)]
    if scenario.market is not None:
        words += ["--mtbf", f"{scenario.market.mtbf_s:g}s"]
    return shlex.join(words)


def sweep_command(scenarios: Sequence[Scenario], policies: Sequence[str], seeds: int) -> str:
    """Return the command that repeats a sweep."""
    traces = dict.fromkeys(one.trace for one in scenarios if one.trace)
    markets = [one.market for one in scenarios if one.market is not None]
    rates = dict.fromkeys(f"{market.mtbf_s:g}s" for market in markets)
    words = ["elastic-sim", "sweep", "OUT"]
    words += [word for trace in traces for word in ("--trace", trace)]
    words += ["--mtbf", ",".join(rates)] if rates else []
    words += ["--model", ",".join(dict.fromkeys(one.model for one in scenarios))]
    synthetic = next((one for one in scenarios if one.market is not None), scenarios[0])
    return shlex.join([*words, *_shared_words(synthetic, policies, seeds)])


def _shared_words(scenario: Scenario, policies: Sequence[str], seeds: int) -> list[str]:
    """Return the options for policies, seeds, values other than defaults, and a failure rate."""
    default, market = Scenario(), scenario.market
    options = [
        ("--policy", ",".join(policies), True),
        ("--seeds", seeds, True),
        ("--microbatches", scenario.microbatches, scenario.microbatches != default.microbatches),
        ("--nodes-of", ",".join(scenario.nodes_of), scenario.nodes_of != default.nodes_of),
        ("--from", f"{scenario.first_s:g}s", bool(scenario.first_s)),
        ("--to", f"{scenario.last_s:g}s", bool(scenario.last_s)),
        ("--notice", f"{scenario.notice_s:g}s", scenario.notice_s >= 0),
    ]
    if market is not None:
        bulk = ",".join(f"{n}:{weight:g}" for n, weight in market.bulk)
        options += [
            ("--nodes", market.nodes, True),
            ("--repair", f"{market.repair_s:g}s", True),
            ("--duration", f"{scenario.duration_s:g}s", True),
            ("--bulk", bulk, market.bulk != ((1, 1.0),)),
        ]
    options += [("--physics", text, True) for text in scenario.physics]
    return [word for name, value, needed in options if needed for word in (name, str(value))]
