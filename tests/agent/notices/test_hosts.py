"""Each host has a launcher. A notice of each kind drains one host; the others go on."""

from __future__ import annotations

import http.client
import json
import signal
import subprocess
import sys
import time
from contextlib import ExitStack
from pathlib import Path

from elastic.domain.errors import EXIT_DRAINED
from elastic.launcher.run.rundir import free_port
from tests.patience import LONG_S
from tests.scenarios.harness import ROOT
from tests.scenarios.membership.test_notices import (
    DEADLINE_S,
    Job,
    assert_nothing_was_lost,
    is_drained,
    is_step,
    kinds,
    running,
)
from tests.scenarios.paced import paced, paced_reference
from tests.scenarios.shared import SCRIPT, exact

HOSTS = ("file", "hook", "pod", "hooked-pod", "last")


def post(run_dir: Path, node: str, body: str) -> int:
    """POST /notice to the hook of a node, whose card has its address."""
    card = json.loads((run_dir / "hooks" / f"{node}.json").read_text())
    host, _, port = card["address"].rpartition(":")
    line = http.client.HTTPConnection(host, int(port), timeout=LONG_S)
    line.request("POST", "/notice", body, {"Authorization": f"Bearer {card['token']}"})
    status = line.getresponse().status
    line.close()
    return status


def drain_self(run_dir: Path) -> subprocess.CompletedProcess[str]:
    words = ["drain", "--self", "--run-dir", str(run_dir), "--deadline", "100", "--json"]
    return subprocess.run(
        [sys.executable, "-m", "elastic", *words],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )


def test_hosts_leave_by_every_door(tmp_path: Path) -> None:
    notice, address = tmp_path / "notice", f"127.0.0.1:{free_port()}"
    common = exact("--nnodes", f"1:{len(HOSTS)}", "--pipelines", "1", "--lease", "30")
    common += ["--checkpoint-dir", str(tmp_path / "checkpoints")]
    script = paced(tmp_path / "hurry")
    own = {
        "file": ["--notice", f"file:{notice}"],
        "hook": ["--notice", "http:0"],
        "pod": ["--notice", "none", "--grace", "100"],
        "hooked-pod": ["--notice", "none", "--grace", "100"],
        "last": ["--notice", "none"],
    }
    with ExitStack() as stack:
        main = [
            "coordinator",
            "--address",
            address,
            *common,
            "--run-dir",
            str(tmp_path / "main"),
            *script,
        ]
        coordinator = stack.enter_context(running(tmp_path / "main", main, {}))
        agents: dict[str, Job] = {}
        for host in HOSTS:
            words = ["agent", "--coordinator", address, "--node", host, *common, *own[host]]
            run_dir = tmp_path / host
            agents[host] = stack.enter_context(
                running(run_dir, [*words, "--run-dir", str(run_dir), *script], {})
            )
        coordinator.wait_for(is_step(1))
        notice.write_text("100")
        for _ in range(3):  # repeated requests are one notice
            assert post(tmp_path / "hook", "hook", '{"deadline_s": 100}') == 202
        coordinator.wait_for(is_drained("file"))
        coordinator.wait_for(is_drained("hook"))
        agents["pod"].process.send_signal(signal.SIGTERM)
        coordinator.wait_for(is_drained("pod"))
        assert agents["pod"].process.wait(DEADLINE_S) == EXIT_DRAINED
        left = drain_self(tmp_path / "hooked-pod")
        assert left.returncode == 0 and json.loads(left.stdout)["left"], left.stderr
        assert agents["hooked-pod"].process.wait(DEADLINE_S) == EXIT_DRAINED
        (tmp_path / "hurry").touch()
        run = coordinator.wait()
        assert agents["last"].process.wait(DEADLINE_S) == 0
        assert agents["file"].process.wait(DEADLINE_S) == 0  # it waits until the job is over
    drained = [event["node"] for event in kinds(run, "drained")]
    assert set(drained[:2]) == {"file", "hook"} and drained[2:] == ["pod", "hooked-pod"]
    assert_nothing_was_lost(run, drained)
    assert sorted(e["provider"] for e in kinds(run, "notice")) == [
        "file",
        "http",
        "signal",
        "signal",
    ]
    assert run.summary["params_sha256"] == paced_reference(tmp_path).summary["params_sha256"]


def test_a_node_with_nothing_to_move_ends_at_once(tmp_path: Path) -> None:
    """Without a coordinator and workers, SIGTERM ends the agent without the grace period."""
    words = [
        "agent",
        "--coordinator",
        f"127.0.0.1:{free_port()}",
        "--node",
        "alone",
        "--nnodes",
        "1:2",
    ]
    flags = ["--grace", "200", "--notice", "http:0", "--run-dir", str(tmp_path / "alone")]
    with running(tmp_path / "alone", [*words, *flags, *SCRIPT], {}) as agent:
        end = time.monotonic() + DEADLINE_S
        while not (tmp_path / "alone" / "hooks" / "alone.json").exists():
            assert agent.process.poll() is None and time.monotonic() < end
            time.sleep(0.05)
        agent.process.send_signal(signal.SIGTERM)
        assert agent.process.wait(LONG_S) == 143
