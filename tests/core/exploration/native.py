"""The search of `explorer` in C, for explorations with many states.

`search.c` combines the steps of single parts, which `Cluster` computes, into joint steps. It needs
a C compiler (`cc`). The search in Python is the reference: a test compares both.
"""

from __future__ import annotations

import ctypes
import gc
import hashlib
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from functools import cache
from itertools import pairwise
from pathlib import Path
from resource import RUSAGE_SELF, getrusage
from typing import Any

from elastic.core.job.state import JobPhase
from tests.core.exploration.cluster import (
    CUT_S,
    HEAD,
    KINDS,
    LONG_S,
    SLOW_S,
    Cluster,
    LinkPhase,
    Op,
    Outcome,
    State,
    Table,
)
from tests.core.exploration.explorer import Result
from tests.core.exploration.node_model import WorkerPhase

NONE = 0xFFFFFFFF
BLOCK = 20_000
"""Number of states that are expanded between two looks at the clock."""
NOTHING, BROKEN, ENDS, NORMAL = range(4)
"""Kinds of outcomes."""
LIMITS_S = (LONG_S, CUT_S, SLOW_S)
ASK = ctypes.CFUNCTYPE(ctypes.c_int, ctypes.c_int, *[ctypes.c_uint32] * 4)


@cache
def library() -> ctypes.CDLL:
    """Return the compiled search. It is compiled once for each version of its source."""
    source = Path(__file__).with_name("search.c")
    name = f"exploration-{hashlib.sha256(source.read_bytes()).hexdigest()[:16]}.so"
    target = source.parent / "__pycache__" / name
    if not target.exists():
        target.parent.mkdir(exist_ok=True)
        with tempfile.TemporaryDirectory(dir=target.parent) as folder:
            made = Path(folder) / name
            command = ["cc", "-O2", "-shared", "-fPIC", "-o", str(made), str(source)]
            subprocess.run(command, check=True)
            made.replace(target)
    found = ctypes.CDLL(str(target))
    pointer, number, long = ctypes.c_void_p, ctypes.c_uint32, ctypes.c_uint64
    words = ctypes.POINTER(ctypes.c_uint32)
    found.create.argtypes, found.create.restype = [ASK, *[number] * 4], pointer
    found.destroy.argtypes = [pointer]
    found.add.argtypes = [pointer, words]
    found.explore.argtypes = [pointer, long]
    found.find_stuck.argtypes = [pointer]
    found.answer_of.argtypes, found.answer_of.restype = [pointer], words
    found.state_of.argtypes, found.state_of.restype = [pointer, long], words
    found.parent_of.argtypes, found.parent_of.restype = [pointer, long], number
    found.figure.argtypes, found.figure.restype = [pointer, ctypes.c_int], long
    return found


class NativeExplorer:
    """Does the same as `Explorer`. The number of states is limited to 2^32 and by the memory."""

    def __init__(self, cluster: Cluster, most_states: int = 0, most_bytes: int = 0) -> None:
        self.cluster, self.most_states, self.most_bytes = cluster, most_states, most_bytes
        self.heads: Table[State] = Table()
        self.pairs: Table[tuple[int, int]] = Table()
        self.events: Table[Any] = Table()
        self.ops: Table[Op] = Table()
        self.sent: Table[tuple[int, ...]] = Table()
        self.sent.number(())
        self.incarnations: Table[str] = Table()
        self.incarnations.number("")
        self.error: BaseException | None = None
        self._answers: tuple[Callable[..., Iterator[int] | list[int]], ...] = (
            self._pair,
            self._head,
            self._team,
            self._event,
            self._beat,
            self._wait,
            self._takeover,
            self._spent,
            self._crashed,
            self._change,
            self._answered,
            self._after_sending,
            self._on_all,
        )
        self._ask = ASK(self._called)
        self._library = library()
        count = len(cluster.names)
        self._search = ctypes.c_void_p(
            self._library.create(
                self._ask,
                count,
                cluster.policy.min_nodes,
                KINDS.index("duplicate"),
                KINDS.index("coordinator cut"),
            )
        )
        self._answer = self._library.answer_of(self._search)

    def close(self) -> None:
        self._library.destroy(self._search)

    # ---- answers to the search in C; `search.c` describes them ----

    def _called(self, what: int, *numbers: int) -> int:
        try:
            words = list(self._answers[what](*numbers))
            for at, word in enumerate(words):
                self._answer[at] = word
            return len(words)
        except BaseException as error:  # noqa: BLE001 - C code cannot pass it on
            self.error = error
            return -1

    def _pair_of(self, node: int, link: int) -> int:
        return self.pairs.number((node, link))

    def _pair(self, number: int, *_: int) -> list[int]:
        cluster = self.cluster
        n, link = self.pairs.values[number]
        node, value = cluster.nodes.values[n], cluster.links.values[link]
        event, popped = cluster.link_event(n, link)
        is_open = value.phase is LinkPhase.OPEN
        facts = (
            node.alive,
            node.alive and is_open,
            value.phase is LinkPhase.CUT,
            node.worker.phase is WorkerPhase.STARTING,
            cluster.may_beat(n, link),
            is_open and bool(value.up),
        )
        flags = sum(1 << bit for bit, holds in enumerate(facts) if holds)
        solo = cluster.solo(n, link)
        order, interest = cluster.quiet_order(n, link), cluster.interest(n, link)
        faults = cluster.pair_faults(n, link, cluster.kinds)
        return [
            n,
            link,
            flags,
            self.incarnations.number(cluster.incarnation(n)),
            cluster.version(n) + 1,
            NONE if event is None else self.events.number(event),
            self._pair_of(n, popped),
            node.agent.epoch + 1,
            *((int(order.kind), order.epoch + 1) if order is not None else (0, 0)),
            *(x for epoch, loads in interest for x in (epoch + 1, loads)),
            len(solo),
            *(x for _, slow, *after in solo for x in (self._pair_of(*after), int(slow))),
            len(faults),
            *(
                x
                for kind, _, after, new, crashes in faults
                for x in (KINDS.index(kind), self._pair_of(after, new), crashes)
            ),
        ]

    def _head(self, number: int, *_: int) -> Iterator[int]:
        cluster, head = self.cluster, self.heads.values[number]
        job_state = cluster.states.values[head[2]]
        phase = job_state.phase
        ends = cluster.until_end and cluster.is_over(head[2])
        flags = ends + 2 * (phase is JobPhase.WAITING) + 4 * cluster.reduces(head)
        yield flags + 8 * cluster.has_trimmed(head[2]) + 16 * (phase is JobPhase.HALTING)
        yield job_state.epoch + 1
        over = cluster.is_over(head[2])
        kinds = cluster.next_kinds(head[0]) if not over else frozenset[str]()
        yield sum(1 << KINDS.index(kind) for kind in kinds)
        for i in range(len(cluster.names)):
            yield self.incarnations.number(cluster.member_incarnation(head[2], i)) or NONE
        takeovers = cluster.takeovers(head, kinds)
        yield len(takeovers)
        for kind, start in takeovers:
            yield KINDS.index(kind)
            yield start

    def _team(self, *numbers: int) -> Iterator[int]:
        try:
            found = self.cluster.team(numbers[: len(self.cluster.names)])
        except AssertionError:
            yield 1
            return
        yield 0
        yield len(found)
        for _, i, node, sent, keeper, kept in found:
            yield from (i, node, self.sent.number(sent))
            yield from (NONE, NONE) if kept < 0 else (keeper, kept)

    def _event(self, head: int, i: int, event: int, *_: int) -> list[int]:
        found = self.events.values[event]
        return self._outcome(lambda: self.cluster.outcome(self.heads.values[head], i, found))

    def _outcome(self, decide: Callable[[], Outcome | None]) -> list[int]:
        try:
            outcome = decide()
        except AssertionError:
            return [BROKEN]
        if outcome is None:
            return [NOTHING]
        head = outcome.head
        if self.cluster.until_end and self.cluster.is_over(head[2]):
            head = self.cluster.end(head[2])[:HEAD]
            return [ENDS, self.heads.number(head)]
        ops = [x for i, op in outcome.ops for x in (i, self.ops.number(op))]
        return [NORMAL, self.heads.number(head), outcome.step + 1, len(outcome.ops), *ops]

    def _beat(self, head: int, i: int, node: int, *_: int) -> list[int]:
        order = self.cluster.beat_answer(self.heads.values[head][2], i, node)
        return [order if order >= 0 else NONE]

    def _wait(self, head: int, heard: int, limit: int, *_: int) -> list[int]:
        def decide() -> Outcome | None:
            passed = self.cluster.passed(self.heads.values[head], heard, LIMITS_S[limit])
            return passed and passed[1]

        return self._outcome(decide)

    def _takeover(self, head: int, start: int, *_: int) -> list[int]:
        return self._outcome(lambda: self.cluster.takeover(self.heads.values[head], start))

    def _spent(self, head: int, kind: int, *_: int) -> list[int]:
        return [self.heads.number(self.cluster.spent(self.heads.values[head], KINDS[kind]))]

    def _crashed(self, head: int, crashes: int, *_: int) -> list[int]:
        before = self.heads.values[head]
        return [self.heads.number((before[0], before[1] + crashes, *before[2:]))]

    def _change(self, pair: int, op: int, *_: int) -> list[int]:
        node, link = self.pairs.values[pair]
        return [self._pair_of(node, self.cluster.changed(link, self.ops.values[op]))]

    def _answered(self, pair: int, order: int, *_: int) -> list[int]:
        node, link = self.pairs.values[pair]
        if order in self.cluster.links.values[link].down:
            return [NONE]
        return [self._pair_of(node, self.cluster.changed(link, ("answer", order)))]

    def _after_sending(self, pair: int, node: int, sent: int, *_: int) -> list[int]:
        link = self.pairs.values[pair][1]
        return [self._pair_of(*self.cluster.sent(link, node, self.sent.values[sent]))]

    def _on_all(self, pair: int, takeover: int, *_: int) -> list[int]:
        node, link = self.pairs.values[pair]
        name = self.cluster.op_for(node, "takeover" if takeover else "cut")
        return [self._pair_of(node, self.cluster.changed(link, (name, 0)))]

    # ---- the search ----

    def _number_of(self, state: State) -> Any:
        pairs = [self._pair_of(*state[at : at + 2]) for at in range(HEAD, len(state), 2)]
        words = [self.heads.number(state[:HEAD]), *pairs]
        return (ctypes.c_uint32 * len(words))(*words)

    def state(self, number: int) -> State:
        words = self._library.state_of(self._search, number)
        pairs = [self.pairs.values[words[1 + i]] for i in range(len(self.cluster.names))]
        return (*self.heads.values[words[0]], *(x for pair in pairs for x in pair))

    def states(self) -> Iterator[State]:
        return map(self.state, range(self._figure(0)))

    def _figure(self, which: int) -> int:
        return int(self._library.figure(self._search, which))

    def _fail(self) -> None:
        assert self.error is not None
        raise self.error

    def run(self, start: State | None = None, report_s: float = 0.0) -> Result:
        """Explore everything from `start`. Progress is shown every `report_s`; 0: never.

        Python answers from tables that only grow, so its garbage collector is switched off.
        """
        collecting = gc.isenabled()
        gc.disable()
        try:
            return self._run(start, report_s)
        finally:
            if collecting:
                gc.enable()

    def _run(self, start: State | None, report_s: float) -> Result:
        result, began, shown = Result(), time.process_time(), time.monotonic()
        self.cluster.keep_no_outcomes()
        self.pairs.number((0, 0))  # stands for all pairs of a job that is over
        if self._library.add(self._search, self._number_of(start or self.cluster.start)) < 0:
            self._fail()
        while (code := self._library.explore(self._search, BLOCK)) != 0:
            if code == -2:
                self._fail()
            if code == -1:
                self._note_violation(result, self._figure(3), report_s > 0)
            # Linux counts in KiB.
            count, size = self._figure(0), 1024 * getrusage(RUSAGE_SELF).ru_maxrss
            if 0 < self.most_states < count or 0 < self.most_bytes < size:
                result.complete = False
                break
            if report_s and time.monotonic() - shown > report_s:
                shown = time.monotonic()
                text = f"  {self._figure(2):,} of {count:,} states, {size / 2**20:,.0f} MiB"
                print(text, file=sys.stderr, flush=True)
        result.states, result.transitions = self._figure(0), self._figure(1)
        faults = {kind: self._figure(16 + i) for i, kind in enumerate(KINDS)}
        result.faults.update({kind: count for kind, count in faults.items() if count})
        result.interventions = self.cluster.interventions
        if result.complete:
            if self._library.find_stuck(self._search) < 0:
                self._fail()
            result.stuck, result.goals = self._figure(4), self._figure(6)
            if result.stuck:
                result.stuck_trace = self.trace(self._figure(5))
        result.seconds = time.process_time() - began
        return result

    def _note_violation(self, result: Result, number: int, shows: bool) -> None:
        try:
            self.cluster.successors(self.state(number))
        except AssertionError as error:
            if str(error) not in result.violations:
                trace = result.violations[str(error)] = self.trace(number)
                if shows:
                    print(f"  {error}", *trace, sep="\n    ", flush=True)
        else:
            raise AssertionError("both searches differ")

    def trace(self, number: int) -> list[str]:
        """Return the labels of a shortest path to a state."""
        path = [number]
        while (parent := self._library.parent_of(self._search, path[-1])) != NONE:
            path.append(parent)
        found = []
        for one, other in pairwise(map(self.state, reversed(path))):
            steps = self.cluster.successors(one)
            found.append(next(self.cluster.text(x.label) for x in steps if x.state == other))
        return found
