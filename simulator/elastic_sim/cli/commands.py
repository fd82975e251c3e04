"""The commands that run policies: `replay` and `policies`."""

from __future__ import annotations

import json
import math
import sys
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import click
from tqdm import tqdm

from elastic.command_line import TIME, Command
from elastic.domain.errors import FieldError
from elastic_sim.cli.options import FILE, RATE, mtbf_of, sizes_of, stored, writable
from elastic_sim.replay import advise as advice
from elastic_sim.replay import show
from elastic_sim.replay.replay import replay as run
from elastic_sim.steps import policies as known
from elastic_sim.steps.clusters import NODE_TYPES, node_type_of
from elastic_sim.steps.scenario import Scenario
from elastic_sim.traces.generate import Market
from elastic_sim.traces.importers import plausibility_warning
from elastic_sim.traces.trace import Trace

Callback = Callable[..., None]
DEFAULT = ("ours", "varuna", "bamboo", "oobleck", "parcae", "oracle")

_OPTIONS = {
    "model": click.option("--model", default="gpt3-6.7b", help="a name, or the file of a profile"),
    "microbatches": click.option(
        "--microbatches", type=int, default=0, help="of a step; needed with the file of a profile"
    ),
    "nodes_of": click.option("--nodes-of", default="a40", help="node types, comma-separated"),
    "mtbf": click.option(
        "--mtbf", type=RATE, help="no trace: the cluster loses nodes so often; each node, as 200h/node"
    ),
    "nodes": click.option("--nodes", type=int, default=32, help="with --mtbf: wanted at any time"),
    "duration": click.option("--duration", type=TIME, default="12h", help="with --mtbf: length of the run"),
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
        "--physics", multiple=True, help="NAME=NUMBER, as boot_s=90; see docs/simulator/simulator.md"
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
    if strange := plausibility_warning(found, unit):
        click.echo(f"elastic-sim: {source}: {strange}{hint}", err=True)


def warn(scenarios: Sequence[Scenario]) -> None:
    """Of strange traces, looked at whole; but runs that were made to fail lose more. Raises FieldError."""
    for trace in dict.fromkeys(one.trace for one in scenarios if one.trace):
        if Path(trace).suffix != ".jsonl":
            doubted(Scenario(trace=trace).trace_of(0), trace)


def policies_of(told: tuple[str, ...]) -> tuple[str, ...]:
    """--policy, repeated or comma-separated; all: every one. Raises FieldError."""
    names = [name.strip() for text in told for name in text.split(",") if name.strip()] or list(DEFAULT)
    names = [one for name in names for one in (known.policy_factories() if name == "all" else (name,))]
    for name in names:
        known.policy_factory(name)
    return tuple(dict.fromkeys(names))


@click.command(cls=Command)
@click.argument("trace", type=FILE, required=False)
@click.option("--policy", "wanted", multiple=True, help="repeatable, or comma-separated; all: every one")
@click.option("--seeds", type=click.IntRange(1, 10_000), default=1, help="runs of each policy")
@click.option("--json", "out", type=FILE, help="write the figures there")
@click.option("--html", type=FILE, help="write a page with tables, charts and decisions there")
@scenario_options()
def replay(
    trace: Path | None,
    wanted: tuple[str, ...],
    seeds: int,
    out: Path | None,
    html: Path | None,
    **told: Any,
) -> None:
    """What each policy delivers and costs on a trace, or at a failure rate."""
    scenario, names = scenario_of(trace, told), policies_of(wanted)
    writable(out, html)
    warn([scenario])
    found = run(scenario.world(), scenario.trace_of, names, range(seeds), keep=html is not None)
    click.echo(show.table(found))
    if not any(one.samples_per_s.value for one in found):
        click.echo(f"elastic-sim: nothing ever runs: {scenario.model} does not fit on these nodes", err=True)
    if out is not None:
        told = show.as_json(scenario.name(), scenario.model, found, scenario=json.loads(scenario.dumps()))
        stored(out, json.dumps(told, indent=2) + "\n")
    if html is not None:
        from elastic_sim.report.report import (
            report,  # its templates need a library that others need not load
        )

        stored(html, report(scenario, found, names, seeds))


@click.command(cls=Command)
def policies() -> None:
    """What each policy does, and where its rules and constants come from."""
    click.echo(show.policies(known.policy_descriptions()))


@click.command(cls=Command)
@click.argument("traces", type=FILE, nargs=-1, metavar="[TRACE]...")
@click.option(
    "--buy",
    default="",
    show_default=False,
    help="nodes in all, spares included; several as 28,32,36 [what the budget pays, else 32, and the best mix with an "
    "eighth fewer and more]",
)
@click.option(
    "--mixes",
    "steps",
    type=click.IntRange(1, 100),
    default=4,
    help="of spot and on-demand",
)
@click.option("--budget", type=float, default=math.inf, show_default=False, help="dollars an hour [none]")
@click.option("--policy", "wanted", multiple=True, default=("ours",), help="ours:PAIR for a backup")
@click.option("--seeds", type=click.IntRange(1, 10_000), default=3, help="runs of each")
@click.option("--json", "out", type=FILE, help="write the figures there")
@scenario_options()
def advise(
    traces: tuple[Path, ...],
    buy: str,
    steps: int,
    budget: float,
    wanted: tuple[str, ...],
    seeds: int,
    out: Path | None,
    **told: Any,
) -> None:
    """Which mix of spot and on-demand nodes to rent, how many as spares, with which backup, and what to expect.

    Several traces count alike.
    """
    if not budget > 0:
        raise FieldError("--budget", budget, "dollars an hour, above 0")
    scenarios, names = scenarios_of(traces, told), policies_of(wanted)
    source = click.get_current_context().get_parameter_source("nodes_of")
    if "model" in scenarios[0].files() and source == click.core.ParameterSource.DEFAULT:
        kinds = ", ".join(kind.name for kind in NODE_TYPES)
        raise FieldError(
            "--nodes-of", "", f"a profile has no prices: name what its nodes cost, one of {kinds}"
        )
    writable(out)
    warn(scenarios)
    if buy or math.isinf(budget):
        mixes = advice.mixes(_sizes(buy or "32"), steps)
    else:
        mixes = advice.affordable(node_type_of(scenarios[0].nodes_of[0]), budget, steps)
    with tqdm(unit="mix", disable=not sys.stderr.isatty()) as bar:
        priced = partial(
            advice.offers,
            scenarios,
            policies=names,
            seeds=range(seeds),
            budget_per_h=budget,
            progress=bar.update,
        )
        found = priced(mixes)
        if not buy:
            found = advice.ranked([*found, *priced(advice.resized(found[0].mix))], budget)
    click.echo(show.advice(found, budget))
    best = found[0]
    if best.within and math.isfinite(best.per_million_samples.value):
        click.echo(f"\n{advice.answer_text(best)}")
    if out is not None:
        offers = [
            {**row, "spares": one.spares, "backup": one.backup, "backup_share": one.backup_share}
            for row, one in zip(show.offers_json(found), found, strict=True)
        ]
        told = {
            "traces": [one.name() for one in scenarios],
            "model": scenarios[0].model,
            "offers": offers,
        }
        stored(out, json.dumps(told, indent=2) + "\n")


def _sizes(text: str) -> list[int]:
    try:
        found = [int(part) for part in text.split(",")]
    except ValueError:
        found = []
    if not found or not all(0 < n <= 100_000 for n in found):
        raise FieldError("--buy", text, "numbers of nodes from 1 up, as 32 or 28,32,36")
    return found
