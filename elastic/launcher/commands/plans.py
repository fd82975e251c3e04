"""`elastic plan`: plan of a running job, plan in a file, or best plan for a cluster."""

from __future__ import annotations

import sys
from collections.abc import Iterable
from dataclasses import replace
from math import isfinite
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import click
from click.core import ParameterSource

from elastic.command_line import Command, file_errors, input_text, output_file
from elastic.config import SCHEDULES
from elastic.domain.errors import FieldError, InfeasiblePlan, UsageError
from elastic.domain.types import Plan
from elastic.launcher.commands.queries import Answer, query, query_options, show
from elastic.launcher.flags.validators import SHAPE
from elastic.planning.capacity import capacity
from elastic.planning.capacity.cluster import Cluster, parse_cluster
from elastic.planning.capacity.report import PipelineReport, Report, UnitReport, picture, report
from elastic.planning.capacity.svg import seconds
from elastic.planning.cost.profile import Profile, parse_profile
from elastic.planning.plan.plan import format_plan, parse_plan, validate_plan
from elastic.planning.plan.shape import nearest_shape
from elastic.planning.search.search import PlanRequest, make_plan

GIB = float(1 << 30)
MAX_ROWS = 64
"""Most rows of a table. JSON output has all rows."""
Alternatives = tuple[tuple[str, float], ...]
"""(shape of a plan, seconds per step; inf if memory is insufficient)."""


@click.command(cls=Command)
@query_options
@click.argument("file", required=False)
@click.option("--cluster", metavar="CLUSTER.toml", help="predict the plan in FILE on this cluster")
@click.option(
    "--shape", type=SHAPE, help="pipelines: auto, their number (2), or the depth of each (3+1)"
)
@click.option("--schedule", type=click.Choice(SCHEDULES),
              help="order of the micro-batches in a pipeline")  # fmt: skip
@click.option("--without", metavar="NODES", help="plan as if these nodes were gone, as node3,node4")
@click.option("--add", metavar="NODES", help="plan as if these nodes came, as 2xA100-80:4,1xT4")
@click.option("--svg", metavar="OUT.svg", help="write a picture of the pipelines' timelines")
def plan(**flags: Any) -> int:
    """Show the plan of a running job, check a plan, or plan for a cluster.

    Without FILE: the plan of a running job. FILE is a plan as text, which is checked, or a cluster
    file NAME.toml, for which the best plan is shown with its predicted seconds per step, samples
    and tokens per second, memory, and alternatives.
    """
    args = SimpleNamespace(**flags)
    whatifs = ("shape", "schedule", "without", "add")
    if args.file is None:
        _refuse(args, ("cluster", *whatifs, "svg"), "it needs a cluster file")
        return show(query(args, "plan", {}), args.json)
    context = click.get_current_context()
    remedy = "it is for the plan of a running job: leave FILE out"
    for flag in ("rdzv_endpoint", "run_dir", "certs", "certs_name", "join_token_file"):
        if context.get_parameter_source(flag) is ParameterSource.COMMANDLINE:
            raise FieldError(f"--{flag.replace('_', '-')}", str(getattr(args, flag)), remedy)
    text = input_text("FILE", Path(args.file))
    out = _picture_file(args.svg)
    if args.file.endswith(".toml") or _looks_like_toml(text):
        _refuse(args, ("cluster",), "FILE is a cluster file itself; --cluster needs a plan")
        answer, found = _for_cluster(args, Path(args.file), text)
    elif args.cluster is not None:
        _refuse(args, whatifs, "FILE is a plan; give the cluster file instead")
        answer, found = _predicted(args, text)
    else:
        _refuse(args, (*whatifs, "svg"), "give a cluster file, or --cluster with the plan")
        checked = _parse(text)
        return show({"plan": format_plan(checked), "reason": checked.reason}, args.json)
    if out is not None:
        title = f"{answer['model']} on {answer['cluster']}"
        with file_errors("--svg", args.svg):
            out.write_text(picture(found, title), encoding="utf-8")
        answer["svg"] = str(out)
    return show(answer, args.json)


def _for_cluster(args: SimpleNamespace, path: Path, text: str) -> tuple[Answer, Report]:
    """Return answer and report of the best plan for a cluster file, after --without and --add."""
    cluster, measured = _cluster(path, text)
    flags = {name: getattr(args, name) for name in ("shape", "schedule")}
    given = {name: value for name, value in flags.items() if value is not None}
    profile = capacity.cluster_profile(cluster, measured)
    request = replace(capacity.plan_request(cluster, profile), **given)
    best = _best_plan(path, request)
    if args.without is None and args.add is None:
        if error := _misfit(args, request.shape, best):
            raise error
        others = capacity.alternatives(request, best)
        return _answer(args, path, cluster, profile, best, others)
    _, before = _answer(args, path, cluster, profile, best, ())
    cluster = cluster if args.add is None else capacity.with_more(cluster, args.add)
    gone = frozenset(name.strip() for name in (args.without or "").split(",") if name.strip())
    if args.without is not None and not gone:
        raise FieldError("--without", args.without, "name nodes, as node3,node4")
    profile = capacity.cluster_profile(cluster, measured)
    capacity.check_gone(gone, capacity.cluster_nodes(cluster, profile))
    request = capacity.plan_request(cluster, profile)
    request = replace(request, **given, dead=gone, current=best, epoch=2)
    best = _best_plan(path, request)
    if error := _misfit(args, request.shape, best):  # training would go on with it
        print(f"elastic plan: warning: {error}", file=sys.stderr)
    others = capacity.alternatives(request, best)
    answer, found = _answer(args, path, cluster, profile, best, others, gone)
    if args.json:
        change = {"without": args.without, "add": args.add, "step_s_before": before.step_s}
        return {**change, **answer}, found
    gain = before.step_s / found.step_s - 1
    words = [f"without {args.without}"] if args.without else []
    words += [f"with {args.add} more"] if args.add else []
    speed = f"{gain:+.1%} speed, from {before.step_s:.4g} s per step"
    return {"change": f"{' '.join(words)}: {speed}", **answer}, found


def _best_plan(path: Path, request: PlanRequest) -> Plan:
    try:
        return make_plan(request)
    except InfeasiblePlan as error:
        raise UsageError(f"{path}: {error}") from error


def _misfit(args: SimpleNamespace, shape: str, found: Plan) -> FieldError | None:
    """Return the error of a plan that has another shape than the requested one."""
    nearest = nearest_shape(shape, found)
    if not nearest:
        return None
    nodes = len({unit.node for unit in found.units()}) + len(found.spares)
    size = f"{nodes} nodes, {found.n_layers} layers and {found.n_microbatches} micro-batches"
    field = "model.shape" if args.shape is None else "--shape"
    return FieldError(field, shape, f"{size} allow {nearest} instead; give that, or auto")


def _predicted(args: SimpleNamespace, text: str) -> tuple[Answer, Report]:
    """Return answer and report of the plan in `text` on the nodes of the file of --cluster."""
    path = Path(args.cluster)
    cluster, measured = _cluster(path, input_text("--cluster", path))
    given = _parse(text)
    return _answer(args, path, cluster, capacity.cluster_profile(cluster, measured), given, ())


def _parse(text: str) -> Plan:
    found = parse_plan(text)
    validate_plan(found)
    return found


def _answer(
    args: SimpleNamespace,
    path: Path,
    cluster: Cluster,
    profile: Profile,
    plan: Plan,
    others: Alternatives,
    gone: frozenset[str] = frozenset(),
) -> tuple[Answer, Report]:
    """Return the answer for a plan, and its report."""
    nodes = capacity.cluster_nodes(cluster, profile)
    capacity.check_plan(plan, profile, nodes)
    samples = cluster.microbatch_size or (1 if cluster.model else 0)
    slow = capacity.cluster_slow(cluster, nodes)
    found = report(plan, profile, nodes, slow=slow, samples=samples)
    head = {"cluster": path.name, "model": profile.model, "nodes": len(nodes) - len(gone)}
    body = as_data(found, others) if args.json else as_tables(found, others)
    return {**head, **body}, found


def _cluster(path: Path, text: str) -> tuple[Cluster, Profile | None]:
    """Return the cluster of a file, and the measured profile that the file names (None: none)."""
    cluster = parse_cluster(text)
    if not cluster.profile_file:
        return cluster, None
    return cluster, parse_profile(input_text("model.profile", path.parent / cluster.profile_file))


def _looks_like_toml(text: str) -> bool:
    lines = (line.strip() for line in text.splitlines())
    first = next((line for line in lines if line and not line.startswith("#")), "")
    return first.startswith("[")


def _refuse(args: SimpleNamespace, names: tuple[str, ...], remedy: str) -> None:
    for name in names:
        value = getattr(args, name)
        if value is not None:
            raise FieldError(f"--{name}", value, remedy)


def _picture_file(name: str | None) -> Path | None:
    if name is None:
        return None
    if Path(name).suffix != ".svg":
        raise FieldError("--svg", name, "give a name that ends in .svg; the file is replaced")
    return output_file("--svg", name)


# ---- output ----


def as_data(found: Report, alternatives: Alternatives = ()) -> Answer:
    """Return the report as JSON values; times in seconds, fractions from 0 to 1."""
    names = ("step_s", "samples_per_s", "tokens_per_s", "tail_s", "stream_s", "bubble")
    units = [unit for pipeline in found.pipelines for unit in pipeline.units]
    return {
        "plan": format_plan(found.plan),
        "reason": found.plan.reason,
        **{name: getattr(found, name) for name in names},
        "short": _missing_memory(found),
        "pipelines": [
            {
                "pipeline": index,
                "schedule": pipeline.schedule,
                "units": len(pipeline.units),
                "microbatches": pipeline.microbatches,
                "finish_s": pipeline.finish_s,
                "bubble": pipeline.bubble,
            }
            for index, pipeline in enumerate(found.pipelines)
        ],
        "stages": [{name: getattr(u, name) for name in UnitReport.__slots__} for u in units],
        "alternatives": [
            {"plan": text, "step_s": step_s if isfinite(step_s) else None}
            for text, step_s in alternatives
        ],
    }


def as_tables(found: Report, alternatives: Alternatives = ()) -> Answer:
    """Return the report as lines and tables, for `as_text`."""
    step_s = found.step_s or 1.0
    rates = {"samples/s": f"{found.samples_per_s:.4g}" if found.samples_per_s else ""}
    rates["tokens/s"] = f"{found.tokens_per_s:.5g}" if found.tokens_per_s else ""
    scheme = f"{found.plan.gradients}+{found.plan.state}"
    tail = f"{seconds(found.tail_s)} ({found.tail_s / step_s:.1%} of the step)"
    stream = f"{seconds(found.stream_s)} ({found.stream_s / step_s:.1%} of the step)"
    units = [unit for pipeline in found.pipelines for unit in pipeline.units]
    return {
        "step": seconds(found.step_s),
        **rates,
        "idle": f"{found.bubble:.1%} of the units' time, bubbles and tail together",
        "tail": f"{tail} for reduction and update",
        "backup": f"{scheme}; streaming gradients adds {stream}",
        "memory": "; ".join(_missing_memory(found)) or "fits everywhere",
        "plan": format_plan(found.plan) + "\n",
        "pipelines": _first_rows(_pipeline_row(i, p) for i, p in enumerate(found.pipelines)),
        "stages": _first_rows(map(_unit_row, units)),
        "alternatives": [
            {
                "alternative": text,
                "step": seconds(step_s) if isfinite(step_s) else "not enough memory",
            }
            for text, step_s in alternatives
        ],
    }


def _missing_memory(found: Report) -> list[str]:
    """Return a text for each unit without enough memory: how much it lacks."""
    return [
        f"{unit.unit} lacks {(unit.memory_bytes - unit.limit_bytes) / GIB:.2f} GiB per worker"
        for pipeline in found.pipelines
        for unit in pipeline.units
        if 0 < unit.limit_bytes < unit.memory_bytes
    ]


def _first_rows(rows: Iterable[Answer]) -> list[Answer]:
    """Return at most MAX_ROWS rows, and a last one with the number of the others, if any."""
    found = list(rows)
    if len(found) <= MAX_ROWS:
        return found
    blank = dict.fromkeys(found[0], "")
    blank[next(iter(blank))] = f"... {len(found) - MAX_ROWS} more: --json"
    return [*found[:MAX_ROWS], blank]


def _pipeline_row(index: int, pipeline: PipelineReport) -> Answer:
    return {
        "pipeline": index,
        "schedule": pipeline.schedule,
        "units": len(pipeline.units),
        "micro-batches": pipeline.microbatches,
        "done after": seconds(pipeline.finish_s),
        "bubble": f"{pipeline.bubble:.1%}",
    }


def _unit_row(unit: UnitReport) -> Answer:
    limit = f" of {unit.limit_bytes / GIB:.1f}" if unit.limit_bytes else ""
    return {
        "pipeline": unit.pipeline,
        "unit": unit.unit,
        "device": unit.device,
        "layers": unit.layers,
        "compute": seconds(unit.compute_s),
        "hop": seconds(unit.hop_s),
        "busy": f"{unit.busy:.1%}",
        "memory GiB": f"{unit.memory_bytes / GIB:.1f}{limit}",
        "recompute": unit.recompute,
    }
