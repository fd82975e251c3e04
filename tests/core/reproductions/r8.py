import sys

sys.path.insert(0, "tests/core/reproductions")
from tests.core.policy.test_progress_watchdog import *

b = Bench(trained(start_s=40.0))
b.report("node1", phase=NodePhase.STARTING, cause="oops", able=False, crash_count=1)
b.activity["node1"] = "start"
for n in ("node0", "node2"):
    b.state = halt(b.state, n)
b.state = halt(b.state, "node1", NodePhase.STARTING)
print(b.state.phase)
t0 = b.now
last = 0
while b.now < t0 + 200 and b.state.ending is None:
    acts = b.wait(0.5, "node0", "node2")
    for n in restarts(acts):
        print(
            "%.1f s: restart order to %s, quarantined %s"
            % (b.now - t0, n, quarantine.is_quarantined(b.state, n))
        )
        b.obey(n)
        b.report(n, epoch=b.state.epoch)
        b.move(n)
    if b.state.phase is JobPhase.HALTING:
        for n in b.state.members:
            if b.state.members[n].report.epoch < b.state.epoch:
                b.state = halt(b.state, n) if n != "node1" else halt(b.state, n, NodePhase.STARTING)
print(
    b.state.phase,
    b.state.ending,
    quarantine.is_quarantined(b.state, "node1"),
    quarantine.record_of(b.state, "node1").stuck,
)
