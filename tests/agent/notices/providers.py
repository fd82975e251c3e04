"""Fake metadata services: real HTTP servers that speak each cloud's protocol.

A path begins with the name of a machine, so that one server serves many machines.
"""

from __future__ import annotations

import json
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any, ClassVar
from urllib.parse import parse_qs, urlsplit

from tests.patience import LONG_S


class Provider:
    """Common parts: values per machine and path, a record of requests, and faults to inject."""

    def __init__(self) -> None:
        self.values: dict[tuple[str, str], Any] = {}
        self.asked: list[tuple[str, str, str]] = []
        """(method, machine, path)."""
        self.broken = ""
        """Fault of all answers: down (503), nonsense, huge or silent."""
        self.failing = ""
        """Path that answers 503."""
        self.changed = threading.Condition()
        self.closing = threading.Event()
        handler = type("Handler", (_Handler,), {"provider": self})
        self._server = ThreadingHTTPServer(("127.0.0.1", 0), handler)
        self._server.daemon_threads = True
        threading.Thread(target=self._server.serve_forever, args=(0.02,), daemon=True).start()

    @property
    def address(self) -> str:
        return f"127.0.0.1:{self._server.server_address[1]}"

    def set(self, machine: str, path: str, value: Any) -> None:
        with self.changed:
            self.values[machine, path] = value
            self.changed.notify_all()

    def forget(self, machine: str, path: str) -> None:
        with self.changed:
            self.values.pop((machine, path), None)
            self.changed.notify_all()

    def close(self) -> None:
        self.closing.set()
        with self.changed:
            self.changed.notify_all()
        self._server.shutdown()
        self._server.server_close()

    def answer(self, request: _Handler, machine: str, path: str, query: dict[str, str]) -> None:
        raise NotImplementedError


class _Handler(BaseHTTPRequestHandler):
    provider: ClassVar[Provider]

    def _serve(self) -> None:
        parts = urlsplit(self.path)
        _, machine, rest = (
            parts.path.split("/", 2) if parts.path.count("/") > 1 else ("", "", parts.path[1:])
        )
        query = {name: values[0] for name, values in parse_qs(parts.query).items()}
        self.provider.asked.append((self.command, machine, f"/{rest}"))
        match self.provider.broken:
            case _ if f"/{rest}" == self.provider.failing:
                self.reply(503, "unavailable")
            case "down":
                self.reply(503, "unavailable")
            case "nonsense":
                self.reply(200, "<html>hello</html>")
            case "huge":
                self.reply(200, "x" * 200_000)
            case "silent":
                self.provider.closing.wait(LONG_S)
            case _:
                self.provider.answer(self, machine, f"/{rest}", query)

    do_GET = do_PUT = do_POST = _serve

    def body(self) -> str:
        return self.rfile.read(int(self.headers.get("Content-Length", "0"))).decode()

    def reply(self, status: int, text: str, **headers: str) -> None:
        content = text.encode()
        self.send_response(status)
        for name, value in {"Content-Length": str(len(content)), **headers}.items():
            self.send_header(name.replace("_", "-"), value)
        self.end_headers()
        self.wfile.write(content)

    def log_message(self, format: str, *args: Any) -> None:
        """Log nothing."""


class FakeAws(Provider):
    """IMDSv2: requests need a token, which expires after `uses` requests."""

    ACTION, REBALANCE = (
        "/latest/meta-data/spot/instance-action",
        "/latest/meta-data/events/recommendations/rebalance",
    )

    def __init__(self, uses: int = 1000) -> None:
        self.uses = uses
        self.tokens: dict[str, int] = {}
        self._made = 0
        super().__init__()

    def answer(self, request: _Handler, machine: str, path: str, query: dict[str, str]) -> None:
        if path == "/latest/api/token":
            ttl = request.headers.get("X-aws-ec2-metadata-token-ttl-seconds", "")
            if request.command != "PUT" or not ttl.isdigit() or not 1 <= int(ttl) <= 21600:
                return request.reply(400, "bad request")
            self._made += 1
            token = f"token-{self._made}=="
            self.tokens[token] = self.uses
            return request.reply(200, token)
        token = request.headers.get("X-aws-ec2-metadata-token", "")
        if self.tokens.get(token, 0) <= 0:
            return request.reply(401, "unauthorized")
        self.tokens[token] -= 1
        if (machine, path) not in self.values:
            return request.reply(404, "not found")
        return request.reply(200, json.dumps(self.values[machine, path]))


class FakeGcp(Provider):
    """Answers requests with the header only, and waits for a change on request."""

    PREEMPTED, MAINTENANCE = (
        "/computeMetadata/v1/instance/preempted",
        "/computeMetadata/v1/instance/maintenance-event",
    )

    def answer(self, request: _Handler, machine: str, path: str, query: dict[str, str]) -> None:
        if request.headers.get("Metadata-Flavor") != "Google":
            return request.reply(403, "Missing Metadata-Flavor:Google header.")
        if path == "/":
            return request.reply(200, "computeMetadata/\n", Metadata_Flavor="Google")
        defaults = {self.PREEMPTED: "FALSE", self.MAINTENANCE: "NONE"}
        if path not in defaults:
            return request.reply(404, "not found")

        def value() -> str:
            return str(self.values.get((machine, path), defaults[path]))

        with self.changed:
            if query.get("wait_for_change") == "true":
                limit = float(query.get("timeout_sec", "60"))
                self.changed.wait_for(
                    lambda: _etag(value()) != query.get("last_etag") or self.closing.is_set(), limit
                )
            text = value()
        return request.reply(200, text, Metadata_Flavor="Google", ETag=_etag(text))


def _etag(text: str) -> str:
    return text.encode().hex()[:16]


class FakeAzure(Provider):
    """Scheduled Events of several machines. StartRequests are recorded and start the event."""

    EVENTS, NAME = "/metadata/scheduledevents", "/metadata/instance/compute/name"

    def __init__(self) -> None:
        self.events: list[dict[str, Any]] = []
        self.started: list[str] = []
        super().__init__()

    def answer(self, request: _Handler, machine: str, path: str, query: dict[str, str]) -> None:
        if request.headers.get("Metadata") != "true":
            return request.reply(400, "Bad request. Required metadata header not specified")
        if path == "/metadata/versions":
            return request.reply(200, json.dumps({"apiVersions": ["2020-07-01", "2021-02-01"]}))
        if path == self.NAME and query.get("format") == "text":
            return request.reply(200, f"VM_{machine}")
        if path != self.EVENTS or query.get("api-version") != "2020-07-01":
            return request.reply(400, "bad request")
        if request.command == "POST":
            wanted = [one["EventId"] for one in json.loads(request.body())["StartRequests"]]
            with self.changed:
                self.started += wanted
                self.changed.notify_all()
            return request.reply(200, "")
        return request.reply(200, json.dumps({"DocumentIncarnation": 1, "Events": self.events}))

    def await_start(self, event: str, limit_s: float) -> bool:
        """Wait until `event` is acknowledged; return False after `limit_s`."""
        with self.changed:
            return self.changed.wait_for(lambda: event in self.started, limit_s)

    def schedule(
        self, event: str, kind: str, *machines: str, not_before: str, duration_s: int = -1
    ) -> None:
        self.events = [
            *self.events,
            {
                "EventId": event,
                "EventStatus": "Scheduled",
                "EventType": kind,
                "ResourceType": "VirtualMachine",
                "Resources": [f"vm_{machine}" for machine in machines],
                "NotBefore": not_before,
                "Description": "",
                "EventSource": "Platform",
                "DurationInSeconds": duration_s,
            },
        ]
