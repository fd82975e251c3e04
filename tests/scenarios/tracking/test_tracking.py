"""A run with trackers, through a lost node and a lost tracker."""

from __future__ import annotations

import json
from pathlib import Path

from tests.scenarios.harness import elastic_run
from tests.scenarios.shared import exact, faults, reference, script
from tests.scenarios.tracking.hooks import KILL_AT, OUT

LOST = ("kill node=1 step=2 microbatch=3",)
CALLBACK = "callback:tests.scenarios.tracking.hooks:Lines"


def test_each_step_once_with_the_values_of_the_failure_free_run(tmp_path: Path) -> None:
    """One tracker is killed while it is told of step 1, and started again."""
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    board, lines = tmp_path / "board", tmp_path / "lines"
    flags = exact("--nnodes", "3", "--pipelines", "1", *faults(*LOST))
    flags += ["--peak-tflops", "0.5,0.5,1"]
    flags += ["--track", CALLBACK, "--track", f"tensorboard:{board}", "--shutdown-timeout", "200"]
    more = ("--checkpoint-every", "3")
    environment = {OUT: str(lines), KILL_AT: "1"}
    run = elastic_run(tmp_path / "run", flags, script(*more), environment=environment)
    assert run.code == 0, run.output
    expected = reference(tmp_path, *more).summary
    assert run.summary["params_sha256"] == expected["params_sha256"]
    told = [json.loads(line) for line in lines.read_text().splitlines()]
    starts = [(line["key"], line["steps"]) for line in told if line["kind"] == "start"]
    assert starts == [("", 6), ("second", 6)], run.output
    assert "the tracker callback:" in run.output and "ended (SIGKILL)" in run.output
    kinds = [line["kind"] for line in told]
    twice = {line["step"] for line in told[: kinds.index("killed")] if line["kind"] == "step"}
    steps = [line for line in told if line["kind"] == "step"]
    numbers = [line["step"] for line in steps]
    assert sorted({*numbers}) == list(range(6)) and len(numbers) <= 6 + len(twice)
    assert [line["loss"] for line in steps[-5:]] == expected["loss"][-5:]
    assert [line["nodes"] for line in steps][-1] == 2
    assert kinds.count("recovery") == kinds.count("end") == 1 and kinds[-1] == "end"
    assert kinds.count("checkpoint") == 2
    found = EventAccumulator(str(board), size_guidance={"scalars": 0})
    found.Reload()
    assert [event.step for event in found.Scalars("loss")] == list(range(6))
    utilisation = [event.value for event in found.Scalars("mfu")]
    assert len(utilisation) == 6 and all(0 < value < 1 for value in utilisation)
    assert run.summary["mfu"] > 0
