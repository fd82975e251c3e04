"""Figures of an epoch change, as summary.json has them. Pure."""

from __future__ import annotations

from typing import Any

from elastic.core.job.state import Recovered


def recovery_entry(event: Recovered, fault_at: float | None) -> dict[str, Any]:
    """Figures of one epoch change. `fault_at`: when the fault was injected, if it was; seconds since 1970.

    detect_s: fault to the coordinator's decision to halt, as of when the news came to it; decide_s: until the plan was
    sent (halting included); transfer_s and rebuild_s: the slowest worker's; total_s: fault to the first micro-batch
    computed. pause_s, of a planned change: from the end of the last step before it to the first micro-batch computed
    after it.
    """
    change = event.change
    planned = change.boundary
    start = change.began - change.detect_s
    if fault_at is not None and fault_at <= change.began and not planned:
        start = fault_at
    return {
        "step": change.step,
        "microbatch": change.microbatch,
        "cause": change.cause,
        "cause_kinds": [cause.kind.value for cause in change.causes],
        "planned": planned,
        "epoch": change.epoch,
        "nodes_before": change.nodes_before,
        "nodes_after": event.nodes_after,
        "detect_s": round(change.began - start, 4),
        "decide_s": round(change.decided - change.began, 4),
        "halt_s": round(change.halted - change.began, 4),
        "transfer_s": round(event.transfer_s, 4),
        "rebuild_s": round(event.rebuild_s, 4),
        "total_s": round(event.resumed_at - start, 4),
        "pause_s": round(event.resumed_at - change.paused, 4) if planned and change.paused else 0.0,
        "microbatches_lost": len(change.replayed),
        "microbatches_replayed": len(change.replayed),
        "microbatches_rerun": change.rerun,
        "microbatches_partial": change.partial,
        "state_source": change.state_source,
        "network_bytes": change.network_bytes,
        "reason": change.reason,
    }
