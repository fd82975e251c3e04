import sys

sys.path.insert(0, "tests/core/reproductions")
from common import *
from elastic.core.job import absent_nodes

s, ab = paused()
mb = next(iter(s.members.values()))
members = {f"m{i}": mb for i in range(400)}
t = s.of(members=members, absent=())
for i in range(600):
    t = absent_nodes.with_absent(t, f"lost{i}", t.updated_at)
from elastic.domain.errors import Unrecoverable

t, acts, r = absent_nodes.wait_or_fail(
    t.of(missing=None), t.change, Unrecoverable("no copy"), t.updated_at
)
print(t.phase, t.missing.count, len(t.absent), "of 1000 nodes 600 are absent")
e = absent_nodes.end_if_hopeless(t, t.updated_at + 601)
print("after 601 s:", e and e[0].phase)
u = t.of(members={**members, "lost0": mb})
print("lost0 returned ->", absent_nodes.returned_nodes(u))
