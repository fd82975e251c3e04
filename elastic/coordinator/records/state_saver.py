"""Saves the job's state in the store before a decision is sent or recorded.

**If the store is away** (etcd or SQLite cannot be reached, or refuses a write), training continues:

1. The coordinator still decides, in memory. Messages, records and metrics that follow from its
   decisions are held back, because a successor would not know these decisions.
2. `retry_s` gives the growing pauses between attempts to save. After REPORT_AFTER failures in a row
   the event `store-lost` is reported; `elastic status` shows that decisions wait.
3. When the store is back, the newest state is saved, and all actions that were held back are
   carried out in their order. The event `store-back` has the duration.
4. If another coordinator took over meanwhile, saving raises StaleError, the actions that were held
   back are dropped, and this coordinator stands by.

Events of the event log are saved with the decision from which they follow (`record`). If this
coordinator dies after the save and before it has written them, the next one writes them.

A store that refuses writes (state too large, permission missing) counts as away, because ending the
coordinator would only lead to its restart. So does an etcd without room (NOSPACE); `full` tells
it apart.

If no action follows from a node's report, the state is saved with a delay: in a job of thousands of
nodes a change of plan causes thousands of such reports. If this coordinator is lost before the
save, the nodes send their reports to the next coordinator.
"""

from __future__ import annotations

import dataclasses
import json
import logging
import time
from collections.abc import Callable, Iterable, Mapping
from functools import cache, partial
from math import inf
from types import MappingProxyType
from typing import Any

from elastic.core.job.state import JobState, Member
from elastic.core.protocol.election import retry_s
from elastic.domain import codec
from elastic.store.interface import (
    Conflict,
    Entry,
    Lease,
    Store,
    StoreError,
    StoreFull,
    StoreUnavailable,
)

log = logging.getLogger("elastic.coordinator")
REPORT_AFTER = 2
"""Failures in a row after which the store is reported as lost. A single failure may be a timeout of
a coordinator that was itself stopped during a save."""
MIN_DELAY_S, MAX_DELAY_S = 0.1, 2.0
"""Limits of the delay of `save_later`, which is otherwise ten times the duration of a save."""

LOG_BYTES = 64 << 10
"""Maximum bytes of events that are saved with a state; longer ones are left out."""


class StateSaver:
    """Saves the state during one term. Used by the coordinator's thread only."""

    def __init__(self, store: Store, lease: Lease, key: str, entry: Entry | None) -> None:
        self._store, self._token, self._key = store, lease.token, key
        self.report: Callable[[str, dict[str, Any]], object] = lambda kind, data: None
        """`report(kind, data)` is called with the events `store-lost` and `store-back`."""
        self.measured: Callable[[float, int], object] = lambda seconds, nbytes: None
        """`measured(seconds, nbytes)` is called after each save."""
        self._encoder = StateEncoder()
        self._revision = entry.revision if entry is not None else None
        self._saved = entry.value if entry is not None else b""
        self._held: list[tuple[object, Callable[[], object]]] = []
        self._lines = list[bytes]()
        """Events among the held actions."""
        self._unsaved: JobState | None = None
        self._delayed: JobState | None = None
        self._delayed_until = self._took_s = 0.0
        self._failures, self._retry_at, self._lost_at = 0, 0.0, 0.0
        self._full = False

    @property
    def away(self) -> bool:
        """Whether the last attempt to save has failed."""
        return self._failures > 0

    @property
    def away_s(self) -> float:
        """Seconds since the first of the failures in a row; 0: the last attempt succeeded."""
        return time.monotonic() - self._lost_at if self.away else 0.0

    @property
    def full(self) -> bool:
        """Whether the last attempt to save has failed because the store has no room."""
        return self._full

    @property
    def nbytes(self) -> int:
        """Size of the state that was saved last."""
        return len(self._saved)

    def hold(self, key: object, action: Callable[[], object]) -> None:
        """Call `action` after the next save, unless an action with the same `key` is held already.
        Actions with key None are all called."""
        if key is None or all(key != other for other, _ in self._held):
            self._held.append((key, action))

    def record(self, line: bytes, write: Callable[[bytes], object]) -> None:
        """Call `write(line)` after the next save, which saves this line of the event log, too."""
        self._lines.append(line)
        self.hold(None, partial(write, line))

    def save(self, state: JobState) -> None:
        """Save `state` and call the held actions, now or when the store is back.

        Raises StaleError if another coordinator has taken over.
        """
        self._unsaved = state
        if time.monotonic() >= self._retry_at:
            self.retry()

    def save_later(self, state: JobState) -> None:
        """Save `state` after a delay or with the next decision. No action may depend on it."""
        if self._unsaved is not None:
            self._unsaved = state
            return
        if self._delayed is None:
            delay_s = min(MAX_DELAY_S, max(MIN_DELAY_S, 10 * self._took_s))
            self._delayed_until = time.monotonic() + delay_s
        self._delayed = state

    def flush(self) -> None:
        """Call the held actions, unless a state is unsaved."""
        if self._unsaved is None:
            held, self._held, self._lines = self._held, [], []
            for _, action in held:
                action()

    def due(self) -> bool:
        """Return whether it is time to call `retry`."""
        pending_at = self._delayed_until if self._delayed is not None else inf
        return time.monotonic() >= (self._retry_at if self.away else pending_at)

    def retry(self) -> None:
        """Save the newest unsaved or delayed state. Raises StaleError as `save` does."""
        state = self._unsaved = self._unsaved or self._delayed
        self._delayed = None
        if state is None:
            return
        try:
            self._put(state)
        except (StoreUnavailable, StoreError) as error:
            self._failures, self._full = self._failures + 1, isinstance(error, StoreFull)
            self._retry_at = time.monotonic() + retry_s(self._failures)
            if self._failures == 1:
                self._lost_at = time.monotonic()
                log.warning("decisions wait for the store: %s", error)
            elif self._failures == REPORT_AFTER:
                self.report("store-lost", {"why": str(error)})
            return
        self._unsaved = None
        failures, self._failures, self._full = self._failures, 0, False
        if failures >= REPORT_AFTER:
            away_s, held = round(time.monotonic() - self._lost_at, 3), len(self._held)
            log.warning("the store is back after %.1f s; %d actions were held back", away_s, held)
            self.report("store-back", {"away_s": away_s, "held": held})
        self.flush()

    def _put(self, state: JobState) -> None:
        began = time.perf_counter()
        value = self._encoder.encode(state.of(log=_first_lines(self._lines))).encode()
        if value == self._saved:
            return
        try:
            entry = self._store.put_if(self._key, value, self._revision, self._token)
        except Conflict:
            # Only this coordinator's token may write, so its last write arrived without an answer.
            present = self._store.get(self._key)
            self._revision = present.revision if present is not None else None
            entry = self._store.put_if(self._key, value, self._revision, self._token)
        self._revision, self._saved = entry.revision, value
        self._took_s = time.perf_counter() - began
        self.measured(self._took_s, len(value))


def _first_lines(lines: Iterable[bytes]) -> tuple[str, ...]:
    """Return the lines that fit into LOG_BYTES, in their order."""
    kept, left = list[str](), LOG_BYTES
    for line in lines:
        if len(line) <= left:
            kept.append(line.decode())
            left -= len(line)
    return tuple(kept)


NO_FIELDS: Mapping[str, Callable[[Any], str]] = MappingProxyType({})


class _Texts:
    """Texts of one object and of its fields, each kept while the value is the same."""

    def __init__(self) -> None:
        self._known: dict[str, tuple[Any, str]] = {}
        self._whole: tuple[Any, str] = (None, "")

    def encode(self, value: Any, inner: Mapping[str, Callable[[Any], str]] = NO_FIELDS) -> str:
        """Return the same text as `codec.dumps(value)`. `inner`: functions that encode fields."""
        if self._whole[0] is value:
            return self._whole[1]
        known, parts = self._known, []
        kind: Any = type(value)
        for name in field_names(kind):
            part = getattr(value, name)
            if name in inner:
                text = inner[name](part)
            elif name in known and known[name][0] is part:
                text = known[name][1]
            else:
                text = codec.dumps(part)
                known[name] = part, text
            parts.append(f'"{name}":{text}')
        self._whole = value, f"{{{','.join(parts)}}}"
        return self._whole[1]


@cache
def field_names(kind: type) -> tuple[str, ...]:
    """Return the names of a dataclass's fields."""
    return tuple(field.name for field in dataclasses.fields(kind))


class StateEncoder:
    """Encodes states as `elastic.domain.codec` does, and reuses the text of unchanged parts.

    Parts of a state are immutable, so the same object has the same text. In a job of thousands of
    nodes few parts change between two saves: heartbeats change a time and two numbers of a member,
    and the assignment alone has tens of thousands of recipes. Not thread-safe.
    """

    def __init__(self) -> None:
        self._state = _Texts()
        self._members: dict[str, tuple[_Texts, _Texts]] = {}
        """Texts of each member, and of its report."""

    def encode(self, state: JobState) -> str:
        """Return the same text as `codec.dumps(state)`."""
        return self._state.encode(state, {"members": self._encode_members})

    def _encode_members(self, members: dict[str, Member]) -> str:
        for node in self._members.keys() - members.keys():
            del self._members[node]
        return f"{{{','.join([self._encode_member(n, mb) for n, mb in members.items()])}}}"

    def _encode_member(self, node: str, member: Member) -> str:
        texts, report = self._members.setdefault(node, (_Texts(), _Texts()))
        return f"{json.dumps(node)}:{texts.encode(member, {'report': report.encode})}"
