import sys

sys.path.insert(0, "tests/core/reproductions")
from common import *
from elastic.core.job import absent_nodes

# B: takeover in HALTING by a coordinator whose clock is 60 s behind
s = running()
a = s.plan.nodes()[3]
inc = s.members[a].report.info.incarnation
for e in (job.ConnectionClosed, job.PortRefused):
    s, acts, _ = transition(s, e(a, inc), s.updated_at + 0.01)
print("phase", s.phase, "retry_at", s.watch.retry_at, "now", s.updated_at)
SKEW = float(sys.argv[1]) if len(sys.argv) > 1 else 60.0
s = s.of(updated_at=s.updated_at)
now = s.updated_at - SKEW
if now < 0:
    # shift whole state: simply re-run with larger clock is equivalent; shift key times
    pass


def shift(s, d):
    mem = {
        n: replace(mb, seen=mb.seen + d, closed_at=mb.closed_at + d if mb.closed_at else 0.0)
        for n, mb in s.members.items()
    }
    w = replace(s.watch, since=s.watch.since + d, retry_at=s.watch.retry_at + d)
    return s.of(
        members=mem,
        watch=w,
        updated_at=s.updated_at + d,
        change=replace(s.change, began=s.change.began + d),
        step_finished_at=s.step_finished_at + d,
    )


s = shift(s, 1e6)
now = s.updated_at - SKEW
t, acts, r = transition(s, job.CoordinatorFailover(), now)
print("takeover:", t.phase, r)
for n in list(t.members):
    rep = replace(
        t.members[n].report,
        phase=NodePhase.HALTED,
        epoch=t.epoch,
        inventory=world().agents[n].inventory(),
        halted=(m.Halted(t.epoch, -1),),
    )
    t, acts, r = transition(t, rep, t.updated_at + 0.01)
print("all halted:", t.phase, all(mb.halted for mb in t.members.values()))
t0 = t.updated_at
while t.phase is JobPhase.HALTING and t.updated_at < t0 + 4000:
    t, acts, r = beat(t, 0.4)
print("left HALTING after %.1f s: %s" % (t.updated_at - t0, t.phase))
# D: KEPT_ABSENT
