"""What the commands of `elastic-sim` have in common: types of options, writing files."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import click

from elastic.command_line import TIME, Parsed, time_of
from elastic.domain.errors import FieldError
from elastic_sim.steps.scenario import Scenario
from elastic_sim.traces.generate import Market
from elastic_sim.traces.importers import doubt
from elastic_sim.traces.trace import Trace


@dataclass(frozen=True, slots=True)
class PerNode:
    """A mean time between two losses of one node."""

    seconds: float


def _rate(flag: str, text: str) -> float | PerNode:
    """Mean time between losses: of the whole cluster as 10m, of each node as 200h/node."""
    time, slash, whose = text.partition("/")
    if slash and whose != "node":
        raise FieldError(flag, text, "10m for the whole cluster, or 200h/node for each node")
    seconds = time_of(flag, time)
    return PerNode(seconds) if slash else seconds


def mtbf_of(rate: float | PerNode, nodes: int, bulk: Sequence[tuple[int, float]]) -> float:
    """Seconds between two losses of the cluster: n nodes are lost n times as often as one, several at once as bulk
    says."""
    if not isinstance(rate, PerNode):
        return rate
    mean = sum(size * weight for size, weight in bulk) / sum(weight for _, weight in bulk)
    return rate.seconds * mean / max(nodes, 1)


class Several(click.ParamType):  # type: ignore[type-arg]
    """Values of another type with commas between them; a tuple, without doubles."""

    def __init__(self, of: click.ParamType) -> None:  # type: ignore[type-arg]
        self._of, self.name = of, f"{of.name},..."

    def convert(
        self, value: Any, param: click.Parameter | None, ctx: click.Context | None
    ) -> tuple[Any, ...]:
        if isinstance(value, tuple):
            return value
        words = [word.strip() for word in str(value).split(",")]
        return tuple(dict.fromkeys(self._of.convert(word, param, ctx) for word in words if word))


RATE = Parsed("TIME[/node]", _rate)
FILE = click.Path(path_type=Path)


def sizes_of(text: str) -> tuple[tuple[int, float], ...]:
    """(nodes lost at once, weight) from 1 or 1:3,4:1. Raises FieldError."""
    remedy = "sizes from 1 up, with weights above 0 if several: 1, or 1:3,4:1"
    try:
        pairs = [part.partition(":") for part in text.split(",")]
        found = tuple((int(size), float(weight) if colon else 1.0) for size, colon, weight in pairs)
    except ValueError:
        raise FieldError("--bulk", text, remedy) from None
    if not all(n >= 1 and w > 0 for n, w in found) or not math.isfinite(sum(w for _, w in found)):
        raise FieldError("--bulk", text, remedy)
    return found


Callback = Callable[..., None]

_OPTIONS = {
    "model": click.option("--model", default="gpt3-6.7b", help="a name, or the file of a profile"),
    "microbatches": click.option(
        "--microbatches", type=int, default=0, help="of a step; needed with the file of a profile"
    ),
    "nodes_of": click.option("--nodes-of", default="a40", help="node types, comma-separated"),
    "mtbf": click.option(
        "--mtbf",
        type=RATE,
        help="no trace: the cluster loses nodes so often; each node, as 200h/node",
    ),
    "nodes": click.option("--nodes", type=int, default=32, help="with --mtbf: wanted at any time"),
    "duration": click.option(
        "--duration", type=TIME, default="12h", help="with --mtbf: length of the run"
    ),
    "repair": click.option(
        "--repair", type=TIME, default="20m", help="with --mtbf: time until a lost node is replaced"
    ),
    "bulk": click.option("--bulk", default="1", help="with --mtbf: nodes lost at once, as 1:3,4:1"),
    "notice": click.option("--notice", type=TIME, help="every loss is announced so long before"),
    "first": click.option("--from", "first", type=TIME, default="0", help="of a trace: begin here"),
    "last": click.option(
        "--to", "last", type=TIME, default=0.0, show_default=False, help="of a trace: end here"
    ),
    "physics": click.option(
        "--physics",
        multiple=True,
        help="NAME=NUMBER, as boot_s=90; see docs/simulator/simulator.md",
    ),
}


def scenario_options(*, but: tuple[str, ...] = ()) -> Callable[[Callback], Callback]:
    """What is simulated. `but`: without these."""

    def with_options(command: Callback) -> Callback:
        for name, option in reversed(_OPTIONS.items()):
            command = command if name in but else option(command)
        return command

    return with_options


def scenario_of(trace: Path | None, told: dict[str, Any]) -> Scenario:
    """From the options above, which are taken out of `told`. Raises FieldError."""
    values = {name: told.pop(name) for name in _OPTIONS}
    if (trace is None) == (values["mtbf"] is None):
        given = "both" if trace is not None else "neither"
        raise FieldError("TRACE, --mtbf", given, "name a trace, or a failure rate with --mtbf")
    market = None
    if trace is None:
        bulk = sizes_of(values["bulk"])
        market = Market(
            nodes=values["nodes"],
            mtbf_s=mtbf_of(values["mtbf"], values["nodes"], bulk),
            bulk=bulk,
            repair_s=values["repair"],
        )
    return Scenario(
        trace=str(trace) if trace is not None else "",
        first_s=values["first"],
        last_s=values["last"],
        market=market,
        duration_s=values["duration"],
        model=values["model"],
        microbatches=values["microbatches"],
        nodes_of=tuple(name.strip() for name in values["nodes_of"].split(",")),
        notice_s=-1.0 if values["notice"] is None else values["notice"],
        physics=tuple(values["physics"]),
    )


def scenarios_of(traces: Sequence[Path], told: dict[str, Any]) -> list[Scenario]:
    """One for each trace, or that of a failure rate. Raises FieldError."""
    first = scenario_of(traces[0] if traces else None, told)
    found = [replace(first, trace=str(trace)) for trace in traces] or [first]
    names = [one.name() for one in found]
    if twice := next((name for name in names if names.count(name) > 1), None):
        raise FieldError("TRACE", twice, "each trace once, under a name of its own")
    return found


def doubted(found: Trace, source: Path | str, unit: str = "seconds", hint: str = "") -> None:
    """Warn of a trace that is unlike any market."""
    if strange := doubt(found, unit):
        click.echo(f"elastic-sim: {source}: {strange}{hint}", err=True)


def warn(scenarios: Sequence[Scenario]) -> None:
    """Of strange traces, looked at whole; but runs that were made to fail lose more. Raises FieldError."""
    for trace in dict.fromkeys(one.trace for one in scenarios if one.trace):
        if Path(trace).suffix != ".jsonl":
            doubted(Scenario(trace=trace).trace_of(0), trace)


def sweep_scenarios(
    traces: tuple[Path, ...],
    rates: tuple[float | PerNode, ...],
    models: tuple[str, ...],
    told: dict[str, Any],
) -> list[Scenario]:
    """Every trace and every rate, with every model. Raises FieldError."""
    if not traces and not rates:
        raise FieldError("--trace, --mtbf", "neither", "name traces, or failure rates, or both")
    names = [trace.name for trace in dict.fromkeys(traces)]
    if twice := next((name for name in names if names.count(name) > 1), None):
        raise FieldError(
            "--trace", twice, "several files have this name, and tables could not tell them apart"
        )
    if not models:
        raise FieldError("--model", "", "name one at least")
    markets: list[tuple[Path | None, float | PerNode | None]] = [(trace, None) for trace in traces]
    markets += [(None, rate) for rate in rates]
    return [
        scenario_of(trace, {**told, "model": model, "mtbf": rate})
        for model in models
        for trace, rate in dict.fromkeys(markets)
    ]


def stored(out: Path, text: str) -> None:
    """Write a file. Raises FieldError."""
    try:
        out.write_text(text)
    except OSError as error:
        raise FieldError("output", str(out), f"it must be writable: {error}") from error


def writable(*paths: Path | None) -> None:
    """Say at once, and not after hours, that a file cannot be written. Raises FieldError."""
    for path in paths:
        if path is not None and not path.parent.is_dir():
            raise FieldError(
                "output", str(path), f"the folder {path.parent} does not exist; make it first"
            )
        if path is not None and path.is_dir():
            raise FieldError("output", str(path), "it is a folder; name a file")
