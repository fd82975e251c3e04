"""Which GPUs of this machine each local node uses."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

VISIBLE = "CUDA_VISIBLE_DEVICES"


def visible_gpus(environ: Mapping[str, str]) -> list[str]:
    """Return the GPUs that processes here may use, as words of CUDA_VISIBLE_DEVICES."""
    visible = environ.get(VISIBLE)
    if visible is None:
        return [str(index) for index in range(len(list(Path("/dev").glob("nvidia[0-9]*"))))]
    return [word.strip() for word in visible.split(",") if word.strip() not in ("", "-1")]


def node_environment(index: int, nproc: int, environ: Mapping[str, str]) -> dict[str, str]:
    """Return the variables that give local node `index` its own GPUs, one for each worker.

    If the machine has fewer GPUs than workers, nodes share them; without a GPU, returns nothing.
    """
    gpus = visible_gpus(environ)
    if not gpus:
        return {}
    own = (gpus[(index * nproc + rank) % len(gpus)] for rank in range(nproc))
    return {VISIBLE: ",".join(dict.fromkeys(own))}
