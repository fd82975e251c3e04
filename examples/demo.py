"""Train a GPT, kill a node in the middle of a step, and compare with a run in which nothing failed.

    make demo    or    python -m examples.demo

Both runs are real: `elastic run` on local nodes, with a group of processes per node. The output is
read from the files of the runs (summary.json, events.jsonl). The exit code is 0 if all checks hold.
"""

from __future__ import annotations

import json
import os
import re
import secrets
import shlex
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from elastic.core.protocol.fault_spec import parse_fault
from elastic.domain.errors import EXIT_FAILURE, EXIT_INTERRUPTED, EXIT_OK
from elastic.domain.ledger import format_indices
from elastic.domain.types import Plan
from elastic.planning.plan.plan import parse_plan
from elastic.telemetry import read_events

SCRIPT = ("-m", "examples.train_gpt", "--steps", "16", "--num-microbatches", "8")
NODES, FEWER = 4, 2
FAULT = "kill node=2 step=8 microbatch=5"
SHOWN_EVERY = 4
"""Steps between two progress lines that are shown."""
CHART_ROWS = 8
PHASES = (
    ("detect", "from the fault until the coordinator decides to halt"),
    ("decide", "until the survivors have halted and the new plan is sent"),
    ("transfer", "until the layers are on their new nodes (state from: {state_source})"),
    ("rebuild", "until the survivors are connected again"),
    ("total", "from the fault until the next micro-batch is computed"),
)


@dataclass(frozen=True)
class FinishedRun:
    """Results of a finished run, read from its files."""

    code: int
    directory: Path
    summary: dict[str, Any]
    plans: tuple[Plan, ...]
    """The plan of each epoch, in order."""

    @property
    def loss(self) -> list[float]:
        return list(self.summary.get("loss", []))

    @property
    def recoveries(self) -> list[dict[str, Any]]:
        return list(self.summary.get("recoveries", []))


def run(directory: Path, nodes: int, flags: Sequence[str]) -> FinishedRun:
    """Run `elastic run` on local nodes, and return the results."""
    arguments = ["--standalone", "--nnodes", str(nodes), "--pipelines", "1"]
    arguments += ["--accumulate", "exact", *flags]
    print("  $ " + shlex.join(["elastic", "run", *arguments, *SCRIPT]), flush=True)
    command = [sys.executable, "-m", "elastic", "run", "--run-dir", str(directory)]
    command += [*arguments, *SCRIPT]
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    ) as child:
        assert child.stdout is not None
        for line in child.stdout:
            if _shown(line):
                print("  " + line.rstrip(), flush=True)
    summary, events = directory / "summary.json", directory / "events.jsonl"
    return FinishedRun(
        code=child.returncode,
        directory=directory,
        summary=json.loads(summary.read_text()) if summary.exists() else {},
        plans=_plans(events) if events.exists() else (),
    )


def _shown(line: str) -> bool:
    step = re.match(r"elastic: step (\d+)/", line)
    return step is None or int(step[1]) % SHOWN_EVERY == 0


def _plans(events: Path) -> tuple[Plan, ...]:
    entries = [entry for entry in read_events(events) if entry["kind"] == "plan"]
    return tuple(parse_plan(entry["text"]) for entry in entries)


def show_plans(plans: Sequence[Plan]) -> None:
    for name, plan in (("before", plans[0]), ("after", plans[-1])):
        for pipeline in plan.pipelines:
            stages = [f"{s.unit.node} [{format_indices(s.layers)}]" for s in pipeline.stages]
            print(f"  {name:7} layers on nodes   {' -> '.join(stages)}")
        if plan.peers:
            peers = "  ".join(f"{node}: {peer}" for node, peer in plan.peers)
            print(f"  {'':7} backups kept by   {peers}")


def show_loss(loss: Sequence[float], failed_at: int | None) -> None:
    """Print a chart with one column per step; X marks the step of the kill."""
    low, high = min(loss), max(loss)
    rows = [round((high - value) / ((high - low) or 1.0) * (CHART_ROWS - 1)) for value in loss]
    for row in range(CHART_ROWS):
        label = high - (high - low) * row / (CHART_ROWS - 1)
        cells = ("X" if step == failed_at else "o" for step in range(len(loss)))
        pairs = zip(cells, rows, strict=True)
        line = "".join(f"  {cell if at == row else ' '}" for cell, at in pairs)
        print(f"  {label:7.3f} |{line.rstrip()}")
    print(f"  {'':7} +{'---' * len(loss)}")
    print(f"  {'step':>7}  {''.join(f'{step:3}' for step in range(len(loss)))}")


def show_recovery(entry: dict[str, Any], microbatches: int) -> None:
    nodes = f"{entry['nodes_before']} -> {entry['nodes_after']} nodes"
    print(f"  {entry['cause']} in step {entry['step']}: {nodes}")
    for name, meaning in PHASES:
        print(f"  {name:>9} {entry[name + '_s']:8.3f} s   {meaning.format(**entry)}")
    lost, again = entry["microbatches_lost"], entry["microbatches_rerun"]
    count = f"{lost} of {microbatches} micro-batches"
    print(f"  work lost: {count} had reached the dead node and were run again")
    print(
        f"  kept: gradients of finished micro-batches; {again} unfinished ones ran after the change"
    )


def checks(failed: FinishedRun, clean: FinishedRun) -> list[tuple[str, bool]]:
    """Return (check, whether it holds) of all checks."""
    node = parse_fault(FAULT).node
    lost = [entry for entry in failed.recoveries if not entry["planned"]]
    steps = len(failed.loss)
    proven = [r.summary.get("ledger", {}).get("proved") == steps for r in (failed, clean)]
    microbatches = failed.plans[0].n_microbatches if failed.plans else 0
    return [
        ("both runs ended with exit code 0", failed.code == clean.code == 0),
        ("the fault was carried out", (failed.directory / "faults" / "0.fired").exists()),
        ("one node was lost, and one recovery followed",
         len(lost) == 1 and node in lost[0]["cause"] and lost[0]["nodes_after"] == NODES - 1),
        ("less than a step was lost",
         len(lost) == 1 and lost[0]["microbatches_lost"] < microbatches),
        ("the other run had no failure", clean.recoveries == []),
        ("each micro-batch counted exactly once", steps > 0 and all(proven)),
        ("the loss fell", steps > 1 and failed.loss[-1] < failed.loss[0]),
        ("the loss of each step is equal, bit for bit", steps > 0 and failed.loss == clean.loss),
        ("the final parameters are equal, bit for bit",
         bool(_sha(failed)) and _sha(failed) == _sha(clean)),
    ]  # fmt: skip


def _sha(run: FinishedRun) -> str:
    return str(run.summary.get("params_sha256", ""))


def report(failed: FinishedRun, clean: FinishedRun) -> None:
    """Print plans, loss, recovery and final parameters of the two runs."""
    if failed.plans:
        print("\nThe plan")
        show_plans(failed.plans)
    entries = failed.recoveries
    if failed.loss:
        print("\nThe loss (X: the step in which the node was killed)")
        show_loss(failed.loss, entries[0]["step"] if entries else None)
    if entries and failed.plans:
        print("\nThe recovery")
        for entry in entries:
            show_recovery(entry, failed.plans[0].n_microbatches)
    print("\nThe parameters after the last step (SHA-256)")
    print(f"  {NODES} nodes, one killed   {_sha(failed) or 'none'}")
    print(f"  {FEWER} nodes, no failure   {_sha(clean) or 'none'}")


def main() -> int:
    began = time.monotonic()
    directory = Path("runs") / f"demo-{time.strftime('%Y%m%d-%H%M%S')}-{secrets.token_hex(2)}"
    directory.mkdir(parents=True)
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    try:
        fault = parse_fault(FAULT)
        where = f"before the backward pass of micro-batch {fault.microbatch} of step {fault.step}"
        print(f"1. A GPT over {NODES} nodes; {fault.node} gets a SIGKILL {where}", flush=True)
        failed = run(directory / "failure", NODES, ["--fault", FAULT])
        print(f"\n2. The same training over {FEWER} nodes, where nothing fails", flush=True)
        clean = run(directory / "reference", FEWER, [])
    except KeyboardInterrupt:
        return EXIT_INTERRUPTED
    report(failed, clean)
    print("\nChecks")
    results = checks(failed, clean)
    for text, holds in results:
        print(f"  {'ok  ' if holds else 'FAIL'}  {text}")
    print(f"\n{time.monotonic() - began:.0f} s; all files are in {directory}")
    return EXIT_OK if all(holds for _, holds in results) else EXIT_FAILURE


if __name__ == "__main__":
    sys.exit(main())
