"""A rendered job on the harness, and the failure-free run that it is compared with."""

from __future__ import annotations

import contextlib
import io
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from elastic.launcher import cli
from elastic.launcher.kubernetes.kustomize import parsed
from tests.kubernetes.cluster import Cluster, Object, wait_for
from tests.kubernetes.pods import Pod
from tests.scenarios import checkpoints
from tests.scenarios.shared import made_once

STEPS = 100
TRAIN = ("-m", "tests.kubernetes.train", "--steps", str(STEPS))
HURRY = ("--hurry", "/elastic/checkpoints/hurry")
PACE = ("--pace", "0.006", "--doubling", "10", *HURRY)
STEADY = ("--pace", "0.1", "--doubling", "50", *HURRY)
"""About two seconds per step with three nodes: time for many faults in a row."""


def render(*words: str) -> list[Object]:
    """The objects that `elastic kubernetes render` prints."""
    return printed("render", *words)


def printed(command: str, *words: str) -> list[Object]:
    """The objects that a command of `elastic kubernetes` prints."""
    out = io.StringIO()
    with contextlib.redirect_stdout(out):
        assert cli.main(["kubernetes", command, *words]) == 0
    return parsed(out.getvalue())


def secrets(name: str, folder: Path) -> list[Object]:
    """Secrets of the user: certificates as in docs/operate/kubernetes.md, and the join token."""
    etcd, files = folder / "etcd", ("ca.crt", "tls.crt", "tls.key")
    for out, hosts in ((folder, name), (etcd, "/".join(certificate_names(name)))):
        assert cli.main(["certs", "--out", str(out), "--hosts", hosts]) == 0
    content = {
        "certs": {file: (folder / name / file).read_text() for file in files},
        "etcd-certs": {file: (etcd / f"{name}-etcd" / file).read_text() for file in files},
        "token": {"token": "5e" * 32 + "\n"},
    }
    return [
        {"kind": "Secret", "metadata": {"name": f"{name}-{rest}"}, "stringData": data}
        for rest, data in content.items()
    ]


def certificate_names(name: str) -> list[str]:
    """Names that the certificate of a job's etcd carries: of the service and of its members."""
    etcd = f"{name}-etcd"
    return [etcd, *(f"{etcd}-{index}.{etcd}" for index in range(3))]


def job_cluster(
    folder: Path, kind: str, nodes: int, *flags: str, pace: tuple[str, ...] = PACE
) -> Cluster:
    """A cluster with the manifests of a job of `nodes` agents, by default with a single coordinator
    and a single member of etcd."""
    words = ("--name", "demo", "--image", "registry.example.com/train:1", "--kind", kind)
    exact = ("--env", "PET_ACCUMULATE=exact")
    overlay = () if "--overlay" in flags else ("--overlay", "local")
    objects = render(*words, "--nodes", f"2:{nodes}", *exact, *overlay, *flags, *TRAIN, *pace)
    objects += printed("claim", "--name", "demo")
    return Cluster([*objects, *secrets("demo", folder / "certs")], folder)


class JobRun:
    """A job of `nodes` agents on a cluster that ends with the `with` block."""

    def __init__(
        self, folder: Path, kind: str, nodes: int, *flags: str, pace: tuple[str, ...] = PACE
    ) -> None:
        self.cluster = job_cluster(folder, kind, nodes, *flags, pace=pace)
        self.objects = self.cluster.objects
        self.agents: list[Pod] = []
        self.coordinators: list[Pod] = []

    def __enter__(self) -> JobRun:
        try:
            etcd = self.cluster.start("etcd")
            wait_for("etcd", lambda: all(pod.ready() for pod in etcd), self.cluster)
            self.coordinators = self.cluster.start("coordinator")
            self.agents = self.cluster.start("agent")
        except BaseException:
            self.cluster.__exit__()
            raise
        return self

    def __exit__(self, *error: object) -> None:
        self.cluster.__exit__(*error)

    # ---- progress and events ----

    @property
    def events(self) -> list[dict[str, Any]]:
        """Events of all coordinators, ordered by time."""
        found = [event for pod in self.coordinators for event in _lines(pod, "events.jsonl")]
        return sorted(found, key=lambda event: float(event["at"]))

    @property
    def step(self) -> int:
        return max((int(line.get("step", 0)) for line in self._progress()), default=0)

    @property
    def nodes(self) -> int:
        """Number of nodes with stages, by the newest line of progress."""
        lines = sorted(self._progress(), key=lambda line: float(line["at"]))
        return int(lines[-1].get("nodes", 0)) if lines else 0

    def recoveries(self) -> list[dict[str, Any]]:
        return [event for event in self.events if event["kind"] == "recovery"]

    def wait_for_step(self, step: int) -> None:
        wait_for(f"step {step}", lambda: self.step >= step, self.cluster)

    def wait_for_change(self, *names: str) -> dict[str, Any]:
        """The first change of plan that one of these nodes caused."""

        def found() -> dict[str, Any] | None:
            return next(
                (r for r in self.recoveries() if set(names) & set(r["cause"].split())), None
            )

        return dict(wait_for(f"a change for {names}", found, self.cluster))

    def plans(self) -> list[str]:
        return [str(event["text"]) for event in self.events if event["kind"] == "plan"]

    def wait_for_everybody(self, before: int) -> None:
        """Wait until a plan after the first `before` plans has a stage on each agent."""

        def planned() -> bool:
            newest = self.plans()[before:][-1:]
            return bool(newest) and all(f"{agent.name}[" in newest[0] for agent in self.agents)

        wait_for("a plan with everybody", planned, self.cluster)

    def finish(self) -> dict[str, Any]:
        """Let the training run to its end at full speed; return its summary. Every due checkpoint
        must be whole."""
        (self.cluster.claim("demo-checkpoints") / "hurry").touch()
        ended = lambda: [pod for pod in self.coordinators if not pod.running]  # noqa: E731
        pod = wait_for("the end", ended, self.cluster)[0]
        assert pod.process is not None and pod.process.returncode == 0, self.cluster.logs()
        runs = (run_dir(pod) / "summary.json" for pod in self.coordinators)  # that of the leader
        summary = dict(json.loads(next(run for run in runs if run.exists()).read_text()))
        directory = self.cluster.claim("demo-checkpoints")
        checkpoints.assert_written(
            directory, checkpoints.due(TRAIN), summary["params_sha256"], self.cluster.logs()
        )
        return summary

    def give_back(self) -> tuple[Pod, dict[str, Any]]:
        """Let the training run to its end, with all controllers at work, until the end Job is over.
        Return its pod and the summary of the training."""
        cluster = self.cluster
        cluster.controllers.control("coordinator", "agent", "end")
        wait_for("the end Job", lambda: cluster.of("end"), cluster)
        (cluster.claim("demo-checkpoints") / "hurry").touch()
        ended = lambda: [pod for pod in cluster.of("end") if pod.code in (0, 3, 5)]  # noqa: E731
        (pod,) = wait_for("the end of the end Job", ended, cluster)
        released = lambda: not cluster.of("agent") and not cluster.of("coordinator")  # noqa: E731
        wait_for("the release of the machines", released, cluster)
        runs = [pod.volume("/elastic/run") / "runs" for pod in self.coordinators]
        (first, *_) = [file for run in runs for file in sorted(run.glob("*/summary.json"))]
        return pod, dict(json.loads(first.read_text()))

    def _progress(self) -> Iterator[dict[str, Any]]:
        for pod in self.coordinators:
            yield from _lines(pod, "progress.jsonl")


def reference(folder: Path) -> dict[str, Any]:
    """Summary of the same training without namespaces and failures."""
    flags = ["--nnodes", "2", "--pipelines", "1", "--accumulate", "exact"]
    return made_once(folder, flags, TRAIN).summary


def allowed(objects: list[Object], pod: Pod) -> list[range]:
    """The ports of a pod that network policies let others reach; everything if none selects it."""
    mine = [
        item["spec"]
        for item in objects
        if item["kind"] == "NetworkPolicy" and "Ingress" in item["spec"]["policyTypes"]
        and item["spec"]["podSelector"]["matchLabels"].items() <= pod.labels.items()
    ]  # fmt: skip
    if not mine:
        return [range(1 << 16)]
    ports = [port for spec in mine for rule in spec.get("ingress", ()) for port in rule["ports"]]
    return [range(port["port"], port.get("endPort", port["port"]) + 1) for port in ports]


def run_dir(pod: Pod) -> Path:
    return pod.volume("/elastic/run") / "runs" / "latest"


def _lines(pod: Pod, name: str) -> list[dict[str, Any]]:
    """The whole lines of a file of JSON lines."""
    try:
        text = (run_dir(pod) / name).read_text()
    except OSError:
        return []
    return [json.loads(line) for line in text.splitlines(keepends=True) if line.endswith("\n")]
