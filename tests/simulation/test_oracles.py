"""The excuses of `tests.simulation.oracles` are narrow."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping, Sequence
from typing import Any

import pytest

from elastic.domain.types import JobSpec, LayerSpec
from tests.simulation.model import expected_figures, figure_of
from tests.simulation.oracles import (
    Injected,
    Reported,
    checkpoints_missing,
    evaluations_wrong,
    out_of_memory,
    scopes,
    scopes_unfinished,
    steps_unreported,
    too_many_epochs,
)


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


def test_nodes_outside_enter_the_epoch_or_another_one_follows() -> None:
    halt = {"kind": "halt", "at": 1.0, "epoch": 2, "outside": ["a", "b"]}
    complete = {"kind": "recovery", "at": 5.0, "epoch": 2}
    after = {"kind": "halt", "at": 3.0, "epoch": 3}
    both, late = {2: {"a": 2.0, "b": 4.0}}, {2: {"a": 2.0, "b": 6.0}}
    assert not scopes_unfinished([halt, complete], both, ())
    assert not scopes_unfinished([halt], late, ()), "the job ended first"
    assert not scopes_unfinished([halt, after], {}, ())
    assert scopes_unfinished([halt, complete], late, ()) == [
        "['b'] stayed outside, and no epoch follows 2"
    ]
    assert scopes_unfinished([halt], {2: {"a": 2.0}}, ()), "no epoch follows"
    assert not scopes_unfinished([halt], {}, [Injected("unrecorded", 1.0, 9.0, "lead")])
    assert scopes([halt, complete, after]) == {"begun": 1, "complete": 1}


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
    members: Sequence[str] = ("node0",),
) -> list[str]:
    due = (2, 4, 6)
    return checkpoints_missing(
        events, faults, due, frozenset(complete), reports, frozenset(members)
    )


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
    """It was bad until the coordinator ended."""
    assert not missing(STEPS, Injected("unrecorded", 39.0, 45.0, ""), complete={2, 6})
    assert missing(STEPS, Injected("unrecorded", 1.0, 3.0, ""), complete={2, 6})
    assert missing(STEPS, Injected("lead-disk", 39.0, 45.0, ""), complete={2, 6})


def test_a_node_that_is_not_back_at_the_end_excuses_what_it_had_to_write() -> None:
    """The store may have forgotten that it joined."""
    gone = [*NAMED, {"kind": "lost", "at": 45.0, "node": "node1"}]
    joined = [*gone, {"kind": "joined", "at": 50.0, "node": "node1"}]
    assert not missing(gone, complete={2, 6})
    assert not missing(joined, complete={2, 6})
    assert missing(joined, complete={2, 6}, members=("node0", "node1"))
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
    unwritten = Injected("unrecorded", 15.0, 25.0, "")
    assert not unreported(cut, unwritten) and not unreported(dataclasses.replace(unwritten, at=9.0))
    assert unreported(unwritten), "it was written before"
    assert unreported(dataclasses.replace(unwritten, at=3.0, until=8.0))


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


SPEC = JobSpec(
    layers=(LayerSpec(3000, 6000, 50, 1.0, 2.0),) * 2,
    n_microbatches=4,
    n_steps=3,
    evaluate_every=2,
    evaluation_microbatches=3,
)
DONE: list[dict[str, Any]] = [{"kind": "step", "step": step} for step in range(3)]
ENDED = {"kind": "end"}


def evaluated(version: int, added: float = 0.0) -> dict[str, Any]:
    figures = expected_figures(SPEC, version)
    loss = figures[figure_of(1)] + added
    return {"kind": "evaluation", "step": version, "loss": loss, "figures": figures}


def test_each_evaluation_is_reported_once_with_its_step() -> None:
    both = [evaluated(2), evaluated(3)]
    assert not evaluations_wrong([*DONE, *both, ENDED], SPEC)
    assert not evaluations_wrong([*DONE, evaluated(2)], SPEC), "no event of the end"
    assert not evaluations_wrong([*DONE[:2], evaluated(3), ENDED], SPEC), "no event of step 2"
    assert not evaluations_wrong([*DONE, DONE[2], evaluated(2), *both, ENDED], SPEC), "done again"
    again = [{"kind": "plan", "step": 2}, DONE[2]]
    assert not evaluations_wrong([*DONE, *again, *both, ENDED], SPEC), "the parameters were known"
    assert evaluations_wrong([*DONE, *again, evaluated(3), ENDED], SPEC), "never reported"
    assert evaluations_wrong([*DONE, DONE[2], *both, ENDED], SPEC), "no epoch began there"
    (missing,) = evaluations_wrong([*DONE, evaluated(3), ENDED], SPEC)
    assert missing == "the evaluation after step 2 is reported 0 times, its step 1 times"
    assert evaluations_wrong([*DONE, evaluated(2), ENDED], SPEC), "the last one is missing"
    assert evaluations_wrong([*DONE, evaluated(2), *both, ENDED], SPEC), "doubled"
    assert evaluations_wrong([*DONE, evaluated(1), *both, ENDED], SPEC), "not due"


def test_an_evaluation_has_the_values_of_a_run_without_failures() -> None:
    (wrong,) = evaluations_wrong([*DONE, evaluated(2, 1.0), evaluated(3), ENDED], SPEC)
    assert wrong.startswith("the evaluation after step 2 has other values")
    other = {**evaluated(2), "figures": expected_figures(SPEC, 1)}
    assert evaluations_wrong([*DONE, other, evaluated(3), ENDED], SPEC)
