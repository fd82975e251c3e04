import sys

sys.path.insert(0, "tests/core/reproductions")
from common import *

s = running()
peers = dict(s.plan.peers)
x = s.plan.nodes()[1]
y = peers[x]
full = s
# the saved state is from before x and y joined: epoch 0 of the same job, other members only
old = s.of(
    members={n: mb for n, mb in s.members.items() if n not in (x, y)},
    epoch=s.epoch - 1,
    trimmed=s.epoch - 1,
    plan=replace(s.plan, epoch=s.epoch - 1),
    phase=JobPhase.RUNNING,
)
t, a, r = transition(old, job.CoordinatorFailover(), old.updated_at + 0.5)
print(r)


def rep(t, e, dt=0.01):
    t, a, r = transition(t, e, t.updated_at + dt)
    print(
        "  ",
        type(e).__name__,
        getattr(getattr(e, "info", None), "node", ""),
        "->",
        t.phase.value,
        r[:110],
        [type(z.message).__name__ for z in a if isinstance(z, Send)][:6],
    )
    return t


for n in (x, y):
    t = rep(t, full.members[n].report)  # fenced, will join again with its vault in a moment
for n in list(t.members):
    t = rep(t, full.members[n].report)
for n in list(t.members):
    t, a = halted(t, n)
print(t.phase, t.ending, t.absent)
