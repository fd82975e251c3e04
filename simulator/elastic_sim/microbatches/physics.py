"""Delays of a machine, except computing times, which the profile gives.

The delays belong to a machine, not to a job: `elastic-sim validate RUN_DIR --calibrate FILE`
measures them in one run, to predict others.
"""

from __future__ import annotations

from dataclasses import dataclass, fields
from math import isfinite
from pathlib import Path

from elastic.command_line import content_errors
from elastic.domain.codec import loads
from elastic.domain.errors import FieldError
from elastic_sim.traces.trace import read_text

VERSION = 2
MAX_JITTER = 0.9


@dataclass(frozen=True, slots=True, kw_only=True)
class MicrobatchPhysics:
    """Delays, in seconds unless a name says otherwise. Each use of a delay, except `pair_s`, is
    varied by a random factor of mean 1."""

    version: int = VERSION
    message_s: float = 0.002
    """Time of a message between coordinator and agent."""
    local_s: float = 0.001
    """Time of a message between agent and worker."""
    closed_s: float = 0.05
    """From the end of a node until its peers see their connections closed."""
    leave_s: float = 0.05
    """Time in which a worker aborts all communication and puts its state into the vault."""
    stop_s: float = 0.05
    """As `leave_s`, but after the last step of an epoch, for a planned change."""
    plan_s: float = 0.1
    """Time of planner and recipes, from the last node's halt until the plan is sent."""
    replan_s: float = 0.1
    """As `plan_s`, but for joining nodes; their plan was computed when they were considered."""
    install_s: float = 0.03
    """Time of an installation, without the transfer of its bytes."""
    group_s: float = 0.1
    """Time to connect, once all workers have their state."""
    pair_s: float = 0.0
    """Additional connection time per pair of workers, which share one store and the same cores.
    Workers that come early connect to each other before the last worker comes."""
    start_s: float = 5.0
    """From the launch of the job's first workers until the last one attaches."""
    spawn_s: float = 3.0
    """Start-up time of a later worker."""
    prefetch_s: float = 0.05
    """Time of a joining node's background transfer, without that of its bytes."""
    resume_s: float = 0.0
    """Additional time of a worker's first micro-batch in an epoch."""
    hop_s: float = 0.0
    """Additional time of a message between stages, beyond the profile's link."""
    step_s: float = 0.0
    """Additional time of a step, beyond micro-batches, reduction and update."""
    bytes_per_s: float = 0.0
    """Bandwidth of a node's link per direction, for states and copies; 0: the profile's."""
    disk_bytes_per_s: float = 0.0
    """Speed at which a worker reads a checkpoint; 0: no time."""
    jitter: float = 0.1
    """Random factors lie between 1 - jitter and 1 + jitter."""


def check(physics: MicrobatchPhysics) -> MicrobatchPhysics:
    """Return `physics`. Raises FieldError for the first invalid value."""
    if physics.version != VERSION:
        remedy = f"this program reads version {VERSION}"
        raise FieldError("Physics.version", physics.version, remedy)
    for field in fields(physics):
        value = getattr(physics, field.name)
        if not isfinite(value) or value < 0:
            raise FieldError(f"Physics.{field.name}", value, "a finite number from 0 up")
    if physics.jitter > MAX_JITTER:
        raise FieldError("Physics.jitter", physics.jitter, f"at most {MAX_JITTER}")
    return physics


def read(path: Path) -> MicrobatchPhysics:
    """Read a file that `--calibrate` wrote. Raises FieldError."""
    text = read_text(path, "--physics")
    with content_errors("--physics", path, "a file that `validate --calibrate` wrote"):
        return check(loads(MicrobatchPhysics, text))
