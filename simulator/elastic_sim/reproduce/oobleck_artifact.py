"""The simulation in Oobleck's artifact (Jang et al., SOSP 2023, branch sosp23-artifact, tools/simulator): its rules,
its constants, whole milliseconds; the program is our own.

Nodes take 45 s from their arrival until they can be used. A rendezvous takes those that can be used when it begins, and
those that become so meanwhile; who leaves meanwhile makes it begin again. A step's time follows from the nodes that
can be used, by a table of measured samples/s for 30 to 15 nodes (more count as 30, fewer as 15). It does not begin
before twelve are there. Nodes that come wait for the next rendezvous. A simulation ends with the trace's last event;
the result is the samples of all steps over the time from the first rendezvous to the last step.

- **Oobleck**: every loss begins a rendezvous of 2 to 10 s; a step that is not over by its end begins again.
- **Varuna**: every loss begins one of 49 to 701 s, less the time of a checkpoint. After every tenth step, and after the
  first one that follows a loss, a checkpoint is written. A loss takes back all steps since the last one; a loss while
  one is written takes ten steps. Where rollback is off (the authors' choice for three models on recorded traces)
  neither does.
- **Bamboo**: twelve stages. A lost node's predecessor does its work too, at 1.5 times the step's time; if it does so
  already, everybody meets for 30 s. After a step with doubled nodes, if others wait or more than 5 % are at risk, or if
  another pipeline is possible, nodes are dealt out anew in 76 s and more.
"""

from __future__ import annotations

import heapq
import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from enum import IntEnum

from elastic.domain.errors import FieldError
from elastic_sim.traces.trace import ADD, Trace

READY_MS = 45_000
STAGES = 12
MOST, LEAST = 30, 15
SLOWED = 1.5
BAMBOO_GLOBAL_MS = 30_000
CHECKPOINT_STEPS = 10


@dataclass(frozen=True, slots=True)
class ArtifactModel:
    """What the artifact says of a model. Milliseconds."""

    name: str
    samples_per_step: int
    oobleck_ms: int
    bamboo_ms: int
    varuna_ms: int
    checkpoint_ms: int
    small: bool
    """Varuna's rollback is off on recorded traces."""
    key: str
    """In the file of measured throughputs."""


MODELS = (
    ArtifactModel("bert-large", 8192, 2_000, 76_000, 76_000, 15_800, True, "bertLarge"),
    ArtifactModel("gpt2", 1024, 2_000, 80_000, 83_000, 11_500, True, "gpt_2_ours"),
    ArtifactModel("gpt3-medium", 819, 3_000, 100_000, 78_700, 11_200, True, "gpt_3m"),
    ArtifactModel("gpt3-2.7b", 512, 6_000, 230_000, 515_000, 50_000, False, "gpt_3_2_7b"),
    ArtifactModel("gpt3-6.7b", 1024, 10_000, 450_000, 701_000, 120_000, False, "gpt_3_6_7b"),
)
BERT_RESTART_S = dict(
    zip(
        range(MOST, LEAST - 1, -1),
        (71.3, 67.6, 67.6, 49.1, 112, 108.3, 104.6, 100.9, 97.2, 93.5, 89.8, 86.1, 82.4, 78.7, 75, 71.3),
        strict=True,
    )
)
"""Varuna's restart of BERT-large by number of nodes."""

ThroughputTable = Mapping[int, float]


class ArtifactEventKind(IntEnum):
    """Events of one millisecond are taken in this order."""

    ADD = 1
    REMOVE = 2
    READY = 4
    GLOBAL = 5
    LOCAL = 6
    STEP = 7
    CHECKPOINT = 8


@dataclass(order=True, slots=True)
class _Event:
    at: int
    kind: ArtifactEventKind
    node: str = field(default="", compare=False)
    version: int = field(default=0, compare=False)


@dataclass(slots=True)
class _Step:
    began: int
    ended: int


class ArtifactSimulation:
    """One system on one trace; subclasses say what a loss costs."""

    def __init__(self, model: ArtifactModel, throughput: ThroughputTable) -> None:
        self.model, self._throughput = model, throughput
        self.now = 0
        self.events: list[_Event] = []
        self.usable: dict[str, bool] = {}
        """Nodes that are there, and whether they can be used."""
        self.slots: dict[str, list[tuple[int, int]]] = {}
        """Node: the (pipeline, stage)s that it runs."""
        self.pipelines = 0
        self.meeting: list[str] = []
        self.status = "stopped"
        """stopped | meeting | running"""
        self.version = 0
        self.step_ms = 0
        self.began: int | None = None
        self.last_step = 0
        self.waiting = 0
        self.steps: list[_Step] = []

    def run(self, trace: Trace) -> float:
        """Samples a second."""
        for event in trace.events:
            kind = ArtifactEventKind.ADD if event.kind == ADD else ArtifactEventKind.REMOVE
            heapq.heappush(self.events, _Event(round(event.seconds * 1000), kind, event.node))
        heapq.heapify(self.events)  # once more, as there: it changes the order of events of one moment
        end = self.events[-1].at if self.events else 0
        act: dict[ArtifactEventKind, Callable[[_Event], None]] = {
            ArtifactEventKind.ADD: self._add,
            ArtifactEventKind.REMOVE: self._remove,
            ArtifactEventKind.READY: self._ready,
            ArtifactEventKind.GLOBAL: self._met,
            ArtifactEventKind.LOCAL: self._met,
            ArtifactEventKind.STEP: self._stepped,
            ArtifactEventKind.CHECKPOINT: lambda event: None,
        }
        while self.events:
            next_one = heapq.heappop(self.events)
            if next_one.at >= end:
                break
            self.now = next_one.at
            act[next_one.kind](next_one)
        span = self.steps[-1].ended - (self.began or 0) if self.steps else 0
        return sum(self.samples()) / span * 1000 if span > 0 else 0.0

    # ---- what happens ----

    def _add(self, event: _Event) -> None:
        self.usable[event.node] = False
        self.push(READY_MS, ArtifactEventKind.READY, event.node)

    def _ready(self, event: _Event) -> None:
        if event.node not in self.usable:
            return
        self.usable[event.node] = True
        if self.status == "stopped":
            self.meet(ArtifactEventKind.GLOBAL)
        elif self.status == "meeting":
            self.meeting.append(event.node)
        else:
            self.waiting += 1

    def _remove(self, event: _Event) -> None:
        del self.usable[event.node]
        self.lost(event.node)

    def _met(self, event: _Event) -> None:
        """A rendezvous is over, or begins again."""
        if any(node not in self.usable for node in self.meeting):
            self.meet(event.kind)
            return
        self._deal()
        self.version += 1
        self.meeting = []
        self.resumed()
        if not self.pipelines:
            self.status = "stopped"
            return
        self.status = "running"
        self.step_ms = self._table()
        self.push(self.step_ms, ArtifactEventKind.STEP)
        if self.began is None:
            self.began = self.last_step = self.now

    def _deal(self) -> None:
        self.pipelines = len(self.meeting) // STAGES
        wanted = [(p, s) for p in range(self.pipelines) for s in range(STAGES)]
        for number, node in enumerate(self.meeting):  # others keep what they had
            self.slots[node] = wanted[number : number + 1]
        self.waiting = max(0, len(self.meeting) - len(wanted))

    def _stepped(self, event: _Event) -> None:
        if event.version != self.version or self.delayed():
            return
        self.steps.append(_Step(self.last_step, self.now))
        at = self.now + self.after_step()
        self.last_step = at
        if self.reconfigures():
            self.meet(ArtifactEventKind.LOCAL)
        else:
            self.push(at - self.now + self.step_ms, ArtifactEventKind.STEP)

    def push(self, after_ms: int, kind: ArtifactEventKind, node: str = "") -> None:
        heapq.heappush(self.events, _Event(self.now + after_ms, kind, node, self.version))

    def meet(self, kind: ArtifactEventKind) -> None:
        """Begin a rendezvous."""
        self.status = "meeting"
        self.meeting = [node for node, usable in self.usable.items() if usable]
        self.push(self.meeting_ms(kind), kind)

    def _table(self) -> int:
        """Milliseconds of a step."""
        nodes = min(max(sum(self.usable.values()), LEAST), MOST)
        rate = self._throughput[nodes]
        return int(self.model.samples_per_step / rate * 1000) if rate else 10**12

    # ---- what systems differ in ----

    def lost(self, node: str) -> None:
        """A node went."""
        self.meet(ArtifactEventKind.GLOBAL)

    def meeting_ms(self, kind: ArtifactEventKind) -> int:
        raise NotImplementedError

    def resumed(self) -> None:
        """A rendezvous is over."""

    def delayed(self) -> bool:
        """Whether the step is not over yet after all."""
        return False

    def after_step(self) -> int:
        """Milliseconds before the next step."""
        return 0

    def samples(self) -> list[float]:
        """Of each step, those that count."""
        return [float(self.model.samples_per_step)] * len(self.steps)

    def reconfigures(self) -> bool:
        return False


class ArtifactOobleck(ArtifactSimulation):
    def meeting_ms(self, kind: ArtifactEventKind) -> int:
        return self.model.oobleck_ms


class ArtifactVaruna(ArtifactSimulation):
    def __init__(self, model: ArtifactModel, throughput: ThroughputTable, *, rollback: bool) -> None:
        super().__init__(model, throughput)
        self._rollback = rollback
        self._restart_ms = model.varuna_ms
        self._written: int | None = None
        """When the last checkpoint was complete."""
        self._after_loss = False
        self._done = 0
        self._rates: list[float] = []
        """Two for each step, samples a millisecond; 0: it was lost. As in the artifact's program, a checkpoint that
        fails before the tenth step makes this list longer than that of steps, and rates those of earlier ones."""

    def lost(self, node: str) -> None:
        self._after_loss = True
        if self._rollback:
            self._forget(0 if self._written is None else self._place(self._written) + 1)
        self.meet(ArtifactEventKind.GLOBAL)

    def _place(self, at: int) -> int:
        """Of the first beginning or end of a step at `at`, among all; else the last."""
        ends = [end for step in self.steps for end in (step.began, step.ended)]
        return ends.index(at) if at in ends else len(ends) - 1

    def _forget(self, first: int) -> None:
        """Nothing from `first` on counts."""
        self._rates[first:] = [0.0] * len(self._rates[first:])

    def samples(self) -> list[float]:
        rates = self._rates[1::2]
        return [(step.ended - step.began) * rate for step, rate in zip(self.steps, rates, strict=False)]

    def meeting_ms(self, kind: ArtifactEventKind) -> int:
        return self._restart_ms - (self.model.checkpoint_ms if kind is ArtifactEventKind.GLOBAL else 0)

    def resumed(self) -> None:
        if self.model.key == "bertLarge" and self.pipelines:
            nodes = min(max(sum(self.usable.values()), LEAST), MOST)
            self._restart_ms = int(BERT_RESTART_S[nodes] * 1000)

    def after_step(self) -> int:
        self._done += 1
        took = self.steps[-1].ended - self.steps[-1].began
        self._rates += [self.model.samples_per_step / took] * 2
        if self._done % CHECKPOINT_STEPS and not self._after_loss:
            return 0
        self._after_loss = False
        writing = self.model.checkpoint_ms
        self.push(2 * writing, ArtifactEventKind.CHECKPOINT)
        if self._rollback and self._interrupted():
            self._done = max(0, self._done - CHECKPOINT_STEPS)
            self._rates[-2 * CHECKPOINT_STEPS :] = [0.0] * (2 * CHECKPOINT_STEPS)
        else:
            self._written = self.now + writing
        return writing

    def _interrupted(self) -> bool:
        """Whether a loss lies before the checkpoint in the artifact's queue of events: a heap, as it is in memory."""
        heapq.heapify(self.events)
        for event in self.events:
            if event.kind is ArtifactEventKind.CHECKPOINT:
                return any(other.kind is ArtifactEventKind.REMOVE for other in self.events[: self.events.index(event)])
        return False


class ArtifactBamboo(ArtifactSimulation):
    def __init__(self, model: ArtifactModel, throughput: ThroughputTable) -> None:
        super().__init__(model, throughput)
        self._slowed_at: tuple[int, int] | None = None
        self._handled = False

    def meeting_ms(self, kind: ArtifactEventKind) -> int:
        return BAMBOO_GLOBAL_MS if kind is ArtifactEventKind.GLOBAL else self.model.bamboo_ms

    def lost(self, node: str) -> None:
        mine = self.slots.pop(node, [])
        if len(mine) > 1:
            self.meet(ArtifactEventKind.GLOBAL)
            return
        if mine:
            pipeline, stage = mine[0]
            before = pipeline, (stage - 1) % STAGES
            held = (self.slots.get(node, []) for node in self.usable)
            keeper = next((slots for slots in held if before in slots), None)
            if keeper is not None and len(keeper) > 1:
                self.meet(ArtifactEventKind.GLOBAL)
                return
            if keeper is not None:
                keeper.append(mine[0])
        if self.status == "running" and self._slowed_at is None:
            self._slowed_at, self._handled = (len(self.steps), self.now), False
            self.step_ms = int(self.step_ms * SLOWED)

    def resumed(self) -> None:
        self._slowed_at, self._handled = None, False

    def delayed(self) -> bool:
        """The step in which a node was lost lasts longer from then on."""
        if self._slowed_at is None or self._handled or self._slowed_at[0] != len(self.steps):
            return False
        self._handled = True
        self.push(int((self.now - self._slowed_at[1]) * (SLOWED - 1)), ArtifactEventKind.STEP)
        return True

    def reconfigures(self) -> bool:
        doubled = sum(len(slots) > 1 for slots in self.slots.values())
        working = self.pipelines * STAGES - doubled
        if doubled and (self.waiting >= doubled or 2 * doubled / working > 0.05):
            return True
        return (working + self.waiting) // STAGES > self.pipelines


def throughputs(text: str) -> dict[str, ThroughputTable]:
    """Read the artifact's tables: {"SYSTEM/MODEL": {"tputs": samples/s for 30, 29, ... 15 nodes}}."""
    try:
        rows = json.loads(text)
        return {
            name: dict(zip(range(MOST, LEAST - 1, -1), map(float, row["tputs"]), strict=True))
            for name, row in rows.items()
        }
    except (ValueError, TypeError, KeyError, AttributeError) as error:
        raise FieldError("throughput tables", text[:60], f"16 numbers each are needed: {error}") from None


def simulate(
    system: str, model: ArtifactModel, trace: Trace, tables: Mapping[str, ThroughputTable], *, recorded: bool
) -> float:
    """Samples a second of oobleck, varuna or bamboo; 0 where the artifact has no table (out of memory)."""
    table = tables.get(f"{system}/{model.key}")
    if table is None:
        return 0.0
    made: dict[str, Callable[[], ArtifactSimulation]] = {
        "oobleck": lambda: ArtifactOobleck(model, table),
        "varuna": lambda: ArtifactVaruna(model, table, rollback=not (recorded and model.small)),
        "bamboo": lambda: ArtifactBamboo(model, table),
    }
    return made[system]().run(trace)


class ArtifactOobleckTimes(ArtifactOobleck):
    """Oobleck, and milliseconds of what it does, counted twice: as the artifact does, and by the clock."""

    def __init__(self, model: ArtifactModel, throughput: ThroughputTable) -> None:
        super().__init__(model, throughput)
        self.begun_ms = 0
        """All steps that began, those that a loss ended, too, at their full length."""
        self.meetings_ms = 0
        """All rendezvous that began."""
        self.redone_ms = 0
        """The full length of a step for each loss."""
        self.lengths_ms: list[int] = []
        """Of the steps that were completed, what losses cost them left out."""
        self.met_ms = 0
        """Rendezvous between the first one and the last step."""
        self._met_before_ms = 0
        self._meeting_since: int | None = None

    def push(self, after_ms: int, kind: ArtifactEventKind, node: str = "") -> None:
        if kind is ArtifactEventKind.STEP:
            self.begun_ms += after_ms
        elif kind is ArtifactEventKind.GLOBAL:
            self.meetings_ms += after_ms
        super().push(after_ms, kind, node)

    def lost(self, node: str) -> None:
        self.redone_ms += self.step_ms
        super().lost(node)

    def meet(self, kind: ArtifactEventKind) -> None:
        if self._meeting_since is None:
            self._meeting_since = self.now
        super().meet(kind)

    def resumed(self) -> None:
        if self._meeting_since is not None and self.began is not None:
            self._met_before_ms += self.now - self._meeting_since
        self._meeting_since = None

    def after_step(self) -> int:
        self.lengths_ms.append(self.step_ms)
        self.met_ms = self._met_before_ms
        return 0


def split(model: ArtifactModel, trace: Trace, table: ThroughputTable) -> dict[str, float]:
    """Percent of Oobleck's time that is effective, restart and lost work, as the artifact's program prints it
    (create_training_step_complete_event, create_global_rendezvous_timeout_event and simulate_spot_instance_remove in
    tools/simulator/oobleck_simulator.py). It takes every step that begins for effective, and for each loss a full step
    for lost besides, so the parts make more than the time there was; they are percent of their own sum."""
    run = ArtifactOobleckTimes(model, table)
    run.run(trace)
    return _percent(run.begun_ms, run.meetings_ms, run.redone_ms)


def clock_split(model: ArtifactModel, trace: Trace, table: ThroughputTable) -> dict[str, float]:
    """The same by the clock, from the end of the first rendezvous to the last step: completed steps, rendezvous, and
    the rest, in which steps ran that were not completed."""
    run = ArtifactOobleckTimes(model, table)
    run.run(trace)
    if not run.steps or run.began is None:
        return _percent(0, 0, 0)
    span = run.steps[-1].ended - run.began
    done = sum(run.lengths_ms)
    return _percent(done, run.met_ms, max(0, span - done - run.met_ms))


def _percent(effective_ms: int, restart_ms: int, lost_ms: int) -> dict[str, float]:
    """0 of everything where there was no time."""
    parts = {"effective": effective_ms, "restart": restart_ms, "lost work": lost_ms}
    total = sum(parts.values())
    return {name: 100 * part / total if total else 0.0 for name, part in parts.items()}


def step_seconds(model: ArtifactModel, trace: Trace, table: ThroughputTable) -> tuple[float, float]:
    """Of Oobleck's completed steps the shortest and the longest, what losses cost them left out."""
    run = ArtifactOobleckTimes(model, table)
    run.run(trace)
    return (min(run.lengths_ms) / 1000, max(run.lengths_ms) / 1000) if run.lengths_ms else (0.0, 0.0)


def oracle(model: ArtifactModel, trace: Trace, tables: Mapping[str, ThroughputTable]) -> float:
    """Samples a second of the best system at every moment: the most of the measured throughputs at the number of nodes
    that are there (more than 30 count as 30, fewer than 15 as 15, as in the artifact), changes at no cost, from the
    first node to the trace's end. 0 where no system has a table."""
    own = [table for name, table in tables.items() if name.partition("/")[2] == model.key]
    if not own or not trace.events:
        return 0.0
    first = since = trace.events[0].seconds
    samples, nodes = 0.0, 0
    for event in trace.events:
        samples += _best(own, nodes) * (event.seconds - since)
        since = event.seconds
        nodes += 1 if event.kind == ADD else -1
    samples += _best(own, nodes) * (trace.end_s - since)
    return samples / (trace.end_s - first) if trace.end_s > first else 0.0


def _best(tables: list[ThroughputTable], nodes: int) -> float:
    return max(table[min(max(nodes, LEAST), MOST)] for table in tables) if nodes else 0.0
