"""Shared options of the commands of `elastic-sim`, the scenarios they give, and output files."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import click

from elastic.command_line import OUTPUT, TIME, ParsedType, file_errors, time_of
from elastic.domain.errors import FieldError
from elastic_sim.steps.scenario import Scenario
from elastic_sim.traces.generate import Market
from elastic_sim.traces.importers import plausibility_warning
from elastic_sim.traces.trace import Trace


@dataclass(frozen=True, slots=True)
class PerNode:
    """A mean time between two losses of one node."""

    seconds: float


def _rate(flag: str, text: str) -> float | PerNode:
    """Parse a mean time between losses: 10m for the cluster, 200h/node for each node."""
    time, slash, whose = text.partition("/")
    if slash and whose != "node":
        raise FieldError(flag, text, "10m for the whole cluster, or 200h/node for each node")
    seconds = time_of(flag, time)
    return PerNode(seconds) if slash else seconds


def mtbf_of(rate: float | PerNode, nodes: int, bulk: Sequence[tuple[int, float]]) -> float:
    """Return the cluster's mean seconds between losses; `bulk`: (nodes lost at once, weight)."""
    if not isinstance(rate, PerNode):
        return rate
    mean = sum(size * weight for size, weight in bulk) / sum(weight for _, weight in bulk)
    return rate.seconds * mean / max(nodes, 1)


class ValueList(click.ParamType):  # type: ignore[type-arg]
    """Comma-separated values of another type, without duplicates, as a tuple."""

    def __init__(self, of: click.ParamType) -> None:  # type: ignore[type-arg]
        self._of, self.name = of, f"{of.name},..."

    def convert(
        self, value: Any, param: click.Parameter | None, ctx: click.Context | None
    ) -> tuple[Any, ...]:
        if isinstance(value, tuple):
            return value
        words = [word.strip() for word in str(value).split(",") if word.strip()]
        if not words:
            self.fail("name one at least", param, ctx)
        return tuple(dict.fromkeys(self._of.convert(word, param, ctx) for word in words))


def _bulk(flag: str, text: str) -> tuple[tuple[int, float], ...]:
    """Parse (nodes lost at once, weight) from 1 or 1:3,4:1. Raises FieldError."""
    remedy = "sizes from 1 up, with weights above 0 if several: 1, or 1:3,4:1"
    try:
        pairs = [part.partition(":") for part in text.split(",")]
        found = tuple((int(size), float(weight) if colon else 1.0) for size, colon, weight in pairs)
    except ValueError:
        raise FieldError(flag, text, remedy) from None
    if not all(n >= 1 and w > 0 for n, w in found) or not math.isfinite(sum(w for _, w in found)):
        raise FieldError(flag, text, remedy)
    return found


def _path(flag: str, text: str) -> Path:
    if not text:
        raise FieldError(flag, text, "name a file or a folder")
    return Path(text)


RATE = ParsedType("TIME[/node]", _rate)
FILE = ParsedType("FILE", _path)
BULK = ParsedType("SIZE[:WEIGHT],...", _bulk)


Callback = Callable[..., None]
option = click.option
WANTED = option("--policy", "wanted", multiple=True, help="names, also comma-separated; or all")
JSON = option("--json", "out", type=OUTPUT, help="write the figures to this file")

_OPTIONS = {
    "model": option("--model", default="gpt3-6.7b", help="a name, or the file of a profile"),
    "microbatches": option(
        "--microbatches", type=int, default=0, help="per step; needed with the file of a profile"
    ),
    "nodes_of": option(
        "--nodes-of",
        type=ValueList(click.STRING),
        default=("a40",),
        help="node types, comma-separated",
    ),
    "mtbf": option(
        "--mtbf", type=RATE, help="mean time between losses, without a trace; per node as 200h/node"
    ),
    "nodes": option("--nodes", type=int, default=32, help="with --mtbf: wanted number of nodes"),
    "duration_s": option(
        "--duration", "duration_s", type=TIME, default="12h", help="with --mtbf: length of the run"
    ),
    "repair_s": option(
        "--repair",
        "repair_s",
        type=TIME,
        default="20m",
        help="with --mtbf: time until a lost node is replaced",
    ),
    "bulk": option(
        "--bulk", type=BULK, default="1", help="with --mtbf: nodes lost at once, as 1:3,4:1"
    ),
    "notice_s": option(
        "--notice",
        "notice_s",
        type=TIME,
        default=-1.0,
        show_default=False,
        help="time between notice and loss",
    ),
    "first_s": option("--from", "first_s", type=TIME, default="0", help="start in the trace"),
    "last_s": option(
        "--to", "last_s", type=TIME, default=0.0, show_default=False, help="end in the trace"
    ),
    "physics": option(
        "--physics",
        multiple=True,
        help="NAME=NUMBER, as boot_s=90; see docs/simulator/simulator.md",
    ),
}
"""Options by the name of their value."""


def scenario_options(*, but: tuple[str, ...] = ()) -> Callable[[Callback], Callback]:
    """Return a decorator that adds the options of a scenario, except those in `but`."""

    def with_options(command: Callback) -> Callback:
        for name, option in reversed(_OPTIONS.items()):
            command = command if name in but else option(command)
        return command

    return with_options


def scenario_of(trace: Path | None, options: dict[str, Any]) -> Scenario:
    """Return the scenario of `options`, and remove them there. Raises FieldError."""
    values = {name: options.pop(name) for name in _OPTIONS}
    if (trace is None) == (values["mtbf"] is None):
        given = "both" if trace is not None else "neither"
        raise FieldError("TRACE, --mtbf", given, "name a trace, or a failure rate with --mtbf")
    rate, nodes, bulk = (values.pop(name) for name in ("mtbf", "nodes", "bulk"))
    repair_s, market = values.pop("repair_s"), None
    if trace is None:
        mtbf_s = mtbf_of(rate, nodes, bulk)
        market = Market(nodes=nodes, mtbf_s=mtbf_s, bulk=bulk, repair_s=repair_s)
    return Scenario(trace=str(trace) if trace is not None else "", market=market, **values)


def scenarios_of(traces: Sequence[Path], options: dict[str, Any]) -> list[Scenario]:
    """Return one scenario per trace, or that of a failure rate. Raises FieldError."""
    first = scenario_of(traces[0] if traces else None, options)
    found = [replace(first, trace=str(trace)) for trace in traces] or [first]
    names = [one.name() for one in found]
    if twice := next((name for name in names if names.count(name) > 1), None):
        raise FieldError("TRACE", twice, "each trace once, under a name of its own")
    return found


def warn_if_implausible(
    found: Trace, source: Path | str, unit: str = "seconds", hint: str = ""
) -> None:
    """Print a warning if the trace is unlike any recorded market."""
    if warning := plausibility_warning(found, unit):
        click.echo(f"elastic-sim: {source}: {warning}{hint}", err=True)


def warn_of_traces(scenarios: Sequence[Scenario]) -> None:
    """Print a warning for implausible traces, except events of runs with injected faults."""
    for trace in dict.fromkeys(one.trace for one in scenarios if one.trace):
        if Path(trace).suffix != ".jsonl":
            warn_if_implausible(Scenario(trace=trace).trace_of(0), trace)


def sweep_scenarios(
    traces: tuple[Path, ...],
    rates: tuple[float | PerNode, ...],
    models: tuple[str, ...],
    options: dict[str, Any],
) -> list[Scenario]:
    """Return a scenario per model, for each trace and each failure rate. Raises FieldError."""
    if not traces and not rates:
        raise FieldError("--trace, --mtbf", "neither", "name traces, or failure rates, or both")
    names = [trace.name for trace in dict.fromkeys(traces)]
    if twice := next((name for name in names if names.count(name) > 1), None):
        remedy = "several files have this name, and tables could not tell them apart"
        raise FieldError("--trace", twice, remedy)
    markets: list[tuple[Path | None, float | PerNode | None]] = [(trace, None) for trace in traces]
    markets += [(None, rate) for rate in rates]
    return [
        scenario_of(trace, {**options, "model": model, "mtbf": rate})
        for model in models
        for trace, rate in dict.fromkeys(markets)
    ]


def write_json(out: Path | None, value: dict[str, Any]) -> None:
    """Write a file, if one is named. Raises FieldError."""
    if out is not None:
        write_output(out, json.dumps(value, indent=2) + "\n")


def write_output(out: Path, text: str) -> None:
    """Write a file. Raises FieldError."""
    with file_errors("output", out):
        out.write_text(text)
