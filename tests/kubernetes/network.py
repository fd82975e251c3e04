"""A network of namespaces: one per pod, joined by a switch in one more namespace.

Nothing is made in the machine's own namespace, so parallel runs do not interfere. A port that is
moved to the island is cut off from the others: packets are lost and sockets stay open, as when a
cable is pulled.
"""

from __future__ import annotations

import itertools
import os
import shutil
import subprocess
import sys
from pathlib import Path

SWITCH, MAIN, ISLAND = "switch", "br0", "br1"
SUBNET = "10.99"
NOBODY = "02:00:00:00:00:00"
"""Hardware address of no namespace."""
_counter = itertools.count()


def missing() -> str:
    """Reason why this machine cannot have such a network; "" if it can."""
    if os.geteuid() != 0:
        return "network namespaces need root"
    for tool in ("ip", "unshare", "nsenter", "setpriv", "mount", "chroot"):
        if shutil.which(tool) is None:
            return f"{tool} is not installed"
    probe = f"elx{os.getpid()}-probe"
    try:
        ip("netns", "add", probe)
        try:
            ip("-n", probe, "link", "add", "br0", "type", "bridge")
            ip("-n", probe, "link", "add", "va", "type", "veth", "peer", "name", "vb")
            unshare = ["unshare", "--mount", "--pid", "--fork", "--uts", "true"]
            subprocess.run(
                ["ip", "netns", "exec", probe, *unshare], check=True, capture_output=True
            )
        finally:
            ip("netns", "del", probe)
    except subprocess.CalledProcessError as error:
        why = error.stderr.decode(errors="replace").strip()
        return f"network namespaces cannot be made here: {why}"
    return ""


def ip(*words: str) -> str:
    """Run ip(8) and return its output. Raises CalledProcessError."""
    return subprocess.run(["ip", *words], check=True, capture_output=True).stdout.decode()


class Network:
    """The switch and its ports. `close` removes everything in any state."""

    def __init__(self) -> None:
        self._tag = f"elx{os.getpid()}-{next(_counter)}"
        self._namespaces: list[str] = []
        self._ports: dict[str, str] = {}
        self._addresses: dict[str, str] = {}
        self._hosts: dict[str, str] = {}
        self._next = itertools.count(10)
        self._switch = self._namespace(SWITCH)
        for bridge in (MAIN, ISLAND):
            ip("-n", self._switch, "link", "add", bridge, "type", "bridge")
            ip("-n", self._switch, "link", "set", bridge, "up")

    def add(self, name: str) -> tuple[str, str]:
        """A namespace on the switch: (its name, its address)."""
        space, number = self._namespace(name), next(self._next)
        port, address = f"p{number}", f"{SUBNET}.{number // 250}.{number % 250 + 1}"
        ip(
            "-n",
            self._switch,
            "link",
            "add",
            port,
            "type",
            "veth",
            "peer",
            "name",
            "eth0",
            "netns",
            space,
        )
        ip("-n", space, "addr", "add", f"{address}/16", "dev", "eth0")
        ip("-n", space, "link", "set", "eth0", "up")
        ip("-n", self._switch, "link", "set", port, "master", MAIN, "up")
        self._ports[space], self._addresses[space] = port, address
        self._write_hosts()
        return space, address

    @property
    def switch(self) -> str:
        """Namespace of the switch."""
        return self._switch

    def service_address(self) -> str:
        """Give the switch an address that all namespaces reach; return it."""
        address = f"{SUBNET}.255.254"
        ip("-n", self._switch, "addr", "add", f"{address}/16", "dev", MAIN)
        return address

    def remove(self, space: str) -> None:
        """Take a namespace away; its processes must have ended."""
        ip("netns", "del", space)
        shutil.rmtree(_etc(space), ignore_errors=True)
        self._namespaces.remove(space)
        del self._ports[space], self._addresses[space]

    def cut(self, *spaces: str) -> None:
        """Move ports to the island: they reach only each other."""
        for space in spaces:
            ip("-n", self._switch, "link", "set", self._ports[space], "master", ISLAND)

    def heal(self, *spaces: str) -> None:
        """Move ports back."""
        for space in spaces:
            ip("-n", self._switch, "link", "set", self._ports[space], "master", MAIN)

    def part(self, space: str, *others: str) -> None:
        """Drop all packets between a namespace and others in silence; it still reaches the rest.

        Both sides send to a hardware address that nobody has.
        """
        for here, there in self._pairs(space, others):
            to = ("to", self._addresses[there], "dev", "eth0", "lladdr", NOBODY, "nud", "permanent")
            ip("-n", here, "neigh", "replace", *to)

    def unite(self, space: str, *others: str) -> None:
        """End what `part` began."""
        for here, there in self._pairs(space, others):
            ip("-n", here, "neigh", "del", "to", self._addresses[there], "dev", "eth0")

    def _pairs(self, space: str, others: tuple[str, ...]) -> list[tuple[str, str]]:
        return [pair for other in others for pair in ((space, other), (other, space))]

    def drop_large(self, space: str, mtu: int) -> None:
        """Let the switch drop packets of more than `mtu` bytes from and to a namespace in silence.

        The hosts still send packets of 1500 bytes. They send them one by one, because a bridge
        forwards larger bundles (GSO) unchecked.
        """
        for one in self._ports:
            ip("-n", one, "link", "set", "eth0", "gso_max_segs", "1")
        ip("-n", self._switch, "link", "set", self._ports[space], "mtu", str(mtu))

    def names(self, hosts: dict[str, list[str]]) -> None:
        """Set the names that every namespace resolves: name -> addresses."""
        self._hosts = {
            "hosts": "".join(f"{a}\t{name}\n" for name, all_ in hosts.items() for a in all_)
        }
        self._write_hosts()

    def listening(self, space: str) -> set[int]:
        """TCP ports that can be reached in a namespace from outside."""
        command = ["ip", "netns", "exec", space, "ss", "-ltnH"]
        lines = (
            subprocess.run(command, check=True, capture_output=True).stdout.decode().splitlines()
        )
        places = [line.split()[3].rpartition(":") for line in lines]
        return {
            int(port)
            for host, _, port in places
            if not host.strip("[]").startswith(("127.", "::1"))
        }

    def close(self) -> None:
        for space in self._namespaces:
            subprocess.run(["ip", "netns", "del", space], check=False, capture_output=True)
            shutil.rmtree(_etc(space), ignore_errors=True)
        self._namespaces.clear()

    def _namespace(self, name: str) -> str:
        space = f"{self._tag}-{name}"
        ip("netns", "add", space)
        self._namespaces.append(space)
        ip("-n", space, "link", "set", "lo", "up")
        _etc(space).mkdir(parents=True, exist_ok=True)
        (_etc(space) / "resolv.conf").write_text("")
        (_etc(space) / "hosts").write_text("127.0.0.1\tlocalhost\n")
        return space

    def _write_hosts(self) -> None:
        """Write the files in place, because running pods have mounted them."""
        text = "127.0.0.1\tlocalhost\n" + self._hosts.get("hosts", "")
        for space in self._ports:
            (_etc(space) / "hosts").write_text(text)


def _etc(space: str) -> Path:
    """Folder that `ip netns exec` mounts over /etc for this namespace."""
    return Path("/etc/netns") / space


def python_in(space: str, program: str, *words: str) -> subprocess.Popen[str]:
    """Start a Python program in a namespace, with pipes for its input and output."""
    command = ["ip", "netns", "exec", space, sys.executable, "-c", program, *words]
    root = Path(__file__).resolve().parents[2]
    env, pipe = {**os.environ, "PYTHONPATH": str(root)}, subprocess.PIPE
    return subprocess.Popen(command, env=env, text=True, stdin=pipe, stdout=pipe)
