"""Where Oobleck's time goes in the artifact's simulation (simulator/elastic_sim/reproduce/artifact.py), and what the best of the
systems would make of a trace if changes cost nothing."""

from __future__ import annotations

from collections.abc import Mapping

from elastic_sim.reproduce.artifact import LEAST, MOST, Kind, Model, Oobleck, Table
from elastic_sim.traces.trace import ADD, Trace


class Accounted(Oobleck):
    """Oobleck, and milliseconds of what it does, counted twice: as the artifact does, and by the clock."""

    def __init__(self, model: Model, throughput: Table) -> None:
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

    def push(self, after_ms: int, kind: Kind, node: str = "") -> None:
        if kind is Kind.STEP:
            self.begun_ms += after_ms
        elif kind is Kind.GLOBAL:
            self.meetings_ms += after_ms
        super().push(after_ms, kind, node)

    def lost(self, node: str) -> None:
        self.redone_ms += self.step_ms
        super().lost(node)

    def meet(self, kind: Kind) -> None:
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


def split(model: Model, trace: Trace, table: Table) -> dict[str, float]:
    """Percent of Oobleck's time that is effective, restart and lost work, as the artifact's program prints it
    (create_training_step_complete_event, create_global_rendezvous_timeout_event and simulate_spot_instance_remove in
    tools/simulator/oobleck_simulator.py). It takes every step that begins for effective, and for each loss a full step
    for lost besides, so the parts make more than the time there was; they are percent of their own sum."""
    run = Accounted(model, table)
    run.run(trace)
    return _percent(run.begun_ms, run.meetings_ms, run.redone_ms)


def clock_split(model: Model, trace: Trace, table: Table) -> dict[str, float]:
    """The same by the clock, from the end of the first rendezvous to the last step: completed steps, rendezvous, and
    the rest, in which steps ran that were not completed."""
    run = Accounted(model, table)
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


def step_seconds(model: Model, trace: Trace, table: Table) -> tuple[float, float]:
    """Of Oobleck's completed steps the shortest and the longest, what losses cost them left out."""
    run = Accounted(model, table)
    run.run(trace)
    return (min(run.lengths_ms) / 1000, max(run.lengths_ms) / 1000) if run.lengths_ms else (0.0, 0.0)


def oracle(model: Model, trace: Trace, tables: Mapping[str, Table]) -> float:
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


def _best(tables: list[Table], nodes: int) -> float:
    return max(table[min(max(nodes, LEAST), MOST)] for table in tables) if nodes else 0.0
