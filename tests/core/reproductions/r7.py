import sys

sys.path.insert(0, "tests/core/reproductions")
from common import *
from elastic.core.job import quarantine

# KEEPER_FAILED note repeated after the keeper was replaced by a healthy incarnation
s = running()
k = "node1"
o = s.plan.nodes()[0]
note = m.BackupNote(m.KEEPER_FAILED, o, k, "OSError: [Errno 28] No space left")
s, a, r = transition(s, note, s.updated_at + 0.01)
print(s.poor_keepers, s.phase, s.change and s.change.boundary)
# keeper rejoins as new incarnation
inc = s.members[k].report.info.incarnation
s, a, r = transition(s, job.ConnectionClosed(k, inc), s.updated_at + 0.01)
info = replace(s.members[k].report.info, incarnation="new", vault="node1:9")
s, a, r = transition(s, m.NodeReport(info, NodePhase.EMPTY, 0), s.updated_at + 0.01)
print(r[:100])
print("poor before resend:", [i for i in s.poor_keepers if i == "new"])
s = s.of(rebalance="")
s, a, r = transition(s, note, s.updated_at + 0.01)
print("poor after resend:", [i for i in s.poor_keepers if i == "new"], "rebalance:", s.rebalance)
