import sys

sys.path.insert(0, "tests/core/reproductions")
from common import *

s, ab = paused()
print(running().plan.peers)
print(s.phase, s.missing, s.absent, len(s.members))
# A: failover 15 min later
t, a, r = transition(s, job.CoordinatorFailover(), s.updated_at + 900)
print("A takeover:", t.phase, r)
# A2: same coordinator paused for 15 min
t, a, r = transition(s, job.Tick(), s.updated_at + 900)
print("A2 paused coordinator:", t.phase, r)
# C: checkpoint commits while paused
t, a, r = transition(s, job.CheckpointCommitted("/c/step-2", 2), s.updated_at + 0.1)
print("C:", t.phase, t.checkpoint, r)
now = t.updated_at
while t.ending is None and t.updated_at < now + 700:
    t, a, r = beat(t, 0.4)
print("C end:", t.phase, t.updated_at - now, t.ending, t.checkpoint)
