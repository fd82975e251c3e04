"""Losses of members, and a coordinator that doubts its own network."""

from __future__ import annotations

from collections.abc import Collection, Iterable
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from elastic.core.coordinator.transitions import transition
from elastic.core.job import state as job
from elastic.core.job.liveness import FEW, is_heard
from elastic.core.job.state import Heartbeat, Heartbeats, JobPhase, JobState, LogEntry, Policy, Send
from elastic.core.protocol import messages as m
from elastic.core.protocol.messages import NodePhase, NodeReport
from elastic.core.protocol.timeouts import RECONNECTS_PER_S, budget
from elastic.domain.types import NodeInfo

START, TICK_S, BEAT_S = 100.0, 0.1, 0.2


def waiting(nodes: int, **policy: Any) -> JobState:
    """A job that waits for one more node."""
    state = JobState(policy=Policy(**{"min_nodes": nodes + 1, "max_nodes": nodes + 1, **policy}))
    for number in range(nodes):
        state, _, _ = transition(state, first_report(f"n{number}"), START)
    assert len(state.members) == nodes
    return state


def first_report(node: str, incarnation: str = "") -> NodeReport:
    return NodeReport(NodeInfo(node, incarnation or f"{node}-1", "h:1"), NodePhase.EMPTY, 0)


class Story:
    """A job whose members send heartbeats, as far as the test lets them through."""

    def __init__(self, state: JobState) -> None:
        self.state, self.actions = state, list[job.JobAction]()
        self.names = tuple(state.members)
        self._beat_at = 0.0

    def event(self, event: Any, later_s: float = 0.0) -> None:
        now = self.state.updated_at + later_s
        self.state, actions, _ = transition(self.state, event, now)
        self.actions += actions

    def live(self, seconds: float, heard: Iterable[str] = (), rtt_s: float = 0.0) -> None:
        """Let time pass while only `heard` reach the coordinator, each every BEAT_S."""
        heard, end = tuple(heard), self.state.updated_at + seconds
        while self.state.updated_at < end - 1e-6:
            self.event(job.Tick(), TICK_S)
            if heard and self.state.updated_at >= self._beat_at:
                self._beat_at = self.state.updated_at + BEAT_S
                beats = tuple(Heartbeat(n, f"{n}-1", 0, 0, rtt_s=rtt_s) for n in heard)
                self.event(Heartbeats(beats))

    def close(self, *nodes: str) -> None:
        for node in nodes:
            self.event(job.ConnectionClosed(node, f"{node}-1"))

    def back(self, *nodes: str) -> None:
        """The agents reconnect and report."""
        for node in nodes:
            if node in self.state.members:
                self.event(self.state.members[node].report)

    def logged(self, kind: str) -> list[dict[str, Any]]:
        return [a.data for a in self.actions if isinstance(a, LogEntry) and a.kind == kind]

    @property
    def lost(self) -> list[tuple[str, str]]:
        return [(data["node"], data["loss"]) for data in self.logged("lost")]

    @property
    def fenced(self) -> list[str]:
        found = (a for a in self.actions if isinstance(a, Send))
        return [a.node for a in found if isinstance(a.message, m.Fenced)]


# ---- closed connections ----


@pytest.mark.parametrize("nodes", [1, 2, 3, 7])
@pytest.mark.parametrize("gap_s", [0.2, 0.5, 1.5, 2.5])
def test_a_reset_of_all_connections_loses_nobody(nodes: int, gap_s: float) -> None:
    story = Story(waiting(nodes))
    story.live(2.0, story.names)
    story.close(*story.names)
    story.live(gap_s)
    story.back(*story.names)
    story.live(5.0, story.names)
    assert not story.lost and not story.logged("doubt")
    assert all(mb.connected for mb in story.state.members.values())


def test_a_single_reset_connection_is_no_loss_before_the_lease() -> None:
    story = Story(waiting(3))
    story.close("n1")
    story.live(2.8, ("n0", "n2"))
    assert not story.lost
    story.live(0.5, ("n0", "n2"))
    assert story.lost == [("n1", "silent")], "it did not return"


@pytest.mark.parametrize("returns", [True, False])
def test_a_sign_of_life_after_a_reset_is_enough(returns: bool) -> None:
    """All connections of a node are reset, so its neighbours accuse it. Its report is large, and
    arrives late over a slow link."""
    story = Story(waiting(3))
    story.live(1.0, story.names)
    story.close("n1")
    accusation = replace(story.state.members["n0"].report, suspects=("n1",))
    story.event(accusation, 0.01)
    if returns:
        story.event(Heartbeat("n1", "n1-1", 0, 0), 0.8)
    story.live(1.5, ("n0", "n2"))
    assert story.lost == ([] if returns else [("n1", "closed")])


def test_a_crowd_that_returns_one_by_one_loses_nobody() -> None:
    """Handshakes take turns: of 400 nodes 25 return per second."""
    nodes, per_s = 400, 25
    story = Story(waiting(nodes))
    for name in story.names:
        story.event(job.ConnectionClosed(name, f"{name}-1"))
    story.live(0.2)
    for back in range(0, nodes, per_s):
        for name in story.names[back : back + per_s]:
            story.event(first_report(name))
        story.live(1.0, story.names[: back + per_s])
    assert len(story.state.members) == nodes and story.state.crowd == 0


def test_a_node_of_a_crowd_that_does_not_return_is_lost() -> None:
    nodes = 60
    story = Story(waiting(nodes))
    for name in story.names:
        story.event(job.ConnectionClosed(name, f"{name}-1"))
    story.live(0.2)
    dead, *alive = story.names
    for name in alive:
        story.event(first_report(name))
    story.live(3.5, alive)
    assert dead in story.state.members, "many were away, and return one after the other"
    story.live((nodes - FEW) / RECONNECTS_PER_S, alive)
    assert dead not in story.state.members and set(alive) == set(story.state.members)
    story.live(1.0, alive)
    assert story.state.crowd == 0
    story.live(3.5, alive[1:])
    assert alive[0] not in story.state.members, "alone it has the usual lease"


def test_the_silence_of_the_user_decides_about_closed_connections() -> None:
    for silence_s in (1.0, 3.0, 8.0):
        story = Story(waiting(3, lease_s=silence_s))
        story.live(1.0, story.names)
        story.close("n1")
        story.live(silence_s - 0.6, ("n0", "n2"))
        assert not story.lost
        story.live(1.2, ("n0", "n2"))
        assert story.lost == [("n1", "silent")]


def test_a_refused_port_proves_the_end_of_an_agent() -> None:
    story = Story(waiting(3))
    story.close("n1")
    story.event(job.PortRefused("n1", "former"))
    story.event(job.PortRefused("nobody", "x"))
    story.event(job.PortRefused("n2", "n2-1"))
    assert not story.lost, "another life, no member, and connected"
    story.event(job.PortRefused("n1", "n1-1"), 0.01)
    assert story.lost == [("n1", "closed")] and story.fenced == ["n1"]
    assert story.state.absent == ()


def test_a_node_that_is_back_is_not_lost_by_an_old_refusal() -> None:
    story = Story(waiting(3))
    story.close("n1")
    member = replace(story.state.members["n1"], refused=True)
    story.state = story.state.of(members={**story.state.members, "n1": member})
    story.back("n1")
    story.live(2.0, story.names)
    assert not story.lost and not story.state.members["n1"].refused


def test_agents_that_ended_are_lost_during_a_doubt_as_well() -> None:
    story = Story(waiting(4))
    story.live(3.5, ("n0",))
    assert story.logged("doubt") and not story.lost
    story.close("n3")
    story.event(job.PortRefused("n3", "n3-1"))
    assert story.lost == [("n3", "closed")]


def accuse(story: Story, accuser: str, accused: str) -> None:
    report = replace(story.state.members[accuser].report, suspects=(accused,))
    story.event(report)


def test_a_closed_and_accused_node_has_a_short_time_to_return() -> None:
    story = Story(waiting(4))
    story.close("n1")
    accuse(story, "n0", "n1")
    story.live(0.5, ("n0", "n2", "n3"))
    assert not story.lost
    story.live(0.6)
    assert not story.lost, "the coordinator's own network may have failed meanwhile"
    story.live(0.3, ("n0", "n2", "n3"))
    assert story.lost == [("n1", "closed")]
    assert story.state.absent[0][0] == "n1", "it may live, so its copies are remembered"


# ---- doubt ----


@pytest.mark.parametrize("nodes", [1, 2, 3, 5, 16])
@pytest.mark.parametrize("away_s", [1.0, 2.9, 3.5, 4.5, 7.0, 12.0, 20.0, 300.0])
@pytest.mark.parametrize("closes", [False, True])
def test_a_coordinator_that_hears_nobody_blames_nobody(
    nodes: int, away_s: float, closes: bool
) -> None:
    """Its cable is pulled, with or without closed connections. The nodes return one by one."""
    story = Story(waiting(nodes))
    story.live(2.0, story.names)
    epoch = story.state.epoch
    story.live(min(away_s, 10.0))
    if closes:
        story.close(*story.names)
    story.live(max(0.0, away_s - 10.0))
    for number, node in enumerate(story.names):
        story.back(node)
        story.live((1.2 if away_s < 3.2 else 4.0) / nodes, story.names[: number + 1])
    story.live(10.0, story.names)
    assert not story.lost and not story.fenced and story.state.epoch == epoch
    assert len(story.logged("doubt")) == len(story.logged("doubt-over")) <= 1
    assert story.logged("doubt") or away_s < 3.2
    assert not story.state.doubt_since


@given(
    st.integers(3, 9),
    st.data(),
    st.floats(0.1, 25.0),
)
def test_a_majority_is_never_lost_before_the_doubt_is_over(
    nodes: int, data: st.DataObject, seconds: float
) -> None:
    """Whichever minority the coordinator still hears, such as the node on its own machine."""
    story = Story(waiting(nodes))
    heard = data.draw(st.sets(st.sampled_from(story.names), max_size=(nodes - 1) // 2))
    story.live(1.0, story.names)
    story.live(seconds, heard)
    assert not story.lost
    story.back(*story.names)
    story.live(5.0, story.names)
    assert not story.lost and not story.state.doubt_since


@pytest.mark.parametrize(("nodes", "silent"), [(2, 1), (3, 1), (4, 2), (9, 4)])
def test_a_silent_minority_is_lost_after_the_lease(nodes: int, silent: int) -> None:
    story = Story(waiting(nodes))
    story.live(3.8, story.names[silent:])
    assert sorted(node for node, _ in story.lost) == sorted(story.names[:silent])
    assert not story.logged("doubt")


def test_a_doubt_that_hears_somebody_ends() -> None:
    """A majority of the machines lost power."""
    story = Story(waiting(4))
    limit = story.state.limits.doubt_s
    story.live(limit, ("n0",))
    assert not story.lost
    story.live(2.5, ("n0",))
    assert sorted(story.lost) == [(node, "silent") for node in ("n1", "n2", "n3")]
    assert not story.state.doubt_since and {n for n, _ in story.state.absent} == {"n1", "n2", "n3"}


def test_a_minority_that_comes_and_goes_does_not_prolong_a_doubt() -> None:
    story = Story(waiting(4))
    limit, began = story.state.limits.doubt_s, story.state.updated_at
    while not story.lost:
        story.live(2.0, heard=["n0"])
        story.live(3.0)
        assert story.state.updated_at < began + 2 * limit
    assert story.state.updated_at > began + limit
    assert {node for node, _ in story.lost} == {"n1", "n2", "n3"}


def test_a_doubt_without_anybody_has_no_limit() -> None:
    story = Story(waiting(3))
    story.live(20 * story.state.limits.doubt_s)
    assert not story.lost and len(story.logged("doubt")) == 1, "it is reported once"


def test_the_time_of_a_short_doubt_is_no_silence() -> None:
    """A cut that is shorter than the lease; one node's packets take longer to come through."""
    story = Story(waiting(3))
    story.live(2.9)
    story.back("n0", "n1")
    story.live(1.0, ("n0", "n1"))
    story.back("n2")
    story.live(5.0, story.names)
    assert not story.lost and not story.logged("doubt"), "it is not reported"


@pytest.mark.parametrize("cut_s", [1.2, 1.7])
def test_a_node_whose_packets_come_late_after_two_short_cuts_is_not_lost(cut_s: float) -> None:
    """TCP repeats lost packets after pauses that double. Each cut is too short for a doubt, or just
    long enough for one."""
    story = Story(waiting(5))
    story.live(1.0, story.names)
    story.live(0.4)
    rest = ("n0", "n1", "n2", "n4")
    story.live(0.3, rest)
    story.live(cut_s)
    story.live(1.5, rest)
    story.live(5.0, story.names)
    assert not story.lost and not story.logged("doubt")


def test_nobody_is_lost_while_nobody_is_heard() -> None:
    """The coordinator's cable fails before the packets of a node that was cut off come through. It
    hears the other one so shortly before that it does not doubt itself yet."""
    story = Story(waiting(2))
    story.live(1.0, story.names)
    story.live(1.8, ("n0",))
    story.live(2.0)
    story.live(5.0, story.names)
    assert not story.lost


@pytest.mark.parametrize("gap_s", [0.4, 1.2, 1.5])
def test_a_silent_node_is_lost_although_the_others_are_often_late(gap_s: float) -> None:
    """One lease of its silence is excused, and `keepalive_s` if the coordinator doubts itself. The
    node is lost just after the other one was heard."""
    story = Story(waiting(2))
    story.live(1.0, story.names)
    since = story.state.updated_at
    while not story.lost and story.state.updated_at < since + 20.0:
        story.live(gap_s)
        story.live(0.1, ("n0",))
    assert story.lost == [("n1", "silent")]
    limits = story.state.limits
    assert story.state.updated_at - since < 3 * limits.lease_s + limits.keepalive_s + 2 * gap_s


@pytest.mark.parametrize("nodes", [2, 4, 6])
@pytest.mark.parametrize("gap_s", [0.3, 0.5, 2.0])
def test_a_cable_that_fails_again_loses_nobody(nodes: int, gap_s: float) -> None:
    """The second cut comes while half of the nodes have not returned from the first one."""
    story = Story(waiting(nodes))
    story.live(1.0, story.names)
    story.live(5.0)
    story.live(gap_s, story.names[: nodes // 2])
    story.live(6.0)
    story.live(6.0, story.names)
    assert not story.lost and len(story.logged("doubt")) == 2


@pytest.mark.parametrize(
    ("down_s", "up_s"), [(6.0, 2.0), (4.0, 2.0), (2.0, 2.0), (5.0, 1.0), (3.5, 3.5), (2.5, 0.3)]
)
def test_a_dead_node_is_lost_although_another_comes_and_goes(down_s: float, up_s: float) -> None:
    """Each return of the other node ends a doubt, which excuses the silence of the dead one."""
    story = Story(waiting(3))
    story.live(1.0, story.names)
    began = story.state.updated_at
    while "n2" not in dict(story.lost) and story.state.updated_at < began + 100.0:
        story.close("n1")
        story.live(down_s, ("n0",))
        story.back("n1")
        story.live(up_s, ("n0", "n1"))
    assert story.lost == [("n2", "silent")]
    assert story.state.updated_at < began + 2 * story.state.limits.doubt_s


def test_an_excuse_is_no_message() -> None:
    """The time of the newest message stays, and a message ends the excuse."""
    story = Story(waiting(3))
    story.live(1.0, story.names)
    seen = story.state.members["n2"].seen
    story.live(6.0)
    story.live(0.5, ("n0", "n1"))
    silent = story.state.members["n2"]
    assert silent.seen == seen and silent.excused_s > 6.0
    assert not is_heard(story.state, silent, story.state.updated_at)
    story.live(0.5, story.names)
    assert not any(mb.excused_s for mb in story.state.members.values())


def test_a_silent_node_is_lost_soon_although_others_reconnect() -> None:
    """The connections of two others are reset, one after another, while it is silent."""
    story = Story(waiting(4))
    story.live(1.0, story.names)
    story.live(0.8, ("n0", "n1", "n2"))
    story.close("n0", "n1")
    story.live(0.3, ("n2",))
    story.back("n0", "n1")
    story.live(3.0, ("n0", "n1", "n2"))
    assert story.lost == [("n3", "silent")]


@pytest.mark.parametrize("quiet_s", [1.2, 1.4, 1.48])
@pytest.mark.parametrize("nodes", [3, 4])
@pytest.mark.parametrize("first", ["report", "heartbeat"])
def test_a_time_in_which_nobody_is_heard_is_no_time_of_a_closed_connection(
    nodes: int, quiet_s: float, first: str
) -> None:
    """The coordinator's own cable is out, and meanwhile the network resets the connections of one
    node, so that a neighbour accuses it. It returns a moment after the others."""
    story = Story(waiting(nodes))
    story.live(1.0, story.names)
    story.live(0.3)
    story.close("n0")
    story.live(quiet_s - 0.3)
    if first == "report":
        accuse(story, "n1", "n0")
        story.live(0.3, story.names[1:])
    else:
        story.live(0.1, story.names[1:])
        accuse(story, "n1", "n0")
        story.live(0.2, story.names[1:])
    assert not story.lost


@pytest.mark.parametrize("others_s", [0.0, 0.1])
def test_a_node_is_back_with_its_first_heartbeat_after_a_time_without_anybody(
    others_s: float,
) -> None:
    """Its report is large, and takes longer."""
    story = Story(waiting(3))
    story.live(1.0, story.names)
    story.live(0.3)
    story.close("n0")
    story.live(0.9)
    story.live(others_s, story.names[1:])
    story.event(Heartbeat("n0", "n0-1", 0, 0))
    accuse(story, "n1", "n0")
    story.live(2.5, story.names[1:])
    assert not story.lost
    story.live(1.0, story.names[1:])
    assert story.lost == [("n0", "silent")]


def test_a_node_that_died_while_nobody_was_heard_is_lost_soon_afterwards() -> None:
    story = Story(waiting(3))
    story.live(1.0, story.names)
    story.close("n0")
    story.live(1.2)
    accuse(story, "n1", "n0")
    story.live(2.0, story.names[1:])
    assert story.lost == [("n0", "closed")]


def test_after_a_doubt_late_nodes_have_time_to_return() -> None:
    story = Story(waiting(5))
    story.live(8.0)
    story.back("n0", "n1", "n2")
    story.live(5.0, ("n0", "n1", "n2"))
    story.back("n3")
    story.live(4.0, ("n0", "n1", "n2", "n3"))
    assert story.lost == [("n4", "silent")], "the one that never came back"


def test_a_machine_that_restarts_during_a_doubt_gets_its_name_back() -> None:
    story = Story(waiting(1))
    story.live(30.0)
    assert story.state.doubt_since and not story.lost
    story.event(first_report("n0", "n0-2"))
    assert story.lost == [("n0", "replaced")]
    assert story.state.members["n0"].report.info.incarnation == "n0-2"
    story.live(1.0)
    assert not story.state.doubt_since


def test_a_new_coordinator_that_hears_nobody_doubts_itself() -> None:
    story = Story(waiting(3))
    story.event(job.CoordinatorFailover(), 5.0)
    story.live(60.0)
    assert not story.lost and len(story.logged("doubt")) == 1
    story.back(*story.names)
    story.live(5.0, story.names)
    assert not story.lost


def test_a_new_coordinator_loses_a_node_that_ended_meanwhile() -> None:
    story = Story(waiting(3))
    story.event(job.CoordinatorFailover(), 5.0)
    story.back("n0", "n2")
    story.event(job.PortRefused("n1", "n1-1"), 0.05)
    assert story.lost == [("n1", "closed")]


# ---- giving up the lead ----


def orders_to_yield(story: Story) -> int:
    return sum(isinstance(action, job.YieldLead) for action in story.actions)


def test_the_lead_is_given_up_if_another_coordinator_may_take_it() -> None:
    story = Story(waiting(3, standbys=True))
    story.live(3.2)
    assert story.state.doubt_since and not orders_to_yield(story)
    story.live(1.6)
    assert orders_to_yield(story) == 1 and story.logged("yield")
    story.live(2.0)
    assert orders_to_yield(story) == 1, "not again at once"


@pytest.mark.parametrize(("standbys", "heard"), [(False, ()), (True, ("n0",))])
def test_the_lead_is_kept(standbys: bool, heard: Collection[str]) -> None:
    """No other coordinator can lead, or this one hears a node, and another might hear none."""
    story = Story(waiting(3, standbys=standbys))
    story.live(25.0, heard)
    assert story.state.doubt_since and not orders_to_yield(story)


def test_the_lead_is_given_up_before_a_majority_is_dropped() -> None:
    """Another coordinator may reach the nodes that this one does not. It has the time to."""
    story = Story(waiting(4, standbys=True))
    limits = story.state.limits
    story.live(1.0, story.names)
    story.live(limits.doubt_s + 2.0, ("n0",))
    assert orders_to_yield(story) == 1 and not story.lost
    assert "1 of 4 nodes" in story.logged("yield")[0]["why"]
    story.live(limits.lease_s - 1.0, ("n0",))
    assert not story.lost, "the next coordinator begins to lead"


@pytest.mark.parametrize("taken_over", [True, False])
def test_a_majority_that_no_coordinator_reaches_is_dropped(taken_over: bool) -> None:
    """The lead is given up only once: the machines have lost power."""
    story = Story(waiting(4, standbys=True))
    limit = story.state.limits.doubt_s
    story.live(1.0, story.names)
    while not orders_to_yield(story):
        story.live(1.0, ("n0",))
    if taken_over:
        story.event(job.CoordinatorFailover(), 2.0)
        story.back("n0")
        story.live(limit, ("n0",))
        assert not story.lost
    story.live(6.0, ("n0",))
    assert sorted(story.lost) == [(node, "silent") for node in ("n1", "n2", "n3")]
    assert orders_to_yield(story) == 1


# ---- round-trip times ----


@pytest.mark.parametrize("rtt_s", [0.0, 0.001, 0.009, 0.08, 0.2, 1.5, 40.0])
def test_limits_grow_with_the_round_trip_time(rtt_s: float) -> None:
    story = Story(waiting(3))
    story.live(1.0, story.names, rtt_s)
    before, limits = budget(3.0), story.state.limits
    if rtt_s < 0.01:
        assert limits == before and story.state.seen.rtt_s == 0.0
        return
    for name in ("lease_s", "closed_s", "contact_s", "adopt_s", "doubt_s"):
        assert getattr(limits, name) >= getattr(before, name) + 10 * min(rtt_s, 2.0)
    assert limits.lease_s <= 3.0 + 10 * 2.0, "a wrong figure has a bound"
    assert story.logged("timeouts")[-1]["measured"]["rtt_s"] == story.state.seen.rtt_s


@pytest.mark.parametrize("rtt_s", [0.08, 0.2])
def test_a_slow_reconnect_of_all_nodes_costs_nothing(rtt_s: float) -> None:
    """Each of ten round trips takes its time; one of the nodes needs them all."""
    story = Story(waiting(3, lease_s=1.0))
    story.live(1.0, story.names, rtt_s)
    story.close(*story.names)
    story.live(4 * rtt_s)
    story.back("n0", "n1")
    story.live(6 * rtt_s + 0.5, ("n0", "n1"))
    story.back("n2")
    story.live(3.0, story.names)
    assert not story.lost and story.state.phase is JobPhase.WAITING
