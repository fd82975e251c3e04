"""What happened in a run, told from its events alone: the same for events.jsonl and for a simulated run."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

PHASES = ("detect_s", "decide_s", "transfer_s", "rebuild_s", "total_s")
WARM = 2
"""Steps of an epoch that are not counted as undisturbed."""


@dataclass(frozen=True, slots=True)
class Story:
    steps: tuple[tuple[int, float, float, int], ...]
    """(step, when it was done, its seconds, epoch), those that count, in order."""
    recoveries: tuple[dict[str, Any], ...]
    plannings: tuple[tuple[str, float], ...]
    """(kind of cause, seconds from when all had halted until the plan went out), for each recovery
    that has one cause."""
    starts: tuple[float, ...]
    """Seconds from a later node's joining until it pulled state."""
    prefetches: tuple[float, ...]
    """Seconds from there to the decision to let it in."""

    @property
    def seconds(self) -> float:
        """From the end of the first step to that of the last one."""
        return self.steps[-1][1] - self.steps[0][1] if self.steps else 0.0

    def planning_s(self, joins: bool) -> list[float]:
        """Of plans for nodes that joined, or of all others."""
        return [seconds for kind, seconds in self.plannings if (kind == "join") is joins]

    def undisturbed(self) -> Iterator[tuple[int, float]]:
        """(step, its seconds) of those in whose epoch `WARM` others came before, and after which it went on."""
        epochs = [epoch for _, _, _, epoch in self.steps]
        for at, (step, _, seconds, epoch) in enumerate(self.steps[:-1]):
            if at >= WARM and epochs[at - WARM] == epoch == epochs[at + 1]:
                yield step, seconds


def tell(events: Sequence[dict[str, Any]]) -> Story:
    """Read events in their order."""
    steps: dict[int, tuple[int, float, float, int]] = {}
    recoveries, halts, plans = list[dict[str, Any]](), dict[int, float](), dict[int, float]()
    pulled = readiness(events)
    starts, prefetches, epoch, trained = list[float](), list[float](), 0, False
    for event in events:
        at = float(event["at"])
        match event["kind"]:
            case "step":
                steps[event["step"]] = event["step"], at, float(event["seconds"]), epoch
            case "lost-steps":
                steps = {step: told for step, told in steps.items() if step < event["from_step"]}
            case "halt":
                halts[event["epoch"]] = at
                for node in event["cause_nodes"] if event["cause_kind"] == "join" else ():
                    if node in pulled:
                        prefetches.append(at - pulled.pop(node))
            case "plan":
                epoch = event["epoch"]
                plans[epoch], trained = at, True
            case "recovery":
                recoveries.append(event)
            case "joined" if trained:
                if event["node"] in pulled:
                    starts.append(pulled[event["node"]] - at)
    plannings = [
        (str(r["cause_kinds"][0]), plans[r["epoch"]] - halts[r["epoch"]] - r["decide_s"])
        for r in recoveries
        if r["epoch"] in plans and len(r["cause_kinds"]) == 1
    ]
    ordered = tuple(steps[step] for step in sorted(steps))
    return Story(ordered, tuple(recoveries), tuple(plannings), tuple(starts), tuple(prefetches))


def readiness(events: Iterable[dict[str, Any]]) -> dict[str, float]:
    """When each node that joined later was first told to pull state, by node."""
    found: dict[str, float] = {}
    for event in events:
        if event["kind"] == "prefetch":
            for node in event["nodes"]:
                found.setdefault(node, float(event["at"]))
    return found


def pairs(measured: Story, predicted: Story) -> list[tuple[dict[str, Any], dict[str, Any]]]:
    """Recoveries of both that are the same one: of the same kind, for the same number of nodes, in order."""
    found, at = list[tuple[dict[str, Any], dict[str, Any]]](), 0
    for one in measured.recoveries:
        for other in range(at, len(predicted.recoveries)):
            if _kind(predicted.recoveries[other]) == _kind(one):
                found.append((one, predicted.recoveries[other]))
                at = other + 1
                break
    return found


def _kind(recovery: dict[str, Any]) -> tuple[Any, ...]:
    return recovery["planned"], recovery["nodes_before"], recovery["nodes_after"]
