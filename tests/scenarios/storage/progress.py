"""Requirements on a job after a fault that lasts: it continues soon, or ends with the cause."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any

LIMIT_S = 10.0
"""Longest time from a fault to a finished step, or to the end of the job."""
WINDOW_S, MOST_EPOCHS = 60.0, 5
"""At most so many epochs without a finished step begin in this time."""


def check_progress(events: Sequence[dict[str, Any]], since: float) -> None:
    """Assert that from `since` on (time.time()), each step or the end came within the limit. A
    step takes its time on this machine without a fault, too."""
    usual = max(
        (e["seconds"] for e in events if e["kind"] == "step" and e["at"] <= since), default=0.0
    )
    ends = [e["at"] for e in events if e["kind"] in ("step", "end") and e["at"] > since]
    assert ends, "neither a step nor the end"
    longest = max(later - earlier for earlier, later in itertools.pairwise([since, *ends]))
    assert longest <= LIMIT_S + usual, f"{longest:.1f} s without a step; usual: {usual:.1f} s"


def check_epochs(events: Sequence[dict[str, Any]]) -> None:
    """Assert that few epochs began without a finished step between them."""
    begun: list[float] = []
    for event in events:
        if event["kind"] == "step":
            begun = []
        elif event["kind"] == "plan":
            begun = [at for at in begun if event["at"] - at < WINDOW_S] + [event["at"]]
            assert len(begun) <= MOST_EPOCHS, f"{len(begun)} epochs without a step"
