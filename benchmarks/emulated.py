"""Runs of `elastic run --emulate` for benchmarks: layers that wait, real copies, slow links."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from elastic.domain.types import LayerSpec
from elastic.planning.cost.profile import Device, LayerTimes, LinkProfile, Profile, format_profile

LATENCY_S = 1e-4
OUTPUT_BYTES = 1 << 14


def equal_layers(
    n: int, parameters: int, seconds: float, bytes_per_s: float, copy_bytes_per_s: float = 1e9
) -> Profile:
    """Return a profile of `n` layers of `parameters` each on a link of `bytes_per_s`.

    A parameter has 4 bytes, 8 more of optimizer state and 4 of gradient. A layer takes `seconds` in
    the forward and backward pass together.
    """
    times = LayerTimes(seconds / 3, 2 * seconds / 3, seconds / 3, seconds / 3)
    layer = LayerSpec(
        4 * parameters,
        8 * parameters,
        4 * parameters,
        times.forward_s,
        times.backward_s,
        output_bytes=OUTPUT_BYTES,
    )
    return Profile(
        model="waiting",
        layers=(layer,) * n,
        devices=(Device("a", (times,) * n),),
        link=LinkProfile(bytes_per_s, LATENCY_S),
        copy_bytes_per_s=copy_bytes_per_s,
    )


def run(
    profile: Profile, flags: Sequence[str], microbatches: int, steps: int, folder: Path
) -> dict[str, Any]:
    """Train for `steps` steps; return the summary. Raises RuntimeError with the run's output."""
    folder.mkdir(parents=True)
    (folder / "profile.json").write_text(format_profile(profile))
    words = [
        "run", "--standalone", "--schedule", "1f1b", "--emulate", str(folder / "profile.json"),
        "--device", "a",
        "--run-dir", str(folder / "run"), *flags, "-m", "benchmarks.waiting",
        "--num-microbatches", str(microbatches), "--steps", str(steps), "--moments",
    ]  # fmt: skip
    command = [sys.executable, "-m", "elastic", *words]
    env = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        command, env=env, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, check=False
    )
    if done.returncode:
        raise RuntimeError(done.stdout.decode(errors="replace"))
    summary: dict[str, Any] = json.loads((folder / "run" / "summary.json").read_text())
    return summary


def shaped(bandwidth: str) -> list[str]:
    """Return flags that limit links between nodes to a bandwidth such as 1Gbit."""
    return ["--link", f"bandwidth={bandwidth} latency={LATENCY_S * 1e3:g}ms"]
