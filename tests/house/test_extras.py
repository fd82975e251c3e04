"""Optional packages: training works without them, and a missing one is named with its extra."""

from __future__ import annotations

import json
import os
import re
import socket
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
OPTIONAL = (
    "megatron",
    "transformers",
    "peft",
    "ray",
    "etcd3",
    "pynvml",
    "yaml",
    "jinja2",
    "plotly",
    "tensorboardX",
    "wandb",
    "mlflow",
    "google",
)
BLOCKER = """
import os, sys

class Blocker:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in os.environ.get("BLOCKED", "").split(","):
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)

sys.meta_path.insert(0, Blocker())
"""


def environment(folder: Path, *blocked: str) -> dict[str, str]:
    """An environment in which the packages look as if they were not installed."""
    folder.mkdir(exist_ok=True)
    (folder / "sitecustomize.py").write_text(BLOCKER)
    path = os.pathsep.join((str(folder), str(ROOT), str(ROOT / "simulator")))
    return {**os.environ, "PYTHONPATH": path, "BLOCKED": ",".join(blocked)}


def example(folder: Path) -> Path:
    """The script of README.md."""
    (source,) = re.findall(r"^```python\n(.*?)^```", (ROOT / "README.md").read_text(), re.S | re.M)
    script = folder / "mine.py"
    script.write_text(source)
    return script


@pytest.mark.chaos  # the last test of this file trains without extras, too
def test_a_plain_torch_model_needs_no_extra(tmp_path: Path) -> None:
    run_dir = tmp_path / "run"
    words = ["--standalone", "--nnodes", "2", "--run-dir", str(run_dir), str(example(tmp_path))]
    done = subprocess.run(
        [sys.executable, "-m", "elastic", "run", *words],
        env=environment(tmp_path, *OPTIONAL),
        capture_output=True,
        text=True,
        timeout=240,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    loss = json.loads((run_dir / "summary.json").read_text())["loss"]
    assert len(loss) == 30 and loss[-1] < loss[0]


@pytest.mark.parametrize(
    ("package", "extra", "words"),
    [
        ("ray", "ray", ("elastic", "run", "--backend", "ray", "mine.py")),
        ("etcd3", "etcd",
            ("elastic", "run", "--standalone", "--store", "etcd://127.0.0.1:1", "mine.py")),
        ("s3fs", "objects", ("elastic", "run", "--standalone", "--checkpoint-dir", "s3://bucket/x",
                             "mine.py")),
        ("yaml", "kubernetes", ("elastic", "kubernetes", "render", "--help")),
        ("tensorboardX", "tensorboard", ("elastic", "track", "--to", "tensorboard:board")),
        ("wandb", "wandb", ("elastic", "track", "--to", "wandb:mine")),
        ("mlflow", "mlflow",
            ("elastic", "run", "--standalone", "--track", "mlflow:mine", "mine.py")),
        ("megatron", "megatron", ("examples.train_gpt", "--steps", "1")),
        ("transformers", "hf", ("examples.train_huggingface", "--steps", "1")),
        ("peft", "lora", ("elastic", "convert", ".", "out", "--to", "peft", "--model",
                          ".", "--lora", ".")),
        (
            "plotly",
            "simulator",
            ("elastic_sim.cli.cli", "traces", "stats", str(ROOT / "traces/steady-32.csv"),
                "--html", "t.html"),
        ),
        ("jinja2", "simulator",
            ("elastic_sim.cli.cli", "replay", "--mtbf", "1h", "--duration", "1h",
                                 "--model", "gpt2", "--policy", "oracle", "--html", "r.html")),
    ],
)  # fmt: skip
def test_a_missing_package_is_named_with_its_extra(
    package: str, extra: str, words: tuple[str, ...], tmp_path: Path
) -> None:
    example(tmp_path)
    done = subprocess.run(
        [sys.executable, "-m", *words],
        env=environment(tmp_path, package),
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=120,
    )
    said = done.stderr.strip().splitlines()
    assert done.returncode == 2 and len(said) == 1, done.stderr
    assert package in said[0] and f"pip install 'elastic-runtime[{extra}]'" in said[0]


def test_a_coordinator_needs_no_torch(tmp_path: Path) -> None:
    """It plans and leads a training of two agents that do have torch, but no extra."""
    script = example(tmp_path)
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
    job, address = ["--nnodes", "2"], f"127.0.0.1:{port}"
    command = [sys.executable, "-m", "elastic"]
    coordinator = subprocess.Popen(
        [
            *command,
            "coordinator",
            *job,
            "--address",
            address,
            "--run-dir",
            str(tmp_path / "run"),
            str(script),
        ],
        env=environment(tmp_path, "torch", *OPTIONAL),
        stderr=subprocess.PIPE,
        text=True,
    )
    agents = [
        subprocess.Popen(
            [
                *command,
                "agent",
                *job,
                "--coordinator",
                address,
                "--node",
                f"node{i}",
                "--run-dir",
                str(tmp_path / f"node{i}"),
                str(script),
            ],
            env=environment(tmp_path / f"without{i}", *OPTIONAL),
        )
        for i in range(2)
    ]
    try:
        _, said = coordinator.communicate(timeout=240)
        assert coordinator.returncode == 0, said
        assert [agent.wait(60) for agent in agents] == [0, 0]
    finally:
        coordinator.kill()
        for agent in agents:
            agent.kill()
    loss = json.loads((tmp_path / "run" / "summary.json").read_text())["loss"]
    assert len(loss) == 30 and loss[-1] < loss[0]
