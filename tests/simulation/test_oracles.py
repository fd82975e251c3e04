"""The excuses of `tests.simulation.oracles` are narrow."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping, Sequence
from typing import Any

import pytest

from tests.simulation.oracles import (
    Injected,
    Reported,
    checkpoints_missing,
    healthy_lost,
    out_of_memory,
    steps_unreported,
    too_many_epochs,
)


def lost(at: float, joined: float = -1.0) -> list[dict[str, Any]]:
    """A loss of node1; `joined`: a join before it."""
    found = [{"kind": "joined", "at": joined, "node": "node1"}] if joined >= 0 else []
    return [*found, {"kind": "lost", "at": at, "node": "node1", "why": "silent"}]


@pytest.mark.parametrize(
    ("fault", "at", "right"),
    [
        (Injected("power", 5.0, 1e9, "node1"), 60.0, True),
        (Injected("power", 5.0, 1e9, "node1"), 4.0, False),
        (Injected("power", 5.0, 1e9, "node0"), 8.0, False),
        (Injected("back", 5.0, 6.0, "node1"), 8.0, True),
        (Injected("back", 5.0, 6.0, "node1"), 30.0, True),
        (Injected("cut-out", 5.0, 11.0, "node1"), 8.5, True),
        (Injected("cut-out", 5.0, 6.0, "node1"), 8.5, False),
        (Injected("pause", 5.0, 11.0, "node1"), 30.0, False),
        (Injected("cut-pair", 5.0, 20.0, "node1"), 10.0, False),
        (Injected("reset", 5.0, 5.0, "node1"), 5.5, False),
        (Injected("disk-full", 5.0, 20.0, "node1"), 10.0, False),
        (Injected("lead-cut", 5.0, 20.0, ""), 10.0, False),
        (Injected("lead-pause", 5.0, 20.0, ""), 10.0, False),
    ],
)
def test_only_silence_and_death_explain_a_loss(fault: Injected, at: float, right: bool) -> None:
    assert healthy_lost(lost(at), [fault]) == [] or not right
    assert bool(healthy_lost(lost(at), [fault])) is not right


def test_a_loss_is_written_when_the_store_is_back() -> None:
    cut, away = Injected("cut-out", 7.0, 13.0, "node1"), Injected("store-away", 5.0, 21.0, "")
    assert not healthy_lost(lost(22.0), [cut, away])
    assert healthy_lost(lost(22.0), [cut]) and healthy_lost(lost(22.0), [away])
    assert healthy_lost(lost(30.0), [cut, away])


def test_a_loss_that_the_store_forgot_is_found_again() -> None:
    """A paused node is lost, and its next incarnation joins a coordinator that knows only the
    former one."""
    pause = [Injected("pause", 2.0, 8.0, "node1")]
    again = {"kind": "lost", "at": 20.9, "node": "node1", "why": "came back", "loss": "replaced"}
    before = lost(4.8, joined=0.4)
    assert not healthy_lost([*before, again], pause)
    assert not healthy_lost([*before, {**again, "loss": "silent"}], pause)
    joined = {"kind": "joined", "at": 8.4, "node": "node1"}
    assert healthy_lost([*before, joined, again], pause)


def test_the_store_forgot_that_another_incarnation_joined() -> None:
    killed, forgets = Injected("back", 1.2, 3.7, "node1"), Injected("lead-amnesia", 5.4, 11.4, "")
    events = [*lost(1.5, joined=1.2), *lost(16.2, joined=5.3)]
    assert not healthy_lost(events, [killed, forgets])
    assert healthy_lost(events, [killed])
    assert healthy_lost(events, [killed, dataclasses.replace(forgets, at=6.4)])
    assert healthy_lost(events, [killed, dataclasses.replace(forgets, at=5.2)])


def test_an_agent_that_ends_closes_its_connections_a_moment_before() -> None:
    assert not healthy_lost(lost(5.0), [Injected("left", 5.05, math.inf, "node1")])
    assert healthy_lost(lost(5.0), [Injected("left", 5.5, math.inf, "node1")])
    assert healthy_lost(lost(5.0), [Injected("kill", 5.05, math.inf, "node1")])


def test_a_drained_node_that_the_store_forgot_is_lost() -> None:
    drained = {"kind": "drained", "at": 4.0, "node": "node1"}
    joined = {"kind": "joined", "at": 5.0, "node": "node1"}
    assert not healthy_lost([drained, *lost(9.0)], [])
    assert healthy_lost([drained, joined, *lost(9.0)], [])


def test_a_former_incarnation_is_lost_late() -> None:
    """The coordinator hears nobody until the killed node has returned."""
    back = [Injected("back", 5.0, 6.0, "node1")]
    assert not healthy_lost(lost(30.0, joined=1.0), back)
    assert healthy_lost(lost(30.0, joined=7.0), back)


def test_a_reset_while_the_node_is_cut_off_is_a_loss_soon() -> None:
    cut, reset = Injected("cut-in", 5.0, 6.0, "node1"), Injected("reset", 5.1, 5.1, "node1")
    assert not healthy_lost(lost(5.4), [cut, reset])
    assert healthy_lost(lost(5.4), [cut]) and healthy_lost(lost(5.4), [reset])
    assert healthy_lost(lost(5.4), [cut, Injected("reset", 5.9, 5.9, "node1")])


def test_two_cuts_with_a_short_gap_are_one_silence() -> None:
    cuts = [Injected("cut-in", 5.0, 6.0, "node1"), Injected("cut-out", 7.0, 8.0, "node1")]
    assert not healthy_lost(lost(9.0), cuts)
    assert healthy_lost(lost(9.0), cuts[:1]) and healthy_lost(lost(9.0), cuts[1:])


def epochs(kinds: list[str], pause_s: float, steps: tuple[int, ...] = ()) -> list[dict[str, Any]]:
    """An epoch after every pause, and a finished step after those in `steps`."""
    found: list[dict[str, Any]] = []
    for number, kind in enumerate(kinds):
        common = {"at": number * pause_s, "epoch": number}
        found.append({"kind": "halt", "cause_kind": kind, "cause": kind, **common})
        found.append({"kind": "plan", **common})
        found += [{"kind": "step", **common}] if number in steps else []
    return found


def test_five_epochs_per_minute_are_the_limit() -> None:
    assert not too_many_epochs(epochs(["contact"] * 5, 1.0))
    assert too_many_epochs(epochs(["contact"] * 6, 1.0))
    assert not too_many_epochs(epochs(["contact"] * 6, 13.0))
    assert not too_many_epochs(epochs(["contact"] * 6, 1.0, steps=(2,)))
    assert not too_many_epochs(epochs(["contact", "lost", "join"] * 3, 1.0))
    assert not too_many_epochs(epochs(["contact"] * 5 + ["resume"], 1.0)), "no failure"


STEPS = [{"kind": "step", "at": 10.0 * step, "step": step - 1} for step in (2, 4, 6)]
REPORTS = {step: [Reported(10.0 * (step + 1), "node0")] for step in (1, 3, 5)}


def given_up(at: float) -> dict[str, Any]:
    return {"kind": "checkpoint-lost", "at": at, "step": 4, "why": "no space"}


NAMED = [*STEPS, given_up(70.0)]


def missing(
    events: list[dict[str, Any]],
    *faults: Injected,
    complete: set[int],
    reports: Mapping[int, Sequence[Reported]] = REPORTS,
) -> list[str]:
    return checkpoints_missing(events, faults, (2, 4, 6), frozenset(complete), reports)


def test_a_disk_fault_excuses_only_the_checkpoint_of_its_time() -> None:
    full = Injected("disk-full", 39.0, 41.0, "node1")
    assert not missing(NAMED, full, complete={2, 6})
    assert missing(NAMED, full, complete={6})
    assert missing(STEPS, full, complete={2, 6}), "no event names it"
    assert missing(NAMED, Injected("disk-full", 1.0, 3.0, "node1"), complete={2, 6})
    assert missing(NAMED, complete={2, 6})
    late = Injected("disk-full", 59.0, 80.0, "node1")
    assert missing(NAMED, full, late, complete={2, 4}), "the last one is never excused"


@pytest.mark.parametrize("kind", ["power", "kill", "left", "unwritten"])
def test_a_node_that_is_gone_excuses_only_the_checkpoint_of_its_time(kind: str) -> None:
    """The step before the missing checkpoint is finished at 40 s."""
    assert missing(NAMED, Injected(kind, 1.0, math.inf, "node1"), complete={2, 6})
    assert not missing(NAMED, Injected(kind, 38.0, math.inf, "node1"), complete={2, 6})
    assert not missing(NAMED, Injected(kind, 42.0, math.inf, "node1"), complete={2, 6})
    assert missing(NAMED, Injected(kind, 58.0, math.inf, "node1"), complete={2, 6})


def test_only_a_fault_before_a_checkpoint_is_given_up_explains_it() -> None:
    early = [*STEPS, given_up(40.1)]
    slow = Injected("disk-slow", 54.9, 55.2, "node2")
    assert not missing(NAMED, slow, complete={2, 6})
    assert missing(early, slow, complete={2, 6})
    gone = {"kind": "lost", "at": 59.0, "node": "node1"}
    assert not missing([*NAMED, gone], complete={2, 6})
    assert missing([*early, gone], complete={2, 6})


def test_the_report_of_a_checkpoint_is_lost_with_the_queue_of_its_agent() -> None:
    """The step is finished at 40.0 s. The coordinator hears of it a second later, because the
    connections of a node were reset, and another node is killed meanwhile and returns."""
    back = Injected("back", 40.1, 40.4, "node1")
    late = [*STEPS, {"kind": "step", "at": 41.0, "step": 3}, given_up(46.0)]
    late.remove(STEPS[1])
    assert not missing(late, back, complete={2, 6})
    assert missing(late, back, complete={2, 6}, reports={3: [Reported(40.5, "node0")]})


def test_a_missing_checkpoint_without_an_event_needs_a_bad_disk_of_the_coordinator() -> None:
    assert not missing(STEPS, Injected("lead-disk", 39.0, 45.0, ""), complete={2, 6})
    assert missing(STEPS, Injected("lead-disk", 1.0, 3.0, ""), complete={2, 6})


def test_a_node_whose_last_join_was_forgotten_is_not_back() -> None:
    joined = {"kind": "joined", "at": 45.0, "node": "node1"}
    events = [*STEPS, {"kind": "lost", "at": 42.0, "node": "node1"}, joined, given_up(46.0)]
    assert missing(events, complete={2, 6})
    assert not missing(events, Injected("lead-amnesia", 45.3, 51.0, ""), complete={2, 6})
    assert missing(events, Injected("lead-amnesia", 47.0, 51.0, ""), complete={2, 6})


def test_a_node_that_is_not_back_at_the_end_excuses_what_it_had_to_write() -> None:
    gone = [*NAMED, {"kind": "lost", "at": 45.0, "node": "node1"}]
    assert not missing(gone, complete={2, 6})
    assert missing([*gone, {"kind": "joined", "at": 50.0, "node": "node1"}], complete={2, 6})
    before = {"kind": "lost", "at": 35.0, "node": "node1"}
    assert missing([*NAMED, before], complete={2, 6}), "it was lost before the step"


def test_a_step_is_missing_only_if_both_reports_were_lost_before_anybody_heard_them() -> None:
    cut = Injected("lead-cut", 9.0, 20.0, "")
    first, second = (Injected("kill", 12.0 + n, math.inf, f"node{n}") for n in range(2))
    both = {step: [Reported(10.0, "node0"), Reported(10.0, "node1")] for step in range(6)}

    def unreported(*faults: Injected, reports: Mapping[int, Sequence[Reported]] = both) -> bool:
        known = [{"kind": "step", "at": 10.0, "step": step} for step in (0, 1, 2, 4, 5)]
        found = steps_unreported(known, faults, 6, reports)
        assert found in ([], [3])
        return bool(found)

    assert not unreported(cut, first, second)
    assert unreported(cut, first) and unreported(cut)
    assert unreported(first, second), "they had time to report it"
    soon = dataclasses.replace(first, at=10.1), dataclasses.replace(second, at=10.2)
    assert not unreported(*soon)
    assert unreported(cut, first, dataclasses.replace(second, at=30.0)), "it was heard again"
    assert unreported(cut, first, second, reports={}), "nobody reported it"


def test_only_a_majority_without_memory_may_end_the_job() -> None:
    joined = [{"kind": "joined", "at": 1.0, "node": f"node{n}"} for n in range(3)]
    one, two = (Injected("memory-full", 5.0, 30.0, f"node{n}") for n in range(2))
    why = "workers crashed 4 times; VaultFull: no room"
    assert out_of_memory(joined, [one, two], 20.0, why)
    assert not out_of_memory(joined, [one], 20.0, why)
    assert out_of_memory(joined, [one], 20.0, f"{why}; no plan fits without it")
    assert not out_of_memory(joined, [one, two], 40.0, why)
    away = Injected("lead-pause", 29.0, 35.0, "")
    assert out_of_memory(joined, [one, two, away], 36.0, why), "it was decided late"
    assert not out_of_memory(joined, [one, two, dataclasses.replace(away, at=33.0)], 36.0, why)
    assert not out_of_memory(joined, [one, two], 20.0, "workers crashed 4 times; OSError")
    lost_one = {"kind": "lost", "at": 9.0, "node": "node2"}
    assert out_of_memory([*joined, lost_one], [one], 20.0, why)
