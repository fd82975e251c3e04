import sys

sys.path.insert(0, "tests/core/reproductions")
from common import *
from elastic.core.job import quarantine

w = World(5, 3, steps=400, shape="auto", backup="stream+snapshot", min_nodes=2)
w.run(limit=5.0)
s = w.coordinator.state
tot = sum(l.param_bytes + l.state_bytes + l.gradient_bytes for l in s.spec.layers)
print("bytes", tot)
MEM = int(sys.argv[1]) if len(sys.argv) > 1 else int(tot * 0.8)
s = s.of(
    members={
        n: replace(mb, report=replace(mb.report, info=replace(mb.report.info, memory_bytes=MEM)))
        for n, mb in s.members.items()
    }
)


def inv(n):
    return tuple(replace(c, epoch=max(c.epoch, s.epoch - 1)) for c in w.agents[n].inventory())


log = []


def ap(s, e, dt=0.01):
    s, a, r = transition(s, e, s.updated_at + dt)
    log.extend((round(s.updated_at, 1), x) for x in a)
    if r:
        print("%7.2f %s" % (s.updated_at, r[:200]))
    return s


def bt(s, dt=0.4):
    beats = tuple(
        job.Heartbeat(mb.node, mb.report.info.incarnation, mb.report.step, 0)
        for mb in s.members.values()
    )
    return ap(s, job.Heartbeats(beats), dt)


# node2's worker crashes four times: FAILED
r = s.members["node2"].report
s = ap(
    s,
    replace(
        r,
        phase=NodePhase.FAILED,
        able=False,
        crash_count=4,
        cause="worker 0 ended with signal 11",
        inventory=inv("node2"),
    ),
)
print(s.phase, quarantine.is_quarantined(s, "node2"))


def settle(s):
    for n in list(s.members):
        r = s.members[n].report
        if s.phase is JobPhase.HALTING and r.epoch < s.epoch:
            if r.phase is NodePhase.FAILED:
                s = ap(s, replace(r, epoch=s.epoch, inventory=inv(n)))
            else:
                s = ap(
                    s,
                    replace(
                        r,
                        phase=NodePhase.HALTED,
                        epoch=s.epoch,
                        inventory=inv(n),
                        halted=(m.Halted(s.epoch, -1),),
                    ),
                )
    return s


s = settle(s)
print(s.phase, s.plan.nodes(), s.plan.peers)
for n in s.plan.nodes():
    s = ap(
        s, replace(s.members[n].report, phase=NodePhase.RUNNING, halted=(), resumed_at=s.updated_at)
    )
print(s.phase)
for n in s.plan.nodes():
    s = ap(s, replace(s.members[n].report, phase=NodePhase.RUNNING, protected=s.epoch))
for _ in range(20):
    s = bt(s)
print("running", s.phase, s.trimmed, s.epoch)
gone = [n for n in s.plan.nodes() if n != "node0"][0]
inc = s.members[gone].report.info.incarnation
s = ap(s, job.ConnectionClosed(gone, inc))
s = ap(s, job.PortRefused(gone, inc))
s = settle(s)
print("after loss of", gone, ":", s.phase, list(s.members))
k = len(log)
t0 = s.updated_at
while s.updated_at < t0 + 3600 and s.ending is None:
    s = bt(s)
print(
    "after 1 h:",
    s.phase,
    "node2",
    s.members["node2"].report.phase,
    "quarantined",
    quarantine.is_quarantined(s, "node2"),
    "actions",
    log[k:],
)
