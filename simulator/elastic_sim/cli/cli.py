"""The `elastic-sim` command."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path
from typing import Any

import click

from elastic.command_line import OUTPUT, CommandLine
from elastic.domain.codec import dumps
from elastic.domain.errors import FieldError, UsageError
from elastic.domain.version import VERSION
from elastic_sim.cli.commands import advise, policies, replay, sweep
from elastic_sim.cli.options import (
    BULK,
    FILE,
    RATE,
    TIME,
    TRACE_FILE,
    ZONES,
    PerNode,
    mtbf_of,
    option,
    warn_if_implausible,
    write_json,
    write_output,
)
from elastic_sim.microbatches.physics import MicrobatchPhysics
from elastic_sim.microbatches.physics import read as read_physics
from elastic_sim.microbatches.validate import calibrate, format_report, report_json, validate
from elastic_sim.reproduce import tables
from elastic_sim.traces import trace as traces
from elastic_sim.traces.fetch import HOST, PUBLISHED_TRACES, fetch
from elastic_sim.traces.generate import Market, fit_market, generate, shared_with_inference
from elastic_sim.traces.importers import FORMATS, UNITS
from elastic_sim.traces.statistics import Statistics, statistics


@click.group("elastic-sim", cls=CommandLine)
@click.version_option(VERSION, "-V", "--version", message="%(prog)s %(version)s")
def main() -> None:
    """Simulate training on spot markets: traces, policies, sweeps, and published values."""


@main.group("traces")
def traces_group() -> None:
    """Read, convert, make and fetch traces."""


@traces_group.command("stats")
@click.argument("file", type=FILE)
@option("--json", "as_json", is_flag=True, help="print JSON")
@option("--html", type=OUTPUT, help="write a page with plots to this file")
def stats(file: Path, as_json: bool, html: Path | None) -> None:
    """Show the nodes, losses and lifetimes of a trace."""
    if html is not None:
        from elastic_sim.report.trace_page import trace_page
    found, _ = traces.read(file)
    if html is not None:
        write_output(html, trace_page(found, file.name))
    warn_if_implausible(found, file)
    click.echo(json.dumps(asdict(statistics(found))) if as_json else _table(statistics(found)))


@traces_group.command("import")
@click.argument("kind", type=click.Choice(sorted(FORMATS)))
@click.argument("source", type=FILE)
@click.argument("out", type=TRACE_FILE)
@option("--bid", type=float, help="spot-prices: highest price at which a zone has nodes")
@option(
    "--nodes",
    type=click.IntRange(1, traces.MAX_NODES),
    default=1,
    help="spot-prices: nodes per zone",
)
@option("--product", help="spot-prices: the product to use, as Linux/UNIX, if there are several")
@option("--hours", is_flag=True, help="counts: times are hours, not seconds")
def import_command(
    kind: str,
    source: Path,
    out: Path,
    bid: float | None,
    nodes: int,
    product: str | None,
    hours: bool,
) -> None:
    """Convert a file of another format into a trace."""
    more: dict[str, Any] = {}
    unit = UNITS[kind]
    if kind == "spot-prices":
        if bid is None:
            raise UsageError("--bid is missing: spot prices need a bid, in dollars per hour")
        more = {"bid": bid, "nodes": nodes, "product": product}
    elif kind == "counts" and hours:
        more, unit = {"unit_s": 3600.0}, "hours"
    elif kind == "events" and (config := source.parent / "config.json").is_file():
        more = {"config": traces.read_text(config, "file")}
    found = FORMATS[kind](traces.read_text(source, "file"), source.name, **more)
    _write(found, out, f", times read as {unit}")
    if kind != "events":  # runs that were made to fail lose more
        hint = " --hours takes them for hours" if kind == "counts" and not hours else ""
        warn_if_implausible(found, source, unit, hint)


@traces_group.command("convert")
@click.argument("source", type=FILE)
@click.argument("out", type=TRACE_FILE)
@option("--repair", is_flag=True, help="drop, sort and complete invalid rows, and list the repairs")
@option("--from", "first", type=TIME, default="0", help="begin here")
@option("--to", "last", type=TIME, help="end here")
def convert(source: Path, out: Path, repair: bool, first: float, last: float | None) -> None:
    """Repair a trace, or cut a window out of it."""
    whole, repairs = traces.read(source, repair=repair)
    found = whole
    for done in repairs:
        click.echo(f"line {done.line}: {done.text}" if done.line else done.text, err=True)
    if first or last is not None:
        end = found.end_s if last is None else last
        if not first < end <= found.end_s:
            remedy = f"a part of 0 to {found.end_s:g} s"
            raise FieldError("--from, --to", f"{first:g}, {end:g}", remedy)
        found = traces.window(whole, first, end)
    _write(found, out)
    warn_if_implausible(whole, source)


@traces_group.command("generate")
@click.argument("out", type=TRACE_FILE)
@option("--nodes", type=int, default=32, help="wanted number of nodes")
@option("--duration", type=TIME, default="24h", help="length of the trace")
@option(
    "--mtbf",
    type=RATE,
    default="1h",
    help="mean time between two losses in the cluster, or per node as 200h/node",
)
@option(
    "--repair",
    "repair_s",
    type=TIME,
    default="20m",
    help="time until a lost node is replaced; 0: never",
)
@option("--notice", "notice_s", type=TIME, default="0", help="time between notice and loss")
@option("--bulk", type=BULK, default="1", help="nodes lost at once, as 1 or 1:3,4:1 (size:weight)")
@option("--diurnal", type=float, default=0.0, help="swing of the loss rate over a day, 0 to 1")
@option(
    "--shape",
    type=float,
    default=1.0,
    help="Weibull shape of the times between losses; below 1: in bursts",
)
@option(
    "--lifetime-shape",
    type=float,
    default=1.0,
    help="Weibull shape of the nodes' lifetimes; below 1: young nodes are lost more often",
)
@option(
    "--zones",
    type=ZONES,
    default=(),
    show_default=False,
    help="zones, comma-separated [a; with --like: the trace's]",
)
@option(
    "--like",
    type=FILE,
    help="a trace to fit; then only --duration, --zones and --seed count",
)
@option(
    "--inference",
    type=int,
    help="share the nodes with inference, which leaves at least this many by day",
)
@option("--seed", type=int, default=0)
def generate_command(
    out: Path,
    nodes: int,
    duration: float,
    mtbf: float | PerNode,
    notice_s: float,
    bulk: tuple[tuple[int, float], ...],
    zones: tuple[str, ...],
    like: Path | None,
    inference: int | None,
    seed: int,
    **rates: Any,
) -> None:
    """Generate a synthetic trace, labelled as such."""
    if inference is not None:
        made = shared_with_inference(nodes, duration, least=inference, seed=seed, notice_s=notice_s)
    else:
        if like is not None:
            market = fit_market(traces.read(like)[0], zones=zones)
        else:
            market = Market(
                nodes=nodes,
                mtbf_s=mtbf_of(mtbf, nodes, bulk),
                bulk=bulk,
                notice_s=notice_s,
                zones=zones or ("a",),
                **rates,
            )
        made = generate(market, duration, seed)
    _write(made, out)


@traces_group.command("fetch")
@click.argument("names", nargs=-1, metavar="[TRACE]...")
@option("--to", "directory", type=FILE, default=Path("traces/originals"))
@option("--host", default=HOST, help="mirror of the authors' repositories")
def fetch_command(names: tuple[str, ...], directory: Path, host: str) -> None:
    """Download recorded traces (all, or those named) and check them."""
    unknown = [name for name in names if name not in PUBLISHED_TRACES]
    if unknown:
        raise FieldError("TRACE", unknown[0], f"one of {', '.join(PUBLISHED_TRACES)}")
    for name in names or PUBLISHED_TRACES:
        original = PUBLISHED_TRACES[name]
        click.echo(f"{name}: {fetch(original, directory, host)} ({original.format})")


@main.command("reproduce")
@click.argument("what", type=click.Choice(sorted(tables.TABLES)))
@option(
    "--data",
    type=FILE,
    help="directory of recorded traces (default: ELASTIC_DATA, or ../shared/data)",
)
@option("--json", "out", type=OUTPUT, help="also write the rows to this file")
def reproduce(what: str, data: Path | None, out: Path | None) -> None:
    """Recompute published values from the rules and constants of their authors."""
    rows = tables.TABLES[what](tables.data_directory(data) if what in tables.RECORDED else Path())
    click.echo(tables.describe(rows))
    write_json(out, {"rows": rows})


@main.command("validate")
@click.argument("run_dirs", metavar="RUN_DIR...", type=FILE, nargs=-1, required=True)
@option("--physics", type=FILE, help="file of delays that --calibrate wrote [default delays]")
@option(
    "--calibrate",
    "out",
    type=OUTPUT,
    help="only measure the delays of these runs and write them to this file",
)
@option("--json", "as_json", type=OUTPUT, help="also write the figures to this file")
def validate_command(
    run_dirs: tuple[Path, ...], physics: Path | None, out: Path | None, as_json: Path | None
) -> None:
    """Compare emulated runs with their simulation: throughput and phases of recoveries."""
    if out is not None:
        if physics is not None or as_json is not None:
            raise FieldError(
                "--calibrate",
                str(out),
                "give --physics and --json to another call: this one measures",
            )
        found = calibrate(run_dirs)
        write_output(out, f"{dumps(found)}\n")
        click.echo(f"{out}: {found}")
        return
    report = validate(
        run_dirs, read_physics(physics) if physics is not None else MicrobatchPhysics()
    )
    click.echo(format_report(report))
    write_json(as_json, report_json(report))


def _table(found: Statistics) -> str:
    rows = asdict(found)
    width = max(map(len, rows))
    return "\n".join(f"{name:<{width}}  {value:>12.4g}" for name, value in rows.items())


def _write(found: traces.Trace, out: Path, more: str = "") -> None:
    write_output(out, traces.format_trace(found))
    click.echo(f"{out}: {len(found.events)} events in {found.end_s / 3600:.4g} h{more}")


for command in (replay, policies, sweep, advise):
    main.add_command(command)


if __name__ == "__main__":
    main()
