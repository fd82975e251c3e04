"""Console lines and faults of the launcher, from entries of the coordinator's files."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from elastic.config import JobConfig, claim_fault
from elastic.console import Console
from elastic.core.protocol.fault_spec import parse_fault
from elastic.launcher.commands.queries import as_text
from elastic.launcher.run.console import (
    EVENT_LINES,
    ProgressBar,
    ProgressLines,
    event_line,
    recovery_line,
)
from elastic.launcher.run.event_tail import Follower, read_object
from elastic.launcher.run.injected import LauncherFaults, missed_faults


def entry(step: int, phase: str = "running", **more: object) -> dict[str, object]:
    return {
        "step": step,
        "microbatch": 0,
        "steps": 9,
        "nodes": 3,
        "plan": "2+1",
        "phase": phase,
        **more,
    }


def test_lines(tmp_path: Path) -> None:
    descriptor = os.open(tmp_path / "console", os.O_CREAT | os.O_WRONLY)
    view = ProgressLines(Console((-1, descriptor), "elastic"))
    view.update(entry(0, "launched"))
    view.update(entry(1, loss=2.5, tokens_per_s=12345.6, epoch=1))
    view.update(entry(2, loss=2.25, epoch=1))
    view.update(entry(1, loss=2.5, epoch=1))  # repeated by a restarted coordinator
    view.update(entry(2, "halting"))
    view.update(entry(2, "halting"))
    view.update(entry(1, loss=2.4, epoch=2))  # fell back to a checkpoint
    view.update(entry(2, loss=2.25, tokens_per_s=0.0, epoch=2))  # a model without tokens
    view.update(entry(9, "finished"))
    view.update({"phase": "failed", "step": 0, "steps": 0, "nodes": 1})
    view.close()
    os.close(descriptor)
    assert (tmp_path / "console").read_text().splitlines() == [
        "elastic: launched at step 0: 3 nodes, plan 2+1",
        "elastic: step 1/9: loss 2.5000, 12,346 tokens/s, 3 nodes, plan 2+1",
        "elastic: step 2/9: loss 2.2500, 3 nodes, plan 2+1",
        "elastic: halting at step 2: 3 nodes, plan 2+1",
        "elastic: step 1/9: loss 2.4000, 3 nodes, plan 2+1",
        "elastic: step 2/9: loss 2.2500, 3 nodes, plan 2+1",
        "elastic: finished at step 9: 3 nodes, plan 2+1",
        "elastic: failed: 1 node",
    ]


@pytest.fixture(params=["full disk", "no reader", "no terminal"])
def failing(request: pytest.FixtureRequest) -> Iterator[Console]:
    """A console that cannot be written: errors ENOSPC, EPIPE and EIO."""
    if request.param == "full disk":
        descriptor = os.open("/dev/full", os.O_WRONLY)
    else:
        read, descriptor = os.pipe() if request.param == "no reader" else os.openpty()
        os.close(read)
    yield Console((descriptor, descriptor), "elastic")
    os.close(descriptor)


def test_lines_that_cannot_be_written_are_lost(failing: Console) -> None:
    view = ProgressLines(failing)
    view.update(entry(1, loss=2.5, epoch=1))
    view.note("lost")
    view.put("node0", b"output of an agent\n")
    view.close()


def test_a_bar_on_a_terminal_that_fails(failing: Console) -> None:
    """The agents' output is read on. Otherwise they would wait for room in the pipe."""
    view = ProgressBar(failing)
    view.update(entry(1, loss=2.5, epoch=1))
    view.note("lost")
    with view.output_of("node0") as output:
        for _ in range(4):  # more than a pipe holds
            os.write(output, b"a line of a worker\n" * 3000)
    view.close()


def test_output_is_printed_above_the_bar(tmp_path: Path) -> None:
    descriptor = os.open(tmp_path / "console", os.O_CREAT | os.O_WRONLY | os.O_APPEND)
    view = ProgressBar(Console((descriptor, descriptor), "elastic"))
    view.update(entry(4, loss=2.5))
    with view.output_of("node0") as output:
        os.write(output, b"a line of a worker\nhalf")
        view.note("a note")
        os.write(output, b" a line\nthe last line")
    view.close()
    text = (tmp_path / "console").read_text()
    lines = {line.rpartition("\r")[2].strip() for line in text.split("\n")}
    assert {"a line of a worker", "half a line", "elastic: a note", "the last line"} <= lines
    assert "4/9" in text and "loss 2.5000" in text
    os.close(descriptor)


def test_bars_do_not_queue_up_while_nobody_reads() -> None:
    read, write = os.pipe()
    view = ProgressBar(Console((write, write), "elastic"))
    view.put("node0", b"a line of a worker\n" * 10_000)
    for step in range(1000):
        view.update(entry(step, phase=f"phase{step}"))
    text = b""
    while b"the end" not in text:
        view.note("the end")
        text += os.read(read, 1 << 20)
    assert len(set(re.findall(rb"phase\d+", text))) < 10
    view.close()
    os.close(write)
    os.close(read)


def test_follower_reads_on_after_an_error(tmp_path: Path) -> None:
    path = tmp_path / "log.jsonl"
    path.write_text('{"a": 1}\n{"a"')
    follower = Follower(path)
    assert follower.read() == [{"a": 1}]
    content = path.read_text() + ": 2}\n"
    path.unlink()
    path.mkdir()
    assert follower.read() == []
    path.rmdir()
    path.write_text(content)
    assert follower.read() == [{"a": 2}]


def test_follower_waits_for_whole_lines(tmp_path: Path) -> None:
    path = tmp_path / "log.jsonl"
    follower = Follower(path)
    assert follower.read() == []
    path.write_text('{"a": 1}\nnot json\n[2]\n{"a"')
    assert follower.read() == [{"a": 1}]
    with path.open("a") as file:
        file.write(": 2}\n")
    assert follower.read() == [{"a": 2}]
    assert read_object(path) is None and read_object(tmp_path / "none") is None


def test_reports() -> None:
    event = json.loads(
        '{"kind": "recovery", "step": 3, "microbatch": 5, "cause": "node2 lost", "nodes_before": 4,'
        '"nodes_after": 3,'
        '"detect_s": 0.01, "decide_s": 0.002, "transfer_s": 0.1, "rebuild_s": 0.05, "total_s": 0.2,'
        '"microbatches_lost": 2}'
    )
    assert recovery_line(event) == (
        "recovered at step 3, micro-batch 5 (node2 lost): 4 -> 3 nodes, 2 micro-batches lost; "
        "seconds: detect 0.010, decide 0.002, transfer 0.100, rebuild 0.050, total 0.200"
    )
    planned = event | {"planned": True, "pause_s": 0.25, "cause": "join node3"}
    assert recovery_line(planned | {"nodes_before": 3, "nodes_after": 4}) == (
        "the plan changed after step 3 (join node3): 3 -> 4 nodes; training paused for 0.250 s"
    )
    assert recovery_line(planned | {"nodes_before": 3, "nodes_after": 3}) == (
        "the plan changed after step 3 (join node3): 3 nodes as before; training paused for 0.250 s"
    )
    assert event_line({"kind": "plan", "step": 1, "data": {}}) == "kind=plan step=1"
    assert as_text(
        {"phase": "running", "nodes": [{"node": "a", "on": True}], "plan": "x\ny\n", "no": None}
    ) == ("phase: running\n\nnode  on\na     yes\n\nx\ny")


@pytest.mark.parametrize(
    ("event", "line"),
    [
        (
            {"kind": "halt", "epoch": 4, "cause": "node1: VaultError: gone", "boundary": False},
            "epoch 4 begins: node1: VaultError: gone",
        ),
        ({"kind": "halt", "epoch": 1, "cause": "start", "cause_kind": "start"}, ""),
        ({"kind": "halt", "epoch": 4, "cause": "join node3", "boundary": True}, ""),
        (
            {"kind": "paused", "why": "1 node, but 2 are needed"},
            "warning: paused: 1 node, but 2 are needed; the job continues when a plan fits",
        ),
        (
            {"kind": "checkpoint-resumed", "step": 4, "path": "/c/4", "run": "a.1", "note": ""},
            "continues from the checkpoint of step 4 of run a.1, /c/4",
        ),
        (
            {"kind": "checkpoint-resumed", "step": 4, "path": "/c", "run": "", "note": "odd"},
            "warning: continues from the checkpoint of step 4 of run unknown, /c: odd",
        ),
        (
            {"kind": "plan", "shape": "1+1", "instead_of": "3+1"},
            "warning: --pipelines 3+1 does not fit; the plan is 1+1",
        ),
        ({"kind": "plan", "shape": "1+1", "instead_of": ""}, ""),
        (
            {"kind": "restart", "why": "node1: worker 0: exit code 5", "restart": 1},
            "all workers start again, restart 1: node1: worker 0: exit code 5",
        ),
        ({"kind": "certificate", "reason": "tls.crt expires"}, "warning: tls.crt expires"),
        (
            {"kind": "agent-failed", "node": "node2", "error": "OSError: no room"},
            "warning: the agent of node2 failed: OSError: no room",
        ),
        (
            {"kind": "refused", "node": "a", "reason": "version", "peer": "b", "detail": "old"},
            "warning: a refused b: old",
        ),
        (
            {"kind": "refused", "node": "a", "reason": "token", "peer": "b", "detail": "no token"},
            "warning: a refused b: no token; give it this job's --join-token-file",
        ),
        ({"kind": "refused", "node": "a", "reason": "replayed", "peer": "b", "detail": "x"}, ""),
    ],
    ids=lambda value: value.get("kind") if isinstance(value, dict) else "",
)
def test_lines_of_events(event: dict[str, Any], line: str) -> None:
    assert EVENT_LINES[event["kind"]](event) == line


@pytest.mark.parametrize("kind", EVENT_LINES)
def test_no_line_has_a_question_mark(kind: str) -> None:
    """An event of another version may lack fields; the line then says which."""
    assert "?" not in EVENT_LINES[kind]({"kind": kind, "reason": "version"})


def test_faults_by_progress(make_config: Callable[..., JobConfig]) -> None:
    texts = (
        "join",
        "kill-coordinator phase=recovery after=1",
        "drain node=0 step=4",
        "kill node=1",
        "join step=9",
    )
    config = make_config(
        faults=tuple(parse_fault(text) for text in texts),
        standalone=True,
        local_nodes=3,
        max_nodes=3,
    )
    faults = LauncherFaults(config)
    assert faults and faults.joins

    def due(step: int, phase: str) -> list[str]:
        return [spec.text for spec in faults.observe(dict(entry(step, phase)))]

    assert due(0, "waiting") == ["join"]
    assert due(0, "installing") == []  # the first plan is no recovery
    assert due(1, "running") == due(2, "halting") == due(2, "installing") == due(2, "running") == []
    assert due(3, "halting") == ["kill-coordinator phase=recovery after=1"]
    assert due(4, "running") == ["drain node=0 step=4"]
    assert due(9, "finished") == [] and not faults


def test_faults_that_did_not_happen(make_config: Callable[..., JobConfig]) -> None:
    texts = ("kill node=1 step=3", "kill node=7", "join step=9", "stop node=0", "drain node=7")
    config = make_config(faults=tuple(parse_fault(text) for text in texts), standalone=False)
    assert claim_fault(config.run_dir, 3)

    def missed(hosting: bool) -> list[str]:
        return [spec.text for spec in missed_faults(config, ["node0", "node1"], hosting)]

    assert missed(hosting=True) == ["kill node=1 step=3", "join step=9", "drain node=7"]
    assert missed(hosting=False) == ["kill node=1 step=3"]


def test_a_fault_is_claimed_once(tmp_path: Path) -> None:
    assert claim_fault(tmp_path, 3)
    assert not claim_fault(tmp_path, 3)
    assert claim_fault(tmp_path, 4)
