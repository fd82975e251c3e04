"""An HTTP hook for in-house schedulers: POST, GET and DELETE /notice, each with `Authorization: Bearer TOKEN`.

    POST    {"deadline_s": 120, "reason": "..."}, a number, or nothing (30 s)    202
    DELETE  takes it back                                                        200
    GET     what stands                                                          200

Bad requests are refused: 400 (content), 401 (token), 404, 405, 411 (no length), 413 (more than 4 KiB).
"""

from __future__ import annotations

import hmac
import json
import logging
import os
import secrets
import threading
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

from elastic.agent.notices.parsing import read_told
from elastic.core.node.notice_tracker import ProviderNotice
from elastic.core.protocol.messages import NoticeKind
from elastic.domain.errors import FieldError

log = logging.getLogger("elastic.agent.notices")
MOST_BYTES = 4096
CLIENT_S = 5.0
"""A client that says nothing for this long is dropped."""
LOOK_EVERY_S = 0.1
PATH = "/notice"


class Hook:
    """Listens at `address` (host:port) until closed. Raises FieldError if the address is not free.

    With no `token` one is made. Address and token are written to `card`, which only the owner of the process can read.
    """

    name, every_s = "http", LOOK_EVERY_S

    def __init__(self, address: str, node: str, card: Path, token: str = "") -> None:
        host, _, port = address.rpartition(":")
        self.node, self.token = node, token or secrets.token_urlsafe(24)
        self._lock, self._count = threading.Lock(), 0
        self._standing: tuple[ProviderNotice, ...] = ()
        try:
            self._server = _Server((host.strip("[]"), int(port)), self)
        except OSError as error:
            raise FieldError("--notice", f"http:{address}", f"the address cannot be had: {error}") from error
        self.address = f"{host}:{self._server.server_address[1]}"
        _write(card, {"address": self.address, "token": self.token, "node": node})
        threading.Thread(target=self._server.serve_forever, name="notices-hook", daemon=True).start()

    def read(self) -> tuple[ProviderNotice, ...]:
        with self._lock:
            return self._standing

    def acknowledge(self, heard: ProviderNotice) -> None:
        """Whoever posted it can see the node leave."""

    def close(self) -> None:
        self._server.shutdown()
        self._server.server_close()

    def post(self, body: bytes) -> dict[str, Any]:
        """Take a notice. Raises FieldError. The same notice again changes nothing."""
        told = read_told(body)
        deadline = time.monotonic() + told.deadline_s
        with self._lock:
            if not self._standing:
                self._count += 1
            identity = f"http:{self.node}:{self._count}"
            detail = told.reason or "asked over HTTP"
            self._standing = (ProviderNotice("http", identity, NoticeKind.LEAVE, deadline, detail),)
        return {"node": self.node, "deadline_s": told.deadline_s}

    def delete(self) -> dict[str, Any]:
        """Take it back."""
        with self._lock:
            self._standing = ()
        return {"node": self.node, "deadline_s": None}

    def get(self) -> dict[str, Any]:
        """Seconds that are left; None: nothing stands."""
        found = self.read()
        left_s = round(found[0].deadline - time.monotonic(), 3) if found else None
        return {"node": self.node, "deadline_s": left_s}


class _Server(ThreadingHTTPServer):
    daemon_threads = True
    request_queue_size = 16

    def __init__(self, address: tuple[str, int], hook: Hook) -> None:
        self.hook = hook
        super().__init__(address, _Handler)

    def handle_error(self, request: Any, client_address: Any) -> None:
        log.info("a client of the notice hook broke off: %s", client_address)


class _Handler(BaseHTTPRequestHandler):
    server: _Server
    timeout = CLIENT_S
    server_version, sys_version = "elastic", ""

    def do_GET(self) -> None:
        if self._allowed():
            self._answer(200, self.server.hook.get())

    def do_DELETE(self) -> None:
        if self._allowed():
            self._answer(200, self.server.hook.delete())

    def do_POST(self) -> None:
        if not self._allowed():
            return
        length = self.headers.get("Content-Length", "")
        if not (length.isascii() and length.isdigit()):
            self._answer(411, {"error": "Content-Length is missing"})
        elif len(length) > 9 or int(length) > MOST_BYTES:
            self._answer(413, {"error": f"at most {MOST_BYTES} bytes"})
        else:
            try:
                self._answer(202, self.server.hook.post(self.rfile.read(int(length))))
            except FieldError as error:
                self._answer(400, {"error": str(error)})

    def do_PUT(self) -> None:
        self._refuse()

    def do_PATCH(self) -> None:
        self._refuse()

    def do_HEAD(self) -> None:
        self._refuse()

    def _refuse(self) -> None:
        if self._allowed():
            self._answer(405, {"error": "POST, GET or DELETE"})

    def _allowed(self) -> bool:
        given = self.headers.get("Authorization", "").encode("latin-1", "replace")
        if not hmac.compare_digest(given, f"Bearer {self.server.hook.token}".encode()):
            log.warning("%s %s from %s: wrong token", self.command, self.path[:80], self.client_address[0])
            self._answer(401, {"error": "Authorization: Bearer TOKEN is missing or wrong"})
            return False
        if self.path != PATH:
            self._answer(404, {"error": f"the path is {PATH}"})
            return False
        return True

    def _answer(self, status: int, body: dict[str, Any]) -> None:
        content = json.dumps(body).encode() + b"\n"
        self.close_connection = True
        self.send_response(status)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(content)))
        if status == 401:
            self.send_header("WWW-Authenticate", "Bearer")
        self.send_header("Connection", "close")
        self.end_headers()
        self.wfile.write(content)

    def log_message(self, format: str, *args: Any) -> None:
        log.info("hook: " + format, *args)


def _write(path: Path, card: dict[str, str]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    draft = path.with_suffix(".tmp")
    draft.unlink(missing_ok=True)
    with os.fdopen(os.open(draft, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w") as file:
        file.write(json.dumps(card) + "\n")
    os.replace(draft, path)
