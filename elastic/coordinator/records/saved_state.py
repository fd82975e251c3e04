"""Reads the saved state of a job, which a coordinator of another version may have written.

Fields of the next version are ignored and missing ones have their defaults, so that a coordinator
can be upgraded and rolled back by one version while the job runs
(`elastic.core.protocol.version`).
"""

from __future__ import annotations

import json

from elastic.core.job.state import JobState
from elastic.core.protocol.version import (
    FIRST,
    PROTOCOL,
    ProtocolVersion,
    incompatibility,
    this_version,
)
from elastic.domain import codec
from elastic.domain.errors import FieldError, IncompatibleVersion


def read_state(text: bytes) -> JobState:
    """Return the state in `text`. It will be saved as this version's.

    Raises IncompatibleVersion if this version cannot read it.
    """
    try:
        data = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise IncompatibleVersion(f"the saved state of the job is not JSON: {error}") from None
    number = data.get("protocol", FIRST) if isinstance(data, dict) else FIRST
    theirs = ProtocolVersion(number if isinstance(number, int) else FIRST)
    problem = incompatibility(
        this_version(), theirs, "this coordinator", "the coordinator that saved the job's state"
    )
    if problem:
        raise IncompatibleVersion(problem)
    try:
        return codec.decode(JobState, data, newer=True).of(protocol=PROTOCOL)
    except FieldError as error:
        problem = f"this coordinator (protocol {PROTOCOL}) cannot read the job's saved state"
        remedy = f"start the version that saved it (protocol {theirs.number})"
        raise IncompatibleVersion(f"{problem}: {error}; {remedy}") from error
