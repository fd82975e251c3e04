"""Who is taken into a job: pre-flight, refusals, standing."""

from __future__ import annotations

from dataclasses import replace

from elastic.core import messages as m
from elastic.core import quarantine
from elastic.core.coordinator import transition
from elastic.core.job import Reported, Send
from elastic.core.messages import NodePhase
from elastic.core.vitals import Check, Preflight, Refused
from tests.core.test_health import running, told


def asks(flight: Preflight, node: str = "new") -> Reported:
    info = replace(running().members["node0"].report.info, node=node, incarnation=f"{node}.1")
    return Reported(m.NodeReport(info, NodePhase.EMPTY, 0, preflight=flight), True)


BAD = Check("disk:memory", 0.0, "bytes", False, True, "/dev/shm has 0 bytes left: make room")
WARN = Check("disk:checkpoints", 0.0, "bytes", False, False, "/c has 0 bytes left: make room")


def test_a_node_that_fails_its_preflight_is_refused_and_may_try_again() -> None:
    state = running()
    waits = []
    for _ in range(3):
        state, actions, reason = transition(state, asks(Preflight("on", 0.1, (BAD,))), state.ticked + 0.01)
        assert "new" not in state.members and "refused" in reason
        (note,) = told(actions, "preflight")
        assert note["ok"] is False and "make room" in note["reason"]
        (answer,) = [a.message for a in actions if isinstance(a, Send) and a.node == "new"]
        assert isinstance(answer, Refused) and answer.retry_s == note["retry_s"]
        waits.append(answer.retry_s)
        state = state.of(ticked=state.ticked + answer.retry_s)
    assert waits == [5.0, 10.0, 20.0]
    state, actions, _ = transition(state, asks(Preflight("on", 0.1, (WARN,), 9.0)), state.ticked + 0.01)
    assert "new" in state.members and told(actions, "preflight")[0]["warnings"] == [WARN.remedy]
    assert quarantine.of(state, "new").refusals == 0


def test_asking_before_the_pause_is_over_costs_nothing() -> None:
    state, _, _ = transition(running(), asks(Preflight("on", 0.1, (BAD,))), 10.0)
    again, actions, _ = transition(state, asks(Preflight("on", 0.1, (BAD,))), 10.5)
    assert not told(actions, "preflight") and quarantine.of(again, "new").refusals == 1
    assert any(isinstance(a, Send) and isinstance(a.message, Refused) for a in actions)


def test_strict_preflight_takes_warnings_and_lame_nodes_for_failures() -> None:
    state = running()
    assert Preflight("strict", 0.1, (WARN,)).failed and not Preflight("on", 0.1, (WARN,)).failed
    for node in state.members:
        record = replace(quarantine.of(state, node), preflight=Preflight("strict", 0.1, (), 100.0))
        state = quarantine.put(state, node, record)
    for score, taken in ((49.0, False), (51.0, True)):
        after, _, _ = transition(state, asks(Preflight("strict", 0.1, (), score)), state.ticked)
        assert ("new" in after.members) is taken
    after, _, _ = transition(state, asks(Preflight("on", 0.1, (), 49.0)), state.ticked)
    assert "new" in after.members


def test_spares_are_taken_by_their_standing() -> None:
    from elastic.planning.request import PlanRequest, pick

    info = running().members["node0"].report.info
    nodes = tuple(replace(info, node=f"node{i}", standing=s) for i, s in enumerate((3, 9, 0, 5)))
    spec = running().spec
    assert spec is not None
    request = PlanRequest(spec=spec, nodes=nodes, epoch=1, max_nodes=2)
    assert [one.node for one in pick(request)[0]] == ["node1", "node3"]
