"""`elastic status --watch` with given answers."""

from __future__ import annotations

import io
import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from elastic.command_line import read_flags
from elastic.domain.errors import UsageError
from elastic.launcher import cli
from elastic.launcher.commands.queries import main_view, status
from elastic.launcher.commands.watch import StatusLines, headline, page, problems, watch


def answer(phase: str = "running", step: int = 3, **more: Any) -> dict[str, Any]:
    node = {
        "node": "node0", "phase": "running", "role": "stage", "connected": True,
        "draining": False, "domain": "", "slow": 1.0,
    }  # fmt: skip
    ill = node | {"node": "node1", "connected": False, "slow": 2.0}
    spare = node | {"node": "node2", "role": "spare"}
    return {
        "phase": phase, "step": step, "steps": 9, "epoch": 1, "loss": 2.5,
        "tokens_per_s": 1234.5, "step_s": 0.25,
        "nodes": [node, ill, spare], "plan": "plan epoch=1", "term": 2, "recoveries": [], **more,
    }  # fmt: skip


RECOVERY = {
    "step": 2, "cause": "node1 lost", "nodes_before": 3, "nodes_after": 2,
    "microbatches_lost": 1, "total_s": 0.2,
}  # fmt: skip


def args(run_dir: Path | None, **more: Any) -> SimpleNamespace:
    where = (
        {"rdzv_endpoint": None, "run_dir": run_dir}
        if run_dir
        else {"rdzv_endpoint": "h:1", "run_dir": None}
    )
    return SimpleNamespace(json=False, **(where | more))


def test_lines_in_a_pipe_until_the_job_is_over(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    answers = [answer(), answer(), answer(recoveries=[RECOVERY], step=4)]

    def query() -> dict[str, Any]:
        if answers:
            return answers.pop(0)
        (tmp_path / "exit.json").write_text('{"code": 0, "reason": "all 9 steps done"}')
        raise UsageError("the run is over")

    assert watch(args(tmp_path), query, 0.05, Path("latest")) == 0
    assert capsys.readouterr().out.splitlines() == [
        "running at step 3/9, epoch 1, loss 2.5000, 0.25 s per step, 1,234 tokens/s, "
        "2 nodes train, 1 spare, coordinator term 2",
        "recovered at step 2 (node1 lost): 3 -> 2 nodes, 1 micro-batches lost, 0.200 s",
        "running at step 4/9, epoch 1, loss 2.5000, 0.25 s per step, 1,234 tokens/s, "
        "2 nodes train, 1 spare, coordinator term 2",
        "all 9 steps done (exit code 0)",
    ]


def test_the_cause_is_shown() -> None:
    """In the headline why the job does not train, in the row of a node its error."""
    halting = answer("halting", cause="node1: VaultError: vault of node0: TLS handshake failed")
    assert headline(halting).endswith(", node1: VaultError: vault of node0: TLS handshake failed")
    node = halting["nodes"][0] | {"error": "worker 0 ended with signal 9"}
    assert problems(node) == "worker 0 ended with signal 9"


def test_a_wait_is_shown() -> None:
    waits = {"for": "nodes: 1 of 2", "seconds": 12.4, "ends": "the job starts when 1 more joins"}
    waiting = answer("waiting", waiting=waits, tokens_per_s=0.0)
    line = "waiting for 12 s: nodes: 1 of 2; the job starts when 1 more joins"
    assert headline(waiting).endswith(f", {line}") and "tokens" not in headline(waiting)
    view = main_view(waiting | {"timeouts": {"disk_s": 30.0}})
    assert view["waiting"] == line.removeprefix("waiting for ")
    assert "timeouts" not in view and "tokens_per_s" not in view


def test_the_leader_is_named() -> None:
    leader = {"name": "demo-coordinator-1", "address": "10.0.0.15:29400"}
    view = main_view(answer(coordinator=leader, term=3))
    assert view["coordinator"] == "demo-coordinator-1 (10.0.0.15:29400), term 3"
    assert "term" not in view
    assert main_view(answer())["term"] == 2, "an older coordinator does not say its name"


@pytest.mark.parametrize("last", ["", "[1, 2]", '{"step": 4', "\0\0"])
def test_the_status_of_a_run_whose_files_are_damaged(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], last: str
) -> None:
    (tmp_path / "exit.json").write_text('{"code": 1, "reason": "the disk was full"}')
    (tmp_path / "summary.json").write_text("[")
    (tmp_path / "progress.jsonl").write_text(last)
    assert cli.main(["status", "--run-dir", str(tmp_path), "--json"]) == 0
    out, err = capsys.readouterr()
    assert json.loads(out)["reason"] == "the disk was full" and err == ""


@pytest.mark.parametrize(("code", "phase"), [(0, "finished"), (1, "failed")])
@pytest.mark.parametrize("flags", [(), ("--json",), ("--watch",)])
def test_the_status_of_a_run_that_is_over(
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    code: int,
    phase: str,
    flags: tuple[str, ...],
) -> None:
    (tmp_path / "exit.json").write_text(json.dumps({"code": code, "reason": "it is over"}))
    summary = {"loss": [2.5, 2.25], "plan": "plan epoch=1", "params_sha256": "ab", "wall_s": 3.0}
    (tmp_path / "summary.json").write_text(json.dumps(summary))
    (tmp_path / "progress.jsonl").write_text('{"step": 1}\n{"step": 2, "steps": 2}\n')
    args = read_flags(status, ["--run-dir", str(tmp_path), *flags])
    assert status.callback is not None and status.callback(**vars(args)) == 0
    text = capsys.readouterr().out
    if "--json" in flags:
        shown = json.loads(text)
        assert (shown["phase"], shown["exit_code"], shown["step"]) == (phase, code, 2)
        assert shown["loss"] == 2.25 and shown["reason"] == "it is over"
    else:
        assert text.startswith(f"phase: {phase}\nreason: it is over\nexit_code: {code}\nstep: 2\n")
        assert f"summary: {tmp_path / 'summary.json'}" in text


def test_a_query_without_answer_is_repeated(capsys: pytest.CaptureFixture[str]) -> None:
    answers: list[Any] = [answer(), UsageError("no coordinator answers"), answer("finished")]

    def query() -> dict[str, Any]:
        found = answers.pop(0)
        if isinstance(found, UsageError):
            raise found
        return dict(found)

    assert watch(args(None), query, 0.05, Path("latest")) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[1] == "no answer from the coordinator; retrying: no coordinator answers"
    assert lines[-1] == "the job is over: finished"


def test_the_first_query_must_succeed(tmp_path: Path) -> None:
    def query() -> dict[str, Any]:
        raise UsageError("no coordinator runs there")

    with pytest.raises(UsageError):
        watch(args(tmp_path), query, 0.05, Path("latest"))


def test_objects_as_json() -> None:
    file = io.StringIO()
    StatusLines(file, as_json=True).show(answer())
    assert json.loads(file.getvalue()) == answer()


def test_the_page_shows_nodes_with_problems_first() -> None:
    from rich.console import Console

    console = Console(file=io.StringIO(), width=100)
    console.print(page(answer(recoveries=[RECOVERY])))
    assert isinstance(console.file, io.StringIO)
    text = console.file.getvalue()
    assert text.index("node1") < text.index("node0")
    for part in (
        "disconnected, 2.0x slower",
        "running at step 3/9",
        "plan epoch=1",
        "recovered at step 2",
    ):
        assert part in text
