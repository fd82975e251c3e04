"""What all policies share. A policy says what its system would do; how long that takes, `World` and `Physics` say."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass, replace

from simulator.account import Use
from simulator.engine import Change, Job, Setup
from simulator.trace import Event
from simulator.world import Running, World

Pauses = tuple[tuple[Use, int], ...]


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
        if self._plain is None or job.paused:
            return None
        return Change(setup=self.paced(job), reason="a node changed its speed")

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

    def moving_s(self, nbytes: float) -> float:
        """Bytes over one node's link."""
        return nbytes / self.world.link_bytes_per_s if self.world.link_bytes_per_s else 0.0


def pauses(*parts: tuple[Use, float]) -> Pauses:
    """From seconds."""
    return tuple((use, ms(seconds)) for use, seconds in parts if seconds > 0)
