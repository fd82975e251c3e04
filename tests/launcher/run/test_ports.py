"""Ports that launchers choose."""

from __future__ import annotations

import contextlib
import random
import socket
import subprocess
import sys
from subprocess import PIPE

import pytest

from elastic.domain.errors import UsageError
from elastic.launcher.flags.request import LOOPBACK
from elastic.launcher.run import rundir
from elastic.launcher.run.rundir import free_port

OTHER = """
import sys
from elastic.launcher.run import rundir
rundir.PORTS = range(int(sys.argv[1]), int(sys.argv[2]))
print(rundir.free_port(), flush=True)
sys.stdin.read()
"""
"""A launcher whose coordinator has not bound its port yet."""


def two_free_ports() -> range:
    """Two ports next to each other that nobody uses."""
    for start in random.sample(rundir.PORTS, rundir.ATTEMPTS):
        with socket.socket() as one, socket.socket() as two, contextlib.suppress(OSError):
            one.bind((LOOPBACK, start))
            two.bind((LOOPBACK, start + 1))
            return range(start, start + 2)
    raise AssertionError("no free ports")


def test_two_launchers_choose_different_ports(monkeypatch: pytest.MonkeyPatch) -> None:
    """Between the choice and the start of the coordinator, seconds pass on a busy machine."""
    ports = two_free_ports()
    monkeypatch.setattr(rundir, "PORTS", ports)
    mine = free_port()
    command = [sys.executable, "-c", OTHER, str(ports.start), str(ports.stop)]
    with subprocess.Popen(command, stdin=PIPE, stdout=PIPE, text=True) as other:
        assert other.stdout is not None
        theirs = int(other.stdout.readline())
        assert {mine, theirs} == {*ports}
        with pytest.raises(UsageError, match=f"from {ports.start} to {ports.stop - 1}"):
            free_port()
        other.communicate()
    assert free_port() == theirs, "it is free again"
