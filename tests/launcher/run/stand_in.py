"""Stand-ins for coordinator and agent in tests of the supervisor.

Arguments of the unused script control them: finish=CODE, serve, fail, leaves, outdated (the
coordinator cannot read the saved state), waits (it never leads), unable (the coordinator fails
after it has written its process id), broken (agents end with an error), loud (a child of each agent
prints 1 MB), and after=N, which delays `finish` to the N-th start of the coordinator.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

from elastic import lifeline
from elastic.config import JobConfig, load_config
from elastic.domain.errors import EXIT_INCOMPATIBLE
from elastic.telemetry import write_last_words


def coordinator() -> None:
    config, args = _begin("--address")
    run_dir = Path(config.run_dir)
    words = dict(word.partition("=")[::2] for word in config.command.args)
    start = _append(run_dir / "starts", args.address)
    if "fail" in words:
        raise SystemExit("the stand-in cannot start")
    if "unable" in words:
        (run_dir / "coordinator-0.pid").write_text(f"{os.getpid()}\n")
        write_last_words(run_dir, "coordinator", "a free port is needed")
        raise SystemExit(2)
    if "outdated" in words:
        write_last_words(run_dir, "coordinator", "protocol 9 wrote the state, protocol 2 is mine")
        raise SystemExit(EXIT_INCOMPATIBLE)
    if "waits" in words:
        signal.pause()
    host, _, port = args.address.rpartition(":")
    listener = socket.create_server((host, int(port)))
    draft = run_dir / "coordinator.tmp"
    draft.write_text(json.dumps({"address": args.address, "pid": os.getpid()}))
    draft.replace(run_dir / "coordinator.json")
    _append(
        run_dir / "progress.jsonl",
        json.dumps(
            {"step": start, "loss": 2.5, "phase": "running", "nodes": 2, "plan": "2", "steps": 9}
        ),
    )
    if "finish" in words and start >= int(words.get("after", "1")):
        (run_dir / "exit.json").write_text(
            json.dumps({"code": int(words["finish"]), "reason": "acted out"})
        )
    signal.pause()
    listener.close()


def agent() -> None:
    """An agent with a child that ignores SIGTERM. With `leaves` it ends on SIGUSR1."""
    config, args = _begin("--node", "--coordinator", "--host", "--domain", "--alone")
    leaves = "leaves" in config.command.args
    if "broken" in config.command.args:
        write_last_words(config.run_dir, args.node, "OSError: no room for the socket")
        raise SystemExit(1)
    signal.signal(signal.SIGUSR1, (lambda *_: sys.exit(0)) if leaves else signal.SIG_IGN)
    loud = "yes | head -c 1000000 &" if "loud" in config.command.args else ""
    child = subprocess.Popen(["sh", "-c", f"trap '' TERM; {loud} sleep 60 & wait; sleep 60"])
    facts = {"node": args.node, "domain": args.domain, "pids": [os.getpid(), child.pid]}
    _append(Path(config.run_dir) / "agents.jsonl", json.dumps(facts))
    signal.pause()


def _begin(*flags: str) -> tuple[JobConfig, Any]:
    parser = argparse.ArgumentParser()
    for flag in ("--run-dir", *flags):
        parser.add_argument(flag)
    parser.add_argument("--parent-pipe", type=int)
    args = parser.parse_args()
    lifeline.watch(args.parent_pipe)
    return load_config(args.run_dir), args


def _append(path: Path, line: str) -> int:
    """Append a line; return how many there are."""
    with path.open("a") as file:
        file.write(line + "\n")
    return len(path.read_text().splitlines())
