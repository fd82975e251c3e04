"""Longer tests on Ray: many losses, the autoscaler, `ray job submit`."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import psutil
import pytest

from tests.launcher.helpers import wait_until
from tests.scenarios.harness import ROOT, Run
from tests.scenarios.ray.ray_cluster import SERVICES, Job, has_agent, ray_cluster, raylet, words
from tests.scenarios.shared import GPT, exact, made_once

pytestmark = [
    pytest.mark.chaos,
    pytest.mark.skipif(
        not find_spec("ray"), reason="ray is optional: pip install 'elastic-runtime[ray]'"
    ),
]
STEPS = ("--num-microbatches", "48", "--steps", "100")
FEW = ("--steps", "12")


def reference(directory: Path, *flags: str) -> Run:
    """The failure-free run on one node."""
    return made_once(directory, exact("--nnodes", "1"), [*GPT, *flags])


def test_two_raylets_then_an_actor_are_killed(tmp_path: Path) -> None:
    with ray_cluster(4) as cluster:
        flags = ["--address", cluster.address, *exact("--pipelines", "1", "--nnodes", "2:4")]
        job = Job(tmp_path / "run", flags, [*GPT, *STEPS])
        try:
            job.until(lambda entry: entry.get("phase") == "running" and entry.get("nodes") == 4)
            for node in [node for node in cluster.worker_nodes if has_agent(node)][:2]:
                raylet(node).send_signal(signal.SIGKILL)
                cluster.remove_node(node, allow_graceful=False)
            job.until(lambda entry: entry.get("nodes") == 2)
            for _ in range(2):
                cluster.add_node(num_cpus=1, wait=False)
            job.until(lambda entry: entry.get("nodes") == 4)
            left = next(node for node in cluster.worker_nodes if has_agent(node))
            agent = next(
                p for p in raylet(left).children(recursive=True) if SERVICES[0] in words(p)
            )
            psutil.Process(agent.ppid()).kill()
            job.until(lambda entry: entry.get("nodes") == 3)
            assert wait_until(lambda: not agent.is_running())
            job.until(lambda entry: entry.get("nodes") == 4)
            assert job.wait(200) == 0, job.output
        finally:
            job.close()
        assert wait_until(lambda: not job.processes()), job.processes()
    summary = json.loads((tmp_path / "run" / "summary.json").read_text())
    assert summary["params_sha256"] == reference(tmp_path, *STEPS).summary["params_sha256"]


@pytest.mark.skipif(
    not (find_spec("aiohttp_cors") and find_spec("opencensus")), reason="pip install 'ray[default]'"
)
def test_as_a_ray_job(tmp_path: Path) -> None:
    with ray_cluster(2, include_dashboard=True, dashboard_port=0) as cluster:
        run_dir = tmp_path / "run"
        run = [
            "elastic",
            "run",
            "--backend",
            "ray",
            "--nnodes",
            "2",
            "--run-dir",
            str(run_dir),
            *exact(*GPT, *FEW),
        ]
        submit = [str(Path(sys.executable).with_name("ray")), "job", "submit"]
        done = subprocess.run(
            [*submit, "--address", f"http://{cluster.webui_url}", "--", sys.executable, "-m", *run],
            cwd=ROOT,
            env={
                **os.environ,
                "PYTHONPATH": os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")]),
            },
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            timeout=200,
            check=False,
        )
    assert done.returncode == 0 and "succeeded" in done.stdout, done.stdout
    assert "elastic: all 12 steps done" in done.stdout
    summary = json.loads((run_dir / "summary.json").read_text())
    assert summary["params_sha256"] == reference(tmp_path, *FEW).summary["params_sha256"]


LISTS = (
    "initialization_commands",
    "setup_commands",
    "head_setup_commands",
    "worker_setup_commands",
    "head_start_ray_commands",
    "worker_start_ray_commands",
    "cluster_synced_files",
    "rsync_exclude",
    "rsync_filter",
)
"""What Ray's autoscaler wants to be told, though its fake machines use none of it."""


class Autoscaling:
    """A head node without CPUs, and Ray's autoscaler, whose machines are processes here."""

    def __init__(self, folder: Path, port: int, client_port: int, most: int) -> None:
        self.address, self.client = f"{own_host()}:{port}", f"ray://{own_host()}:{client_port}"
        kinds = {
            "ray.head.default": {"resources": {"CPU": 0}, "node_config": {}, "max_workers": 0},
            "worker": {
                "resources": {"CPU": 1},
                "node_config": {},
                "min_workers": 0,
                "max_workers": most,
            },
        }
        config = {
            "cluster_name": "test",
            "max_workers": most,
            "provider": {
                "type": "fake_multinode",
                "gcs_address": self.address,
                "launch_multiple": True,
                "disable_node_updaters": True,
                "disable_launch_config_check": True,
            },
            "available_node_types": kinds,
            "head_node_type": "ray.head.default",
            "idle_timeout_minutes": 1,
            "upscaling_speed": 1.0,
            **{name: {} for name in ("auth", "docker", "file_mounts")},
            **{name: [] for name in LISTS},
            "file_mounts_sync_continuously": False,
        }
        (folder / "autoscaler.json").write_text(json.dumps(config))
        command = [
            str(Path(sys.executable).with_name("ray")),
            "start",
            "--head",
            "--block",
            "--num-cpus",
            "0",
        ]
        command += [
            "--port",
            str(port),
            "--include-dashboard",
            "false",
            "--ray-client-server-port",
            str(client_port),
        ]
        self.log = folder / "head.out"
        with self.log.open("wb") as out:
            self.process = subprocess.Popen(
                [*command, f"--autoscaling-config={folder / 'autoscaler.json'}"],
                env={
                    **os.environ,
                    "RAY_FAKE_CLUSTER": "1",
                    "AUTOSCALER_UPDATE_INTERVAL_S": "1",
                    "PYTHONPATH": str(ROOT),
                },
                stdout=out,
                stderr=subprocess.STDOUT,
            )

    def close(self) -> None:
        ours = [
            self.process.pid,
            *(p.pid for p in psutil.Process(self.process.pid).children(recursive=True)),
        ]
        for process in psutil.process_iter():
            mine = process.pid in ours or any(self.address in word for word in words(process))
            if mine and process.pid != os.getpid():
                process.kill()
        self.process.wait()


def own_host() -> str:
    import ray

    return str(ray.util.get_node_ip_address())


@pytest.mark.parametrize("outside", [False, True], ids=["inside", "client"])
def test_the_autoscaler_brings_the_nodes(outside: bool, tmp_path: Path) -> None:
    """The job is started inside the cluster, or by a client outside."""
    from elastic.launcher.run.rundir import free_port

    scaling = Autoscaling(tmp_path, free_port(), free_port(), most=2)
    try:
        assert wait_until(
            lambda: (
                scaling.process.poll() is not None
                or "Ray runtime started" in scaling.log.read_text()
            ),
            60.0,
        ), scaling.log.read_text()
        address = scaling.client if outside else scaling.address
        flags = ["--address", address, *exact("--nnodes", "1:2", "--pipelines", "1")]
        job = Job(tmp_path / "run", flags, [*GPT, "--steps", "2000"])
        try:
            job.until(lambda entry: entry.get("phase") == "running" and entry.get("nodes") == 2)
            assert "no node is missing any more" in job.output
            job.process.send_signal(signal.SIGTERM)
            assert job.wait() == 128 + signal.SIGTERM, job.output
        finally:
            job.close()
        assert wait_until(lambda: not job.processes()), job.processes()
    finally:
        scaling.close()
