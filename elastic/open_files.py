"""Raises the limit on open files of a process at its start.

Each node costs the coordinator a descriptor, and each peer costs a vault one. Login shells often
allow 1,024, and the hard limit is much higher.
"""

from __future__ import annotations

import logging
import resource

log = logging.getLogger(__name__)
SPARE = 256
"""Descriptors for files, pipes, the store, and connections that are not authenticated yet."""


def raise_limit(connections: int) -> int:
    """Raise the limit of this process as far as it may; return it. Log a warning if so many
    connections do not fit."""
    hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    needed = connections + SPARE
    if hard != resource.RLIM_INFINITY and hard < needed:
        text = "at most %d files may be open, and %d nodes need up to %d: raise `ulimit -Hn`"
        log.warning(text, hard, connections, needed)
    return hard
