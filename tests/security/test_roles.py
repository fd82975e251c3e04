"""Tokens of roles: who may read, who may drain, and that events name the caller."""

from __future__ import annotations

import getpass
import json
import socket
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from elastic.domain.errors import EXIT_USAGE, FieldError, UsageError
from elastic.launcher.cli import main
from elastic.rpc.control import client
from elastic.rpc.control.client import CoordinatorSession, call
from elastic.rpc.control.envelope import unpack_call
from elastic.rpc.control.server import Caller
from elastic.rpc.security.rejections import REJECTIONS, Reason
from elastic.rpc.security.roles import CHANGES, LESSER, READS, Role, role_of, token_of
from elastic.rpc.security.tls import SecuritySettings
from tests.launcher.helpers import read, wait_until
from tests.rpc.conftest import Recorder, ServerBench

TOKEN = "a-join-token-of-the-tests"
ME = f"{getpass.getuser()}@{socket.gethostname()}"
Calls = list[tuple[str, dict[str, Any]]]


@pytest.fixture
def calls() -> Calls:
    return []


@pytest.fixture
def address(calls: Calls) -> Iterator[str]:
    def on_call(kind: str, body: dict[str, Any]) -> dict[str, Any]:
        calls.append((kind, body))
        return {"done": kind}

    bench = ServerBench(on_call=on_call, secure=SecuritySettings(token=TOKEN))
    yield bench.address
    bench.server.close()


def ask(address: str, kind: str, token: str) -> dict[str, Any]:
    return call(address, kind, {"node": "node1"}, secure=SecuritySettings(token=token))


def test_tokens_name_their_role_and_differ() -> None:
    tokens = {role: token_of(role, TOKEN) for role in Role}
    assert {role_of(token): role for role, token in tokens.items()} == {r: r for r in Role}
    assert tokens[Role.MEMBER] == TOKEN and len({*tokens.values()}) == 3
    assert token_of(Role.VIEWER, "another-join-token") != tokens[Role.VIEWER]
    assert role_of("viewer-of-all-tokens") is Role.MEMBER, "a join token may begin like one"
    assert token_of(Role.VIEWER, "") == ""


@pytest.mark.parametrize("kind", READS)
@pytest.mark.parametrize("role", Role)
def test_everybody_reads(address: str, calls: Calls, role: Role, kind: str) -> None:
    assert ask(address, kind, token_of(role, TOKEN)) == {"done": kind}
    assert calls == [(kind, {"node": "node1"})]


@pytest.mark.parametrize("role", [Role.MEMBER, Role.OPERATOR])
def test_an_operator_changes_the_job_and_is_named(address: str, calls: Calls, role: Role) -> None:
    for kind in CHANGES:
        ask(address, kind, token_of(role, TOKEN))
        (asked, body) = calls.pop()
        assert asked == kind and body["by"].startswith(f"{role} {ME} at ipv4:127.0.0.1:")


def test_a_caller_cannot_name_somebody_else(address: str, calls: Calls) -> None:
    body = {"node": "node1", "by": "somebody else"}
    call(address, "drain", body, secure=SecuritySettings(token=TOKEN))
    assert calls[0][1]["by"].startswith(f"member {ME}")


def test_a_viewer_changes_nothing(address: str, calls: Calls) -> None:
    before = REJECTIONS.counts().get(("coordinator", Reason.FORGED), 0)
    for kind in (*CHANGES, "unknown"):
        with pytest.raises(UsageError, match=f"a viewer may only read; {kind} needs .*operator"):
            ask(address, kind, token_of(Role.VIEWER, TOKEN))
    assert calls == []
    assert REJECTIONS.counts()[("coordinator", Reason.FORGED)] == before + len(CHANGES) + 1


def test_a_viewer_that_claims_another_role_is_refused(
    address: str, calls: Calls, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(client, "role_of", lambda token: Role.OPERATOR)
    with pytest.raises(UsageError, match="does not know the join token"):
        ask(address, "drain", token_of(Role.VIEWER, TOKEN))
    monkeypatch.setattr(client, "proved", lambda *_: True)
    with pytest.raises(UsageError, match="the join token is missing or wrong"):
        ask(address, "drain", token_of(Role.VIEWER, TOKEN))
    assert calls == []


@pytest.mark.parametrize("role", LESSER)
def test_no_node_joins_with_the_token_of_a_lesser_role(address: str, role: Role) -> None:
    told = Recorder()
    callbacks: dict[str, Any] = {
        name: told.callback(name) for name in ("on_message", "on_up", "on_down")
    }
    mine = SecuritySettings(token=token_of(role, TOKEN))
    session = CoordinatorSession(address, sender="node0", secure=mine, **callbacks)
    try:
        assert wait_until(lambda: "join token" in session.problem), session.problem
    finally:
        session.close()


@pytest.mark.parametrize("role", LESSER)
def test_a_node_is_refused_before_it_starts(tmp_path: Path, role: Role) -> None:
    file = tmp_path / "token"
    file.write_text(token_of(role, TOKEN) + "\n")
    with pytest.raises(FieldError, match=f"job's {role}, and nodes need the join token"):
        read("--standalone", "--join-token-file", str(file), "-m", "json.tool")


def test_the_command_prints_the_token(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "join.token").write_text(TOKEN + "\n")
    assert main(["token", "--role", "viewer", "--run-dir", str(tmp_path)]) == 0
    assert capsys.readouterr().out == token_of(Role.VIEWER, TOKEN) + "\n"
    file = tmp_path / "operator"
    file.write_text(token_of(Role.OPERATOR, TOKEN))
    assert main(["token", "--role", "viewer", "--join-token-file", str(file)]) == EXIT_USAGE
    assert "nodes need the join token" in capsys.readouterr().err
    assert main(["token", "--role", "viewer", "--run-dir", str(tmp_path / "none")]) == EXIT_USAGE
    assert "no join token is there" in capsys.readouterr().err


def test_a_coordinator_of_the_former_version_is_called_without_a_role(
    address: str, calls: Calls, monkeypatch: pytest.MonkeyPatch
) -> None:
    def former(envelope: Any) -> dict[str, Any]:
        return {key: value for key, value in unpack_call(envelope).items() if key != "roles"}

    monkeypatch.setattr(client, "unpack_call", former)
    ask(address, "drain", TOKEN)
    assert calls[0][1]["by"].startswith("member unnamed at ")
    assert json.dumps(calls[0][1])


@pytest.mark.parametrize("name", ["a\nb", "\x1b[2Ja", "\x7f"])
def test_a_name_that_could_forge_lines_is_not_taken(name: str) -> None:
    class Context:
        def invocation_metadata(self) -> tuple[tuple[str, str], ...]:
            return ("caller", name), ("role", "operator")

        def peer(self) -> str:
            return "ipv4:10.0.0.1:9"

    assert str(Caller.of(Context())) == "operator unnamed at ipv4:10.0.0.1:9"
