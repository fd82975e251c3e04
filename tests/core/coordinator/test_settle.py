"""Learning and deciding apart is the same as both at once; heartbeats cost the same in a job of any size."""

from __future__ import annotations

from dataclasses import replace

from elastic.coordinator.records.state_saver import StateEncoder
from elastic.core.coordinator.transitions import learn, settle, transition
from elastic.core.job.state import Beat, Beats, Closed, JobState, Policy, Reported, Send
from elastic.core.protocol import messages as m
from elastic.core.protocol.messages import Measured, NodePhase, NodeReport
from elastic.domain import codec
from elastic.domain.types import JobSpec, LayerSpec, NodeInfo

SPEC = JobSpec((LayerSpec(8, 8, 8, 1.0, 2.0),) * 4, 4, 10)


def report(node: str, phase: NodePhase = NodePhase.EMPTY, **changes: object) -> NodeReport:
    return replace(NodeReport(NodeInfo(node, f"{node}-1", "h:1"), phase, 0), **changes)  # type: ignore[arg-type]


def attached(node: str) -> NodeReport:
    return report(node, NodePhase.IDLE, able=True, elastic=True, spec=SPEC, restart=0)


def test_many_events_are_decided_on_together_as_one_by_one() -> None:
    policy = Policy(min_nodes=3, max_nodes=3)
    nodes = ("a", "b", "c")
    rounds = [[Reported(report(n)) for n in nodes], [Reported(attached(n)) for n in nodes]]
    rounds += [[Closed("b", "b-1"), Beat("a", "a-1", 0, 0)], [Beat("c", "c-1", 0, 0)]]
    apart = single = JobState(policy=policy)
    for number, events in enumerate(rounds):
        now = 10.0 + number
        for event in events:
            apart, _, _ = learn(apart, event, now)
            single, _, _ = transition(single, event, now)
        apart, _, _ = settle(apart, now)
        single, _, _ = settle(single, now)
        assert apart == single, number
    assert set(apart.members) == {"a", "c"} and apart.epoch == 1 and apart.losses == 1


def test_heartbeats_together_are_as_one_by_one() -> None:
    state = JobState(policy=Policy(min_nodes=2, max_nodes=2))
    for one in (report("a"), report("b"), attached("a"), attached("b")):
        state, _, _ = transition(state, Reported(one), 1.0)
    measured = (Measured(0, 1, 3, 0.1, 0.2),)
    beats = (
        Beat("a", "a-1", 3, 1, measured),
        Beat("x", "x-1", 0, 0),
        Beat("b", "b-2", 3, 1),
        Beat("a", "a-1", 3, 2),
    )
    together, actions, _ = learn(state, Beats(beats), 1.2)
    fenced = [action.node for action in actions if isinstance(action, Send)]
    for beat in beats:
        state, _, _ = learn(state, beat, 1.2)
    assert together == state and fenced == ["x", "b"]
    assert (together.members["a"].seen, together.members["b"].seen) == (1.2, 1.0)
    assert together.members["a"].report.microbatch == 2 and together.seen.microbatch_s > 0.29


def test_what_is_learned_is_answered_at_once() -> None:
    state = JobState(policy=Policy())
    same, (action, *_), _ = learn(state, Beat("x", "x-1", 0, 0), 1.0)
    assert isinstance(action, Send) and isinstance(action.message, m.Fenced) and same.members == {}


def test_a_stall_is_noticed_by_what_is_learned_first() -> None:
    state, _, _ = settle(learn(JobState(policy=Policy(min_nodes=9)), Reported(report("a")), 1.0)[0], 1.0)
    late = 1.0 + state.limits.starved_s + 5.0
    state, _, _ = learn(state, Beat("z", "z-1", 0, 0), late)
    assert state.members["a"].seen == 1.0 + 5.0, "that time is not counted against the member"
    state, actions, _ = settle(state, late)
    assert "a" in state.members and not actions


def test_the_model_is_kept_once() -> None:
    state = JobState(policy=Policy(min_nodes=2, max_nodes=2))
    for one in (report("a"), report("b"), attached("a"), attached("b")):
        state, _, _ = learn(state, Reported(one), 1.0)
    assert state.spec == SPEC
    assert [member.report.spec for member in state.members.values()] == [None, None]
    other = replace(attached("b"), spec=replace(SPEC, n_steps=11))
    state, _, _ = learn(state, Reported(other), 1.1)
    assert state.members["b"].report.failed is not None


def test_saved_text_is_the_codecs_own() -> None:
    """Also when only some of it changed, and when members went."""
    encoder, state = StateEncoder(), JobState(policy=Policy(min_nodes=2, max_nodes=2))
    events = [Reported(report('a"'))] + [Reported(f(n)) for f in (report, attached) for n in ("b", "c")]
    for number, event in enumerate(
        [*events, Beat("b", "b-1", 1, 2), Beat("b", "b-1", 1, 2), Closed("c", "c-1")]
    ):
        state, _, _ = transition(state, event, 10.0 + number / 10)
        assert encoder.encode(state) == codec.dumps(state)
        assert codec.loads(JobState, encoder.encode(state)) == state
    state = state.of(members={})
    assert encoder.encode(state) == codec.dumps(state)
