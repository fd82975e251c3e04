import sys

sys.path.insert(0, "tests/core/reproductions")
from common import *
from elastic.core.health.path_fault import PathFault
from elastic.core.job import reachability
from elastic.core.job.epoch_change import (
    candidates,
    plan_request,
    resume_if_feasible,
    _situation,
    _choose,
)
from elastic.core.job.join_policy import plan_if_feasible

w = World(
    5, 3, steps=400, shape="auto", backup="none+none" if False else "stream+snapshot", min_nodes=2
)
w.run(limit=5.0)
s = w.coordinator.state
mem = {"node0": 40, "node1": 40, "node2": 104}


def with_mem(s):
    return s.of(
        members={
            n: replace(
                mb, report=replace(mb.report, info=replace(mb.report.info, memory_bytes=mem[n]))
            )
            for n, mb in s.members.items()
        }
    )


s = with_mem(s)
f = PathFault(("node0", "node2"), (("node0", "node2"),), "node0 -> node2: no answer", s.updated_at)
s = s.of(paths=(f,), plan=None)
print("covers", reachability.covers(s, list(s.members)))
print("candidates", [mb.node for mb in candidates(s)])
print("plan with candidates:", plan_if_feasible(plan_request(s, 9)))
t = s.of(left_out=("node0",))
p = plan_if_feasible(plan_request(t, 9))
print("plan without node0:", p and p.nodes())
u = s.of(
    phase=JobPhase.PAUSED,
    blocked=("x",),
    change=EpochChange(2, (Cause(CauseKind.CONTACT, "x"),), False, (), 2, 0.0, None, 0, 0),
)
print("resume:", resume_if_feasible(u, u.updated_at))
