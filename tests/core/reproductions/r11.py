import sys

sys.path.insert(0, "tests/core/reproductions")
from common import *

s = running()
peers = dict(s.plan.peers)
a = s.plan.nodes()[1]
b = peers[a]
slots = tuple((l, 0) for l in range(s.spec.n_layers))
s, acts, _ = transition(s, m.CheckpointPart(4, slots, s.epoch, "node0"), s.updated_at + 0.01)
print(acts, s.checkpoint_parts)
for n in (a, b):
    inc = s.members[n].report.info.incarnation
    for e in (job.ConnectionClosed, job.PortRefused):
        s, acts, r = transition(s, e(n, inc), s.updated_at + 0.01)
for n in list(s.members):
    s, acts = halted(s, n)
print(s.phase, s.ending)
print([x for x in acts if not isinstance(x, Send)])
t, acts, r = transition(s, CheckpointCommitted("/c/step-4", 4), s.updated_at + 0.05)
print(t.phase, t.checkpoint, r)
