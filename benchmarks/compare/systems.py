"""How each system is started: with its defaults, and tuned as its documents advise."""

from __future__ import annotations

import json
import sys
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

from benchmarks.compare.cluster import Record
from benchmarks.compare.job import MICROBATCHES, NODES

PYTHON = sys.executable


@dataclass(frozen=True)
class System(ABC):
    """One system with its settings."""

    name: ClassVar[str]
    needs: ClassVar[str] = ""
    """Module that must be importable."""
    tuned: bool = False

    @property
    def settings(self) -> str:
        return "tuned" if self.tuned else "defaults"

    def services(self, port: int) -> list[list[str]]:
        """Return commands that run beside the nodes."""
        return []

    @abstractmethod
    def node(self, node: int, port: int, folder: Path) -> list[str]:
        """Return the command of a node."""

    def env(self, node: int, port: int) -> Mapping[str, str]:
        return {}

    def steps(self, records: Sequence[Record], folder: Path) -> list[Record]:
        """Return the records of committed steps and of the end."""
        return [record for record in records if record["kind"] in ("step", "end")]


@dataclass(frozen=True)
class Ours(System):
    """`elastic run`, once per node. Nothing is tuned."""

    name = "ours"

    def node(self, node: int, port: int, folder: Path) -> list[str]:
        host = "true" if node == 0 else "false"
        starts = len([*folder.glob(f"run{node}-*")])  # a run directory is of one start only
        return [
            PYTHON, "-m", "elastic", "run", "--nnodes", f"2:{NODES}", "--rdzv-backend", "c10d",
            "--rdzv-endpoint", f"127.0.0.1:{port}", "--rdzv-conf", f"is_host={host}",
            "--rdzv-id", "compare", "--pipelines", str(NODES),
            "--run-dir", str(folder / f"run{node}-{starts}"), "-m", "benchmarks.compare.train_ours",
        ]  # fmt: skip

    def steps(self, records: Sequence[Record], folder: Path) -> list[Record]:
        lines = (folder / "run0-0" / "events.jsonl").read_text().splitlines()
        events = [json.loads(line) for line in lines]
        found: list[Record] = [
            {**event, "node": 0, "microbatches": MICROBATCHES}
            for event in events
            if event["kind"] == "step"
        ]
        evaluations = [event for event in events if event["kind"] == "evaluation"]
        return [*found, *({**one, "kind": "end", "node": 0} for one in evaluations[-1:])]


@dataclass(frozen=True)
class Torchrun(System):
    """torchrun on each node, with the rendezvous at node 0, and a checkpoint every 10 steps.

    Tuned: a checkpoint after each step, so that no finished step is lost; a rendezvous that waits
    2 s for further nodes, not 30, and 3 s for a silent one, not 15; collectives that fail after
    10 s, not 30 min; and the global batch divided by the workers that are there.

    By default, torch 2.13 lets no node return while the one with rank 0 stays: the returning node
    waits for the address of a store that rank 0 publishes in its first rendezvous only
    (`next_rendezvous` in torch/distributed/elastic/rendezvous/dynamic_rendezvous.py). All nodes
    give up after 60 s. So both settings use the switch that PyTorch offers against it
    (github.com/pytorch/pytorch/issues/135712).
    """

    name = "torchrun"
    module: ClassVar[str] = "torch.distributed.run"
    script_flags: ClassVar[tuple[str, ...]] = ()
    """Flags of the training script that this launcher needs."""

    def env(self, node: int, port: int) -> Mapping[str, str]:
        return {"TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"}

    def node(self, node: int, port: int, folder: Path) -> list[str]:
        conf = "is_host=" + ("true" if node == 0 else "false")
        script = ["--checkpoint", str(folder / "checkpoint.pt")]
        if self.tuned:
            conf += ",last_call_timeout=2,keep_alive_interval=1"
            script += ["--every", "1", "--timeout", "10", "--keep-batch"]
        return [
            PYTHON, "-m", self.module, "--nnodes", f"2:{NODES}",
            "--nproc-per-node", "1", "--max-restarts", "100", "--rdzv-backend", "c10d",
            "--rdzv-endpoint", f"127.0.0.1:{port}", "--rdzv-conf", conf, "--rdzv-id", "compare",
            "-m", "benchmarks.compare.train_torchrun", *script, *self.script_flags,
        ]  # fmt: skip


class Nvrx(Torchrun):
    """The launcher of NVIDIA Resiliency Extension (`ft_launcher`), with torchrun's settings.

    Its workers send heartbeats to the monitor of their node, as its guide for in-job restarts says.
    """

    name, needs = "nvrx", "nvidia_resiliency_ext"
    module = "nvidia_resiliency_ext.fault_tolerance.launcher"
    script_flags = ("--heartbeats",)


@dataclass(frozen=True)
class Torchft(System):
    """One replica group per node, each under torchrun, and a lighthouse, with the limits of its
    README and of its example train_ddp.py.

    Tuned: a lighthouse that waits 1 s for further groups, not 10, and collectives and calls that
    fail after 2 s and 10 s.
    """

    name, needs = "torchft", "torchft"

    def services(self, port: int) -> list[list[str]]:
        join_ms = "1000" if self.tuned else "10000"
        return [
            [PYTHON, "-m", "benchmarks.compare.lighthouse", "--bind", f"127.0.0.1:{port}",
             "--join-timeout-ms", join_ms],
        ]  # fmt: skip

    def env(self, node: int, port: int) -> Mapping[str, str]:
        return {"TORCHFT_LIGHTHOUSE": f"http://127.0.0.1:{port}"}

    def node(self, node: int, port: int, folder: Path) -> list[str]:
        limits = ["--collective", "2", "--timeout", "10"] if self.tuned else []
        return [
            PYTHON, "-m", "torch.distributed.run", "--standalone", "--nnodes", "1",
            "--nproc-per-node", "1", "-m", "benchmarks.compare.train_torchft", *limits,
        ]  # fmt: skip


SYSTEMS: tuple[System, ...] = (
    Ours(),
    Torchft(),
    Torchft(tuned=True),
    Torchrun(),
    Torchrun(tuned=True),
    Nvrx(),
    Nvrx(tuned=True),
)
