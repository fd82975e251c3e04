"""What things take besides computing: messages, finding out, deciding, meeting, starting, moving bytes.

Computing comes from the profile. Everything here belongs to a machine, not to a job: `elastic-sim validate RUN_DIR
--calibrate FILE` measures it in one run, for others.
"""

from __future__ import annotations

from dataclasses import dataclass, fields
from math import isfinite
from pathlib import Path

from elastic.domain.codec import dumps, loads
from elastic.domain.errors import FieldError

VERSION = 2
MOST_JITTER = 0.9


@dataclass(frozen=True, slots=True, kw_only=True)
class Physics:
    """Seconds, unless a name says otherwise. Every use of one but `pair_s` is multiplied by a random factor of mean
    1."""

    version: int = VERSION
    message_s: float = 0.002
    """Between coordinator and agent, one way."""
    local_s: float = 0.001
    """Between agent and worker, one way."""
    closed_s: float = 0.05
    """From a node's end to the moment at which those it was connected with see their connections closed."""
    leave_s: float = 0.05
    """A worker leaves all communication at once, and puts what it has into the vault."""
    stop_s: float = 0.05
    """The same after the last step of an epoch, for a planned change."""
    plan_s: float = 0.1
    """Planner and recipes: from everybody's having halted to the plan's going out."""
    replan_s: float = 0.1
    """The same for nodes that join: the plan was made already, when they were considered."""
    install_s: float = 0.03
    """Of an installation, besides the bytes that it moves."""
    group_s: float = 0.1
    """Connecting, once everybody has what it needs."""
    pair_s: float = 0.0
    """How much longer it takes for each two that meet: everybody connects to everybody at one store and on the same
    cores. Who comes early has met the others that did by the time the last one comes."""
    start_s: float = 5.0
    """Of the job's first workers, all at once: from their launch to the last one's attaching."""
    spawn_s: float = 3.0
    """Of a worker started later."""
    prefetch_s: float = 0.05
    """Of a newcomer's background transfer, besides the bytes that it moves."""
    resume_s: float = 0.0
    """Of the first micro-batch of an epoch on a worker, besides computing."""
    hop_s: float = 0.0
    """Of a message between stages, besides what the profile's link takes."""
    step_s: float = 0.0
    """Of a step, besides its micro-batches, reduction and update."""
    bytes_per_s: float = 0.0
    """Of a node's link, each way, for states and copies; 0: as the profile says."""
    disk_bytes_per_s: float = 0.0
    """At which a worker reads a checkpoint; 0: taken as free."""
    jitter: float = 0.1
    """Factors lie between 1 - jitter and 1 + jitter."""


def check(physics: Physics) -> Physics:
    """Raise FieldError for the first value that is none."""
    if physics.version != VERSION:
        raise FieldError(
            "Physics.version", physics.version, f"this program reads version {VERSION}"
        )
    for field in fields(physics):
        value = getattr(physics, field.name)
        if not isfinite(value) or value < 0:
            raise FieldError(f"Physics.{field.name}", value, "a finite number from 0 up")
    if physics.jitter > MOST_JITTER:
        raise FieldError("Physics.jitter", physics.jitter, f"at most {MOST_JITTER}")
    return physics


def read(path: Path) -> Physics:
    """Read what `write` wrote. Raises FieldError."""
    try:
        text = path.read_bytes().decode("utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise FieldError("--physics", str(path), f"a readable file is needed: {error}") from error
    return check(loads(Physics, text))


def write(physics: Physics, path: Path) -> None:
    try:
        path.write_text(dumps(physics) + "\n")
    except OSError as error:
        raise FieldError("--calibrate", str(path), f"it must be writable: {error}") from error
