"""`elastic kubernetes end`: the end Job of a rendered job (`deploy/kubernetes/base/end.yaml`).

Deployments and StatefulSets start ended pods again for ever. The end Job reads the pods of the
coordinators from the Kubernetes API until one of them has ended with an exit code of OVER. Then it
scales agents and coordinators to 0, and ends with the same code. Nothing is kept in this process:
if its pod is lost, the next one finds the exit codes in the status of the pods. If these pods are
gone and all machines were given back, nobody knows the code any more, and the end Job fails.
"""

from __future__ import annotations

import http.client
import json
import ssl
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import click
from click import IntRange

from elastic.command_line import TIME, Command, ParsedType, file_errors
from elastic.domain.errors import (
    EXIT_JOB_FAILED,
    EXIT_OK,
    EXIT_UNRECOVERABLE,
    ElasticError,
    FieldError,
)
from elastic.launcher.run.wait_lines import sentence
from elastic.reminder import EVERY_S, Reminder

OVER = (EXIT_OK, EXIT_UNRECOVERABLE, EXIT_JOB_FAILED)
"""Exit codes of a coordinator whose training is over. After others it is started again."""
CONTAINER = "coordinator"
"""Name of the coordinator's container in its pod."""
REQUEST_S = 10.0
"""Timeout of a request to the API server."""
MAX_BYTES = 4 << 20
"""Largest answer of the API server that is read."""
OK, NOT_FOUND = 200, 404
Answer = TypeVar("Answer")


class UnknownEnd(ElasticError):
    """Nothing tells any more how the training ended."""

    exit_code = EXIT_JOB_FAILED  # no further pod of the end Job would learn it

    def __init__(self) -> None:
        super().__init__(
            "the machines have been given back, and the pods that knew how the training ended are "
            "gone: look for the checkpoint of the last step, and for the logs of the coordinators"
        )


@dataclass(frozen=True, slots=True)
class Change:
    """A change of one object that gives its machines back."""

    name: str
    """KIND/NAME, as the user gave it."""
    path: str
    """Path of the object at the API server; {namespace} stands for its namespace."""
    patch: Mapping[str, Any]
    """JSON merge patch of the object's `spec`."""

    def is_made(self, found: Mapping[str, Any]) -> bool:
        """Whether an object has these values already. The API server leaves out zeros."""
        spec = found.get("spec", {})
        return all(spec.get(key, 0) == value for key, value in self.patch["spec"].items())


@dataclass(frozen=True, slots=True)
class Ending:
    """End of the training, as the pod of a coordinator shows it."""

    pod: str
    code: int
    message: str
    """End of the container's log if it failed; "": it did not, or nothing was logged."""


_SCALE = {"spec": {"replicas": 0}}
_KINDS: dict[str, tuple[str, Mapping[str, Any]]] = {
    "deployment": ("apps/v1/namespaces/{{namespace}}/deployments/{name}/scale", _SCALE),
    "statefulset": ("apps/v1/namespaces/{{namespace}}/statefulsets/{name}/scale", _SCALE),
    "cronjob": ("batch/v1/namespaces/{{namespace}}/cronjobs/{name}", {"spec": {"suspend": True}}),
}
"""Per kind of object: its path below /apis, and the patch that ends its work."""


def change_of(flag: str, text: str) -> Change:
    """Return the change for KIND/NAME. Raises FieldError, which names `flag`."""
    kind, _, name = text.partition("/")
    if kind not in _KINDS or not name or "/" in name:
        raise FieldError(flag, text, f"give KIND/NAME with one of the kinds {', '.join(_KINDS)}")
    path, patch = _KINDS[kind]
    return Change(text, f"/apis/{path.format(name=name)}", patch)


def ending_of(pod: Mapping[str, Any]) -> Ending | None:
    """Return how the training ended, from the pod of a coordinator; None: it goes on.

    The container may have been started again already: the status keeps its former end.
    """
    for container in pod.get("status", {}).get("containerStatuses", ()):
        if container.get("name") != CONTAINER:  # a sidecar that was added to the pod
            continue
        for state in (container.get("state", {}), container.get("lastState", {})):
            ended = state.get("terminated") or {}
            if ended.get("exitCode") in OVER:
                message = str(ended.get("message") or "").strip()
                return Ending(str(pod["metadata"]["name"]), int(ended["exitCode"]), message)
    return None


class ApiServer:
    """Client of the Kubernetes API for one namespace, with the credentials of a pod."""

    def __init__(self, host: str, port: int, namespace: str, credentials: Path) -> None:
        """`credentials`: directory with `token`, which changes every hour, and `ca.crt`."""
        self._place, self._namespace = (host, port), namespace
        self._token = credentials / "token"
        self._tls = ssl.create_default_context(cafile=str(credentials / "ca.crt"))

    def get_pod(self, name: str) -> dict[str, Any]:
        """Return a pod; {}: there is none. Raises ElasticError."""
        return self._ask("GET", f"/api/v1/namespaces/{self._namespace}/pods/{name}")

    def is_made(self, change: Change) -> bool:
        """Whether the object of a change exists and has its values. Raises ElasticError."""
        found = self._ask("GET", change.path.format(namespace=self._namespace))
        return bool(found) and change.is_made(found)

    def apply(self, change: Change) -> None:
        """Patch an object, if it exists. Raises ElasticError."""
        path = change.path.format(namespace=self._namespace)
        self._ask("PATCH", path, json.dumps(change.patch))

    def _ask(self, method: str, path: str, body: str = "") -> dict[str, Any]:
        host, port = self._place
        server = http.client.HTTPSConnection(host, port, timeout=REQUEST_S, context=self._tls)
        try:
            headers = {"Authorization": f"Bearer {self._token.read_text().strip()}"}
            if body:
                headers["Content-Type"] = "application/merge-patch+json"
            with closing(server):
                server.request(method, path, body or None, headers)
                answer = server.getresponse()
                text = answer.read(MAX_BYTES)
        except (OSError, http.client.HTTPException) as error:
            problem = f"the API server at {host}:{port} cannot be asked"
            raise ElasticError(f"{problem}: {error or type(error).__name__}") from error
        if answer.status == NOT_FOUND:
            return {}
        if answer.status != OK:
            said = " ".join(text.decode(errors="replace").split())[:300]
            raise ElasticError(f"{method} {path}: status {answer.status}: {said}")
        try:
            found = json.loads(text)
        except ValueError as error:
            raise ElasticError(f"{method} {path}: the answer is not JSON: {error}") from error
        return found if isinstance(found, dict) else {}


def await_end(
    api: ApiServer, coordinators: Sequence[str], changes: Sequence[Change], every_s: float
) -> Ending:
    """Return when the pod of a coordinator shows the end of the training.

    Raises UnknownEnd if the coordinators are gone and all changes have been made: an end Job
    before this one was lost right before its own end, or somebody has scaled the job to 0.
    """
    while True:
        pods = [_repeat(partial(api.get_pod, name), every_s) for name in coordinators]
        ending = next((end for end in map(ending_of, pods) if end is not None), None)
        if ending is not None:
            return ending
        if not any(pods) and all(_repeat(partial(api.is_made, c), every_s) for c in changes):
            raise UnknownEnd()
        time.sleep(every_s)


def _repeat(request: Callable[[], Answer], every_s: float) -> Answer:
    """Return the answer to a request. It is repeated while it fails, and every few seconds a line
    says why."""
    began = time.monotonic()
    reminder = Reminder(began - EVERY_S)  # the first line is due at once
    while True:
        try:
            return request()
        except ElasticError as error:
            now = time.monotonic()
            if reminder.is_due(now):
                _say(sentence(str(error), now - began, "the request is repeated"))
        time.sleep(every_s)


def _say(text: str) -> None:
    print(f"elastic kubernetes end: {text}", flush=True)


# fmt: off
@click.command(cls=Command, options_metavar="[flags]")
@click.option("--coordinator", "coordinators", metavar="POD", multiple=True, required=True,
              help="pod of a coordinator; repeatable")
@click.option("--namespace", required=True, help="namespace of the objects")
@click.option("--api-host", envvar="KUBERNETES_SERVICE_HOST", required=True, show_default=False,
              help="host of the API server (in a pod: known)")
@click.option("--api-port", envvar="KUBERNETES_SERVICE_PORT", type=IntRange(1, 65535), default=443,
              help="port of the API server (in a pod: known)")
@click.option("--credentials", type=click.Path(file_okay=False, path_type=Path), metavar="DIR",
              default="/elastic/api", help="directory with `token` and `ca.crt`")
@click.option("--every", type=TIME, default="2", help="seconds between two requests")
@click.argument("changes", metavar="KIND/NAME...", nargs=-1, required=True,
                type=ParsedType("KIND/NAME", change_of))
def end(
    coordinators: tuple[str, ...],
    namespace: str,
    api_host: str,
    api_port: int,
    credentials: Path,
    every: float,
    changes: tuple[Change, ...],
) -> int:
    """Wait for the end of a job in this cluster, then give its machines back.

    Each KIND/NAME is a deployment or statefulset that is scaled to 0, or a cronjob that is
    suspended. The exit code is that of the training. The end Job of a rendered job runs this.
    """

    if not 0.1 <= every <= 3600:
        raise FieldError("--every", every, "give 0.1 to 3600 seconds")
    with file_errors("--credentials", credentials, "read"):
        (credentials / "token").read_text()
        api = ApiServer(api_host, api_port, namespace, credentials)
    _say(f"the training goes on until one of the pods {', '.join(coordinators)} ends with it")
    ending = await_end(api, coordinators, changes, every)
    why = f": {ending.message}" if ending.message else ""
    _say(f"{ending.pod} has ended with exit code {ending.code}{why}")
    for change in changes:
        _repeat(partial(api.apply, change), every)
        _say(f"{change.name}: {json.dumps(change.patch['spec'])}")
    return ending.code
