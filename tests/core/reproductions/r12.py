import sys

sys.path.insert(0, "tests/core/reproductions")
from tests.core.policy.test_progress_watchdog import *

b = Bench(trained())
fail(b, "node0", failures=(FULL,))  # one transient failure of node0, attempt 1
print(b.state.phase, b.state.watch.attempts, b.state.watch.failures)
for k in (2, 3):
    fail(b, "node0", suspects=("node1",), failures=("LinkFailed: reset by peer",))
    print(b.state.phase, b.state.watch.attempts)
# now node1's and node2's workers crash together (e.g. both pods are OOM-killed), before a step is done
c = b.state.members
b.report(
    "node1",
    phase=NodePhase.STARTING,
    able=False,
    crash_count=1,
    cause="worker 0 ended with signal 9",
)
b.report(
    "node2",
    phase=NodePhase.STARTING,
    able=False,
    crash_count=1,
    cause="worker 0 ended with signal 9",
)
for n in NODES:
    b.state = halt(b.state, n, NodePhase.HALTED if n == "node0" else NodePhase.STARTING)
b.wait(1.0)
print(b.state.phase, b.state.ending)
