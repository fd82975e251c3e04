"""With compressed copies the parameters are those of a failure-free run; the log gives reasons."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.scenarios.harness import elastic_run, proved
from tests.scenarios.shared import SCRIPT, exact, faults, reference

FAULTS = {
    "kill-in-microbatch": "kill node=1 step=2 microbatch=3",
    "kill-in-update": "kill node=1 step=2 phase=optimizer",
    "hang": "stop node=2 step=2 microbatch=2",
}


def told(run_dir: Path) -> str:
    """Lines of the agents' logs about compression."""
    texts = [path.read_text() for path in (run_dir / "logs").glob("node*.log")]
    return "".join(
        line
        for text in texts
        for line in text.splitlines(keepends=True)
        if "copies of kind" in line
    )


@pytest.mark.parametrize(
    "fault",
    [
        pytest.param(name, marks=[] if name == "kill-in-microbatch" else [pytest.mark.chaos])
        for name in FAULTS
    ],
)
def test_same_parameters_from_compressed_copies(fault: str, tmp_path: Path) -> None:
    flags = [
        "--nnodes",
        "3",
        "--pipelines",
        "1",
        "--backup",
        "stream:2+snapshot",
        "--compress",
        "on",
    ]
    slow = ["--link", "bandwidth=200Mbit latency=1ms", *faults(FAULTS[fault])]
    run = elastic_run(tmp_path / "run", exact(*flags, *slow), SCRIPT)
    assert run.code == 0, run.output
    assert run.summary["params_sha256"] == reference(tmp_path).summary["params_sha256"], run.output
    assert run.summary["recoveries"] and run.summary["ledger"] == proved(run.summary)
    assert "sent compressed from now on: --compress on" in told(tmp_path / "run")


@pytest.mark.chaos
@pytest.mark.parametrize(
    ("link", "compressed"), [("bandwidth=100Mbit", True), ("latency=1us", False)]
)
def test_auto_switches_on_where_the_link_is_slow(
    link: str, compressed: bool, tmp_path: Path
) -> None:
    """`auto` compresses on a shaped link and not on loopback. Needs a machine that is not busy."""
    flags = ["--nnodes", "3", "--pipelines", "1", "--backup", "stream:2+snapshot", "--link", link]
    run = elastic_run(tmp_path / "run", exact(*flags), [*SCRIPT, "--hidden", "128"])
    assert run.code == 0, run.output
    assert ("compressed from now on" in told(tmp_path / "run")) is compressed
