"""DOC"""

from __future__ import annotations

import json
import math
import os
import shlex
import sys
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

import click
from tqdm import tqdm

from elastic.command_line import Command
from elastic.domain.errors import EXIT_INTERRUPTED, FieldError
from elastic_sim.cli.options import (
    FILE,
    RATE,
    PerNode,
    Several,
    scenario_of,
    scenario_options,
    scenarios_of,
    stored,
    sweep_scenarios,
    warn,
    writable,
)
from elastic_sim.replay import advise as advice
from elastic_sim.replay import show
from elastic_sim.replay.replay import replay as run
from elastic_sim.report.command_line import scenario_words
from elastic_sim.steps import policies as known
from elastic_sim.steps.clusters import NODE_TYPES, node_type_of
from elastic_sim.steps.scenario import Scenario
from elastic_sim.sweep import sweep as sweeps
from elastic_sim.sweep.cells import Backend, Cell, cells_of, checked
from elastic_sim.sweep.local_backend import local

DEFAULT_POLICIES = ("ours", "varuna", "bamboo", "oobleck", "parcae", "oracle")


def policies_of(told: tuple[str, ...]) -> tuple[str, ...]:
    """--policy, repeated or comma-separated; all: every one. Raises FieldError."""
    names = [name.strip() for text in told for name in text.split(",") if name.strip()] or list(
        DEFAULT_POLICIES
    )
    names = [one for name in names for one in (known.makers() if name == "all" else (name,))]
    for name in names:
        known.maker_of(name)
    return tuple(dict.fromkeys(names))


@click.command(cls=Command)
@click.argument("trace", type=FILE, required=False)
@click.option(
    "--policy", "wanted", multiple=True, help="repeatable, or comma-separated; all: every one"
)
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
    if html is not None:
        from elastic_sim.report.replay_page import replay_page
    warn([scenario])
    found = run(scenario.world(), scenario.trace_of, names, range(seeds), keep=html is not None)
    click.echo(show.table(found))
    if not any(one.samples_per_s.value for one in found):
        click.echo(
            f"elastic-sim: nothing ever runs: {scenario.model} does not fit on these nodes",
            err=True,
        )
    if out is not None:
        told = show.as_json(
            scenario.name(), scenario.model, found, scenario=json.loads(scenario.dumps())
        )
        stored(out, json.dumps(told, indent=2) + "\n")
    if html is not None:
        stored(html, replay_page(scenario, found, names, seeds))


@click.command(cls=Command)
def policies() -> None:
    """What each policy does, and where its rules and constants come from."""
    click.echo(show.policies(known.abouts()))


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
    "--mixes", "steps", type=click.IntRange(1, 100), default=4, help="of spot and on-demand"
)
@click.option(
    "--budget", type=float, default=math.inf, show_default=False, help="dollars an hour [none]"
)
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
            found = advice.ordered([*found, *priced(advice.resized(found[0].mix))], budget)
    click.echo(show.advice(found, budget))
    best = found[0]
    if best.within and math.isfinite(best.per_million.value):
        click.echo(f"\n{advice.answer(best)}")
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


@click.command(cls=Command)
@click.argument("out", type=FILE)
@click.option("--trace", "traces", type=FILE, multiple=True, help="repeatable")
@click.option(
    "--mtbf", "rates", type=Several(RATE), default=(), help="failure rates, as 10m,1h,200h/node"
)
@click.option(
    "--model",
    "models",
    type=Several(click.STRING),
    default=("gpt3-6.7b",),
    help="names, or files of profiles, comma-separated",
)
@click.option(
    "--policy", "wanted", multiple=True, help="repeatable, or comma-separated; all: every one"
)
@click.option("--seeds", type=click.IntRange(1, 10_000), default=3, help="runs of each")
@click.option("--workers", type=click.IntRange(1, 1024), help="processes [one a core]")
@click.option("--ray", is_flag=True, help="on a Ray cluster, in place of processes of this machine")
@click.option(
    "--address", help="with --ray: of the cluster [RAY_ADDRESS, or one that is started here]"
)
@click.option("--html", type=FILE, help="write a page with charts and tables there")
@scenario_options(but=("model", "mtbf"))
def sweep(
    out: Path,
    traces: tuple[Path, ...],
    rates: tuple[float | PerNode, ...],
    models: tuple[str, ...],
    wanted: tuple[str, ...],
    seeds: int,
    workers: int | None,
    ray: bool,
    address: str | None,
    html: Path | None,
    **told: Any,
) -> None:
    """Traces and failure rates x models x policies x seeds, into the folder OUT. The same command goes on where one
    was interrupted."""
    scenarios, names = sweep_scenarios(traces, rates, models, told), policies_of(wanted)
    cells = cells_of(scenarios, names, seeds)
    writable(html)
    if html is not None:
        from elastic_sim.sweep.sweep_page import sweep_page
    backend = _backend(workers, ray, address)
    checked(cells)
    warn(scenarios)
    with tqdm(total=len(cells), unit="cell", disable=not sys.stderr.isatty()) as bar:

        def began(done: int) -> None:
            bar.update(done)
            if done:
                bar.write(f"{done} of {len(cells)} cells were done before", file=sys.stderr)

        def progress(cell: Cell) -> None:
            bar.set_postfix_str(str(cell), refresh=False)
            bar.update()

        try:
            rows = sweeps.run(out, cells, backend, began=began, progress=progress)
        except KeyboardInterrupt:
            bar.close()
            click.echo("elastic-sim: interrupted; the same command goes on from here", err=True)
            sys.exit(EXIT_INTERRUPTED)
    if html is not None:
        stored(html, sweep_page(rows, seeds, sweep_command(scenarios, names, seeds)))
    click.echo("goodput: samples over those of the oracle, with 95 % intervals over seeds")
    click.echo(sweeps.table(rows))
    click.echo(f"{out / sweeps.WHOLE}: {len(cells)} cells")


def sweep_command(scenarios: Sequence[Scenario], policies: Sequence[str], seeds: int) -> str:
    """The same sweep again."""
    traces = dict.fromkeys(one.trace for one in scenarios if one.trace)
    rates = dict.fromkeys(f"{one.market.mtbf_s:g}s" for one in scenarios if one.market is not None)
    words = [
        "elastic-sim",
        "sweep",
        "OUT",
        *(word for trace in traces for word in ("--trace", trace)),
    ]
    words += ["--mtbf", ",".join(rates)] if rates else []
    words += ["--model", ",".join(dict.fromkeys(one.model for one in scenarios))]
    words += ["--policy", ",".join(policies), "--seeds", f"{seeds}"]
    made_up = next((one for one in scenarios if one.market is not None), scenarios[0])
    return shlex.join([*words, *scenario_words(made_up)])


def _backend(workers: int | None, ray: bool, address: str | None) -> Backend:
    """Raises FieldError."""
    if not ray:
        if address is not None:
            raise FieldError("--address", address, "it goes with --ray")
        return partial(local, workers=workers or os.cpu_count() or 1)
    if workers is not None:
        raise FieldError(
            "--workers", workers, "it goes without --ray, which has as many as the cluster has CPUs"
        )
    try:
        from elastic_sim.sweep.ray_backend import LOCAL, on_ray
    except ImportError as error:
        remedy = f"ray is not installed ({error}); pip install 'elastic-runtime[ray]'"
        raise FieldError("--ray", True, remedy) from error
    return on_ray(address or os.environ.get("RAY_ADDRESS") or LOCAL)
