"""Every pair of backup schemes recovers exactly and repeats only the work that it promises.

After each loss, the parameters equal those of a failure-free run, bit for bit.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from elastic.planning.plan.plan import parse_plan
from tests.scenarios.harness import Run, elastic_run, proved
from tests.scenarios.shared import SCRIPT, exact, faults, reference, script

PAIRS = (
    ("stream+snapshot", "1"),
    ("stream:2+snapshot", "1"),
    ("stream:4+snapshot", "2"),
    ("recompute+snapshot", "1"),
    ("stream+replica", "2"),
    ("stream:3+replica", "2"),
    ("recompute+replica", "2"),
    ("stream:2+replay", "1"),
    ("recompute+replay:4", "1"),
    ("stream+replay:2", "2"),
    ("log+snapshot", "1"),
    ("log+replica", "2"),
    ("log+replay:4", "1"),
    ("reduce+replica", "2"),
    ("reduce:2+replica", "2"),
    ("reduce+snapshot", "2"),
    ("reduce:2+replay:4", "2"),
    ("stream+snapshot/sharded", "2"),
    ("stream:2+replay:2/sharded", "2"),
    ("recompute+snapshot/sharded", "4"),
    ("reduce+snapshot/sharded", "2"),
    ("log+snapshot/sharded", "2"),
)
"""(schemes, pipelines)"""
FAULTS = {
    "kill-in-microbatch": "kill node=1 step=2 microbatch=3",
    "kill-in-reduction": "kill node=1 step=2 phase=reduce",
    "kill-in-update": "kill node=1 step=2 phase=optimizer",
    "hang": "stop node=2 step=2 microbatch=2",
    "drain": "drain node=1 step=2 deadline=60",
}


def run_with(
    directory: Path, backup: str, pipelines: str, *flags: str, more: Sequence[str] = ()
) -> Run:
    shape = ["--nnodes", "4", "--pipelines", pipelines, "--backup", backup]
    return elastic_run(directory / "run", exact(*shape, *flags), script(*more))


@pytest.mark.chaos
@pytest.mark.parametrize(
    ("backup", "pipelines", "fault"),
    [
        pytest.param(
            backup, pipelines, fault, id=f"{backup}-{fault}"
        )
        for backup, pipelines in PAIRS
        for fault in FAULTS
    ],
)  # fmt: skip
def test_same_parameters_under_every_pair(
    backup: str, pipelines: str, fault: str, tmp_path: Path
) -> None:
    longer = (
        ["--steps", "200"] if fault == "drain" else []
    )  # it comes from outside, and takes its time
    expected = reference(tmp_path, *longer).summary
    run = run_with(tmp_path, backup, pipelines, *faults(FAULTS[fault]), more=longer)
    assert run.code == 0, run.output
    summary = run.summary
    assert summary["params_sha256"] == expected["params_sha256"], run.output
    assert summary["loss"] == expected["loss"]
    assert summary["ledger"] == proved(summary)
    assert summary["recoveries"], run.output
    if fault == "drain":
        assert all(r["microbatches_lost"] == 0 for r in summary["recoveries"])


@pytest.mark.parametrize(
    ("gradients", "most"),
    [
        pytest.param("stream", 4, id="stream", marks=pytest.mark.chaos),
        pytest.param("stream:2", 6, id="stream-2", marks=pytest.mark.chaos),
        pytest.param("recompute", 6, id="recompute", marks=pytest.mark.chaos),
    ],
)
def test_what_is_lost_is_what_the_scheme_promises(
    gradients: str, most: int, tmp_path: Path
) -> None:
    """The last stage is killed before the backward pass of the last of six micro-batches.

    No other micro-batch is in flight there. With `stream:K`, at most 3 K gradients are not yet
    acknowledged. With `recompute`, the whole work of the stage is lost.
    """
    run = run_with(
        tmp_path, f"{gradients}+snapshot", "1", *faults("kill node=3 step=2 microbatch=5")
    )
    assert run.code == 0, run.output
    replayed = run.summary["recoveries"][0]["microbatches_replayed"]
    assert 1 <= replayed <= most
    if gradients == "recompute":
        assert replayed == 6


@pytest.mark.parametrize(
    ("lost", "source"),
    [
        pytest.param((1,), "peer", id="one", marks=pytest.mark.chaos),
        pytest.param((1, 2), "checkpoint", id="with-its-peer", marks=pytest.mark.chaos),
    ],
)
def test_a_shared_optimizer_state_survives_one_loss(
    lost: tuple[int, ...], source: str, tmp_path: Path
) -> None:
    """Each of four pipelines has a quarter of every layer's optimizer state, and the next one a
    copy. The node with the copy is killed before anybody has made another one."""
    phases = ("reduce", "recovery")
    kills = [f"kill node={node} step=3 phase={p}" for node, p in zip(lost, phases, strict=False)]
    run = run_with(
        tmp_path,
        "stream+snapshot/sharded",
        "4",
        *faults(*kills),
        more=["--checkpoint-every", "1"],
    )
    assert run.code == 0, run.output
    assert run.summary["params_sha256"] == reference(tmp_path).summary["params_sha256"], run.output
    assert run.summary["ledger"] == proved(run.summary)
    assert source in [recovery["state_source"] for recovery in run.summary["recoveries"]], (
        run.summary["recoveries"]
    )


@pytest.mark.parametrize(
    "shape",
    [
        pytest.param(
            ("--nnodes", "3", "--pipelines", "2+1", "--schedule", "interleaved"),
            id="interleaved",
            marks=pytest.mark.chaos,
        ),
        pytest.param(
            ("--nnodes", "4", "--pipelines", "3+1", "--schedule", "zero-bubble"),
            id="uneven",
            marks=pytest.mark.chaos,
        ),
    ],
)
def test_pipelines_of_other_cuts_share_a_state(shape: tuple[str, ...], tmp_path: Path) -> None:
    flags = ["--backup", "stream+snapshot/sharded", *faults("kill node=1 step=3 phase=optimizer")]
    run = elastic_run(tmp_path / "run", exact(*shape, *flags), SCRIPT)
    assert run.code == 0, run.output
    assert run.summary["params_sha256"] == reference(tmp_path).summary["params_sha256"], run.output


@pytest.mark.chaos
@pytest.mark.parametrize("before", ["3", "4", "1"])
def test_a_shared_state_goes_on_with_any_number_of_pipelines(before: str, tmp_path: Path) -> None:
    """A run on two nodes starts from a checkpoint that several pipelines wrote together."""
    flags = ["--checkpoint-dir", str(tmp_path / "kept"), "--backup", "stream+snapshot/sharded"]
    shape = ["--nnodes", before, "--pipelines", before]
    if before == "1":
        flags[-1] = "stream+snapshot"
    first = elastic_run(tmp_path / "first", exact(*shape, *flags), [*SCRIPT, "--steps", "3"])
    assert first.code == 0, first.output
    again = [
        "--nnodes",
        "2",
        "--pipelines",
        "2",
        "--resume",
        "auto",
        *flags[:-1],
        "stream+snapshot/sharded",
    ]
    second = elastic_run(tmp_path / "second", exact(*again), SCRIPT)
    assert second.code == 0, second.output
    assert second.summary["params_sha256"] == reference(tmp_path).summary["params_sha256"], (
        second.output
    )


@pytest.mark.chaos
def test_what_was_summed_over_the_holders_is_not_run_again(tmp_path: Path) -> None:
    """The last stage of the second pipeline is killed before its last backward pass.

    It had finished five of its six micro-batches. The other pipeline holds the sums of all but
    those of three rounds.
    """
    more = ["--num-microbatches", "12"]
    run = run_with(
        tmp_path, "reduce+replica", "2", *faults("kill node=3 step=2 microbatch=11"), more=more
    )
    assert run.code == 0, run.output
    assert run.summary["params_sha256"] == reference(tmp_path, *more).summary["params_sha256"], (
        run.output
    )
    assert 1 <= run.summary["recoveries"][0]["microbatches_replayed"] <= 4


@pytest.mark.parametrize(
    ("backup", "pipelines", "phase"),
    [
        pytest.param("stream+replay:8", "1", "phase=optimizer", id="update"),
        pytest.param(
            "recompute+replay:8", "2", "microbatch=3", id="microbatch", marks=pytest.mark.chaos
        ),
        pytest.param(
            "stream:3+replay", "1", "phase=reduce", id="reduction", marks=pytest.mark.chaos
        ),
    ],
)
def test_states_are_made_again_from_what_updates_took(
    backup: str, pipelines: str, phase: str, tmp_path: Path
) -> None:
    """Not every layer of node 1 has sent a whole state since the start, so that at least three
    updates must be repeated from their inputs."""
    run = run_with(tmp_path, backup, pipelines, *faults(f"kill node=1 step=3 {phase}"))
    assert run.code == 0, run.output
    assert run.summary["params_sha256"] == reference(tmp_path).summary["params_sha256"], run.output
    recovery = run.summary["recoveries"][0]
    updates = re.search(r"state from peer and up to (\d+) updates", recovery["reason"])
    assert updates and int(updates[1]) >= 3, recovery["reason"]
    assert recovery["step"] >= 3


@pytest.mark.parametrize(
    "fault",
    [
        pytest.param("kill node=1 step=3 microbatch=3", id="kill"),
        pytest.param("", id="none", marks=pytest.mark.chaos),
    ],
)
def test_a_full_vault_costs_protection_not_the_job(fault: str, tmp_path: Path) -> None:
    """A vault of 64 KiB cannot keep the state of any layer.

    The copies are refused, the other nodes learn of it, and a loss falls back to the checkpoint.
    The parameters equal those of a failure-free run.
    """
    flags = [
        "--nnodes",
        "3",
        "--pipelines",
        "1",
        "--backup",
        "stream+snapshot",
        "--vault-memory",
        "64KiB",
    ]
    injected = faults(fault) if fault else []
    run = elastic_run(
        tmp_path / "run", exact(*flags, *injected), [*SCRIPT, "--checkpoint-every", "1"]
    )
    assert run.code == 0, run.output
    assert run.summary["params_sha256"] == reference(tmp_path).summary["params_sha256"], run.output
    short = [event for event in run.events if event["kind"] == "backup-short"]
    assert short and all("--vault-memory" in event["detail"] for event in short)
    assert "training continues without them" in run.output
    sources = [recovery["state_source"] for recovery in run.summary["recoveries"]]
    assert sources == (["checkpoint"] if fault else [])


@pytest.mark.parametrize(
    ("pipelines", "source"),
    [
        pytest.param("1", "checkpoint", id="no-good-copy", marks=pytest.mark.chaos),
        pytest.param("2", "peer", id="another-source", marks=pytest.mark.chaos),
    ],
)
def test_flipped_bytes_never_become_parameters(pipelines: str, source: str, tmp_path: Path) -> None:
    """Bytes of node 1's copies are flipped in the vaults; then node 1 is lost.

    If another pipeline holds its layers, they come from there, else from the checkpoint.
    """
    corrupt = [
        f"corrupt node={node} step=3 microbatch=5" for node in (2, 3)
    ]  # when all states have arrived
    flags = ["--nnodes", "4", "--pipelines", pipelines, "--backup", "stream+snapshot"]
    injected = faults(*corrupt, "kill node=1 step=3 phase=reduce")
    run = elastic_run(
        tmp_path / "run", exact(*flags, *injected), [*SCRIPT, "--checkpoint-every", "1"]
    )
    assert run.code == 0, run.output
    assert run.summary["params_sha256"] == reference(tmp_path).summary["params_sha256"], run.output
    assert source in [recovery["state_source"] for recovery in run.summary["recoveries"]], (
        run.summary["recoveries"]
    )
    found = [event for event in run.events if event["kind"] == "copy-corrupt"]
    assert found and all("dropped" in event["detail"] for event in found)
    assert "does not match its checksum" in run.output


def plan_events(run: Run) -> list[dict[str, Any]]:
    return [event for event in run.events if event["kind"] == "plan"]


def held_by(node: str, plan: dict[str, Any]) -> set[int]:
    """Layers that the plan of an event gives to a node."""
    stages = [st for _, _, st in parse_plan(plan["text"]).stages() if st.unit.node == node]
    return {layer for stage in stages for layer in stage.layers}


@pytest.mark.parametrize(
    ("fault", "in_flight"),
    [
        # The first stage sends micro-batch 5 after the whole of 0 and 1. The others may be on the
        # way back, or finished, when they hear of the loss.
        pytest.param("kill node=1 step=2 microbatch=5", 4, id="middle"),
        pytest.param("kill node=0 step=2 microbatch=5", 0, id="first", marks=pytest.mark.chaos),
        pytest.param("kill node=3 step=2 microbatch=5", 3, id="last", marks=pytest.mark.chaos),
        pytest.param("kill node=1 step=2 phase=reduce", 0, id="reduction", marks=pytest.mark.chaos),
        pytest.param("kill node=1 step=2 phase=optimizer", 0, id="update", marks=pytest.mark.chaos),
    ],
)
def test_with_logged_messages_only_the_lost_stage_computes_again(
    fault: str, in_flight: int, tmp_path: Path
) -> None:
    """Of six micro-batches, all but those in flight repeat only the layers of the lost stage.

    If a gradient were added twice, the commit would fail.
    """
    run = run_with(tmp_path, "log+snapshot", "1", *faults(fault))
    assert run.code == 0, run.output
    summary, (before, after) = run.summary, plan_events(run)
    assert summary["params_sha256"] == reference(tmp_path).summary["params_sha256"], run.output
    assert summary["ledger"] == proved(summary)
    lost = held_by(fault.split()[1].replace("=", ""), before)
    alone = {m for _, m, first, last in after["partial"] if set(range(first, last)) <= lost}
    assert after["step"] == 2 and len(alone) >= 6 - in_flight, after
    recovery = summary["recoveries"][0]
    assert recovery["microbatches_rerun"] <= in_flight
    assert recovery["microbatches_partial"] == len({m for _, m, _, _ in after["partial"]})


@pytest.mark.chaos
@pytest.mark.parametrize(
    ("pipelines", "injected", "flags"),
    [
        pytest.param(
            "1",
            ("kill node=1 step=2 microbatch=5", "kill node=2 step=2 microbatch=5"),
            (),
            id="adjacent",
        ),
        pytest.param(
            "1",
            ("kill node=0 step=2 microbatch=5", "kill node=2 step=2 microbatch=5"),
            (),
            id="apart",
        ),
        pytest.param(
            "2",
            ("kill node=3 step=2 microbatch=5", "kill node=0 step=2 microbatch=3"),
            (),
            id="in-part",
        ),
        pytest.param(
            "1",
            ("kill node=1 step=2 microbatch=4", "kill node=2 step=2 phase=recovery"),
            (),
            id="installing",
        ),
        pytest.param("1", ("kill-worker node=1 step=2 microbatch=4",), (), id="worker"),
        pytest.param("1", ("stop node=2 step=2 microbatch=5",), ("--dropout", "0.1"), id="dropout"),
        pytest.param(
            "1",
            ("kill node=1 step=2 microbatch=4",),
            ("--tie-embeddings", "--dtype", "bf16"),
            id="bf16",
        ),
    ],
)
def test_logged_messages_under_several_faults(
    pipelines: str, injected: tuple[str, ...], flags: tuple[str, ...], tmp_path: Path
) -> None:
    """Several nodes are lost, one after the other or together.

    In the case in-part, node 0 runs micro-batches from 3 on only when it replaces node 3. Where a
    state and both its copies are lost, the checkpoint of the last step is used.
    """
    more = ["--checkpoint-every", "1", *flags]
    run = run_with(tmp_path, "log+snapshot", pipelines, *faults(*injected), more=more)
    assert run.code == 0, run.output
    assert run.summary["params_sha256"] == reference(tmp_path, *flags).summary["params_sha256"], (
        run.output
    )
    assert run.summary["ledger"] == proved(run.summary)
    if not any("phase" in fault for fault in injected):
        assert any(event["partial"] for event in plan_events(run)), run.output


@pytest.mark.chaos
@pytest.mark.parametrize(
    "flags", [("--tp", "2"), ("--schedule", "interleaved"), ("--schedule", "zero-bubble")]
)
def test_logged_messages_with_tensor_parallelism_and_other_schedules(
    flags: tuple[str, str], tmp_path: Path
) -> None:
    tp = flags[0] == "--tp"
    mine = ["--nproc-per-node", "2"] if tp else list(flags)
    more = list(flags) if tp else []
    injected = faults("kill node=1 step=2 microbatch=4")
    run = run_with(tmp_path, "log+snapshot", "1", *mine, *injected, more=more)
    assert run.code == 0, run.output
    expected = run_with(tmp_path / "expected", "log+snapshot", "1", *mine, more=more)
    assert run.summary["params_sha256"] == expected.summary["params_sha256"], run.output
    assert run.summary["recoveries"][0]["microbatches_partial"] >= 3


def test_crashed_workers_get_their_layers_from_shared_memory(tmp_path: Path) -> None:
    """Two nodes cannot hold the model, so the job waits for new workers on node 1.

    They load their state from the node's own memory, and the plan stays the same.
    """
    flags = exact(
        "--nnodes",
        "3",
        "--pipelines",
        "1",
        "--backup",
        "stream+snapshot",
        "--node-memory",
        "2100KiB",
    )
    run = elastic_run(
        tmp_path / "run", [*flags, *faults("kill-worker node=1 step=2 microbatch=2")], [*SCRIPT]
    )
    assert run.code == 0, run.output
    assert run.summary["params_sha256"] == reference(tmp_path).summary["params_sha256"], run.output
    (recovery,) = run.summary["recoveries"]
    assert (recovery["state_source"], recovery["network_bytes"]) == ("shared memory", 0)
    assert (recovery["nodes_before"], recovery["nodes_after"]) == (3, 3) and recovery["total_s"] > 0
    assert [event["wait"] for event in run.events if event["kind"] == "wait"] == [True]
