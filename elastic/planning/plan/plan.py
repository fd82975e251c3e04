"""Text form of a plan, and the validation of plans.

    plan epoch=4 layers=6 microbatches=8 tp=1 backup=stream+snapshot
    pipeline 0 microbatches=0-3 schedule=zero-bubble: node0[0:2] node1[2:4]+recompute node3[4:6]
    pipeline 1 microbatches=4-7: node4[0:6]
    peers node0>node1 node1>node3 node3>node4 node4>node5
    spares node5
    reason 2 pipelines of depths 3+1

A unit prints as NODE, or as NODE/GROUP if its group is not 0 or the node has other units in the
plan. The default schedule is 1f1b. Stages are listed in model order, so units repeat under the
interleaved schedule. The formatter omits peers, spares and reason if they are empty. The parser
skips blank lines and lines that begin with #. A reason escapes backslash, newline and carriage
return as \\\\, \\n and \\r. `parse_plan(format_plan(p)) == p` holds for every valid plan.
"""

from __future__ import annotations

import re
from collections import Counter

from elastic.domain.errors import FieldError
from elastic.domain.ledger import EMPTY, format_indices, parse_indices
from elastic.domain.types import Pipeline, Plan, Stage, Unit
from elastic.planning.plan.schemes import gradients_of, state_of
from elastic.planning.schedule.schedule import ONE_F_ONE_B, check_stages, units_of

_NODE = r"[A-Za-z0-9_.:\-]+"
_HEADER = re.compile(
    r"plan epoch=(\d+) layers=(\d+) microbatches=(\d+) tp=(\d+) backup=([\w:]+)\+([\w:/]+)"
)
_PIPELINE = re.compile(r"pipeline (\d+) microbatches=(\S+?)(?: schedule=([a-z0-9-]+))?:(.*)")
_STAGE = re.compile(rf"({_NODE})(?:/(\d+))?\[(\d+):(\d+)\](\+recompute)?")
_PEER = re.compile(rf"({_NODE})>({_NODE})")
_ESCAPES = {"\\": "\\\\", "\n": "\\n", "\r": "\\r"}
_UNESCAPES = {text: char for char, text in _ESCAPES.items()}


def format_plan(plan: Plan) -> str:
    """Return the text form of `plan`. Raises FieldError for names that the parser would reject."""
    _check_names(plan)
    groups = Counter(unit.node for unit in dict.fromkeys(plan.units()))
    lines = [
        f"plan epoch={plan.epoch} layers={plan.n_layers} microbatches={plan.n_microbatches} "
        f"tp={plan.tp} backup={plan.gradients}+{plan.state}"
    ]
    for number, pipeline in enumerate(plan.pipelines):
        stages = "".join(f" {_format_stage(stage, groups)}" for stage in pipeline.stages)
        schedule = "" if pipeline.schedule == ONE_F_ONE_B else f" schedule={pipeline.schedule}"
        indices = format_indices(pipeline.microbatches)
        lines.append(f"pipeline {number} microbatches={indices}{schedule}:{stages}")
    if plan.peers:
        lines.append("peers " + " ".join(f"{node}>{peer}" for node, peer in plan.peers))
    if plan.spares:
        lines.append("spares " + " ".join(plan.spares))
    if plan.reason:
        lines.append("reason " + "".join(_ESCAPES.get(char, char) for char in plan.reason))
    return "\n".join(lines)


def parse_plan(text: str) -> Plan:
    """Return the plan that `text` describes. Raises FieldError for malformed text.

    `validate_plan` checks whether the plan can run.
    """
    text = text.replace("\r\n", "\n")
    lines = [
        line for line in text.split("\n") if line.strip() and not line.lstrip().startswith("#")
    ]
    header = _HEADER.fullmatch(lines[0].rstrip()) if lines else None
    if not header:
        remedy = "begin with: plan epoch=E layers=L microbatches=M tp=T backup=GRADIENTS+STATE"
        raise FieldError("plan", lines[0] if lines else "", remedy)
    epoch, layers, microbatches, tp = (int(header[i]) for i in range(1, 5))
    pipelines: list[Pipeline] = []
    rest: dict[str, str] = {}
    for line in lines[1:]:
        word = line.split(" ", 1)[0]
        if word == "pipeline":
            pipelines.append(_parse_pipeline(line.rstrip(), len(pipelines)))
        elif word in ("peers", "spares", "reason") and word not in rest:
            rest[word] = line[len(word) + 1 :]
        else:
            raise FieldError(
                "plan", line, "lines are pipeline N ..., and once each peers, spares, reason"
            )
    return Plan(
        epoch=epoch,
        n_layers=layers,
        n_microbatches=microbatches,
        tp=tp,
        pipelines=tuple(pipelines),
        spares=tuple(rest.get("spares", "").split()),
        peers=tuple(_parse_peer(item) for item in rest.get("peers", "").split()),
        gradients=header[5],
        state=header[6],
        reason=re.sub(r"\\[\\nr]", lambda m: _UNESCAPES[m[0]], rest.get("reason", "")),
    )


def validate_plan(plan: Plan) -> None:
    """Raise FieldError for the first reason why `plan` cannot run."""
    for name, value, least in (
        ("epoch", plan.epoch, 0),
        ("layers", plan.n_layers, 1),
        ("microbatches", plan.n_microbatches, 1),
        ("tp", plan.tp, 1),
        ("pipelines", len(plan.pipelines), 1),
    ):
        if value < least:
            raise FieldError(f"plan.{name}", value, f"at least {least} is needed")
    gradients_of(plan.gradients, "plan.backup.gradients")
    state_of(plan.state, "plan.backup.state")
    _check_names(plan)
    for number, pipeline in enumerate(plan.pipelines):
        _check_cover(f"plan.pipeline {number}", pipeline, plan.n_layers)
    _check_units(plan)
    for number, pipeline in enumerate(plan.pipelines):
        _check_schedule(f"plan.pipeline {number}", pipeline)
    _check_microbatches(plan)
    _check_peers(plan)


def _format_stage(stage: Stage, groups: Counter[str]) -> str:
    unit = stage.unit
    group = f"/{unit.group}" if unit.group or groups[unit.node] > 1 else ""
    recompute = "+recompute" if stage.recompute else ""
    return f"{unit.node}{group}[{stage.first}:{stage.last}]{recompute}"


def _parse_pipeline(line: str, expected: int) -> Pipeline:
    match = _PIPELINE.fullmatch(line)
    if not match or int(match[1]) != expected:
        raise FieldError(
            "plan.pipeline", line, f"write: pipeline {expected} microbatches=0-3: node0[0:2] ..."
        )
    stages = []
    for item in match[4].split():
        stage = _STAGE.fullmatch(item)
        if not stage:
            raise FieldError(
                f"plan.pipeline {expected}",
                item,
                "write a stage as NODE[FIRST:LAST] or NODE/GROUP[...]; +recompute may follow",
            )
        unit = Unit(stage[1], int(stage[2] or 0))
        stages.append(Stage(unit, int(stage[3]), int(stage[4]), recompute=bool(stage[5])))
    indices = parse_indices(match[2], f"plan.pipeline {expected}.microbatches")
    return Pipeline(tuple(stages), indices, match[3] or ONE_F_ONE_B)


def _parse_peer(item: str) -> tuple[str, str]:
    match = _PEER.fullmatch(item)
    if not match:
        raise FieldError(
            "plan.peers", item, "write NODE>PEER; the peer keeps the backups of the node"
        )
    return match[1], match[2]


def _check_names(plan: Plan) -> None:
    names = [*plan.nodes(), *plan.spares, *(name for pair in plan.peers for name in pair)]
    for name in names:
        if not re.fullmatch(_NODE, name):
            raise FieldError("plan.node", name, "use letters, digits, and . : _ - only")


def _check_cover(field: str, pipeline: Pipeline, n_layers: int) -> None:
    if not pipeline.stages:
        raise FieldError(field, "", "a pipeline needs at least one stage")
    expected = 0
    for stage in pipeline.stages:
        text = f"{stage.unit.node}[{stage.first}:{stage.last}]"
        if stage.first != expected:
            raise FieldError(field, text, f"the stage must begin at layer {expected}")
        if stage.last <= stage.first:
            raise FieldError(field, text, "a stage needs at least one layer")
        expected = stage.last
    if expected != n_layers:
        raise FieldError(
            field, f"layers 0 to {expected - 1}", f"stages must cover all {n_layers} layers"
        )


def _check_schedule(field: str, pipeline: Pipeline) -> None:
    """Check that the schedule exists and fits, and that the units repeat in a fixed order."""
    units = units_of(pipeline)
    try:
        check_stages(pipeline.schedule, len(units), len(pipeline.stages))
    except FieldError as error:
        raise FieldError(f"{field}.schedule", pipeline.schedule, error.remedy) from None
    for s, stage in enumerate(pipeline.stages):
        if stage.unit != units[s % len(units)]:
            wanted = units[s % len(units)]
            remedy = (
                f"units repeat in a fixed order: stage {s} belongs on {wanted.node}/{wanted.group}"
            )
            raise FieldError(f"{field}.schedule", f"{stage.unit.node}/{stage.unit.group}", remedy)


def _check_units(plan: Plan) -> None:
    seen: dict[Unit, int] = {}
    layers: dict[tuple[str, int], Unit] = {}
    for number, _, stage in plan.stages():
        unit = stage.unit
        if unit.group < 0:
            raise FieldError("plan.unit", f"{unit.node}/{unit.group}", "groups count from 0")
        if seen.setdefault(unit, number) != number:
            remedy = "a unit holds stages of one pipeline only; use another node"
            raise FieldError("plan.unit", f"{unit.node}/{unit.group}", remedy)
        for layer in stage.layers:
            if layers.setdefault((unit.node, layer), unit) != unit:
                remedy = (
                    f"a node holds layer {layer} at most once; "
                    "put the other pipeline on another node"
                )
                raise FieldError("plan.unit", unit.node, remedy)


def _check_microbatches(plan: Plan) -> None:
    counts = Counter(index for pipeline in plan.pipelines for index in pipeline.microbatches)
    wanted = range(plan.n_microbatches)
    for problem, indices in (
        ("are outside 0..M-1", [i for i in counts if i not in wanted]),
        ("are given twice", [i for i, n in counts.items() if n > 1]),
        ("are in no pipeline", [i for i in wanted if i not in counts]),
    ):
        if indices:
            text = format_indices(sorted(indices))
            raise FieldError(
                "plan.microbatches",
                text,
                f"these {problem}; each of 0..M-1 belongs to one pipeline",
            )
    for number, pipeline in enumerate(plan.pipelines):
        if not pipeline.microbatches:
            raise FieldError(
                f"plan.pipeline {number}.microbatches",
                EMPTY,
                "give it at least one, or leave it out",
            )


def _check_peers(plan: Plan) -> None:
    holders = set(plan.nodes())
    known = holders | set(plan.spares)
    for name, count in Counter(plan.spares).items():
        if count > 1 or name in holders:
            raise FieldError("plan.spares", name, "a spare is named once and holds no stage")
    seen: set[str] = set()
    for node, peer in plan.peers:
        pair = f"{node}>{peer}"
        if node not in holders or node in seen:
            raise FieldError("plan.peers", pair, f"{node} must hold a stage and have one peer only")
        if peer == node:
            raise FieldError(
                "plan.peers", pair, "a node cannot keep its own backup; name another node"
            )
        if peer not in known:
            raise FieldError("plan.peers", pair, f"{peer} is not in this plan")
        seen.add(node)
