"""`elastic plan`: the plan of a running job, a plan in a file, or the best plan for a cluster in a file."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import click

from elastic.command_line import Command
from elastic.config import SCHEDULES
from elastic.domain.errors import FieldError, InfeasiblePlan, UsageError
from elastic.launcher.commands.queries import ask, query_options, show

if TYPE_CHECKING:
    from elastic.domain.types import Plan
    from elastic.planning.capacity.cluster import Cluster
    from elastic.planning.capacity.report import Report
    from elastic.planning.cost.profile import Profile
    from elastic.planning.search.search import PlanRequest


@click.command(cls=Command)
@query_options
@click.argument("file", required=False)
@click.option("--cluster", metavar="CLUSTER.toml", help="predict the plan in FILE on this cluster")
@click.option("--shape", help="pipelines: auto, their number (2), or the depth of each (3+1)")
@click.option("--schedule", type=click.Choice(SCHEDULES), help="order of the micro-batches in a pipeline")
@click.option("--without", metavar="NODES", help="plan as if these nodes were gone, as node3,node4")
@click.option("--add", metavar="NODES", help="plan as if these nodes came, as 2xA100-80:4,1xT4")
@click.option("--svg", metavar="OUT.svg", help="write a picture of the pipelines' timelines")
def plan(**flags: Any) -> int:
    """Show the plan of a running job, check a plan, or plan for a cluster.

    Without FILE: the plan of a running job. FILE is a plan as text, which is checked, or a cluster file NAME.toml,
    for which the best plan is shown with what to expect: seconds per step, samples and tokens per second, memory,
    alternatives.
    """
    args = SimpleNamespace(**flags)
    if args.file is None:
        _refuse(args, ("cluster", "shape", "schedule", "without", "add", "svg"), "give a cluster file")
        return show(ask(args, "plan", {}), args.json)
    text = _read("FILE", Path(args.file))
    out = _picture_file(args.svg)
    if args.file.endswith(".toml") or _looks_like_toml(text):
        _refuse(args, ("cluster",), "FILE is a cluster file itself; --cluster goes with a plan")
        answer, found = _for_cluster(args, Path(args.file), text)
    elif args.cluster is not None:
        _refuse(
            args, ("shape", "schedule", "without", "add"), "FILE is a plan; give the cluster file instead"
        )
        answer, found = _predicted(args, text)
    else:
        _refuse(
            args,
            ("shape", "schedule", "without", "add", "svg"),
            "give a cluster file, or --cluster beside the plan",
        )
        return show(_checked(text), args.json)
    if out is not None:
        from elastic.planning.capacity.report import picture

        out.write_text(picture(found, f"{answer['model']} on {answer['cluster']}"), encoding="utf-8")
        answer["svg"] = str(out)
    return show(answer, args.json)


def _for_cluster(args: SimpleNamespace, path: Path, text: str) -> tuple[dict[str, Any], Report]:
    """Plan for a cluster file, as it is or after a change."""
    from elastic.planning.capacity.capacity import (
        alternatives,
        check_gone,
        cluster_nodes,
        plan_request,
        with_more,
    )

    cluster, measured = _cluster(path, text)
    asked = {name: getattr(args, name) for name in ("shape", "schedule") if getattr(args, name) is not None}
    profile = _profile(cluster, measured)
    request = replace(plan_request(cluster, profile), **asked)
    best = _decided(path, request)
    if args.without is None and args.add is None:
        return _answer(args, path, cluster, profile, best, alternatives(request, best))
    _, now = _answer(args, path, cluster, profile, best, ())
    cluster = cluster if args.add is None else with_more(cluster, args.add)
    gone = frozenset(name.strip() for name in (args.without or "").split(",") if name.strip())
    profile = _profile(cluster, measured)
    check_gone(gone, cluster_nodes(cluster, profile))
    request = replace(plan_request(cluster, profile), **asked, dead=gone, current=best, epoch=2)
    best = _decided(path, request)
    answer, found = _answer(args, path, cluster, profile, best, alternatives(request, best), gone)
    change: dict[str, Any] = {"without": args.without, "add": args.add, "step_s_before": now.step_s}
    if not args.json:
        gain = now.step_s / found.step_s - 1
        words = f"without {args.without}" * bool(args.without), f"with {args.add} more" * bool(args.add)
        change = {
            "change": f"{' '.join(filter(None, words))}: {gain:+.1%} speed, from {now.step_s:.4g} s a step"
        }
    return {**change, **answer}, found


def _decided(path: Path, request: PlanRequest) -> Plan:
    from elastic.planning.search.search import make_plan

    try:
        return make_plan(request)
    except InfeasiblePlan as error:
        raise UsageError(f"{path}: {error}") from error


def _predicted(args: SimpleNamespace, text: str) -> tuple[dict[str, Any], Report]:
    """Predict a given plan on a cluster file's nodes."""
    from elastic.planning.plan.plan import parse_plan, validate_plan

    path = Path(args.cluster)
    cluster, measured = _cluster(path, _read("--cluster", path))
    found = parse_plan(text)
    validate_plan(found)
    return _answer(args, path, cluster, _profile(cluster, measured), found, ())


def _answer(
    args: SimpleNamespace,
    path: Path,
    cluster: Cluster,
    profile: Profile,
    plan: Plan,
    others: tuple[tuple[str, float], ...],
    gone: frozenset[str] = frozenset(),
) -> tuple[dict[str, Any], Report]:
    from elastic.launcher.commands.tables import as_data, as_tables
    from elastic.planning.capacity.capacity import check_plan, cluster_nodes, cluster_slow
    from elastic.planning.capacity.report import report

    nodes = cluster_nodes(cluster, profile)
    check_plan(plan, profile, nodes)
    samples = cluster.microbatch_size or (1 if cluster.model else 0)
    found = report(plan, profile, nodes, slow=cluster_slow(cluster, nodes), samples=samples)
    head = {"cluster": path.name, "model": profile.model, "nodes": len(nodes) - len(gone)}
    body = as_data(found, others) if args.json else as_tables(found, others)
    return {**head, **body}, found


def _cluster(path: Path, text: str) -> tuple[Cluster, Profile | None]:
    """What a cluster file says, and the measured profile that it names."""
    from elastic.planning.capacity.cluster import parse_cluster
    from elastic.planning.cost.profile import parse_profile

    cluster = parse_cluster(text)
    if not cluster.profile_file:
        return cluster, None
    return cluster, parse_profile(_read("model.profile", path.parent / cluster.profile_file))


def _profile(cluster: Cluster, measured: Profile | None) -> Profile:
    from elastic.planning.capacity.capacity import cluster_profile

    return cluster_profile(cluster, measured)


def _checked(text: str) -> dict[str, Any]:
    from elastic.planning.plan.plan import format_plan, parse_plan, validate_plan

    found = parse_plan(text)
    validate_plan(found)
    return {"plan": format_plan(found), "reason": found.reason}


def _looks_like_toml(text: str) -> bool:
    lines = (line.strip() for line in text.splitlines())
    return next((line for line in lines if line and not line.startswith("#")), "").startswith("[")


def _refuse(args: SimpleNamespace, names: tuple[str, ...], remedy: str) -> None:
    for name in names:
        value = getattr(args, name)
        if value is not None:
            raise FieldError(f"--{name}", value, remedy)


def _read(field: str, path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise FieldError(field, str(path), f"it cannot be read as text: {error}") from error


def _picture_file(name: str | None) -> Path | None:
    if name is None:
        return None
    path = Path(name)
    if path.suffix != ".svg":
        raise FieldError("--svg", name, "a file name ending in .svg; one that exists is replaced")
    if path.is_dir() or not path.parent.is_dir():
        raise FieldError("--svg", name, "a file in a directory that exists")
    return path
