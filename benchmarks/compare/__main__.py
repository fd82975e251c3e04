"""Run this runtime, torchft, torchrun and NVRx on the same work, with kills at the same moments.

    python -m benchmarks.compare [--systems ours,torchft] [--keep DIR]

Four nodes train the same network on the same data, 16 micro-batches of 0.1 s per step. Each system
runs once without failures and once with two kills: SIGKILL to all processes of a node in the middle
of a step. A new node replaces it after 5 s. Rivals run with their defaults and tuned as their
documents advise (`benchmarks.compare.systems`). Systems that are not installed are named and left
out; `make compare` installs them.
"""

from __future__ import annotations

import argparse
import importlib.util
import os
import socket
import sys
import tempfile
from collections.abc import Sequence
from functools import partial
from pathlib import Path

from benchmarks.compare.cluster import Kill, Nodes, RecordReader
from benchmarks.compare.figures import Figures, figures
from benchmarks.compare.job import NODE, NODES, RECORDS, STEPS
from benchmarks.compare.systems import SYSTEMS, System
from benchmarks.results import Row, save

ROOT = Path(__file__).parents[2]
REPLACE_S, LIMIT_S = 5.0, 240.0
"""Seconds from a kill to the start of the new node, and longest time of a run."""
KILLS = (Kill(node=2, step=STEPS // 6), Kill(node=3, step=STEPS // 2))


def free_port() -> int:
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        return int(found.getsockname()[1])


def run(system: System, kills: Sequence[Kill], folder: Path) -> Figures:
    """Run a system with kills. Raises RuntimeError or TimeoutError, with the place of its logs."""
    (folder / "records").mkdir(parents=True)
    port, path = free_port(), os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])
    shared = {RECORDS: str(folder / "records"), "OMP_NUM_THREADS": "1", "PYTHONPATH": path}
    envs = [{**shared, **system.env(node, port), NODE: str(node)} for node in range(NODES)]
    reader = RecordReader(folder / "records")
    try:
        command = partial(system.node, port=port, folder=folder)
        with Nodes(command, envs, system.services(port), shared, folder) as nodes:
            killed = nodes.carry_out(kills, REPLACE_S, LIMIT_S, reader)
        return figures(reader.records, system.steps(reader.records, folder), killed)
    except (RuntimeError, TimeoutError, ValueError, OSError) as error:
        raise RuntimeError(f"{system.name} ({system.settings}): {error}; see {folder}") from error


def rows(system: System, calm: Figures, killed: Figures) -> list[Row]:
    name = f"{system.name}, {system.settings}"
    kills = len(killed.idle_s)
    return [
        Row(f"{name}: usual step", calm.step_s, "s", None, "lower"),
        Row(f"{name}: next useful work after a kill", max(killed.idle_s), "s", None, "lower"),
        Row(f"{name}: next new step after a kill", max(killed.pause_s), "s", None, "lower"),
        Row(f"{name}: longer per kill", (killed.seconds - calm.seconds) / kills, "s", None,
            "lower"),
        Row(f"{name}: micro-batches lost per kill", killed.lost / kills, "", None, "lower"),
        Row(f"{name}: steps with a smaller batch", killed.small_steps, "", None, "lower"),
        Row(f"{name}: final loss, without kills", calm.loss, "", None, "lower"),
        Row(f"{name}: final loss, with kills", killed.loss, "", None, "lower"),
    ]  # fmt: skip


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.compare")
    names = sorted({system.name for system in SYSTEMS})
    parser.add_argument("--systems", default=",".join(names), help="comma-separated")
    parser.add_argument("--keep", type=Path, help="keep the files of all runs in this new folder")
    args = parser.parse_args()
    wanted = [name for name in args.systems.split(",") if name]
    for name in wanted:
        if name not in names:
            parser.error(f"--systems: {name} is not one of {', '.join(names)}")
    found: list[Row] = []
    with tempfile.TemporaryDirectory() as scratch:
        base = args.keep or Path(scratch)
        for number, system in enumerate(one for one in SYSTEMS if one.name in wanted):
            if system.needs and importlib.util.find_spec(system.needs) is None:
                print(f"{system.name} is left out: {system.needs} is not installed", flush=True)
                continue
            calm = run(system, (), base / f"{number}-calm")
            killed = run(system, KILLS, base / f"{number}-killed")
            print(f"{system.name}, {system.settings}\n  {calm}\n  {killed}", flush=True)
            found += rows(system, calm, killed)
    save("compare", found)
    return 0


if __name__ == "__main__":
    sys.exit(main())
