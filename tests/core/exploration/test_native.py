"""The search in C finds the same as the search in Python."""

from __future__ import annotations

import shutil

import pytest

from elastic.core.coordinator import event_handlers
from elastic.core.policy import progress_watchdog
from tests.core.exploration import cluster
from tests.core.exploration.cluster import Cluster
from tests.core.exploration.explorer import Explorer, Result
from tests.core.exploration.native import NativeExplorer

pytestmark = pytest.mark.skipif(shutil.which("cc") is None, reason="there is no C compiler")


def compare(
    nodes: int,
    *sequences: tuple[str, ...],
    from_start: bool = False,
    reduced: bool = False,
    pipelines: int = 1,
    microbatches: int = 1,
    spares: int | None = None,
) -> Result:
    """Do both searches, and compare all their figures."""

    def new_cluster() -> Cluster:
        kinds = frozenset(sequences)
        return Cluster(
            nodes,
            0,
            sequences=kinds,
            coarse=True,
            until_end=True,
            reduced=reduced,
            pipelines=pipelines,
            microbatches=microbatches,
            spares=spares,
        )

    one, two = new_cluster(), new_cluster()
    found = Explorer(one).run(one.start if from_start else one.running())
    native = NativeExplorer(two)
    other = native.run(two.start if from_start else two.running())
    native.close()
    for name in ("states", "transitions", "complete", "faults", "goals", "stuck", "interventions"):
        assert getattr(found, name) == getattr(other, name), name
    assert {text: len(trace) for text, trace in found.violations.items()} == {
        text: len(trace) for text, trace in other.violations.items()
    }
    assert len(found.stuck_trace) == len(other.stuck_trace)
    return other


@pytest.mark.parametrize("reduced", [False, True])
@pytest.mark.parametrize("kind", ["drop", "duplicate", "takeover", "lost save"])
def test_both_searches_find_the_same_after_one_fault(kind: str, reduced: bool) -> None:
    assert compare(3, (kind,), reduced=reduced).faults[kind] > 10


def test_both_searches_find_the_same_with_two_pipelines() -> None:
    compare(3, ("node crash",), reduced=True, pipelines=2, microbatches=2, spares=1)


def test_both_searches_leave_out_the_same_orders() -> None:
    every, few = (compare(2, ("cut",), reduced=reduced) for reduced in (False, True))
    assert few.states < every.states * 3 / 4


def test_both_searches_find_the_same_after_two_faults() -> None:
    compare(2, ("takeover", "duplicate"), ("drop", "drop"))


def test_both_searches_find_the_same_stuck_states(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(event_handlers, "_missed_orders", lambda state, node: ())
    monkeypatch.setattr(progress_watchdog, "check_progress", lambda state, now: None)
    assert compare(2, ("drop",), from_start=True).stuck
    assert compare(2, ("drop",), from_start=True, reduced=True).stuck


def test_messages_that_pile_up_end_the_search(monkeypatch: pytest.MonkeyPatch) -> None:
    """A search with a queue that grows for ever says so, and is not taken for a large one."""
    monkeypatch.setattr(cluster, "MOST_WAITING", 1)
    for found in (Explorer, NativeExplorer):
        job = Cluster(2, 1, coarse=True, until_end=True)
        with pytest.raises(RuntimeError, match="2 messages wait on one connection"):
            found(job).run(job.running())
