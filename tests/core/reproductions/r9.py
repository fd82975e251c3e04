import sys

sys.path.insert(0, "tests/core/reproductions")
from tests.core.policy.test_progress_watchdog import *

NEED = 25.0  # quiet start of 25 s; the first start was measured as 40 s
b = Bench(trained(start_s=40.0))
t0 = b.now
began = {}
for n in ("node1", "node2", "node0"):
    b.activity[n] = "start"
    b.cpu[n] = 0.0
    b.report(
        n, phase=NodePhase.STARTING, cause="worker 0 ended with signal 7", able=False, crash_count=1
    )
    b.move(n)
    began[n] = b.now
print(b.state.phase)
while b.now < t0 + 120 and b.state.ending is None:
    for n in list(b.state.members):
        if b.state.members[n].report.epoch < b.state.epoch:
            b.state = halt(b.state, n, NodePhase.STARTING)
    acts = b.wait(0.5)
    for n in restarts(acts):
        print("%.1f s: restart order to %s" % (b.now - t0, n))
        b.obey(n)
        b.move(n)
        began[n] = b.now
    for n, at in began.items():
        if b.now - at > NEED:
            print(n, "attached")
print("%.1f" % (b.now - t0), b.state.phase, b.state.ending)
