"""The commands that run policies: replay, policies, advise and sweep."""

from __future__ import annotations

import math
import os
import sys
from collections.abc import Sequence
from dataclasses import asdict
from functools import partial
from itertools import count
from pathlib import Path
from typing import Any

import click
from tqdm import tqdm

from elastic.command_line import OUTPUT, Command
from elastic.domain.errors import EXIT_INTERRUPTED, FieldError
from elastic_sim.cli.options import (
    DEFAULT,
    FILE,
    JSON,
    RATE,
    WANTED,
    PerNode,
    ValueList,
    option,
    scenario_options,
    scenarios_of,
    sweep_scenarios,
    warn_of_traces,
    write_json,
    write_output,
)
from elastic_sim.cli.progress import Progress
from elastic_sim.replay import advise as advice
from elastic_sim.replay import show
from elastic_sim.replay.replay import replay as run
from elastic_sim.report.command_line import sweep_command
from elastic_sim.steps import policies as known
from elastic_sim.steps.clusters import NODE_TYPES
from elastic_sim.sweep import sweep as sweeps
from elastic_sim.sweep.cells import Backend, SweepCell, cells_of, check_cells
from elastic_sim.sweep.local_backend import run_locally

DEFAULT_POLICIES = ("ours", "varuna", "bamboo", "oobleck", "parcae", "oracle")


def policies_of(words: tuple[str, ...]) -> tuple[str, ...]:
    """Return the policies of --policy; "all" means every policy. Raises FieldError."""
    names = [name.strip() for text in words for name in text.split(",") if name.strip()]
    if words and not names:
        raise FieldError("--policy", ",".join(words), "name policies, or all")
    names = names or list(DEFAULT_POLICIES)
    names = [
        one for name in names for one in (known.policy_classes() if name == "all" else (name,))
    ]
    for name in names:
        known.policy_class(name)
    return tuple(dict.fromkeys(names))


@click.command(cls=Command)
@click.argument("trace", type=FILE, required=False)
@WANTED
@option("--seeds", type=click.IntRange(1, 10_000), default=1, help="runs of each policy")
@JSON
@option("--html", type=OUTPUT, help="write a page with tables and charts to this file")
@scenario_options()
def replay(
    trace: Path | None,
    wanted: tuple[str, ...],
    seeds: int,
    out: Path | None,
    html: Path | None,
    **scenario_values: Any,
) -> None:
    """Compare throughput and cost of policies on a trace, or at a failure rate."""
    (scenario,) = scenarios_of([trace] if trace is not None else [], scenario_values)
    names, keep = policies_of(wanted), html is not None
    if html is not None:
        from elastic_sim.report.replay_page import replay_page
    with Progress("elastic-sim replay") as progress:
        warn_of_traces([scenario])
        world, every = scenario.world(), range(seeds)
        found = run(world, scenario.trace_of, names, every, keep=keep, progress=progress.show)
    click.echo(show.table(found))
    if not any(one.samples_per_s.value for one in found):
        click.echo(
            f"elastic-sim: nothing ever runs: {scenario.model} does not fit on these nodes",
            err=True,
        )
    write_json(out, show.as_json(scenario, asdict(scenario), found))
    if html is not None:
        write_output(html, replay_page(scenario, found, names, seeds))


@click.command(cls=Command)
def policies() -> None:
    """Describe each policy and the source of its rules and constants."""
    click.echo(show.policies([kind.about for kind in known.policy_classes().values()]))


@click.command(cls=Command)
@click.argument("traces", type=FILE, nargs=-1, metavar="[TRACE]...")
@option(
    "--buy",
    type=ValueList(click.IntRange(1, 100_000)),
    default=(),
    show_default=False,
    help="total number of nodes with spares; several as 28,32,36 [as many as the budget pays for, "
    "or 32; then the best mix with an eighth fewer and an eighth more]",
)
@option("--mixes", "steps", type=click.IntRange(1, 100), default=4, help="steps of the spot share")
@option("--budget", type=float, default=math.inf, show_default=False, help="$ per hour [none]")
@option("--policy", "wanted", multiple=True, default=("ours",), help="ours:PAIR sets the backup")
@option("--seeds", type=click.IntRange(1, 10_000), default=3, help="runs of each mix")
@JSON
@scenario_options()
def advise(
    traces: tuple[Path, ...],
    buy: tuple[int, ...],
    steps: int,
    budget: float,
    wanted: tuple[str, ...],
    seeds: int,
    out: Path | None,
    **scenario_values: Any,
) -> None:
    """Recommend a mix of spot and on-demand nodes, the number of spares, and a backup.

    Several traces have equal weights.
    """
    if not budget > 0:
        raise FieldError("--budget", budget, "dollars an hour, above 0")
    scenarios, names = scenarios_of(traces, scenario_values), policies_of(wanted)
    source = click.get_current_context().get_parameter_source("nodes_of")
    if "model" in scenarios[0].files() and source is DEFAULT:
        kinds = ", ".join(kind.name for kind in NODE_TYPES)
        remedy = f"a profile has no prices: name what its nodes cost, one of {kinds}"
        raise FieldError("--nodes-of", "", remedy)
    if buy or math.isinf(budget):
        mixes = advice.mixes(buy or (32,), steps)
    else:
        recorded = [one.trace_of(0) for one in scenarios]
        shares = advice.composition(scenarios[0], recorded)
        mixes = advice.affordable(shares, budget, steps)
    with Progress("elastic-sim advise") as progress:
        total, numbers = len(names) * (len(mixes) + (0 if buy else 2)), count(1)

        def priced_one() -> None:
            done = next(numbers)
            progress.show(min(1.0, done / total), f"{done} of {total} offers")

        warn_of_traces(scenarios)
        progress.show(0.0, f"0 of {total} offers")
        priced = partial(
            advice.offers,
            scenarios,
            policies=names,
            seeds=range(seeds),
            budget_per_h=budget,
            progress=priced_one,
        )
        found = priced(mixes)
        if not buy:
            found = advice.ranked([*found, *priced(advice.resized(found[0].mix))], budget)
    click.echo(show.advice(found, budget))
    best = found[0]
    if best.within and math.isfinite(best.per_million_samples.value):
        click.echo(f"\n{advice.answer_text(best)}")
    traces_json, offers = [one.name() for one in scenarios], show.offers_json(found)
    write_json(out, {"traces": traces_json, "model": scenarios[0].model, "offers": offers})


@click.command(cls=Command)
@click.argument("out", type=FILE)
@option("--trace", "traces", type=FILE, multiple=True, help="a trace; repeatable")
@option(
    "--mtbf", "rates", type=ValueList(RATE), default=(), help="failure rates, as 10m,1h,200h/node"
)
@option(
    "--model",
    "models",
    type=ValueList(click.STRING),
    default=("gpt3-6.7b",),
    help="names, or files of profiles, comma-separated",
)
@WANTED
@option("--seeds", type=click.IntRange(1, 10_000), default=3, help="runs of each")
@option("--workers", type=click.IntRange(1, 1024), help="number of processes [one per core]")
@option("--ray", is_flag=True, help="run on a Ray cluster, not on this machine")
@option("--address", help="with --ray: address of the cluster [RAY_ADDRESS, or start one]")
@option("--html", type=OUTPUT, help="write a page with tables and charts to this file")
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
    **scenario_values: Any,
) -> None:
    """Run traces and failure rates x models x policies x seeds into the folder OUT.

    The same command continues an interrupted sweep.
    """
    scenarios, names = sweep_scenarios(traces, rates, models, scenario_values), policies_of(wanted)
    if html is not None:
        from elastic_sim.sweep.sweep_page import sweep_page
    backend = _backend(workers, ray, address)
    try:
        with Progress("elastic-sim sweep") as progress:
            cells = cells_of(scenarios, names, seeds)
            check_cells(cells)
            warn_of_traces(scenarios)
            rows = _run_cells(out, cells, backend, progress)
    except KeyboardInterrupt:
        click.echo("elastic-sim: interrupted; the same command goes on from here", err=True)
        sys.exit(EXIT_INTERRUPTED)
    if html is not None:
        write_output(html, sweep_page(rows, seeds, sweep_command(scenarios, names, seeds)))
    click.echo("goodput: samples over those of the oracle, with 95 % intervals over seeds")
    click.echo(sweeps.table(rows))
    click.echo(f"{out / sweeps.SUMMARY_FILE}: {len(cells)} cells")


def _run_cells(
    out: Path, cells: Sequence[SweepCell], backend: Backend, shown: Progress
) -> list[sweeps.SweepRow]:
    """Run the cells that are not done yet, and show the progress. Raises FieldError, CellFailed."""
    done, total = 0, len(cells)

    def began(before: int) -> None:
        nonlocal done
        done = before
        shown.show(done / total, f"{done} of {total} cells")
        if done:
            tqdm.write(f"{done} of {total} cells were done before", file=sys.stderr)

    def progress(cell: SweepCell) -> None:
        nonlocal done
        done += 1
        shown.show(done / total, f"{done} of {total} cells, the last one: {cell}")

    return sweeps.run(out, cells, backend, began=began, progress=progress)


def _backend(workers: int | None, ray: bool, address: str | None) -> Backend:
    """Return the backend that the options name. Raises FieldError."""
    if not ray:
        if address is not None:
            raise FieldError("--address", address, "it goes with --ray")
        return partial(run_locally, workers=workers or os.cpu_count() or 1)
    if workers is not None:
        remedy = "it goes without --ray, which has as many as the cluster has CPUs"
        raise FieldError("--workers", workers, remedy)
    try:
        from elastic_sim.sweep.ray_backend import LOCAL, check_address, run_on_ray
    except ImportError as error:
        remedy = f"ray is not installed ({error}); pip install 'elastic-runtime[ray]'"
        raise FieldError("--ray", True, remedy) from error
    known = address or os.environ.get("RAY_ADDRESS") or LOCAL
    check_address("--address" if address else "RAY_ADDRESS", known)
    return partial(run_on_ray, address=known)
