"""A real Prometheus beside a real job."""

from __future__ import annotations

import contextlib
import json
import math
import os
import shutil
import signal
import subprocess
import sys
import time
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import psutil
import pytest
import yaml

from elastic.domain.types import LayerSpec
from elastic.launcher.run.rundir import free_port
from elastic.planning.cost.profile import Device, LayerTimes, LinkProfile, Profile, format_profile
from tests.patience import LONG_S

ROOT = Path(__file__).resolve().parents[2]
RULES = ROOT / "deploy" / "prometheus" / "rules.yml"
CONFIG = ROOT / "deploy" / "prometheus" / "prometheus.yml"
DASHBOARD = ROOT / "deploy" / "grafana" / "dashboard.json"
DEADLINE_S = LONG_S
T = TypeVar("T")


def need(*programs: str) -> None:
    """Skip where Prometheus is not installed."""
    if missing := [name for name in programs if shutil.which(name) is None]:
        pytest.skip(f"{', '.join(missing)} not found: apt-get install prometheus")


def until(found: Callable[[], T], what: str, deadline_s: float = DEADLINE_S) -> T:
    """Poll `found` until its value is true; return it. Fails with `what` after the deadline."""
    end = time.monotonic() + deadline_s
    while True:
        value = found()
        if value:
            return value
        if time.monotonic() > end:
            pytest.fail(f"not within {deadline_s:g} s: {what}")
        time.sleep(0.1)


@dataclass(frozen=True)
class Prometheus:
    """A running server."""

    address: str

    def ask(self, path: str, **query: Any) -> Any:
        """Data of an answer of the HTTP API; None while it does not answer."""
        url = f"http://{self.address}/api/v1/{path}?{urllib.parse.urlencode(query)}"
        try:
            with urllib.request.urlopen(url, timeout=LONG_S) as answer:
                return json.load(answer)["data"]
        except urllib.error.HTTPError as error:
            if error.code == 503:  # it is starting
                return None
            pytest.fail(f"{path} {query}: {error.read().decode()}")
        except OSError:
            return None

    def finite(self, query: str, since: float) -> int:
        """Samples of a query over the time since then that are numbers."""
        data = self.ask("query_range", query=query, start=since, end=time.time(), step=1)
        values = [
            float(v) for series in (data or {}).get("result", ()) for _, v in series["values"]
        ]
        return sum(math.isfinite(value) for value in values)


@contextlib.contextmanager
def prometheus(folder: Path, run_dir: Path, etcd: Sequence[str] = ()) -> Iterator[Prometheus]:
    """A server with the shipped rules and configuration, which scrapes the processes of `run_dir`,
    and members of etcd at these addresses as those of the job `etcd`.

    It scrapes every two seconds; a scrape fails after the same time.
    """
    config = yaml.safe_load(CONFIG.read_text())
    config["global"] = {
        "scrape_interval": "2s",
        "scrape_timeout": "2s",
        "evaluation_interval": "1s",
    }
    config["rule_files"] = [str(RULES)]
    (discovery,) = config["scrape_configs"][0]["file_sd_configs"]
    discovery |= {"files": [str(run_dir / "metrics" / "*.json")], "refresh_interval": "1s"}
    labels = {"job": "etcd", "role": "etcd"}
    targets = [{"targets": [address], "labels": labels} for address in etcd]
    config["scrape_configs"].append({"job_name": "etcd", "static_configs": targets})
    with started(folder, config) as found:
        yield found


@contextlib.contextmanager
def started(folder: Path, config: dict[str, Any]) -> Iterator[Prometheus]:
    """A server with this configuration, which answers."""
    folder.mkdir()
    (folder / "prometheus.yml").write_text(yaml.safe_dump(config))
    found = Prometheus(f"127.0.0.1:{free_port()}")
    command = [
        "prometheus", f"--config.file={folder / 'prometheus.yml'}",
        f"--storage.tsdb.path={folder / 'data'}",
        f"--web.listen-address={found.address}", "--log.level=warn",
    ]  # fmt: skip
    with (folder / "log").open("wb") as log:
        process = subprocess.Popen(command, stdout=log, stderr=log)
    try:
        until(lambda: found.ask("query", query="1"), "Prometheus answers")
        yield found
    finally:
        process.terminate()
        process.wait(LONG_S)


@contextlib.contextmanager
def job(folder: Path, *flags: str) -> Iterator[Path]:
    """A run of waiting layers until the block ends; yields its run directory."""
    layer = LayerSpec(4096, 0, 4096, 0.02, 0.04, output_bytes=8192)
    times = LayerTimes(0.02, 0.04, 0.02, 0.02)  # long steps cost the machine little
    profile = Profile(
        model="toy",
        layers=(layer,) * 6,
        devices=(Device("a", (times,) * 6),),
        link=LinkProfile(1e9, 0.001),
    )
    folder.mkdir()
    (folder / "profile.json").write_text(format_profile(profile))
    run_dir = folder / "run"
    command = [
        sys.executable, "-m", "elastic", "run", "--standalone", "--run-dir", str(run_dir),
        "--lease", "30",
        "--emulate", str(folder / "profile.json"), "--metrics-port", "0", *flags,
        "-m", "benchmarks.waiting", "--num-microbatches", "8", "--steps", "100000",
        "--evaluate-every", "10",
    ]  # fmt: skip
    with (folder / "output").open("wb") as output:
        process = subprocess.Popen(
            command,
            cwd=ROOT,
            env={**os.environ, "PYTHONPATH": str(ROOT)},
            stdout=output,
            stderr=output,
        )
    try:
        yield run_dir
    finally:
        process.terminate()
        process.wait(LONG_S)


def kill_node(run_dir: Path, node: str) -> None:
    """SIGKILL to an agent and its workers."""
    signal_node(run_dir, node, signal.SIGKILL)


def signal_node(run_dir: Path, node: str, number: signal.Signals) -> None:
    """Send a signal to an agent and its workers."""
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error):
            words = process.cmdline()
            if (
                str(run_dir) in words
                and "--node" in words
                and words[words.index("--node") + 1] == node
            ):
                os.killpg(process.pid, number)
                return
    raise AssertionError(f"no agent of {node}")


def events(run_dir: Path, kind: str) -> list[dict[str, Any]]:
    """Entries of the event log so far."""
    path = run_dir / "events.jsonl"
    whole = path.read_text().rpartition("\n")[0] if path.exists() else ""
    found = (json.loads(line) for line in whole.splitlines())
    return [entry for entry in found if entry["kind"] == kind]


def scrape(run_dir: Path, name: str) -> str:
    """The metrics of a process of the run, as text."""
    (target,) = json.loads((run_dir / "metrics" / f"{name}.json").read_text())
    (address,) = target["targets"]
    with urllib.request.urlopen(f"http://{address}/metrics", timeout=LONG_S) as answer:
        return str(answer.read().decode())
