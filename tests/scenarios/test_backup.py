"""Every pair of backup schemes: whatever is lost, the parameters are those of a failure-free run, bit for bit; and what
is run again is what the scheme promises."""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path

import pytest

from tests.scenarios.harness import Run, elastic_run
from tests.scenarios.shared import SCRIPT, exact, faults, reference

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
    ("reduce+replica", "2"),
    ("reduce:2+replica", "2"),
    ("reduce+snapshot", "2"),
    ("reduce:2+replay:4", "2"),
)
"""(schemes, pipelines)"""
FAULTS = {
    "kill-in-microbatch": "kill node=1 step=2 microbatch=3",
    "kill-in-reduction": "kill node=1 step=2 phase=reduce",
    "kill-in-update": "kill node=1 step=2 phase=optimizer",
    "hang": "stop node=2 step=2 microbatch=2",
    "drain": "drain node=1 step=2 deadline=60",
}
SMALL = {("stream:2+snapshot", "kill-in-microbatch"), ("recompute+replica", "kill-in-update")}


def run_with(directory: Path, backup: str, pipelines: str, *flags: str, script: Sequence[str] = ()) -> Run:
    shape = ["--nnodes", "4", "--pipelines", pipelines, "--backup", backup]
    return elastic_run(directory / "run", exact(*shape, *flags), [*SCRIPT, *script])


@pytest.mark.parametrize(
    ("backup", "pipelines", "fault"),
    [
        pytest.param(
            backup, pipelines, fault, id=f"{backup}-{fault}",
            marks=[] if (backup, fault) in SMALL else [pytest.mark.chaos],
        )
        for backup, pipelines in PAIRS
        for fault in FAULTS
    ],
)  # fmt: skip
def test_same_parameters_under_every_pair(backup: str, pipelines: str, fault: str, tmp_path: Path) -> None:
    longer = ["--steps", "60"] if fault == "drain" else []  # it comes from outside, and takes its time
    expected = reference(tmp_path, *longer).summary
    run = run_with(tmp_path, backup, pipelines, *faults(FAULTS[fault]), script=longer)
    assert run.code == 0, run.output
    summary = run.summary
    assert summary["params_sha256"] == expected["params_sha256"], run.output
    assert summary["loss"] == expected["loss"]
    assert summary["ledger"] == {"double": 0, "missing": 0}
    assert summary["recoveries"], run.output
    if fault == "drain":
        assert all(r["microbatches_lost"] == 0 for r in summary["recoveries"])


@pytest.mark.parametrize(
    ("gradients", "most"),
    [
        pytest.param("stream", 4, id="stream", marks=pytest.mark.chaos),
        pytest.param("stream:2", 6, id="stream-2", marks=pytest.mark.chaos),
        pytest.param("recompute", 6, id="recompute"),
    ],
)
def test_what_is_lost_is_what_the_scheme_promises(gradients: str, most: int, tmp_path: Path) -> None:
    """The last stage is killed before the backward pass of the last of six micro-batches: nothing but that is in flight
    there. Streamed, at most three K are not yet acknowledged; recomputed, all that the stage ran is lost."""
    run = run_with(tmp_path, f"{gradients}+snapshot", "1", *faults("kill node=3 step=2 microbatch=5"))
    assert run.code == 0, run.output
    replayed = run.summary["recoveries"][0]["microbatches_replayed"]
    assert 1 <= replayed <= most
    if gradients == "recompute":
        assert replayed == 6


def test_what_was_summed_over_the_holders_is_not_run_again(tmp_path: Path) -> None:
    """The last stage of the second pipeline is killed before the backward pass of the last of its six micro-batches. It
    had finished five; the other pipeline has all but those of three rounds."""
    more = ["--num-microbatches", "12"]
    run = run_with(tmp_path, "reduce+replica", "2", *faults("kill node=3 step=2 microbatch=11"), script=more)
    assert run.code == 0, run.output
    assert run.summary["params_sha256"] == reference(tmp_path, *more).summary["params_sha256"], run.output
    assert 1 <= run.summary["recoveries"][0]["microbatches_replayed"] <= 4


@pytest.mark.parametrize(
    ("backup", "pipelines", "phase"),
    [
        pytest.param("stream+replay:8", "1", "phase=optimizer", id="update"),
        pytest.param("recompute+replay:8", "2", "microbatch=3", id="microbatch", marks=pytest.mark.chaos),
        pytest.param("stream:3+replay", "1", "phase=reduce", id="reduction", marks=pytest.mark.chaos),
    ],
)
def test_states_are_made_again_from_what_updates_took(
    backup: str, pipelines: str, phase: str, tmp_path: Path
) -> None:
    """Since the beginning not all layers of node 1 had their turn to go to the peer whole: three updates and more
    lead on from there."""
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
    """64 KiB hold no layer's state: the copies are not kept, everybody hears of it, and a loss falls back to the
    checkpoint, with the parameters of a failure-free run."""
    flags = ["--nnodes", "3", "--pipelines", "1", "--backup", "stream+snapshot", "--vault-memory", "64KiB"]
    injected = faults(fault) if fault else []
    run = elastic_run(tmp_path / "run", exact(*flags, *injected), [*SCRIPT, "--checkpoint-every", "1"])
    assert run.code == 0, run.output
    assert run.summary["params_sha256"] == reference(tmp_path).summary["params_sha256"], run.output
    short = [event for event in run.events if event["kind"] == "backup-short"]
    assert short and all("--vault-memory" in event["detail"] for event in short)
    assert "training goes on without them" in run.output
    sources = [recovery["state_source"] for recovery in run.summary["recoveries"]]
    assert sources == (["checkpoint"] if fault else [])


@pytest.mark.parametrize(
    ("pipelines", "source"),
    [
        pytest.param("1", "checkpoint", id="no-good-copy"),
        pytest.param("2", "peer", id="another-source", marks=pytest.mark.chaos),
    ],
)
def test_flipped_bytes_never_become_parameters(pipelines: str, source: str, tmp_path: Path) -> None:
    """What the vaults keep of node 1 gets flipped bytes; then it is lost. Where another pipeline holds its layers
    they come from there, else from the checkpoint."""
    corrupt = [f"corrupt node={node} step=3 microbatch=5" for node in (2, 3)]  # when all states have arrived
    flags = ["--nnodes", "4", "--pipelines", pipelines, "--backup", "stream+snapshot"]
    injected = faults(*corrupt, "kill node=1 step=3 phase=reduce")
    run = elastic_run(tmp_path / "run", exact(*flags, *injected), [*SCRIPT, "--checkpoint-every", "1"])
    assert run.code == 0, run.output
    assert run.summary["params_sha256"] == reference(tmp_path).summary["params_sha256"], run.output
    assert source in [recovery["state_source"] for recovery in run.summary["recoveries"]], run.summary[
        "recoveries"
    ]
    found = [event for event in run.events if event["kind"] == "copy-corrupt"]
    assert found and all("dropped" in event["detail"] for event in found)
    assert "does not match its checksum" in run.output
