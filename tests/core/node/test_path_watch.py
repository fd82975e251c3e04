"""The watch of paths: when a peer is unreachable, and which peers are asked."""

from __future__ import annotations

import pytest

from elastic.core.node.path_watch import (
    MAX_WATCHED,
    PathWatch,
    attempt_s,
    attempted,
    changed_vaults,
    interval_s,
    peers_to_watch,
)
from elastic.core.protocol.timeouts import DEFAULT_TIMEOUTS, budget
from elastic.domain.types import Pipeline, Plan, Stage, Unit

LIMITS = DEFAULT_TIMEOUTS


def fail_for(seconds: float, attempt: float, watch: PathWatch | None = None) -> PathWatch:
    """A watch after failures, each of which took `attempt` seconds, over a time."""
    watch, now = watch or PathWatch(0.0, 0.0), 0.0
    while now < seconds:
        began = now
        now += max(attempt, 1e-3)
        watch = attempted(watch, "no answer", began, now, LIMITS)
        now = max(now, began + interval_s(LIMITS))
    return watch


@pytest.mark.parametrize("silence_s", [0.5, 3.0, 30.0])
def test_two_attempts_fit_before_the_limit(silence_s: float) -> None:
    limits = budget(silence_s)
    assert interval_s(limits) + 2 * attempt_s(limits) <= 1.1 * limits.path_s


@pytest.mark.parametrize("attempt", [0.0, attempt_s(LIMITS)])
def test_a_peer_without_answers_is_unreachable(attempt: float) -> None:
    watch = fail_for(1.5 * LIMITS.path_s, attempt)
    assert watch.silent_s(1.5 * LIMITS.path_s, LIMITS) >= LIMITS.path_s
    assert not fail_for(0.5 * LIMITS.path_s, attempt).silent_s(0.6 * LIMITS.path_s, LIMITS)
    assert not attempted(watch, "", 6.0, 6.1, LIMITS).silent_s(60.0, LIMITS)


def test_one_slow_attempt_is_no_proof() -> None:
    watch = attempted(PathWatch(0.0, 0.0), "slow", 0.9, 0.9 + attempt_s(LIMITS), LIMITS)
    assert watch.failures == 1 and not watch.silent_s(100.0, LIMITS)


@pytest.mark.parametrize("where", ["between attempts", "in an attempt"])
def test_a_node_that_was_delayed_itself_blames_nobody(where: str) -> None:
    watch = fail_for(0.7 * LIMITS.path_s, 0.0)
    began = watch.ended + (60.0 if where == "between attempts" else 0.1)
    ended = began + (0.1 if where == "between attempts" else 60.0)
    watch = attempted(watch, "timed out", began, ended, LIMITS)
    assert watch.failures == 0 and not watch.silent_s(ended + 0.1, LIMITS)


def test_few_peers_are_all_asked() -> None:
    names = [f"n{i}" for i in range(MAX_WATCHED + 1)]
    assert set(peers_to_watch("n0", None, names)) == set(names[1:])


def test_of_many_peers_the_near_ones_are_asked() -> None:
    names = [f"n{i:03}" for i in range(100)]
    stages = tuple(Stage(Unit(name, 0), i % 50, i % 50 + 1) for i, name in enumerate(names))
    pipelines = (Pipeline(stages[:50], (0,)), Pipeline(stages[50:], (1,)))
    plan = Plan(
        epoch=1,
        n_layers=50,
        n_microbatches=2,
        tp=1,
        pipelines=pipelines,
        peers=(("n010", "n090"), ("n080", "n010")),
    )
    asked = peers_to_watch("n010", plan, names, unreachable=["n033"])
    assert len(asked) == MAX_WATCHED and "n010" not in asked
    assert asked[0] == "n033"
    assert {"n090", "n080", "n060", "n009", "n011"} <= set(asked)
    assert len(peers_to_watch("spare", plan, [*names, "spare"])) == MAX_WATCHED


def test_a_peer_with_a_new_vault_is_asked_anew() -> None:
    before = {"a": "h:1", "b": "h:2", "c": "h:3"}
    after = {"a": "h:1", "b": "h:9", "d": "h:4"}
    assert changed_vaults(before, after) == (("b", "c"), {"b": "h:9", "d": "h:4"})
