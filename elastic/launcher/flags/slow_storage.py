"""Calls to storage that may hang: a wait with a limit, of which the user is told."""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable

HANGING_S = 2.0
"""Longest wait for a directory on another disk, and for storage without a word about it."""
OBJECTS_S = 20.0
"""Longest wait for an object store at the start."""


def ends_in_time(function: Callable[[], object], limit_s: float, location: str) -> bool:
    """Call `function`, and return whether it has ended within `limit_s`. Raises its errors.

    A line on standard error tells of a wait of more than HANGING_S for `location`. A function that
    has not ended goes on, and its result is lost.
    """
    raised: list[BaseException] = []

    def work() -> None:
        try:
            function()
        except BaseException as error:  # noqa: BLE001 - raised below
            raised.append(error)

    thread = threading.Thread(target=work, name="check-storage", daemon=True)
    thread.start()
    thread.join(min(HANGING_S, limit_s))
    if thread.is_alive() and limit_s > HANGING_S:
        print(f"elastic: waiting up to {limit_s:g} s for {location}", file=sys.stderr, flush=True)
        thread.join(limit_s - HANGING_S)
    if thread.is_alive():
        return False
    if raised:
        raise raised[0]
    return True
