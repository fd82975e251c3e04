"""What all policies share. A policy says what its system would do; how long that takes, `World` and `Physics` say."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from elastic_sim.steps.engine import Change, Job, Setup
from elastic_sim.steps.time_accounting import Use
from elastic_sim.steps.world import Running, World
from elastic_sim.traces.trace import Event

Pauses = tuple[tuple[Use, int], ...]
CHECKPOINT_S = 600.0
"""Between durable checkpoints, written beside training (assumed); never less than twice what one takes."""


def ms(seconds: float) -> int:
    return round(seconds * 1000)


@dataclass(frozen=True, slots=True, kw_only=True)
class About:
    """What `elastic-sim policies` prints."""

    name: str
    what: str
    source: str
    ours: bool = False


class Base:
    """Answers nothing, and runs everybody at the pace of the slowest."""

    about: About
    detect_s = 5.0
    """From a loss to the moment at which the system knows."""

    def __init__(self, world: World, seed: int = 0) -> None:
        self.world, self.physics = world, world.physics
        self.draw = random.Random(f"{seed} {self.about.name}")
        self._plain: Setup | None = None
        self._losses = 0
        """Moments at which nodes were lost."""
        self._durable, self._durable_at = 0, 0
        """Steps in the newest durable checkpoint, and when the last one was begun."""
        self._storing: int | None = None
        """Steps in the one that is being written."""
        self._asked: list[tuple[int, str]] = []

    @property
    def name(self) -> str:
        return self.about.name

    # ---- answers ----

    def begin(self, job: Job) -> Change:
        raise NotImplementedError

    def changed(self, job: Job, came: Sequence[Event], gone: Sequence[Event]) -> Change | None:
        raise NotImplementedError

    def told(self, job: Job, going: Sequence[Event]) -> Change | None:
        return None

    def slowed(self, job: Job) -> Change | None:
        """Nobody notices; everybody waits for the slowest."""
        if self._plain is None:
            return None
        return Change(setup=self.paced(job), reason="a node changed its speed", go_on=True)

    def stepped(self, job: Job) -> Change | None:
        return None

    def rang(self, job: Job, name: str) -> Change | None:
        return None

    def timers(self) -> list[tuple[int, str]]:
        asked, self._asked = self._asked, []
        return asked

    # ---- for those below ----

    def ask(self, after_s: float, name: str) -> None:
        """Set a timer."""
        self._asked.append((ms(after_s), name))

    def use(self, job: Job, running: Running | None, *, text: str = "", samples: int = 0) -> Setup | None:
        """What runs from now on, under `running`'s figures."""
        self._plain = None
        if running is not None:
            self._plain = Setup(
                nodes=min(running.nodes, len(job.alive)),
                step_ms=max(1, ms(running.step_s)),
                samples=samples or self.world.samples,
                text=text or f"{running.pipelines} x {running.depth}",
            )
        return self.paced(job)

    def change_plain(self, job: Job, **changes: object) -> Setup | None:
        """The same with other figures."""
        self._plain = replace(self._plain, **changes) if self._plain is not None else None  # type: ignore[arg-type]
        return self.paced(job)

    def paced(self, job: Job) -> Setup | None:
        plain = self._plain
        if plain is None or not job.slow:
            return plain
        return replace(plain, step_ms=round(plain.step_ms * max(job.slow.values())))

    def checkpoint_beside(self, job: Job) -> None:
        """A durable checkpoint now and then, written beside training: whole once its bytes are in storage."""
        write_ms = 1000 * self.world.checkpoint_s(len(job.alive))
        if self._storing is not None and job.now - self._durable_at >= write_ms:
            self._durable, self._storing = min(self._storing, job.steps), None
        if self._storing is None and job.now - self._durable_at >= max(1000 * CHECKPOINT_S, 2 * write_ms):
            self._storing, self._durable_at = job.steps, job.now

    def last_durable(self, job: Job) -> int:
        """Steps to go back to."""
        self._storing = None
        return min(self._durable, job.steps)

    def from_checkpoint(
        self, job: Job, setup: Setup | None, reason: str, *, detect_s: float | None = None
    ) -> Change:
        """All processes anew, from the durable checkpoint; while too few nodes are there nothing is started."""
        parts = pauses(
            (Use.DETECT, self.detect_s if detect_s is None else detect_s),
            (Use.PLAN, self.physics.restart_s(self.world.devices(len(job.alive)))),
            (Use.TRANSFER, self.world.checkpoint_s(len(job.alive))),
        )
        return Change(parts if setup else parts[:1], setup, back_to=self.last_durable(job), reason=reason)

    def from_storage(self, job: Job, setup: Setup | None, gone: Sequence[Event]) -> Change:
        """Nobody has the whole state any more: everybody anew, whoever came or went."""
        reason = f"{len(gone)} lost, none has the state" if gone else "nodes came"
        return self.from_checkpoint(job, setup, reason, detect_s=None if gone else 0.0)

    def pays(self, job: Job, then: Running | None, pause_s: float, samples: int = 0) -> bool:
        """Whether changing to `then` gains more until the next loss than its pause costs."""
        now = self._plain
        if now is None or then is None:
            return False
        rate, new = now.samples / now.step_ms, (samples or self.world.samples) / (1000 * then.step_s)
        until_s = (job.now / 1000 + 3600.0) / (self._losses + 1)
        return (1 - rate / new) * until_s > pause_s

    def regrid(
        self, job: Job, then: Running | None, now: Running | None, start: Callable[[Job], Setup | None]
    ) -> Change | None:
        """A checkpoint, and everybody anew on another grid, if more nodes are there than it has and that pays."""
        if then is None or now is None or then.nodes <= now.nodes:
            return None
        n = len(job.alive)
        stored, restart = self.world.checkpoint_s(n), self.physics.restart_s(self.world.devices(n))
        if not self.pays(job, then, 2 * stored + restart):
            return None
        parts = pauses((Use.TRANSFER, stored), (Use.PLAN, restart), (Use.TRANSFER, stored))
        return Change(parts, start(job), reason="a larger grid")

    def hits(self, job: Job, gone: Sequence[Event]) -> bool:
        """Whether a loss hit nodes in use; which are, is drawn."""
        used, before = self._plain.nodes if self._plain else 0, len(job.alive) + len(gone)
        return any(self.draw.random() < used / before for _ in gone)

    def moving_s(self, nbytes: float) -> float:
        """Bytes over one node's link."""
        return nbytes / self.world.link_bytes_per_s if self.world.link_bytes_per_s else 0.0


def pauses(*parts: tuple[Use, float]) -> Pauses:
    """From seconds."""
    return tuple((use, ms(seconds)) for use, seconds in parts if seconds > 0)
