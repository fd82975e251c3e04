"""Item 6: if all nodes are slower than profiled, the profile is wrong, and no node is blamed."""

from __future__ import annotations

from elastic.domain.types import LayerSpec
from elastic.planning.cost.profile import Device, LayerTimes, Profile, format_profile
from tests.launcher.cases.case import Case, Command
from tests.launcher.cases.scripts import train

LAYER = LayerSpec(80, 160, 32, 1e-6, 2e-6, output_bytes=32)
TOO_FAST = Profile(
    model="small", layers=(LAYER,) * 3, devices=(Device("a", (LayerTimes(1e-6, 2e-6),) * 3),)
)
"""Times that no machine reaches."""

CASES = (
    Case(
        item=6,
        title="All nodes are slower than the profile says",
        files={
            "train.py": train("trainer(middle=lambda: Slow(4, 4), steps=20).run()"),
            "profile.json": format_profile(TOO_FAST),
        },
        is_long=True,
        command=Command(
            line="elastic run --standalone --nnodes 2 --run-dir run --profile profile.json "
            "train.py",
            shows=(
                "warning: all nodes compute at least Nx slower than the profile says",
                "it shows no node to be slow",
                "profile again under the load of this job",
                "step 20/20: loss N, 2 nodes",
                "all 20 steps done",
            ),
            hides=("quarantine", "-> 1 nodes"),
        ),
    ),
)
