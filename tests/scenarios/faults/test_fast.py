"""With --accumulate fast gradients add up in any order; a recovered run is close, not equal."""

from __future__ import annotations

from pathlib import Path

from tests.scenarios.harness import elastic_run, proved
from tests.scenarios.shared import SCRIPT, faults, reference


def test_final_loss_is_that_of_the_failure_free_run(tmp_path: Path) -> None:
    expected = reference(tmp_path).summary
    flags = ["--nnodes", "3", "--pipelines", "1", "--accumulate", "fast"]
    run = elastic_run(
        tmp_path / "run", [*flags, *faults("kill node=1 step=2 microbatch=3")], SCRIPT
    )
    assert run.code == 0, run.output
    summary = run.summary
    assert len(summary["recoveries"]) == 1
    assert summary["ledger"] == proved(summary)
    assert abs(summary["loss"][-1] - expected["loss"][-1]) < 1e-4
