"""Breadth-first search over all joint states, and the search for stuck states."""

from __future__ import annotations

import sys
import time
from array import array
from collections import Counter
from dataclasses import dataclass, field
from itertools import pairwise

import numpy as np

from tests.core.exploration.cluster import Cluster, State


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
        """Number of the state from which each state was found."""
        self.goals = array("b")
        self.source, self.target = array("i"), array("i")
        """Steps that are no faults, by the numbers of their states."""

    def run(self, start: State | None = None, report_s: float = 0.0) -> Result:
        """Explore everything from `start`. Progress is shown every `report_s`; 0: never."""
        result, began = Result(), time.process_time()
        self._add(start or self.cluster.start, -1)
        at, shown = 0, time.monotonic()
        while at < len(self.order):
            self._expand(at, result, report_s > 0)
            at += 1
            if self.most_states and len(self.order) > self.most_states:
                result.complete = False
                break
            if report_s and time.monotonic() - shown > report_s:
                shown = time.monotonic()
                print(f"  {at:,} of {len(self.order):,} states", file=sys.stderr, flush=True)
        result.states = len(self.order)
        result.interventions = self.cluster.interventions
        if result.complete:
            self._find_stuck(result, np.frombuffer(self.goals, dtype=np.int8) > 0)
        result.seconds = time.process_time() - began
        return result

    def _add(self, state: State, parent: int) -> int:
        """Return the number of a state, which may be new."""
        number = self.numbers.get(state)
        if number is None:
            number = self.numbers[state] = len(self.order)
            self.order.append(state)
            self.parent.append(parent)
            self.goals.append(self.cluster.is_goal(state))
        return number

    def _expand(self, at: int, result: Result, shows: bool) -> None:
        """Add all next states of state number `at`."""
        try:
            found = self.cluster.successors(self.order[at])
        except AssertionError as error:
            self.goals[at] = 1
            if str(error) not in result.violations:
                trace = result.violations[str(error)] = self.trace(at)
                if shows:
                    print(f"  {error}", *trace, sep="\n    ", flush=True)
            return
        result.transitions += len(found)
        for _, after, fault in found:
            number = self._add(after, at)
            if fault:
                result.faults[fault] += 1
            else:
                self.source.append(at)
                self.target.append(number)

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
