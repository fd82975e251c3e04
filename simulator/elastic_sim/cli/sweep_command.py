"""The command `sweep`."""

from __future__ import annotations

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
from elastic_sim.cli.commands import policies_of, scenario_of, scenario_options, warn
from elastic_sim.cli.options import FILE, RATE, PerNode, Several, stored, writable
from elastic_sim.report.words import options
from elastic_sim.steps.scenario import Scenario
from elastic_sim.sweep import sweep as sweeps
from elastic_sim.sweep.cells import Backend, Cell, cells_of, checked
from elastic_sim.sweep.sweep_local import local


@click.command(cls=Command)
@click.argument("out", type=FILE)
@click.option("--trace", "traces", type=FILE, multiple=True, help="repeatable")
@click.option("--mtbf", "rates", type=Several(RATE), default=(), help="failure rates, as 10m,1h,200h/node")
@click.option(
    "--model",
    "models",
    type=Several(click.STRING),
    default=("gpt3-6.7b",),
    help="names, or files of profiles, comma-separated",
)
@click.option("--policy", "wanted", multiple=True, help="repeatable, or comma-separated; all: every one")
@click.option("--seeds", type=click.IntRange(1, 10_000), default=3, help="runs of each")
@click.option("--workers", type=click.IntRange(1, 1024), help="processes [one a core]")
@click.option("--ray", is_flag=True, help="on a Ray cluster, in place of processes of this machine")
@click.option("--address", help="with --ray: of the cluster [RAY_ADDRESS, or one that is started here]")
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
    scenarios, policies = scenarios_of(traces, rates, models, told), policies_of(wanted)
    cells = cells_of(scenarios, policies, seeds)
    writable(html)
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
        from elastic_sim.sweep.sweep_report import sweep_report

        stored(html, sweep_report(rows, seeds, command_line(scenarios, policies, seeds)))
    click.echo("goodput: samples over those of the oracle, with 95 % intervals over seeds")
    click.echo(sweeps.table(rows))
    click.echo(f"{out / sweeps.WHOLE}: {len(cells)} cells")


def scenarios_of(
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


def command_line(scenarios: Sequence[Scenario], policies: Sequence[str], seeds: int) -> str:
    """The same sweep again."""
    traces = dict.fromkeys(one.trace for one in scenarios if one.trace)
    rates = dict.fromkeys(f"{one.market.mtbf_s:g}s" for one in scenarios if one.market is not None)
    words = ["elastic-sim", "sweep", "OUT", *(word for trace in traces for word in ("--trace", trace))]
    words += ["--mtbf", ",".join(rates)] if rates else []
    words += ["--model", ",".join(dict.fromkeys(one.model for one in scenarios))]
    words += ["--policy", ",".join(policies), "--seeds", f"{seeds}"]
    made_up = next((one for one in scenarios if one.market is not None), scenarios[0])
    return shlex.join([*words, *options(made_up)])


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
        from elastic_sim.sweep.sweep_ray import LOCAL, on_ray
    except ImportError as error:
        remedy = f"ray is not installed ({error}); pip install 'elastic-runtime[ray]'"
        raise FieldError("--ray", True, remedy) from error
    return on_ray(address or os.environ.get("RAY_ADDRESS") or LOCAL)
