"""HTTP endpoint that takes notices of in-house schedulers.

Requests go to /notice and need the header `Authorization: Bearer TOKEN`.

    POST    set the notice: {"deadline_s": 120, "reason": "..."}, seconds, or empty (30 s)   202
    DELETE  withdraw it                                                                       200
    GET     show it                                                                           200

Errors: 400 (content), 401 (token), 404, 405, 411 (no length), 413 (more than 4 KiB).
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

from elastic.agent.notices.file import parse_notice
from elastic.agent.notices.source import Source, make_notice
from elastic.core.node.notice_tracker import ProviderNotice
from elastic.domain.errors import FieldError
from elastic.rpc.security.tls import write_token

log = logging.getLogger("elastic.agent.notices")
MAX_BODY_BYTES = 4096
CLIENT_S = 5.0
"""Silence after which a client is disconnected."""
HOOK_POLL_S = 0.1
PATH = "/notice"


class NoticeHook(Source):
    """Takes notices over HTTP at `address` (host:port) until closed.

    `token`: secret that requests must carry; "": make a new one. Address and token are written to
    the file `card`, which only the owner can read. Raises FieldError if the address is not free.
    """

    name, every_s = "http", HOOK_POLL_S

    def __init__(self, address: str, node: str, card: Path, token: str = "") -> None:
        host, _, port = address.rpartition(":")
        self.node, self.token = node, token or secrets.token_urlsafe(24)
        self._lock, self._count = threading.Lock(), 0
        self._notices: tuple[ProviderNotice, ...] = ()
        try:
            self._server = _HookServer((host.strip("[]"), int(port)), _HookHandler)
        except OSError as error:
            raise FieldError(
                "--notice", f"http:{address}", f"the address is not free: {error}"
            ) from error
        self._server.hook = self
        self.address = f"{host}:{self._server.server_address[1]}"
        card.parent.mkdir(parents=True, exist_ok=True)
        draft = card.with_suffix(".tmp")
        content = {"address": self.address, "token": self.token, "node": node}
        write_token(draft, json.dumps(content))
        os.replace(draft, card)
        threading.Thread(
            target=self._server.serve_forever, name="notices-hook", daemon=True
        ).start()

    def read(self) -> tuple[ProviderNotice, ...]:
        with self._lock:
            return self._notices

    def close(self) -> None:
        self._server.shutdown()
        self._server.server_close()

    def post(self, body: bytes) -> dict[str, Any]:
        """Set the notice, or the deadline and reason of a present one. Raises FieldError."""
        notice = parse_notice(body)
        with self._lock:
            if not self._notices:
                self._count += 1
            what, detail = f"{self.node}:{self._count}", notice.reason or "asked over HTTP"
            self._notices = (make_notice("http", what, notice.deadline_s, detail),)
        return {"node": self.node, "deadline_s": notice.deadline_s}

    def delete(self) -> dict[str, Any]:
        """Withdraw the notice; return the answer."""
        with self._lock:
            self._notices = ()
        return {"node": self.node, "deadline_s": None}

    def get(self) -> dict[str, Any]:
        """Return the node and the seconds until the deadline; None: there is no notice."""
        found = self.read()
        left_s = round(found[0].deadline - time.monotonic(), 3) if found else None
        return {"node": self.node, "deadline_s": left_s}


class _HookServer(ThreadingHTTPServer):
    daemon_threads = True
    request_queue_size = 16
    hook: NoticeHook

    def handle_error(self, request: Any, client_address: Any) -> None:
        log.info("a client of the notice hook disconnected: %s", client_address)


class _HookHandler(BaseHTTPRequestHandler):
    server: _HookServer
    timeout = CLIENT_S
    server_version, sys_version = "elastic", ""

    def _serve(self) -> None:
        self._answer(*self._carry_out())

    do_GET = do_DELETE = do_POST = do_PUT = do_PATCH = do_HEAD = _serve

    def _carry_out(self) -> tuple[int, dict[str, Any]]:
        """Carry out the request; return the status and the content of the answer."""
        hook, given = self.server.hook, self.headers.get("Authorization", "")
        if not hmac.compare_digest(
            given.encode("latin-1", "replace"), f"Bearer {hook.token}".encode()
        ):
            log.warning(
                "%s %s from %s: wrong token", self.command, self.path[:80], self.client_address[0]
            )
            return 401, {"error": "Authorization: Bearer TOKEN is missing or wrong"}
        if self.path != PATH:
            return 404, {"error": f"the path is {PATH}"}
        match self.command:
            case "GET":
                return 200, hook.get()
            case "DELETE":
                return 200, hook.delete()
            case "POST":
                return self._post(hook)
        return 405, {"error": "POST, GET or DELETE"}

    def _post(self, hook: NoticeHook) -> tuple[int, dict[str, Any]]:
        length = self.headers.get("Content-Length", "")
        if not (length.isascii() and length.isdigit()):
            return 411, {"error": "Content-Length is missing"}
        if len(length) > 9 or int(length) > MAX_BODY_BYTES:
            return 413, {"error": f"at most {MAX_BODY_BYTES} bytes"}
        try:
            return 202, hook.post(self.rfile.read(int(length)))
        except FieldError as error:
            return 400, {"error": str(error)}

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
