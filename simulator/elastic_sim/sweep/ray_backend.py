"""Runs cells on a Ray cluster; the only module that imports ray, which is optional.

A task is a batch of cells with the same plans, because a worker process caches plans. Ray reruns
the batch of a worker that died. A batch that keeps failing is split, to find the failing cell.
"""

from __future__ import annotations

import hashlib
import os
import re
import socket
import tempfile
from collections.abc import Generator, Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import groupby
from pathlib import Path
from typing import Any

import ray
from ray import exceptions

from elastic.command_line import reason_of
from elastic.domain import version
from elastic.domain.errors import FieldError
from elastic_sim.steps.scenario import Scenario
from elastic_sim.sweep.cells import (
    MAX_DEATHS,
    CellFailed,
    Result,
    SweepCell,
    attempt,
    died,
    plan_key,
    result_or_raise,
)
from elastic_sim.traces.trace import read_bytes

MAX_BATCH = 8
"""Cells per batch; all of them run again when their worker dies."""
LOCAL = "local"
"""Address of a temporary cluster on this machine."""
CONNECT_S = 5.0
"""Ray itself tries for a minute to connect to an address at which nothing answers."""
DIED = (exceptions.WorkerCrashedError, exceptions.NodeDiedError, exceptions.OutOfMemoryError)
Files = Mapping[str, bytes]
"""Contents by path, for machines of the cluster."""


def check_address(field: str, address: str) -> None:
    """Raise FieldError about `field` if nothing answers at an address with a port."""
    match = re.fullmatch(r"(?:ray://)?(?:\[(.+)\]|([^\s/:]+)):(\d{1,5})", address)
    if match is None:  # "auto", LOCAL, or an address that Ray itself refuses
        return
    host, port = match[1] or match[2], int(match[3])
    if not 1 <= port <= 65535:
        raise FieldError(field, address, "name HOST:PORT with a port from 1 to 65535")
    try:
        socket.create_connection((host, port), CONNECT_S).close()
    except (OSError, UnicodeError) as error:
        why = reason_of(error) if isinstance(error, OSError) else "it is not the name of a host"
        remedy = f"no Ray cluster can be reached there: {why}; name HOST:PORT of its head node"
        raise FieldError(field, address, remedy) from error


def run_on_ray(cells: Sequence[SweepCell], address: str) -> Generator[tuple[SweepCell, Result]]:
    """Run cells on the cluster at `address`, or LOCAL. Raises CellFailed.

    Raises FieldError if there is no cluster.
    """
    ours = Path(__file__).resolve().parents[2]
    runtime = Path(version.__file__).resolve().parents[2]
    sources = dict.fromkeys((str(ours), str(runtime)))
    path = os.pathsep.join(filter(None, (*sources, os.environ.get("PYTHONPATH", ""))))
    more = {"include_dashboard": False} if address == LOCAL else {}
    try:
        ray.init(
            address=address,
            runtime_env={"env_vars": {"PYTHONPATH": path, "OMP_NUM_THREADS": "1"}},
            log_to_driver=False,
            logging_level="ERROR",
            **more,
        )
    except (OSError, RuntimeError, ValueError, exceptions.RayError) as error:
        remedy = f"a Ray cluster must run there: {' '.join(str(error).split())[:300]}"
        raise FieldError("--address", address, remedy) from error
    try:
        yield from _run(cells)
    finally:
        ray.shutdown()


def _run(cells: Sequence[SweepCell]) -> Iterator[tuple[SweepCell, Result]]:
    task = ray.remote(_attempt_all).options(num_cpus=1, max_retries=MAX_DEATHS - 1)
    files = ray.put(read_files(cells))
    cpus = max(1, int(ray.cluster_resources().get("CPU", 1)))
    running = {task.remote(batch, files): batch for batch in batches(cells, cpus)}
    while running:
        done = ray.wait(list(running), num_returns=1)[0][0]
        batch = running.pop(done)
        try:
            found = ray.get(done)
        except DIED as error:
            if len(batch) == 1:
                raise died(batch[0]) from error
            running |= {task.remote([cell], files): [cell] for cell in batch}
            continue
        except exceptions.RayError as error:
            raise CellFailed(f"{batch[0]}: {error}") from error
        for cell, result in zip(batch, found, strict=True):
            yield cell, result_or_raise(cell, result)


def batches(cells: Sequence[SweepCell], cpus: int) -> Iterator[list[SweepCell]]:
    """Yield batches of cells with the same plans, small enough to use all CPUs."""
    for _, group in groupby(cells, lambda cell: plan_key(cell.scenario)):
        same = list(group)
        size = min(MAX_BATCH, -(-len(same) // cpus))
        for start in range(0, len(same), size):
            yield same[start : start + size]


def _attempt_all(cells: Sequence[SweepCell], files: Files) -> list[Result | str]:
    """Return the results or errors of a batch of cells, in a Ray worker."""
    return [
        attempt(replace(cell, scenario=with_local_files(cell.scenario, files))) for cell in cells
    ]


def read_files(cells: Sequence[SweepCell]) -> Files:
    """Return all files that cells read. Raises FieldError."""
    paths = {path for cell in cells for path in cell.scenario.files().values()}
    return {path: read_bytes(Path(path)) for path in sorted(paths)}


def with_local_files(scenario: Scenario, files: Files) -> Scenario:
    """Return the scenario with copies of its files on this machine, in folders named by content."""
    copies: dict[str, Any] = {}
    for name, path in scenario.files().items():
        folder = Path(tempfile.gettempdir(), f"elastic-sim-{os.getuid()}")
        folder /= hashlib.sha256(files[path]).hexdigest()
        copy = folder / Path(path).name
        if not copy.exists():
            folder.mkdir(parents=True, exist_ok=True, mode=0o700)
            fresh = folder / f".{os.getpid()}"
            fresh.write_bytes(files[path])
            fresh.replace(copy)
        copies[name] = str(copy)
    return replace(scenario, **copies)
