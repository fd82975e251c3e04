"""The simulation in Oobleck's artifact, with its models of Oobleck, Varuna and Bamboo.

Source: Jang et al., SOSP 2023, branch sosp23-artifact, tools/simulator. Rules and constants are the
artifact's, in whole milliseconds; this code is our own.

A node is usable 45 s after its arrival. A rendezvous includes all nodes that are usable before its
end. If one of these nodes leaves meanwhile, the rendezvous begins again. The step time follows
from the number of usable nodes, by a table of measured samples/s for 30 to 15 nodes (more count as
30, fewer as 15). Training does not begin with fewer than twelve nodes. Nodes that join wait for the
next rendezvous. The simulation ends with the trace's last event. Its result is the samples of all
steps, divided by the time from the first rendezvous to the last step.

- **Oobleck**: every loss begins a rendezvous of 2 to 10 s. A step that has not ended by the end of
  the rendezvous begins again.
- **Varuna**: every loss begins a rendezvous of 49 to 701 s, less the time of a checkpoint. A
  checkpoint follows every tenth step, and the first step after a loss. A loss takes back all steps
  since the last checkpoint; a loss during a checkpoint takes back ten steps. The authors switch
  this rollback off for three models on recorded traces.
- **Bamboo**: twelve stages. The predecessor of a lost node also does its work, at 1.5 times the
  step time. If the predecessor already does two nodes' work, a rendezvous takes 30 s. Nodes are
  redistributed in 76 s or more after a step with doubled nodes, if others wait or more than 5 % are
  at risk, or if another pipeline is possible.

`ArtifactOobleckTimes` tells where Oobleck's time goes in this simulation. `oracle` is the best
system at each number of nodes, if changes cost nothing."""

from __future__ import annotations

import heapq
import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import IntEnum

from elastic.domain.errors import FieldError
from elastic_sim.traces.trace import ADD, Trace

READY_MS = 45_000
STAGES = 12
MAX_NODES, MIN_NODES = 30, 15
TABLE_NODES = range(MAX_NODES, MIN_NODES - 1, -1)
"""Numbers of nodes of the tables' columns, in order."""
SLOWED = 1.5
BAMBOO_GLOBAL_MS = 30_000
CHECKPOINT_STEPS = 10


@dataclass(frozen=True, slots=True)
class ArtifactModel:
    """Constants of a model in the artifact. Times in milliseconds."""

    name: str
    samples_per_step: int
    oobleck_ms: int
    bamboo_ms: int
    varuna_ms: int
    checkpoint_ms: int
    small: bool
    """Whether Varuna's rollback is off on recorded traces."""
    key: str
    """Name in the file of measured throughputs."""


MODELS = (
    ArtifactModel("bert-large", 8192, 2_000, 76_000, 76_000, 15_800, True, "bertLarge"),
    ArtifactModel("gpt2", 1024, 2_000, 80_000, 83_000, 11_500, True, "gpt_2_ours"),
    ArtifactModel("gpt3-medium", 819, 3_000, 100_000, 78_700, 11_200, True, "gpt_3m"),
    ArtifactModel("gpt3-2.7b", 512, 6_000, 230_000, 515_000, 50_000, False, "gpt_3_2_7b"),
    ArtifactModel("gpt3-6.7b", 1024, 10_000, 450_000, 701_000, 120_000, False, "gpt_3_6_7b"),
)
BERT_RESTART_S = (
    71.3, 67.6, 67.6, 49.1, 112, 108.3, 104.6, 100.9, 97.2, 93.5, 89.8, 86.1, 82.4, 78.7, 75, 71.3,
)  # fmt: skip
"""Restart times of Varuna for BERT-large, one per number in `TABLE_NODES`."""

ThroughputTable = Mapping[int, float]
"""Samples per second by number of nodes."""


def _in_table(nodes: int) -> int:
    return min(max(nodes, MIN_NODES), MAX_NODES)


class ArtifactEventKind(IntEnum):
    """Kinds of events, in the order in which those of one millisecond are processed."""

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
    """Simulates one system; subclasses define the cost of a loss."""

    def __init__(self, model: ArtifactModel, throughput: ThroughputTable) -> None:
        self.model, self._throughput = model, throughput
        self.now = 0
        self.events: list[_Event] = []
        self.usable: dict[str, bool] = {}
        """Whether each node present is usable."""
        self.slots: dict[str, list[tuple[int, int]]] = {}
        """(pipeline, stage) pairs that each node runs."""
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
        """Run the trace and return the samples per second."""
        for event in trace.events:
            kind = ArtifactEventKind.ADD if event.kind == ADD else ArtifactEventKind.REMOVE
            heapq.heappush(self.events, _Event(round(event.seconds * 1000), kind, event.node))
        heapq.heapify(
            self.events
        )  # as in the artifact: heapify changes the order of events of one moment
        end = self.events[-1].at if self.events else 0
        while self.events and self.events[0].at < end:
            current = heapq.heappop(self.events)
            self.now = current.at
            self._process(current)
        span = self.steps[-1].ended - (self.began or 0) if self.steps else 0
        return sum(self.samples()) / span * 1000 if span > 0 else 0.0

    # ---- events ----

    def _process(self, event: _Event) -> None:
        match event.kind:
            case ArtifactEventKind.ADD:
                self.usable[event.node] = False
                self.push(READY_MS, ArtifactEventKind.READY, event.node)
            case ArtifactEventKind.REMOVE:
                del self.usable[event.node]
                self.lost(event.node)
            case ArtifactEventKind.READY if event.node in self.usable:
                self._ready(event.node)
            case ArtifactEventKind.GLOBAL | ArtifactEventKind.LOCAL:
                self._met(event.kind)
            case ArtifactEventKind.STEP if event.version == self.version and not self.delayed():
                self._stepped()

    def _ready(self, node: str) -> None:
        self.usable[node] = True
        if self.status == "stopped":
            self.meet(ArtifactEventKind.GLOBAL)
        elif self.status == "meeting":
            self.meeting.append(node)
        else:
            self.waiting += 1

    def _met(self, kind: ArtifactEventKind) -> None:
        """End a rendezvous, or begin it again if a node left."""
        if any(node not in self.usable for node in self.meeting):
            self.meet(kind)
            return
        self._assign_places()
        self.version += 1
        self.meeting = []
        self.resumed()
        if not self.pipelines:
            self.status = "stopped"
            return
        self.status = "running"
        self.step_ms = self._step_length_ms()
        self.push(self.step_ms, ArtifactEventKind.STEP)
        if self.began is None:
            self.began = self.last_step = self.now

    def _assign_places(self) -> None:
        self.pipelines = len(self.meeting) // STAGES
        wanted = [(p, s) for p in range(self.pipelines) for s in range(STAGES)]
        for number, node in enumerate(self.meeting):  # other nodes keep their places
            self.slots[node] = wanted[number : number + 1]
        self.waiting = max(0, len(self.meeting) - len(wanted))

    def _stepped(self) -> None:
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

    def _step_length_ms(self) -> int:
        rate = self._throughput[_in_table(sum(self.usable.values()))]
        return int(self.model.samples_per_step / rate * 1000) if rate else 10**12

    # ---- differences between systems ----

    def lost(self, node: str) -> None:
        """Called when `node` is lost; subclasses override it."""
        self.meet(ArtifactEventKind.GLOBAL)

    def meeting_ms(self, kind: ArtifactEventKind) -> int:
        raise NotImplementedError

    def resumed(self) -> None:
        """Called when a rendezvous has ended; subclasses override it."""

    def delayed(self) -> bool:
        """Return whether the step that would end now takes longer."""
        return False

    def after_step(self) -> int:
        """Called after each step; return the milliseconds before the next step."""
        return 0

    def samples(self) -> list[float]:
        """Return the samples of each step that count."""
        return [float(self.model.samples_per_step)] * len(self.steps)

    def reconfigures(self) -> bool:
        """Return whether a local rendezvous follows the step."""
        return False


class ArtifactOobleck(ArtifactSimulation):
    """The artifact's model of Oobleck."""

    def meeting_ms(self, kind: ArtifactEventKind) -> int:
        return self.model.oobleck_ms


class ArtifactVaruna(ArtifactSimulation):
    """The artifact's model of Varuna."""

    def __init__(
        self, model: ArtifactModel, throughput: ThroughputTable, *, rollback: bool
    ) -> None:
        super().__init__(model, throughput)
        self._rollback = rollback
        self._restart_ms = model.varuna_ms
        self._written: int | None = None
        """Time in milliseconds at which the last checkpoint is complete."""
        self._after_loss = False
        self._done = 0
        self._rates: list[float] = []
        """Two entries per step, in samples per millisecond; 0: the step was lost. As in the
        artifact's program, a checkpoint that fails before the tenth step makes this list longer
        than the list of steps. Later steps then get the rates of earlier ones."""

    def lost(self, node: str) -> None:
        self._after_loss = True
        if self._rollback:
            first = 0 if self._written is None else self._place(self._written) + 1
            self._rates[first:] = [0.0] * len(self._rates[first:])
        self.meet(ArtifactEventKind.GLOBAL)

    def _place(self, at: int) -> int:
        """Return the index of `at` among begins and ends of all steps, or else the last index."""
        ends = [end for step in self.steps for end in (step.began, step.ended)]
        return ends.index(at) if at in ends else len(ends) - 1

    def samples(self) -> list[float]:
        rates = self._rates[1::2]
        pairs = zip(self.steps, rates, strict=False)
        return [(step.ended - step.began) * rate for step, rate in pairs]

    def meeting_ms(self, kind: ArtifactEventKind) -> int:
        return self._restart_ms - (
            self.model.checkpoint_ms if kind is ArtifactEventKind.GLOBAL else 0
        )

    def resumed(self) -> None:
        if self.model.key == "bertLarge" and self.pipelines:
            nodes = sum(self.usable.values())
            self._restart_ms = int(BERT_RESTART_S[MAX_NODES - _in_table(nodes)] * 1000)

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
        """Return whether a loss stands before the first checkpoint in the list of the event heap.

        Like the artifact, compare positions in the list, which is not sorted. Heapifies `events`.
        """
        heapq.heapify(self.events)
        kinds = [event.kind for event in self.events]
        return ArtifactEventKind.REMOVE in kinds[: kinds.index(ArtifactEventKind.CHECKPOINT)]


class ArtifactBamboo(ArtifactSimulation):
    """The artifact's model of Bamboo."""

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
        """Return whether a loss lengthens the step: its rest takes 1.5 times as long."""
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
    """Read the artifact's tables: {"SYSTEM/MODEL": {"tputs": samples/s for 30 to 15 nodes}}."""
    try:
        rows = json.loads(text)
        return {
            name: dict(zip(TABLE_NODES, map(float, row["tputs"]), strict=True))
            for name, row in rows.items()
        }
    except (ValueError, TypeError, KeyError, AttributeError) as error:
        remedy = f"16 numbers each are needed: {error}"
        raise FieldError("throughput tables", text[:60], remedy) from None


def simulate(
    system: str,
    model: ArtifactModel,
    trace: Trace,
    tables: Mapping[str, ThroughputTable],
    *,
    recorded: bool,
) -> float:
    """Return the samples per second of oobleck, varuna or bamboo; 0: no table (out of memory).

    `recorded`: whether the trace was recorded; Varuna's rollback is then off for small models.
    """
    table = tables.get(f"{system}/{model.key}")
    if table is None:
        return 0.0
    if system == "varuna":
        rollback = not (recorded and model.small)
        return ArtifactVaruna(model, table, rollback=rollback).run(trace)
    return (ArtifactOobleck if system == "oobleck" else ArtifactBamboo)(model, table).run(trace)


class ArtifactOobleckTimes(ArtifactOobleck):
    """Oobleck with two accounts of its time: as the artifact counts it, and by the clock."""

    def __init__(self, model: ArtifactModel, throughput: ThroughputTable, trace: Trace) -> None:
        super().__init__(model, throughput)
        self._begun_ms = 0
        """Full length of all steps that began, including those that a loss ended."""
        self._meetings_ms = 0
        """Length of all rendezvous that began."""
        self._redone_ms = 0
        """The full length of one step per loss."""
        self._lengths_ms: list[int] = []
        """Lengths of the completed steps, without the cost of losses."""
        self._met_ms = 0
        """Time of rendezvous between the first one and the last step."""
        self._met_before_ms = 0
        self._meeting_since: int | None = None
        self.run(trace)

    def push(self, after_ms: int, kind: ArtifactEventKind, node: str = "") -> None:
        if kind is ArtifactEventKind.STEP:
            self._begun_ms += after_ms
        elif kind is ArtifactEventKind.GLOBAL:
            self._meetings_ms += after_ms
        super().push(after_ms, kind, node)

    def lost(self, node: str) -> None:
        self._redone_ms += self.step_ms
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
        self._lengths_ms.append(self.step_ms)
        self._met_ms = self._met_before_ms
        return 0

    def counted(self) -> dict[str, float]:
        """Return the percent of effective time, restarts and lost work, as the artifact prints
        them.

        The artifact counts every step that begins as effective, and one more full step per loss as
        lost, so that the sum of the parts exceeds the true time. The percents are of this sum.
        Source: create_training_step_complete_event, create_global_rendezvous_timeout_event and
        simulate_spot_instance_remove in tools/simulator/oobleck_simulator.py."""
        return _percent(self._begun_ms, self._meetings_ms, self._redone_ms)

    def by_the_clock(self) -> dict[str, float]:
        """Return the same by the clock, from the end of the first rendezvous to the last step.

        The parts are completed steps, rendezvous, and the rest: steps that were not completed.
        """
        done_ms = sum(self._lengths_ms)
        span_ms = self.steps[-1].ended - (self.began or 0) if self.steps else 0
        return _percent(done_ms, self._met_ms, max(0, span_ms - done_ms - self._met_ms))

    def step_seconds(self) -> tuple[float, float]:
        """Return the seconds of the shortest and longest completed step, without lost time."""
        lengths_ms = self._lengths_ms or [0]
        return min(lengths_ms) / 1000, max(lengths_ms) / 1000


def _percent(effective_ms: int, restart_ms: int, lost_ms: int) -> dict[str, float]:
    """Return the percent of each part; 0 if there was no time."""
    parts = {"effective": effective_ms, "restart": restart_ms, "lost work": lost_ms}
    total = sum(parts.values())
    return {name: 100 * part / total if total else 0.0 for name, part in parts.items()}


def oracle(model: ArtifactModel, trace: Trace, tables: Mapping[str, ThroughputTable]) -> float:
    """Return the samples per second of the best system at every moment, if changes cost nothing.

    This is the mean from the first node to the trace's end. As in the artifact, more than 30 nodes
    count as 30, and fewer than 15 as 15. 0 if no system has a table.
    """
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
    return max(table[_in_table(nodes)] for table in tables) if nodes else 0.0
