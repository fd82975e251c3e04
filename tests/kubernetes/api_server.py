"""The part of the Kubernetes API that the end Job uses: TLS, tokens, roles, pods and patches."""

from __future__ import annotations

import ctypes
import json
import os
import re
import socket
import ssl
import threading
from collections.abc import Callable
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

from elastic.launcher import cli

Object = dict[str, Any]
CLONE_NEWNET = 0x40000000
_PATH = re.compile(
    r"/(?:api|apis/(?P<group>[\w.]+))/v1/namespaces/(?P<namespace>[\w-]+)"
    r"/(?P<resource>\w+)/(?P<name>[\w-]+)(?:/(?P<sub>\w+))?"
)
VERBS = {"GET": "get", "PATCH": "patch"}
KINDS = {"deployments": "Deployment", "statefulsets": "StatefulSet", "cronjobs": "CronJob"}


class ApiServer:
    """Serves `objects`. A token names its service account; roles decide what it may do."""

    def __init__(
        self,
        objects: list[Object],
        folder: Path,
        read_pod: Callable[[str], Object | None],
        listening: socket.socket,
    ) -> None:
        """`read_pod`: returns a pod as the API shows it; None: there is none."""
        self.objects, self._read_pod = objects, read_pod
        self.address: tuple[str, int] = listening.getsockname()[:2]
        self.served = list[tuple[str, str, int]]()
        """Method, path and status of each request."""
        self.fails_with = 0
        """Status of all answers; 0: as they should be."""
        host = self.address[0]
        assert cli.main(["certs", "--out", str(folder), "--hosts", host]) == 0
        self.ca = folder / host / "ca.crt"
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.load_cert_chain(folder / host / "tls.crt", folder / host / "tls.key")
        api = self

        class Handler(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                api._serve(self)

            def do_PATCH(self) -> None:
                api._serve(self)

            def log_message(self, *_: object) -> None:
                pass

        self._server = ThreadingHTTPServer(self.address, Handler, bind_and_activate=False)
        self._server.socket.close()
        self._server.socket = context.wrap_socket(
            listening, server_side=True, do_handshake_on_connect=False
        )
        threading.Thread(target=self._server.serve_forever, args=(0.05,), daemon=True).start()

    def close(self) -> None:
        self._server.shutdown()
        self._server.server_close()

    @staticmethod
    def token(account: str) -> str:
        return f"token-of-{account}"

    def find(self, kind: str, name: str) -> Object | None:
        for item in self.objects:
            if item["kind"] == kind and item["metadata"]["name"] == name:
                return item
        return None

    def _serve(self, request: BaseHTTPRequestHandler) -> None:
        body = request.rfile.read(int(request.headers.get("Content-Length", 0)))
        status, answer = self._answer(request, body)
        self.served.append((request.command, request.path, status))
        text = json.dumps(answer).encode()
        request.send_response(status)
        request.send_header("Content-Length", str(len(text)))
        request.end_headers()
        request.wfile.write(text)

    def _answer(self, request: BaseHTTPRequestHandler, body: bytes) -> tuple[int, Object]:
        if self.fails_with:
            return self.fails_with, {"kind": "Status", "message": "told to fail"}
        match, verb = _PATH.fullmatch(request.path), VERBS[request.command]
        if match is None:
            return 404, {}
        account = request.headers.get("Authorization", "").removeprefix("Bearer token-of-")
        if not self.allows(account, verb, **match.groupdict()):
            return 403, {"kind": "Status", "message": f"{account} may not {verb} {request.path}"}
        if match["resource"] == "pods":
            pod = self._read_pod(match["name"])
            return (404, {}) if pod is None else (200, pod)
        item = self.find(KINDS[match["resource"]], match["name"])
        if item is None:
            return 404, {}
        if verb == "patch":
            assert request.headers["Content-Type"] == "application/merge-patch+json"
            item["spec"] |= json.loads(body)["spec"]
        if match["sub"] == "scale" and not item["spec"]["replicas"]:
            return 200, {"kind": "Scale", "spec": {}}
        return 200, item

    def allows(
        self, account: str, verb: str, group: str | None, resource: str, name: str,
        sub: str | None, namespace: str,
    ) -> bool:  # fmt: skip
        """Whether a role of the account has this verb for this object."""
        whole = f"{resource}/{sub}" if sub else resource
        roles = [
            self.find(item["roleRef"]["kind"], item["roleRef"]["name"])
            for item in self.objects
            if item["kind"] == "RoleBinding"
            and any(
                s["kind"] == "ServiceAccount" and s["name"] == account for s in item["subjects"]
            )
        ]
        return any(
            verb in rule["verbs"]
            and (group or "") in rule["apiGroups"]
            and whole in rule["resources"]
            and name in rule.get("resourceNames", [name])
            for role in roles
            if role is not None
            for rule in role["rules"]
        )


def listen(host: str, namespace: str = "") -> socket.socket:
    """A listening socket; `namespace`: network namespace in which it listens."""
    made = list[socket.socket]()

    def make() -> None:
        if namespace:
            descriptor = os.open(f"/run/netns/{namespace}", os.O_RDONLY)
            assert ctypes.CDLL(None, use_errno=True).setns(descriptor, CLONE_NEWNET) == 0
            os.close(descriptor)
        made.append(socket.create_server((host, 0)))

    thread = threading.Thread(target=make)  # only this thread changes its namespace
    thread.start()
    thread.join()
    return made[0]
