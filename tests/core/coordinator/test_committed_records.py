"""The record of a step proves its commit, but not that of a later run of the same step."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from elastic.core.job.state import JobPhase, JobState, LogEntry, ProgressWatch
from elastic.core.protocol import messages as m
from elastic.core.protocol.messages import NodePhase
from elastic.domain.types import GRADIENT, STATE, Copy, StepRecord
from tests.core.coordinator.test_divergence import running
from tests.core.coordinator.test_transitions import send_report
from tests.core.state_access import assignment_of, plan_of

STEP = 9
COMMITTED = StepRecord(STEP, 0.5, 2.0, 1.0)


def copies(state: JobState, node: str, epoch: int, ledger: frozenset[int]) -> tuple[Copy, ...]:
    """States of version STEP of the node's layers, and gradients of that step with `ledger`."""
    kinds = ((STATE, frozenset[int]()), (GRADIENT, ledger)) if ledger else ((STATE, ledger),)
    losses = tuple((index, 1.0) for index in sorted(ledger))
    return tuple(
        Copy(
            kind, layer, 0, STEP, epoch, node, 1000 * epoch + 10 * layer + n, 8, "",
            held, losses, node,
        )
        for _, _, stage in plan_of(state).stages() if stage.unit.node == node
        for layer in stage.layers
        for n, (kind, held) in enumerate(kinds, 1)
    )  # fmt: skip


def recovered(
    state: JobState,
    epoch: int,
    ledgers: Mapping[str, frozenset[int]],
    halted: Mapping[str, m.Halted],
) -> JobState:
    """Lose contact in `epoch`, whose copies all vaults have, and install the next one."""
    first, *_ = ledgers
    state, _, _ = send_report(
        state.of(watch=ProgressWatch()), first, phase=NodePhase.STARTING, cause="crash"
    )
    assert state.phase is JobPhase.HALTING
    for node, ledger in ledgers.items():
        state, _, _ = send_report(
            state,
            node,
            phase=NodePhase.HALTED,
            epoch=state.epoch,
            inventory=copies(state, node, epoch, ledger),
            halted=(halted[node],),
        )
    assert state.phase is JobPhase.INSTALLING
    return state


def undone() -> JobState:
    """Step 9 was committed, but its gradients and the first states 10 are lost: it runs again."""
    state = running()
    nodes = plan_of(state).nodes()
    halted = dict.fromkeys(nodes, m.Halted(state.epoch + 1, STEP, record=COMMITTED))
    state = recovered(state, 1, dict.fromkeys(nodes, frozenset()), halted)
    assert assignment_of(state).step == STEP and assignment_of(state).record is None
    return state


def ledgers_of(state: JobState) -> dict[str, frozenset[int]]:
    """Ledgers that have all micro-batches of the step together."""
    plan = plan_of(state)
    everything, nodes = range(plan.n_microbatches), plan.nodes()
    return {n: frozenset(everything[k :: len(nodes)]) for k, n in enumerate(nodes)}


def test_a_step_that_runs_again_is_not_committed_yet() -> None:
    """All its micro-batches are done, and contact is lost in the reduction, before the commit."""
    state = undone()
    assert state.newest_step == STEP - 1
    ledgers = ledgers_of(state)
    halted = dict.fromkeys(ledgers, m.Halted(state.epoch + 1, STEP))
    state = recovered(state, 2, ledgers, halted)
    assert assignment_of(state).step == STEP


def test_a_worker_that_missed_an_installation_reports_the_former_commit() -> None:
    state = undone()
    ledgers = ledgers_of(state)
    late, other = ledgers
    halted = {
        late: m.Halted(state.epoch, STEP, record=COMMITTED),
        other: m.Halted(state.epoch + 1, STEP),
    }
    state = recovered(state, 2, ledgers, halted)
    assert assignment_of(state).step == STEP


def test_a_step_that_only_lost_nodes_committed_is_logged() -> None:
    """The last layer's copy has the record; without it the step's loss is not known."""
    for record in (COMMITTED, None):
        state = running().of(logged_step=STEP - 1, record=None)
        (kept, lost), last = plan_of(state).nodes(), plan_of(state).n_layers - 1
        newer = tuple(
            replace(
                copy, step=STEP + 1, sequence=copy.sequence + 500, node=kept,
                record=record if copy.layer == last else None,
            )
            for copy in copies(state, lost, 1, frozenset())
        )  # fmt: skip
        state, _, _ = send_report(state, lost, phase=NodePhase.STARTING, cause="crash")
        inventory = {kept: (*copies(state, kept, 1, frozenset()), *newer), lost: ()}
        actions: tuple[object, ...] = ()
        for node, found in inventory.items():
            halted = (m.Halted(state.epoch, STEP),) if node == kept else ()
            state, actions, _ = send_report(
                state, node, phase=NodePhase.HALTED, epoch=state.epoch,
                inventory=found, halted=halted,
            )  # fmt: skip
        assert assignment_of(state).step == STEP + 1
        steps = [a.data for a in actions if isinstance(a, LogEntry) and a.kind == "step"]
        assert [(s["step"], s["loss"]) for s in steps] == ([(STEP, 1.0)] if record else [])


def test_the_commit_of_the_second_run_counts() -> None:
    state = undone()
    ledgers = ledgers_of(state)
    again = StepRecord(STEP, 0.25, 4.0, 1.0)
    halted = dict.fromkeys(ledgers, m.Halted(state.epoch + 1, STEP, record=again))
    state = recovered(state, 2, ledgers, halted)
    assert (assignment_of(state).step, assignment_of(state).record) == (STEP + 1, again)
    assert state.record == again
