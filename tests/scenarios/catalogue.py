"""Fault scenarios that must end with the parameters of a failure-free run, bit for bit.

Faults are addressed by node, step, micro-batch and phase, so nothing depends on time. `make chaos`
runs all scenarios; `make test` runs those marked `small`.
"""

from __future__ import annotations

from dataclasses import dataclass

BASE = (
    "--layers", "4", "--hidden", "64", "--heads", "4", "--seq-len", "64",
    "--micro-batch-size", "2", "--num-microbatches", "6", "--steps", "6",
)  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class Scenario:
    """One run with faults, and the outcome that it must have."""

    name: str
    faults: tuple[str, ...]
    model: str = "plain"
    """Key of MODELS; the failure-free run of the same model is the reference."""
    nodes: str = "4"
    pipelines: str = "1"
    flags: tuple[str, ...] = ()
    recoveries: int = 1
    """At least so many epoch changes must be reported."""
    nodes_after: int | None = None
    nothing_lost: bool = False
    """microbatches_lost must be 0 (planned changes)."""
    small: bool = False


MODELS: dict[str, tuple[str, ...]] = {
    "plain": (),
    "tied": ("--tie-embeddings",),
    "dropout": ("--dropout", "0.1"),
    "bf16": ("--dtype", "bf16"),
    "tp2": ("--tp", "2"),
    "everything": ("--tie-embeddings", "--dropout", "0.1", "--dtype", "bf16"),
    "everything-tp2": ("--tie-embeddings", "--dropout", "0.1", "--dtype", "bf16", "--tp", "2"),
}

_STAGES = {"first": 0, "middle": 1, "last": 3}
_MICROBATCHES = {"first": 0, "middle": 3, "last": 5}

SCENARIOS: tuple[Scenario, ...] = (
    *(
        Scenario(
            name=f"kill-{stage}-stage-{when}-microbatch",
            faults=(f"kill node={node} step=2 microbatch={microbatch}",),
            nodes_after=3,
        )
        for stage, node in _STAGES.items()
        for when, microbatch in _MICROBATCHES.items()
    ),
    Scenario(name="kill-in-a-microbatch", faults=("kill node=1 step=2 microbatch=3",), nodes="3",
        nodes_after=2),
    Scenario(name="kill-in-reduction", faults=("kill node=1 step=2 phase=reduce",), pipelines="2"),
    Scenario(name="kill-in-reduction-one-pipeline", faults=("kill node=2 step=2 phase=reduce",)),
    Scenario(name="kill-in-optimizer", faults=("kill node=1 step=2 phase=optimizer",)),
    Scenario(
        name="kill-in-last-optimizer",
        faults=("kill node=1 step=5 phase=optimizer",),
        nodes="3",
        flags=("--backup", "log+snapshot"),
        small=True,
    ),
    Scenario(name="kill-teller-in-optimizer", faults=("kill node=0 step=2 phase=optimizer",)),
    Scenario(name="kill-in-optimizer-two-pipelines",
        faults=("kill node=2 step=2 phase=optimizer",), pipelines="2"),
    Scenario(
        name="two-nodes-in-one-step",
        faults=("kill node=0 step=2 microbatch=1", "kill node=2 step=2 microbatch=4"),
        recoveries=1,
        nodes_after=2,
    ),
    Scenario(
        name="second-kill-during-recovery",
        faults=("kill node=1 step=2 microbatch=2", "kill node=3 step=2 phase=recovery"),
        flags=("--backup", "recompute+snapshot"),
        nodes_after=2,
        small=True,
    ),
    Scenario(
        name="source-of-transfer-killed",
        faults=("kill node=1 step=2 microbatch=4", "kill node=2 step=2 phase=recovery"),
        pipelines="2",
        # Under `reduce` all nodes halt after the first loss, so node 2 is still a source.
        flags=("--backup", "reduce+snapshot"),
        nodes_after=2,
    ),
    Scenario(
        name="only-source-of-transfer-killed",
        faults=("kill node=1 step=3 microbatch=2", "kill node=2 step=3 phase=recovery"),
        flags=("--checkpoint-every", "1"),
        nodes_after=2,
    ),
    Scenario(name="kill-worker", faults=("kill-worker node=1 step=2 microbatch=2",)),
    Scenario(
        name="kill-worker-on-a-single-node", faults=("kill-worker node=0 step=2 microbatch=2",),
        nodes="1"
    ),
    Scenario(name="hang", faults=("stop node=2 step=2 microbatch=2",)),
    Scenario(name="partition", faults=("partition node=1 step=2 microbatch=2 duration=6",),
        flags=("--steps", "8")),
    Scenario(name="drain", faults=("drain node=1 step=2 deadline=60",), nothing_lost=True,
        nodes_after=3, flags=("--steps", "200")),
    Scenario(
        name="join", faults=("join step=1",), nodes="3:4", nothing_lost=True, nodes_after=4,
        flags=("--steps", "400")
    ),
    Scenario(
        name="four-three-two-four",
        faults=("kill node=3 step=1 microbatch=3", "kill node=1 step=2 microbatch=1",
            "join step=3", "join step=3"),
        nodes="2:4",
        flags=("--steps", "400"),
        recoveries=3,
        nodes_after=4,
    ),
    Scenario(
        name="two-pipelines", faults=("kill node=3 step=2 microbatch=4",), pipelines="2+2",
        nodes_after=3
    ),
    Scenario(name="three-plus-one", faults=("kill node=1 step=2 microbatch=2",), pipelines="3+1",
        nodes_after=3),
    Scenario(name="three-plus-one-loses-the-one", faults=("kill node=3 step=2 microbatch=4",),
        pipelines="3+1"),
    Scenario(name="four-pipelines", faults=("kill node=2 step=2 microbatch=3",), pipelines="4",
        nodes_after=3),
    Scenario(
        name="tensor-parallel", faults=("kill node=1 step=2 microbatch=2",), model="tp2", nodes="2",
        flags=("--nproc-per-node", "2"),
    ),
    Scenario(
        name="tensor-parallel-loses-one-rank",
        faults=("kill-worker node=1 worker=1 step=2 microbatch=2",), model="tp2",
        nodes="3", flags=("--nproc-per-node", "2"),
    ),
    Scenario(name="tied-embeddings", faults=("kill node=0 step=2 microbatch=2",), model="tied"),
    Scenario(name="tied-embeddings-optimizer", faults=("kill node=3 step=2 phase=optimizer",),
        model="tied"),
    Scenario(name="tied-two-pipelines", faults=("kill node=0 step=2 microbatch=2",), model="tied",
        pipelines="2"),
    Scenario(name="dropout", faults=("kill node=2 step=2 microbatch=2",), model="dropout"),
    Scenario(name="bf16", faults=("kill node=2 step=2 microbatch=2",), model="bf16"),
    Scenario(
        name="everything-at-once", faults=("kill node=2 step=2 microbatch=2",), model="everything",
        pipelines="2",
    ),
    Scenario(
        name="everything-on-two-nodes", faults=("kill node=1 step=2 microbatch=2",),
        model="everything", nodes="2", small=True,
    ),
    Scenario(
        name="everything-tensor-parallel", faults=("kill node=1 step=2 microbatch=2",),
        model="everything-tp2", nodes="2", flags=("--nproc-per-node", "2"),
    ),
)  # fmt: skip
