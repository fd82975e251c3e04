"""Whole jobs of four nodes in which one pair of nodes cannot reach each other for a while.

The world's workers cannot train, and vaults cannot send, over the bad path. Agents watch their
paths by the real rules.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import pytest

from elastic.core.job.state import JobPhase, JobState
from elastic.core.protocol.timeouts import DEFAULT_TIMEOUTS
from tests.core.recovery.job_model import make_spec
from tests.core.world.world import Fault, World

NODES = tuple(f"node{i}" for i in range(4))
PAIRS = tuple(itertools.combinations(NODES, 2))
AWAY_S = 12.0
BOUND_S = 10.0
"""After this time with a bad path, training must continue."""
MICROBATCHES = 8
"""So many that a node more makes steps faster: it is used again when its paths are well."""
Moment = Callable[[JobState], bool]
MOMENTS: dict[str, tuple[Fault | None, Moment]] = {
    "starting": (None, lambda s: s.phase is JobPhase.LAUNCHED),
    "training": (None, lambda s: s.phase is JobPhase.RUNNING and s.newest_step == 2),
    "halting": (
        Fault("crash", 3.0),
        lambda s: s.phase is JobPhase.HALTING and s.epoch > 1,
    ),
    "installing": (
        Fault("crash", 3.0),
        lambda s: s.phase is JobPhase.INSTALLING and s.epoch > 1,
    ),
    "joining": (Fault("back", 3.0, 3, 1.0), lambda s: bool(s.joining)),
    "boundary": (
        Fault("back", 3.0, 3, 1.0),
        lambda s: s.change is not None and s.change.boundary and s.phase is JobPhase.HALTING,
    ),
    "ending": (None, lambda s: s.newest_step == s.spec.n_steps - 2 if s.spec else False),
}


class PathWorld(World):
    """Cuts paths at a moment, and records when steps and plans came."""

    def __init__(self, moment: Moment, broken: tuple[tuple[str, str], ...], **options: Any):
        super().__init__(5, options.pop("nodes", len(NODES)), **options)
        self.spec = make_spec(4, MICROBATCHES, self.spec.n_steps)
        self.moment, self.planned, self.cut_at = moment, broken, 0.0
        self.steps: list[tuple[float, int]] = []
        self.plans: list[tuple[float, tuple[str, ...]]] = []
        self._watch_job()

    def _watch_job(self) -> None:
        state = self.coordinator.state
        if not self.cut_at and self.moment(state):
            self.cut_at = self.now
            self.cut_paths(AWAY_S, *self.planned)
        if state.newest_step >= 0 and (not self.steps or state.newest_step > self.steps[-1][1]):
            self.steps.append((self.now, state.newest_step))
        if state.plan is not None and (not self.plans or self.plans[-1][1] != state.plan.nodes()):
            self.plans.append((self.now, state.plan.nodes()))
        self.at(0.01, self._watch_job)


@pytest.mark.parametrize("ways", ["there", "back", "both"])
@pytest.mark.parametrize("moment", MOMENTS)
@pytest.mark.parametrize("pair", PAIRS)
def test_training_continues_without_one_of_the_two(
    pair: tuple[str, str], moment: str, ways: str
) -> None:
    fault, when = MOMENTS[moment]
    broken = {"there": (pair,), "back": (pair[::-1],), "both": (pair, pair[::-1])}[ways]
    world = PathWorld(when, broken, steps=40, shape="2")
    if fault is not None:
        world.inject(fault)
    assert world.run() is JobPhase.FINISHED, world.trail[-30:]
    world.check_end()
    began, ended = world.cut_at, world.cut_at + AWAY_S
    assert began
    during = [at for at, _ in world.steps if began + BOUND_S <= at <= ended]
    finished = world.steps[-1][0] < ended
    assert during or finished, "training stalls while the path is bad"
    late = DEFAULT_TIMEOUTS.path_s * 2 + began
    assert not any(set(pair) <= set(nodes) for at, nodes in world.plans if late < at <= ended)
    if not finished:
        assert set(pair) <= set(world.plans[-1][1]), "both are used again"
    killed = fault is not None and fault.kind == "back"
    assert len(world.coordinator.dropped) == killed, "nobody else is lost"
    assert world.coordinator.state.epoch <= 8, "epochs that fail at once come less and less often"


def test_a_job_that_needs_both_nodes_pauses_until_they_reach_each_other() -> None:
    """Without backups each of two nodes holds layers that only the other can fetch from it."""
    pair = ("node0", "node1")
    moment = MOMENTS["training"][1]
    world = PathWorld(moment, (pair,), nodes=2, steps=12, shape="1", backup="none+none")
    assert world.run() is JobPhase.FINISHED, world.trail[-30:]
    world.check_end()
    paused = [text for text in world.trail if "paused:" in text]
    assert len(paused) == 1, "the same situation is not tried again"
    assert "node0 and node1 cannot reach each other" in paused[0]
    assert "layer" in paused[0], "the pause names what is missing"
    assert set(pair) <= set(world.plans[-1][1])
    assert world.coordinator.state.epoch <= 3
