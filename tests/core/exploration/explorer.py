"""Breadth-first search over all joint states, and the search for stuck states."""

from __future__ import annotations

import sys
import time
from array import array
from collections import Counter
from dataclasses import dataclass, field
from itertools import pairwise

import numpy as np

from tests.core.exploration.cluster import Cluster, State, Violation


@dataclass
class Result:
    """Figures of an exploration."""

    states: int = 0
    transitions: int = 0
    seconds: float = 0.0
    """CPU time."""
    complete: bool = True
    faults: Counter[str] = field(default_factory=Counter)
    """Number of transitions by kind of fault."""
    by_budget: Counter[int] = field(default_factory=Counter)
    """Number of states by faults that are left."""
    violations: dict[str, list[str]] = field(default_factory=dict)
    """Text of a broken promise: shortest trace."""
    stuck: int = 0
    stuck_trace: list[str] = field(default_factory=list)
    goals: int = 0
    interventions: set[str] = field(default_factory=set)


class Explorer:
    def __init__(self, cluster: Cluster, most_states: int = 0) -> None:
        self.cluster, self.most_states = cluster, most_states
        self.numbers: dict[State, int] = {}
        self.order: list[State] = []
        self.parent = array("i")
        self.source, self.target = array("i"), array("i")

    def run(self, start: State | None = None, report_s: float = 0.0) -> Result:
        result, began = Result(), time.process_time()
        cluster, numbers, order = self.cluster, self.numbers, self.order
        start = start or cluster.start
        numbers[start] = 0
        order.append(start)
        self.parent.append(-1)
        goals = array("b", [0])
        at, shown = 0, time.monotonic()
        while at < len(order):
            state = order[at]
            try:
                found = cluster.successors(state)
            except Violation as error:
                if str(error) not in result.violations:
                    result.violations[str(error)] = self.trace(at)
                    if report_s:
                        print(f"  {error}", *self.trace(at), sep="\n    ", flush=True)
                goals[at] = 1
                at += 1
                continue
            if cluster.is_goal(state):
                goals[at] = 1
            for _, after, fault in found:
                number = numbers.get(after)
                if number is None:
                    number = numbers[after] = len(order)
                    order.append(after)
                    self.parent.append(at)
                    goals.append(0)
                if fault:
                    result.faults[fault] += 1
                else:
                    self.source.append(at)
                    self.target.append(number)
            result.transitions += len(found)
            at += 1
            if self.most_states and len(order) > self.most_states:
                result.complete = False
                break
            if report_s and time.monotonic() - shown > report_s:
                shown = time.monotonic()
                print(f"  {at:,} of {len(order):,} states", file=sys.stderr, flush=True)
        result.states = len(order)
        for state in order:
            result.by_budget[state[0]] += 1
        result.interventions = cluster.watchdog
        if result.complete:
            self._find_stuck(result, np.frombuffer(goals, dtype=np.int8) > 0)
        result.seconds = time.process_time() - began
        return result

    def _find_stuck(self, result: Result, good: np.ndarray) -> None:
        """Mark all states from which a goal can be reached without another fault."""
        good = good.copy()
        result.goals = int(good.sum())
        source = np.frombuffer(self.source, dtype=np.int32)
        target = np.frombuffer(self.target, dtype=np.int32)
        while True:
            new = source[good[target] & ~good[source]]
            if not len(new):
                break
            good[new] = True
        bad = np.flatnonzero(~good)
        result.stuck = len(bad)
        if len(bad):
            result.stuck_trace = self.trace(int(bad[0]))

    def trace(self, number: int) -> list[str]:
        """Return the labels of a shortest path to a state."""
        path = [number]
        while self.parent[path[-1]] >= 0:
            path.append(self.parent[path[-1]])
        path.reverse()
        found = []
        for one, other in pairwise(path):
            wanted = self.order[other]
            steps = self.cluster.successors(self.order[one])
            found.append(
                next(self.cluster.text(step.label) for step in steps if step.state == wanted)
            )
        return found
