from dataclasses import replace
from elastic.core.node import node as core
from elastic.core.node.node import *
from elastic.core.protocol import messages as m
from elastic.domain.types import NodeInfo

st = core.NodeState(
    NodeInfo("node1", "i", "v:1"), first_step_s=3.0, elastic=True
)  # measured before: install -> end of first step took 3 s
launch = m.Launch(0, 1, 0, 1, "h", 1, 0)
st, _, _ = core.transition(st, launch, 1000.0)
st = replace(st, elastic=True)
now, last, prev = 1000.0, 1000.0, None
while now < 1200:
    now += 0.1
    cpu = now - 1000.0  # the main thread uses 100 % CPU: it imports and builds its model
    st, _, _ = core.transition(st, core.WorkersPolled((core.ProcessSample(0, False, cpu),)), now)
    s = core.heartbeat(st).signs
    if s != prev:
        prev, last = s, now
print(
    "last sign of progress %.1f s after the start, though the worker uses 100%% CPU for 200 s"
    % (last - 1000)
)
