import sys

sys.path.insert(0, "tests/core/reproductions")
import common

common.N = 14
from common import *
from elastic.core.job import absent_nodes

s = running()
nodes = s.plan.nodes()
peers = dict(s.plan.peers)
a = nodes[1]
b = peers[a]
spares = [n for n in s.members if n not in nodes and n not in peers.values()]
print("plan", nodes, "peers", peers, "spares", spares)
gone = [a, b, *spares[:5]] if len(spares) >= 5 else [a, b, *spares]
s0 = s
s, _ = lose(s, *gone)
for n in list(s.members):
    s, _a = halted(s, n)
print(s.phase, s.missing and s.missing.nodes, "attempts", s.watch.attempts)


def returning(n):
    former = s0.members[n].report.info
    info = replace(former, incarnation=former.incarnation + "-again")
    return m.NodeReport(info, NodePhase.EMPTY, 0, inventory=world().agents[n].inventory())


def settle(s):
    for n in list(s.members):
        r = s.members[n].report
        if s.phase is JobPhase.HALTING and r.epoch < s.epoch:
            ph = NodePhase.STARTING if n in gone else NodePhase.HALTED
            rep = replace(
                r,
                phase=ph,
                epoch=s.epoch,
                inventory=world().agents[n].inventory(),
                halted=() if n in gone else (m.Halted(s.epoch, -1),),
            )
            s, acts, _ = transition(s, rep, s.updated_at + 0.01)
    return s


t0 = s.updated_at
for n in [*gone[2:], a, b]:
    for _ in range(8):
        s, _a, _ = beat(s)  # 3.2 s between returns
    s, acts, r = transition(s, returning(n), s.updated_at + 0.01)
    s = settle(s)
    print(
        "%6.1f %s returned: %s attempts %d retry in %.1f cause %r"
        % (
            s.updated_at - t0,
            n,
            s.phase.value,
            s.watch.attempts,
            max(0, s.watch.retry_at - s.updated_at),
            s.watch.cause,
        )
    )
t1 = s.updated_at
while s.phase is not JobPhase.INSTALLING and s.updated_at < t1 + 300:
    s, _a, _ = beat(s)
    s = settle(s)
print("installing %.1f s after the last return; phase %s" % (s.updated_at - t1, s.phase))
