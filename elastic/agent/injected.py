"""Injected faults that the agent carries out, when a worker has reached their point."""

from __future__ import annotations

import logging
import time

from elastic.agent.vault.vault import Vault
from elastic.core.protocol.fault_spec import FaultKind, FaultSpec

log = logging.getLogger(__name__)


def carry_out(fault: FaultSpec, vault: Vault) -> float:
    """Do it; return until when (time.monotonic) the node is cut off from everybody, 0: not at all."""
    if fault.kind is FaultKind.CORRUPT:
        log.warning("one byte is flipped in each of %d copies (injected)", vault.flip_bytes())
        return 0.0
    log.warning("partitioned from everybody for %g s (injected)", fault.duration_s)
    return time.monotonic() + fault.duration_s
