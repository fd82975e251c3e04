"""The numbers of a recovery that trackers draw."""

from __future__ import annotations

from elastic.launcher.tracking.callback import RunEvent

FIGURES = (
    "detect_s", "total_s", "pause_s", "nodes_before", "nodes_after", "microbatches_lost",
    "microbatches_rerun", "network_bytes",
)  # fmt: skip


def figures(recovery: RunEvent) -> dict[str, float]:
    """Return the numbers among the fields of a recovery, by name."""
    found = {name: recovery.fields.get(name) for name in FIGURES}
    return {name: float(value) for name, value in found.items() if isinstance(value, int | float)}
