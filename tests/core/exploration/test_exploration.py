"""Complete explorations that are small enough for every run of the tests.

`make explore` runs the larger ones (docs/design/exploration.md).
"""

from __future__ import annotations

from dataclasses import replace

import pytest

from elastic.core.coordinator import event_handlers, transitions
from elastic.core.policy import progress_watchdog
from elastic.core.protocol import messages as m
from elastic.core.recovery.solver import Solver
from tests.core.exploration import coordinator_model
from tests.core.exploration.cluster import HEAD, Cluster, State
from tests.core.exploration.explorer import Explorer, Result


def explore(cluster: Cluster) -> Result:
    return Explorer(cluster).run(cluster.running())


def check(result: Result) -> None:
    assert result.complete
    assert not result.violations, result.violations
    assert not result.stuck, result.stuck_trace


def test_a_job_without_faults_always_ends() -> None:
    """From the first node that joins until all agents have ended, in the smallest steps."""
    cluster = Cluster(2, 0)
    result = Explorer(cluster).run(cluster.start)
    check(result)
    assert result.states > 500 and not result.interventions


@pytest.mark.parametrize("kind", ["drop", "duplicate", "takeover"])
def test_the_start_survives_one_fault(kind: str) -> None:
    cluster = Cluster(2, 1, kinds=frozenset({kind}), coarse=True, until_end=True)
    result = Explorer(cluster).run(cluster.start)
    check(result)
    assert result.faults[kind] > 10 and not result.interventions


@pytest.mark.parametrize("kind", ["drop", "takeover", "node crash"])
def test_two_nodes_and_a_spare_survive_one_fault(kind: str) -> None:
    result = explore(Cluster(3, 1, kinds=frozenset({kind}), coarse=True, until_end=True))
    check(result)
    assert result.faults[kind] > 10 and not result.interventions


@pytest.mark.parametrize("kind", ["drop", "takeover"])
def test_two_pipelines_survive_one_fault(kind: str) -> None:
    kinds = frozenset({kind})
    result = explore(
        Cluster(3, 1, kinds=kinds, coarse=True, until_end=True, pipelines=2, microbatches=2)
    )
    check(result)
    assert result.faults[kind] > 10 and not result.interventions


def two_pipelines_and_a_spare() -> Cluster:
    """Return a job in which the spare replaces one of two pipelines of one node."""
    kinds = frozenset({"node crash"})
    return Cluster(
        3,
        1,
        kinds=kinds,
        steps=2,
        coarse=True,
        until_end=True,
        pipelines=2,
        microbatches=3,
        spares=1,
    )


def test_a_pipeline_goes_on_while_another_one_is_repaired() -> None:
    cluster = two_pipelines_and_a_spare()
    check(explore(cluster))
    nodes, messages = cluster.nodes.values, cluster.messages.values
    assert any(assignment.promised for assignment in cluster.model.assignments)
    assert any(cluster.model.goes_on(node.worker) for node in nodes)
    reports = [one for one in messages if isinstance(one, m.NodeReport)]
    assert any(one.complete for report in reports for one in report.halted)


def test_a_promised_microbatch_that_counts_twice_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """If copies with promised micro-batches were used, a layer would have one of them twice."""
    allowed = Solver._common_ledgers
    monkeypatch.setattr(
        Solver,
        "_common_ledgers",
        lambda self, layer, version: allowed(replace(self, promised=0), layer, version),
    )
    result = explore(two_pipelines_and_a_spare())
    assert any(text.startswith("step ") and ", layer " in text for text in result.violations)


@pytest.mark.parametrize("reduced", [False, True])
def test_an_epoch_that_the_coordinator_lost_is_found(
    reduced: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without the rule against a store that lost its last writes, nodes are ahead for long."""
    monkeypatch.setattr(transitions, "_regain_epoch", lambda state, now: None)
    sequences = frozenset({("worker crash", "lost save")})
    cluster = Cluster(2, 2, sequences=sequences, coarse=True, until_end=True, reduced=reduced)
    result = Explorer(cluster, 2_000).run(cluster.running())
    assert any("halted in epoch 2, the coordinator is running" in x for x in result.violations)


@pytest.mark.parametrize("reduced", [False, True])
def test_a_stuck_state_is_found(reduced: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without repeated orders and without the watchdog, a lost order is waited for for ever."""
    monkeypatch.setattr(event_handlers, "_missed_orders", lambda state, node: ())
    monkeypatch.setattr(progress_watchdog, "check_progress", lambda state, now: None)
    kinds = frozenset({"drop"})
    cluster = Cluster(2, 1, kinds=kinds, coarse=True, until_end=True, reduced=reduced)
    assert Explorer(cluster).run(cluster.start).stuck


@pytest.mark.parametrize(
    ("nodes", "kind"), [(2, "cut"), (2, "worker crash"), (3, "node crash"), (3, "lost save")]
)
def test_orders_that_are_left_out_make_no_difference(nodes: int, kind: str) -> None:
    """The reduced search meets each state of the full one, except for orders that arrived."""
    kinds = frozenset({kind})
    cluster = Cluster(nodes, 1, kinds=kinds, coarse=True, until_end=True, reduced=True)
    few = Explorer(cluster)
    result = few.run(cluster.running())
    check(result)
    cluster.reduced = False
    every = Explorer(cluster)
    full = every.run(cluster.running())
    check(full)
    assert result.states < full.states * 3 / 4 and result.interventions == full.interventions
    assert result.faults == full.faults
    cluster.reduced = True
    assert few.numbers.keys() <= every.numbers.keys()
    assert {x for x in few.numbers if cluster.settled(x) != x and not x[0]} == set()
    for state in {cluster.settled(state) for state in every.order} - few.numbers.keys():
        assert not few.numbers.keys().isdisjoint(after_orders(cluster, state))


def after_orders(cluster: Cluster, state: State) -> set[State]:
    """Return the states that are reached if only orders arrive."""
    found, todo = {state}, [state]
    while todo:
        state = todo.pop()
        for i, name in enumerate(cluster.names):
            pair = state[HEAD + 2 * i : HEAD + 2 * i + 2]
            for label, _, *after in cluster.solo(*pair):
                if isinstance(label, tuple) and label[:2] == (name, "<"):
                    at = HEAD + 2 * i
                    new = cluster.settled((*state[:at], *after, *state[at + 2 :]))
                    if new not in found:
                        found.add(new)
                        todo.append(new)
    return found


def test_values_that_nothing_reads_change_no_step(monkeypatch: pytest.MonkeyPatch) -> None:
    """With and without the copies in old reports, the same phases are met."""
    found = []
    for keeps in (False, True):
        if keeps:
            monkeypatch.setattr(coordinator_model, "_may_use_copies", lambda state, report: True)
        cluster = Cluster(3, 1, kinds=frozenset({"takeover"}), coarse=True, until_end=True)
        cluster.model.keeps_assignments = not keeps
        explorer = Explorer(cluster)
        result = explorer.run(cluster.running())
        check(result)
        found.append((result, {outline(cluster, state) for state in explorer.order}))
    (few, outlines), (many, others) = found
    assert few.states < many.states and few.interventions == many.interventions
    assert outlines == others


def outline(cluster: Cluster, state: State) -> tuple[object, ...]:
    """Return the phases and epochs of all parts, and the kinds of messages under way."""
    job = cluster.states.values[state[2]]
    members = [(mb.report.phase, mb.report.epoch, mb.connected) for mb in job.members.values()]
    parts: list[object] = [job.phase, job.epoch, *members]
    for at in range(HEAD, len(state), 2):
        node, link = cluster.nodes.values[state[at]], cluster.links.values[state[at + 1]]
        ways = [[type(cluster.messages.values[x]) for x in way] for way in (link.up, link.down)]
        parts += [node.alive, node.agent.phase, node.agent.epoch, node.worker.phase, link.phase]
        parts += [node.worker.version, *map(tuple, ways)]
    return tuple(parts)
