import functools
from dataclasses import replace
from elastic.core.coordinator.transitions import transition
from elastic.core.job import state as job
from elastic.core.job.state import *
from elastic.core.protocol import messages as m
from elastic.core.protocol.messages import NodePhase
from tests.core.world.world import World

N = 5


@functools.cache
def world():
    w = World(5, N, steps=400, shape="1", backup="stream+snapshot")
    w.run(limit=5.0)
    return w


def running():
    s = world().coordinator.state
    assert s.phase is JobPhase.RUNNING, s.phase
    return s.of(start_s=3600.0)


def lose(state, *nodes):
    told = ()
    while set(nodes) & state.members.keys():
        here = [mb for n, mb in state.members.items() if n not in nodes]
        beats = tuple(
            job.Heartbeat(mb.node, mb.report.info.incarnation, mb.report.step, 0) for mb in here
        )
        state, a, _ = transition(state, job.Heartbeats(beats), state.updated_at + 0.4)
        told += a
    return state, told


def beat(state, dt=0.4):
    beats = tuple(
        job.Heartbeat(mb.node, mb.report.info.incarnation, mb.report.step, 0)
        for mb in state.members.values()
    )
    return transition(state, job.Heartbeats(beats), state.updated_at + dt)


def halted(state, node):
    r = replace(
        state.members[node].report,
        phase=NodePhase.HALTED,
        epoch=state.epoch,
        inventory=world().agents[node].inventory(),
        halted=(m.Halted(state.epoch, -1),),
    )
    state, a, _ = transition(state, r, state.updated_at + 0.01)
    return state, a


def paused():
    s = running()
    peers = dict(s.plan.peers)
    a = s.plan.nodes()[1]
    b = peers[a]
    s, _ = lose(s, a, b)
    for n in list(s.members):
        s, acts = halted(s, n)
    return s, (a, b)
