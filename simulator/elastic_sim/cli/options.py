"""Shared options of the commands of `elastic-sim`, the scenarios they give, and output files."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import click

from elastic.command_line import OUTPUT, ParsedType, file_errors, output_file, time_of
from elastic.domain.errors import FieldError
from elastic_sim.steps.scenario import Scenario
from elastic_sim.traces.generate import Market
from elastic_sim.traces.importers import plausibility_warning
from elastic_sim.traces.trace import MAX_NODES, MAX_SECONDS, NAME_RULE, Trace, is_name

WITHOUT_TRACE = {
    "nodes": "the trace has its own nodes: `elastic-sim advise TRACE --buy N` tries other numbers",
    "duration_s": "the trace has its own length: --from and --to cut a part out of it",
    "repair_s": "the trace says when nodes come back",
    "bulk": "the trace says how many nodes are lost at once",
}
"""Options that go with --mtbf only, by the name of their value, and why a trace needs none."""


@dataclass(frozen=True, slots=True)
class PerNode:
    """A mean time between two losses of one node."""

    seconds: float


def _time(flag: str, text: str) -> float:
    """Parse a time of at most a hundred years. Raises FieldError."""
    seconds = time_of(flag, text)
    if seconds > MAX_SECONDS:
        raise FieldError(flag, text, "a time of at most a hundred years")
    return seconds


def _rate(flag: str, text: str) -> float | PerNode:
    """Parse a mean time between losses: 10m for the cluster, 200h/node for each node."""
    time, slash, whose = text.partition("/")
    if slash and whose != "node":
        raise FieldError(flag, text, "10m for the whole cluster, or 200h/node for each node")
    seconds = _time(flag, time)
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
    remedy = f"sizes from 1 to {MAX_NODES}, with weights above 0 if several: 1, or 1:3,4:1"
    try:
        pairs = [part.partition(":") for part in text.split(",")]
        found = tuple((int(size), float(weight) if colon else 1.0) for size, colon, weight in pairs)
    except ValueError:
        raise FieldError(flag, text, remedy) from None
    usable = all(1 <= n <= MAX_NODES and w > 0 for n, w in found)
    if not usable or not math.isfinite(sum(w for _, w in found)):
        raise FieldError(flag, text, remedy)
    return found


def _path(flag: str, text: str) -> Path:
    if not text:
        raise FieldError(flag, text, "name a file or a folder")
    return Path(text)


def _trace_file(flag: str, text: str) -> Path:
    """Return the path of a trace that can be written. Raises FieldError."""
    path = output_file(flag, text)
    if path.exists() and not path.is_file():
        raise FieldError(flag, text, "it is not a regular file; name one for the trace")
    return path


def _zones(flag: str, text: str) -> tuple[str, ...]:
    """Parse comma-separated names of zones. Raises FieldError."""
    names = tuple(name.strip() for name in text.split(","))
    if not all(map(is_name, names)):
        raise FieldError(flag, text, f"comma-separated {NAME_RULE}")
    return names


TIME = ParsedType("TIME", _time)
RATE = ParsedType("TIME[/node]", _rate)
FILE = ParsedType("FILE", _path)
BULK = ParsedType("SIZE[:WEIGHT],...", _bulk)
TRACE_FILE, ZONES = ParsedType("FILE", _trace_file), ParsedType("NAME,...", _zones)

Callback = Callable[..., None]
DEFAULT = click.core.ParameterSource.DEFAULT
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
    "last_s": option("--to", "last_s", type=TIME, help="end in the trace"),
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
    first_s, last_s = values["first_s"], values.pop("last_s")
    if last_s is not None and last_s <= first_s:
        raise FieldError("--to", last_s, f"a time after --from ({first_s:g} s)")
    values["last_s"] = last_s or 0.0
    rate, nodes, bulk = (values.pop(name) for name in ("mtbf", "nodes", "bulk"))
    repair_s, market = values.pop("repair_s"), None
    if trace is None:
        mtbf_s = mtbf_of(rate, nodes, bulk)
        market = Market(nodes=nodes, mtbf_s=mtbf_s, bulk=bulk, repair_s=repair_s)
    return Scenario(trace=str(trace) if trace is not None else "", market=market, **values)


def refuse_beside_traces() -> None:
    """Raise FieldError if an option of the running command has no effect, because all its losses
    are recorded."""
    context = click.get_current_context()
    for param in context.command.params:
        name = param.name or ""
        if name in WITHOUT_TRACE and context.get_parameter_source(name) is not DEFAULT:
            remedy = f"it goes with --mtbf, and {WITHOUT_TRACE[name]}"
            raise FieldError(param.opts[0], context.params[name], remedy)


def scenarios_of(traces: Sequence[Path], options: dict[str, Any]) -> list[Scenario]:
    """Return one scenario per trace, or that of a failure rate. Raises FieldError."""
    first = scenario_of(traces[0] if traces else None, options)
    if traces:
        refuse_beside_traces()
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
    if not rates:
        refuse_beside_traces()
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
