"""The error of a connection names its likely cause: another program, or one side without TLS."""

from __future__ import annotations

import http.server
import threading
from collections.abc import Iterator

import pytest

from elastic.domain.errors import UsageError
from elastic.rpc.control.client import call
from elastic.rpc.control.connection_errors import FOREIGN, NEEDS_NONE, NEEDS_TLS, explained
from tests.launcher.helpers import wait_until
from tests.rpc.conftest import ClientBench


@pytest.fixture
def web_server() -> Iterator[str]:
    """Address of a program that is no coordinator."""
    with http.server.HTTPServer(("127.0.0.1", 0), http.server.BaseHTTPRequestHandler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f"127.0.0.1:{server.server_port}"
        server.shutdown()


def test_another_program_has_the_address_of_the_coordinator(web_server: str) -> None:
    with pytest.raises(UsageError, match="another program answers there"):
        call(web_server, "status", {})
    client = ClientBench(web_server)
    assert wait_until(lambda: client.session.problem.startswith("another program answers there"))
    client.session.close()


@pytest.mark.parametrize(
    ("text", "cause"),
    [
        ("Failed parsing HTTP/2 (Expected SETTINGS frame as the first frame)", FOREIGN),
        ("connection attempt timed out before receiving SETTINGS frame", FOREIGN),
        ("ipv4:127.0.0.1:1: Socket closed", NEEDS_TLS),
        ("recvmsg:Connection reset by peer", NEEDS_TLS),
        ("SSL_ERROR_SSL: error:100000f7:SSL routines:WRONG_VERSION_NUMBER", NEEDS_NONE),
    ],
)
def test_likely_causes(text: str, cause: str) -> None:
    assert explained(text) == f"{cause} ({text})"


def test_other_errors_speak_for_themselves() -> None:
    assert explained("Connection refused") == "Connection refused"
