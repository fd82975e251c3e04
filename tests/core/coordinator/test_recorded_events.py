"""Recording and deciding separately gives the same result as `transition`."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from elastic.coordinator.records.state_saver import StateEncoder
from elastic.core.coordinator.transitions import apply_rules, record_event, transition
from elastic.core.job.state import (
    ConnectionClosed,
    Heartbeat,
    Heartbeats,
    JobState,
    Policy,
    PortRefused,
    Send,
)
from elastic.core.protocol import messages as m
from elastic.core.protocol.messages import MicrobatchTiming, NodePhase, NodeReport
from elastic.domain import codec
from elastic.domain.types import JobSpec, LayerSpec, NodeInfo

SPEC = JobSpec((LayerSpec(8, 8, 8, 1.0, 2.0),) * 4, 4, 10)


def report(node: str, phase: NodePhase = NodePhase.EMPTY, **changes: object) -> NodeReport:
    return replace(NodeReport(NodeInfo(node, f"{node}-1", "h:1"), phase, 0), **changes)  # type: ignore[arg-type]


def attached(node: str) -> NodeReport:
    return report(node, NodePhase.IDLE, able=True, elastic=True, spec=SPEC, restart=0)


def test_one_decision_for_many_events_equals_single_decisions() -> None:
    policy = Policy(min_nodes=3, max_nodes=3)
    nodes = ("a", "b", "c")
    rounds: list[list[Any]] = [
        [report(n) for n in nodes],
        [attached(n) for n in nodes],
    ]
    rounds += [
        [ConnectionClosed("b", "b-1"), PortRefused("b", "b-1"), Heartbeat("a", "a-1", 0, 0)],
        [Heartbeat("c", "c-1", 0, 0)],
    ]
    apart = single = JobState(policy=policy)
    for number, events in enumerate(rounds):
        now = 10.0 + number
        for event in events:
            apart, _, _ = record_event(apart, event, now)
            single, _, _ = transition(single, event, now)
        apart, _, _ = apply_rules(apart, now)
        single, _, _ = apply_rules(single, now)
        assert apart == single, number
    assert set(apart.members) == {"a", "c"} and apart.epoch == 1 and apart.history.events == 1


def test_heartbeats_together_equal_single_heartbeats() -> None:
    state = JobState(policy=Policy(min_nodes=2, max_nodes=2))
    for one in (report("a"), report("b"), attached("a"), attached("b")):
        state, _, _ = transition(state, one, 1.0)
    measured = (MicrobatchTiming(0, 1, 3, 0.1, 0.2),)
    beats = (
        Heartbeat("a", "a-1", 3, 1, measured),
        Heartbeat("x", "x-1", 0, 0),
        Heartbeat("b", "b-2", 3, 1),
        Heartbeat("a", "a-1", 3, 2),
    )
    together, actions, _ = record_event(state, Heartbeats(beats), 1.2)
    fenced = [action.node for action in actions if isinstance(action, Send)]
    for beat in beats:
        state, _, _ = record_event(state, beat, 1.2)
    assert together == state and fenced == ["x", "b"]
    assert (together.members["a"].seen, together.members["b"].seen) == (1.2, 1.0)
    assert together.members["a"].report.microbatch == 2 and together.seen.microbatch_s > 0.29


def test_an_event_is_answered_when_it_is_recorded() -> None:
    state = JobState(policy=Policy())
    same, (action, *_), _ = record_event(state, Heartbeat("x", "x-1", 0, 0), 1.0)
    assert isinstance(action, Send) and isinstance(action.message, m.Fenced) and same.members == {}


def test_the_first_event_after_a_stall_excuses_it() -> None:
    state, _, _ = apply_rules(
        record_event(JobState(policy=Policy(min_nodes=9)), report("a"), 1.0)[0], 1.0
    )
    late = 1.0 + state.limits.starved_s + 5.0
    state, _, _ = record_event(state, Heartbeat("z", "z-1", 0, 0), late)
    assert state.members["a"].seen == 1.0 + 5.0, "that time is not counted against the member"
    state, actions, _ = apply_rules(state, late)
    assert "a" in state.members and not actions


def test_the_model_is_stored_once() -> None:
    state = JobState(policy=Policy(min_nodes=2, max_nodes=2))
    for one in (report("a"), report("b"), attached("a"), attached("b")):
        state, _, _ = record_event(state, one, 1.0)
    assert state.spec == SPEC
    assert [member.report.spec for member in state.members.values()] == [None, None]
    other = replace(attached("b"), spec=replace(SPEC, n_steps=11))
    state, _, _ = record_event(state, other, 1.1)
    assert state.members["b"].report.failed is not None


def test_the_saved_text_equals_the_codec_output() -> None:
    """This includes partial changes and departed members."""
    text, state = StateEncoder(), JobState(policy=Policy(min_nodes=2, max_nodes=2))
    events = [report('a"')] + [f(n) for f in (report, attached) for n in ("b", "c")]
    for number, event in enumerate(
        [
            *events,
            Heartbeat("b", "b-1", 1, 2),
            Heartbeat("b", "b-1", 1, 2),
            ConnectionClosed("c", "c-1"),
        ]
    ):
        state, _, _ = transition(state, event, 10.0 + number / 10)
        assert text.encode(state) == codec.dumps(state)
        assert codec.loads(JobState, text.encode(state)) == state
    state = state.of(members={})
    assert text.encode(state) == codec.dumps(state)
