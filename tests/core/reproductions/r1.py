from dataclasses import replace
from tests.core.job.test_absent_nodes import *
from elastic.core.job.state import CheckpointCommitted

# ---- A: paused, minority absent, coordinator down 15 min then takeover
state, told = lose(running(), "node2", proven=False)
print("absent", state.absent, state.phase)
state, _ = halted(state, "node0")
state, acts = halted(state, "node1")
print("phase", state.phase, state.missing)
# make it miss copies: hide inventories of node1's copies
