"""The HTTP hook: valid and invalid requests."""

from __future__ import annotations

import http.client
import json
import socket
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from elastic.agent.notices.hook import MAX_BODY_BYTES, NoticeHook
from elastic.domain.errors import FieldError
from tests.patience import LONG_S


@pytest.fixture
def hook(tmp_path: Path) -> Iterator[NoticeHook]:
    made = NoticeHook("127.0.0.1:0", "node3", tmp_path / "hooks" / "node3.json")
    yield made
    made.close()


def ask(
    hook: NoticeHook,
    method: str,
    body: str | bytes | None = None,
    path: str = "/notice",
    token: str | None = None,
) -> tuple[int, Any]:
    host, _, port = hook.address.rpartition(":")
    line = http.client.HTTPConnection(host, int(port), timeout=LONG_S)
    line.request(
        method, path, body, {"Authorization": f"Bearer {hook.token if token is None else token}"}
    )
    answer = line.getresponse()
    text = answer.read()
    line.close()
    return answer.status, json.loads(text) if text else None


def test_a_notice_is_posted_looked_at_and_taken_back(hook: NoticeHook) -> None:
    assert ask(hook, "GET") == (200, {"node": "node3", "deadline_s": None})
    assert ask(hook, "POST", '{"deadline_s": 120, "reason": "gpu quota"}') == (
        202,
        {"node": "node3", "deadline_s": 120},
    )
    (one,) = hook.read()
    assert 110 < one.deadline - time.monotonic() <= 120 and one.detail == "gpu quota"
    assert ask(hook, "POST", "60")[0] == 202
    assert hook.read()[0].identity == one.identity
    assert 50 < ask(hook, "GET")[1]["deadline_s"] <= 60
    assert ask(hook, "DELETE")[0] == 200 and hook.read() == ()
    assert ask(hook, "POST", "")[0] == 202
    assert hook.read()[0].identity != one.identity


@pytest.mark.parametrize(
    ("status", "request_"),
    [
        (401, {"method": "POST", "token": "wrong", "body": "1"}),
        (401, {"method": "GET", "token": ""}),
        (404, {"method": "GET", "path": "/"}),
        (404, {"method": "POST", "path": "/notice/x", "body": "1"}),
        (405, {"method": "PUT", "body": "1"}),
        (413, {"method": "POST", "body": "1" * (MAX_BODY_BYTES + 1)}),
        (400, {"method": "POST", "body": "soon"}),
        (400, {"method": "POST", "body": '{"deadline_s": -1}'}),
        (400, {"method": "POST", "body": '{"deadline_s": true}'}),
        (400, {"method": "POST", "body": '{"deadline_s": NaN}'}),
        (400, {"method": "POST", "body": '{"deadline_s": 1e300}'}),
        (400, {"method": "POST", "body": '{"minutes": 2}'}),
        (400, {"method": "POST", "body": b"\xff\xfe"}),
        (400, {"method": "POST", "body": '{"reason": 5}'}),
    ],
)
def test_bad_requests_are_refused_and_change_nothing(
    hook: NoticeHook, status: int, request_: dict[str, Any]
) -> None:
    assert ask(hook, **request_)[0] == status
    assert hook.read() == ()


def test_a_post_without_a_length_is_refused(hook: NoticeHook) -> None:
    host, _, port = hook.address.rpartition(":")
    with socket.create_connection((host, int(port)), 10) as line:
        line.sendall(
            b"POST /notice HTTP/1.1\r\nHost: x\r\n"
            + f"Authorization: Bearer {hook.token}\r\n\r\n".encode()
        )
        assert b" 411 " in line.recv(4096).split(b"\r\n")[0]
    assert hook.read() == ()


def test_the_card_is_for_the_owner_alone(hook: NoticeHook, tmp_path: Path) -> None:
    card = tmp_path / "hooks" / "node3.json"
    assert card.stat().st_mode & 0o777 == 0o600
    assert json.loads(card.read_text()) == {
        "address": hook.address,
        "token": hook.token,
        "node": "node3",
    }


def test_an_address_that_is_taken_is_a_clear_error(hook: NoticeHook, tmp_path: Path) -> None:
    with pytest.raises(FieldError, match="is not free"):
        NoticeHook(hook.address, "node4", tmp_path / "card.json")
