"""Plans, copies and inventories for the tests of recovery."""

from __future__ import annotations

import itertools

from elastic.core.recovery.recovery import PromisedWork, solve
from elastic.domain.types import (
    GRADIENT,
    STATE,
    UPDATE,
    Assignment,
    Copy,
    JobSpec,
    Pipeline,
    Plan,
    Recipe,
    Stage,
    StepRecord,
    Unit,
)
from tests.core.recovery.job_model import make_spec

M = 4
RECORD = StepRecord(6, 0.5, 2.0, 1.0)


def pipeline(*spans: tuple[str, int, int], microbatches: tuple[int, ...]) -> Pipeline:
    return Pipeline(tuple(Stage(Unit(node), a, b) for node, a, b in spans), microbatches)


def plan_of(*pipelines: Pipeline, tp: int = 1) -> Plan:
    n_layers = pipelines[0].stages[-1].last
    return Plan(
        epoch=5, n_layers=n_layers, n_microbatches=M, tp=tp, pipelines=pipelines, reason="because"
    )


ONE = plan_of(pipeline(("a", 0, 2), microbatches=(0, 1, 2, 3)))
TWO = plan_of(
    pipeline(("a", 0, 2), microbatches=(0, 1)), pipeline(("b", 0, 2), microbatches=(2, 3))
)
sequences = itertools.count(1)


def state(layer: int, version: int, node: str = "a", owner: str = "", **more: int) -> Copy:
    return _copy(STATE, layer, version, node, owner or node, frozenset(), **more)


def gradient(
    layer: int, step: int, held: set[int], node: str = "a", owner: str = "", **more: int
) -> Copy:
    return _copy(GRADIENT, layer, step, node, owner or node, frozenset(held), **more)


def update(layer: int, step: int, node: str = "a", owner: str = "", **more: int) -> Copy:
    return _copy(UPDATE, layer, step, node, owner or node, frozenset(), **more)


def _copy(
    kind: str,
    layer: int,
    step: int,
    node: str,
    owner: str,
    held: frozenset[int],
    shard: int = 0,
    epoch: int = 4,
    nbytes: int = 0,
) -> Copy:
    return Copy(
        kind=kind,
        layer=layer,
        shard=shard,
        step=step,
        epoch=epoch,
        owner=owner,
        sequence=next(sequences),
        nbytes=nbytes or (100 if kind == STATE else 10),
        checksum="",
        microbatches=held,
        losses=tuple((i, 1.0) for i in sorted(held)),
        node=node,
    )


def run(
    plan: Plan,
    *copies: Copy,
    records: tuple[StepRecord, ...] = (),
    nodes: str = "abcd",
    spec: JobSpec | None = None,
    checkpoint: tuple[str, int] | None = None,
    initial: bool = False,
    live: dict[str, int] | None = None,
    fetch_s: float = 0.0,
    promised: PromisedWork | None = None,
) -> Assignment:
    """Solve a recovery on `nodes`, which have a vault each."""
    return solve(
        plan=plan,
        spec=spec or make_spec(plan.n_layers, M, 20, plan.tp),
        inventory=copies,
        records=records,
        vaults=tuple((node, f"{node}:1") for node in nodes),
        checkpoint=checkpoint,
        initial_allowed=initial,
        live=live or {},
        fetch_s=fetch_s,
        promised=promised,
    )


def recipes(assignment: Assignment) -> dict[tuple[str, int, int], Recipe]:
    """(node, layer, TP rank): recipe."""
    return {(node, r.layer, r.shard): r for node, r in assignment.recipes}
