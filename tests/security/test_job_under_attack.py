"""A whole job with certificates: through a kill, and under attack at all of its ports."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import socket
import threading
import time
from pathlib import Path
from typing import Any

import grpc
import pytest
from msgspec.structs import replace

from elastic.core.protocol.messages import Fenced, Heartbeat, Stop
from elastic.domain.errors import ElasticError, UsageError, VaultError
from elastic.launcher import cli
from elastic.rpc.bulk.transfer import VaultClient
from elastic.rpc.control.channel_options import client_options
from elastic.rpc.control.client import ANNOUNCEMENT, CoordinatorStub, _channel, call
from elastic.rpc.control.envelope import CHALLENGE, pack
from elastic.rpc.security.tls import CA, TOKEN_FILE, SecuritySettings, read_token
from elastic.rpc.security.token_proof import answer
from tests.launcher.helpers import wait_until
from tests.patience import LONG_S
from tests.scenarios.harness import Run, elastic_run
from tests.scenarios.paced import STEPS, TRAIN, paced, paced_reference
from tests.scenarios.shared import exact, faults
from tests.security.parts import WRONG, Authority

WAIT_S = LONG_S


def running(run_dir: Path, certs: Path) -> tuple[str, SecuritySettings, dict[str, Any]]:
    """The coordinator's address, what its members know, and its status, once it trains."""
    end = time.monotonic() + WAIT_S
    while time.monotonic() < end:
        with contextlib.suppress(OSError, ElasticError, ValueError):
            address = json.loads((run_dir / "coordinator.json").read_text())["address"]
            mine = SecuritySettings(certs, "", read_token(run_dir / TOKEN_FILE))
            status = call(address, "status", {}, secure=mine)
            if status["phase"] == "running" and status["step"] >= 1:
                return address, mine, status
        threading.Event().wait(0.5)  # each call costs a handshake, in the time of the job
    raise AssertionError("the job does not run")


def forge(
    address: str, mine: SecuritySettings, sender: str, messages: list[tuple[object, int]]
) -> None:
    """Say things on a session of `sender`, as somebody who has certificate and token."""
    nonce = str(call(address, CHALLENGE, {"nonce": "0"}, secure=mine)["nonce"])
    metadata = (
        ANNOUNCEMENT,
        ("sender", sender),
        ("nonce", nonce),
        ("proof", answer(mine.token, nonce, "session", sender)),
    )
    said = [
        replace(pack(message, term=0, epoch=0), sequence=number) for message, number in messages
    ]
    with _channel(grpc, address, client_options(5.0), mine) as channel:
        list(CoordinatorStub(channel).session(iter(said), metadata=metadata, timeout=10))


def attack(
    address: str, mine: SecuritySettings, vault: str, authority: Authority, place: Path
) -> None:
    """Everything of the acceptance list, at both ports."""
    foreign = place / "foreign"
    shutil.copytree(authority.foreign, foreign)
    expired = place / "expired"
    shutil.copytree(authority.expired, expired)
    for certs in (foreign, expired):
        shutil.copy(authority.good / CA, certs / CA)
    others = [
        SecuritySettings(None, "", mine.token),
        *(SecuritySettings(c, "", mine.token) for c in (foreign, expired)),
    ]
    for who in (
        *others,
        SecuritySettings(mine.certs, "", ""),
        SecuritySettings(mine.certs, "", WRONG),
    ):
        with contextlib.suppress(UsageError):
            call(address, "drain", {"node": "node1", "deadline_s": 0}, secure=who, timeout_s=5)
            raise AssertionError(who)
        with contextlib.suppress(VaultError):
            VaultClient(vault, node="node0", timeout_s=LONG_S, secure=who).inventory()
            raise AssertionError(who)
    for where in (address, vault):
        for _ in range(20):
            host, _, port = where.rpartition(":")
            with (
                socket.create_connection((host, int(port)), timeout=LONG_S) as sock,
                contextlib.suppress(OSError),
            ):
                sock.sendall(b"\xff" + os.urandom(499))
    with contextlib.suppress(UsageError):
        call(address, "echo", {"x": "y" * (1 << 20)}, secure=mine)
    stale = Heartbeat("node1", "of-old", 99, 0)
    forge(address, mine, "node9", [(stale, 1), (Stop(3), 2), (Stop(3), 2), (Fenced("you"), 3)])
    forge(address, mine, "node1", [(stale, 1)])


def test_attacked_on_all_ports_it_trains_on(tmp_path: Path, authority: Authority) -> None:
    found: list[Run] = []
    flags = exact("--nnodes", "2", "--pipelines", "1", "--certs", str(authority.good))
    job = threading.Thread(
        target=lambda: found.append(elastic_run(tmp_path / "run", flags, paced(tmp_path / "hurry")))
    )
    job.start()
    try:
        address, mine, status = running(tmp_path / "run", authority.good)
        attack(address, mine, status["nodes"][1]["vault"], authority, tmp_path)
        hit = call(address, "status", {}, secure=mine)
        assert wait_until(
            lambda: call(address, "status", {}, secure=mine)["step"] >= hit["step"] + 2
        )
        after = call(address, "status", {}, secure=mine)
    finally:
        (tmp_path / "hurry").touch()
        job.join()
    (run,) = found
    assert run.code == 0, run.output
    assert after["step"] < STEPS, "the attack came too late"
    assert not any(node["draining"] for node in after["nodes"])
    assert not [r for r in run.summary["recoveries"] if not r["planned"]]
    assert run.summary["params_sha256"] == paced_reference(tmp_path).summary["params_sha256"]
    told = {(e["port"], e["reason"]) for e in run.events if e["kind"] == "refused"}
    assert {("vault", reason) for reason in ("plain-text", "wrong-ca", "expired", "token")} <= told
    coordinator = ("handshake", "token", "oversize", "replayed", "forged", "stale")
    assert {("coordinator", reason) for reason in coordinator} <= told
    assert all(
        e["count"] >= 1 and e["total"] >= e["count"] for e in run.events if e["kind"] == "refused"
    )
    assert [e["what"] for e in run.events if e["kind"] == "unencrypted"] == ["workers"]
    written = b"".join(
        path.read_bytes() for path in (tmp_path / "run").rglob("*") if path.is_file()
    )
    assert mine.token.encode() not in written and mine.token not in run.output
    assert not [e for e in run.events if e["kind"] in ("lost", "drain")]


@pytest.mark.chaos  # test_expired_job loses a node in a job with certificates, too
def test_a_kill_with_certificates_and_commands(tmp_path: Path, authority: Authority) -> None:
    flags = exact("--nnodes", "3", "--pipelines", "1", "--certs", str(authority.good))
    run = elastic_run(tmp_path / "run", [*flags, *faults("kill node=1 step=2 microbatch=3")], TRAIN)
    assert run.code == 0, run.output
    assert [r["nodes_after"] for r in run.summary["recoveries"] if not r["planned"]] == [2]
    assert run.summary["params_sha256"] == paced_reference(tmp_path).summary["params_sha256"]
    assert not [e for e in run.events if e["kind"] == "refused"]
    assert cli.main(["status", "--run-dir", str(tmp_path / "run")]) == 2  # over: a clear answer
