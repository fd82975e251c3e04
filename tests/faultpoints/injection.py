"""Fault points of a process: the system calls at which copies, checkpoints and decisions depend on
the kernel, the disk or another process.

`install` wraps these calls. Each call has an address that is equal in every run of the same job:

    agent-a/ack/Reply put=gradient.0.step1#2

that is role, kind, detail and number. A process either records its points or injects one fault.
The module needs the standard library alone, because `sitecustomize` loads it into every process of
a real job.

    kind      calls                                    faults
    send      sending of requests and payloads         kill, stop, EIO
    publish   sending of an announcement               kill, stop, EIO
    ack       sending of a reply or acknowledgement    kill, kill-after, stop, EIO
    socket    creation of a socket, accept             kill, stop, EMFILE
    allocate  posix_fallocate of a slot                kill, stop, EIO, ENOSPC, ENOSPC+
    open      open of a slot or checkpoint file        kill, stop, EMFILE
    fsync     fsync                                    kill, stop, EIO, EIO+
    rename    rename, replace                          kill, kill-after, stop, ENOSPC
    save      write to the store                       kill, kill-after, stop, ENOSPC, lost-answer

A fault happens once; with "+" it happens at every later call with the same kind and detail.
"""

from __future__ import annotations

import builtins
import errno
import json
import os
import re
import signal
import socket
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

FAULTS: dict[str, tuple[str, ...]] = {
    "send": ("kill", "stop", "EIO"),
    "publish": ("kill", "stop", "EIO"),
    "ack": ("kill", "kill-after", "stop", "EIO"),
    "socket": ("kill", "stop", "EMFILE"),
    "allocate": ("kill", "stop", "EIO", "ENOSPC", "ENOSPC+"),
    "open": ("kill", "stop", "EMFILE"),
    "fsync": ("kill", "stop", "EIO", "EIO+"),
    "rename": ("kill", "kill-after", "stop", "ENOSPC"),
    "save": ("kill", "kill-after", "stop", "ENOSPC", "lost-answer"),
}
"""Faults per kind of point."""
ACKNOWLEDGEMENTS = ("Reply", "BundleAcknowledged")
_UNSTABLE = re.compile(r"(?<=worker-)\d+|[0-9a-f]{8,}|\d+(?=\.slot)")
"""Parts of file names that differ from run to run."""


class Point(NamedTuple):
    """Address of one call."""

    role: str
    kind: str
    detail: str
    number: int

    @property
    def text(self) -> str:
        return f"{self.role}/{self.kind}/{self.detail}#{self.number}"


def parse_point(text: str) -> Point:
    """Parse the text of a point."""
    role, kind, rest = text.split("/", 2)
    detail, _, number = rest.rpartition("#")
    return Point(role, kind, detail, int(number))


class Injector:
    """Numbers the calls of one process. Records them, or injects a fault at one of them."""

    def __init__(
        self,
        role: str,
        *,
        record: str = "",
        target: Point | None = None,
        fault: str = "",
        claim: Callable[[Point], bool] = lambda point: True,
        stopping: Callable[[], object] = lambda: None,
    ) -> None:
        """`record`: file to which each point is appended. `claim(point)` returns whether this
        process may inject the fault. `stopping()` is called before the process stops itself."""
        self.role, self._target, self._fault = role, target, fault
        self._claim, self._stopping = claim, stopping
        self._numbers: Counter[tuple[str, str]] = Counter()
        self._lock = threading.Lock()
        self._inside = threading.local()
        self._claimed = False
        self._record = -1
        if record:
            self._record = os.open(record, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600)

    @contextmanager
    def reach(self, kind: str, detail: str) -> Iterator[bool]:
        """Pass a point around the call in the block. Yields whether the answer is to be lost."""
        if getattr(self._inside, "busy", False):
            yield False
            return
        self._inside.busy = True
        try:
            after = self._before(kind, detail)
            yield after == "lost-answer"
            if after == "kill-after":
                os.kill(os.getpid(), signal.SIGKILL)
        finally:
            self._inside.busy = False

    def _before(self, kind: str, detail: str) -> str:
        """Count the call, and carry out a fault that comes before it. Return one that comes
        after it."""
        with self._lock:
            self._numbers[kind, detail] += 1
            point = Point(self.role, kind, detail, self._numbers[kind, detail])
        if self._record >= 0:
            os.write(self._record, f"{point.text}\n".encode())
        if self._target is None or not self._due(point):
            return ""
        fault = self._fault.removesuffix("+")
        if fault == "kill":
            os.kill(os.getpid(), signal.SIGKILL)
        elif fault == "stop":
            self._stopping()
            os.kill(os.getpid(), signal.SIGSTOP)
        elif fault in ("kill-after", "lost-answer"):
            return fault
        else:
            number = getattr(errno, fault)
            raise OSError(number, f"{os.strerror(number)} (injected at {point.text})")
        return ""

    def _due(self, point: Point) -> bool:
        if self._claimed:
            alike = self._target is not None and point[:3] == self._target[:3]
            return self._fault.endswith("+") and alike
        self._claimed = point == self._target and self._claim(point)
        return self._claimed


def install(injector: Injector, folders: tuple[str, ...]) -> None:
    """Wrap the calls of this process. Files outside `folders` are no points."""

    def ours(path: object) -> bool:
        return isinstance(path, str | os.PathLike) and os.fspath(path).startswith(folders)

    def named(path: object) -> str:
        text = os.fspath(path) if isinstance(path, str | os.PathLike) else ""
        return _UNSTABLE.sub("*", os.path.basename(text))

    def wrap(owner: Any, name: str, kind: str, detail: Callable[..., str]) -> None:
        """Replace a function; calls for which `detail` returns "" are no points."""
        function = getattr(owner, name)

        def call(*args: Any, **kwargs: Any) -> Any:
            text = detail(*args, **kwargs)
            if not text:
                return function(*args, **kwargs)
            with injector.reach(kind, text):
                return function(*args, **kwargs)

        setattr(owner, name, call)

    def of_descriptor(descriptor: int, *_: object) -> str:
        path = os.readlink(f"/proc/self/fd/{descriptor}")
        return named(path) if ours(path) else ""

    def of_open(path: object, mode: str = "r", *_: object, **__: object) -> str:
        changes = any(letter in mode for letter in "wxa+")
        return named(path) if changes and ours(path) else ""

    def of_os_open(path: object, flags: int, *_: object, **__: object) -> str:
        return named(path) if flags & os.O_CREAT and ours(path) else ""

    wrap(os, "fsync", "fsync", of_descriptor)
    wrap(os, "posix_fallocate", "allocate", of_descriptor)
    wrap(builtins, "open", "open", of_open)
    wrap(os, "open", "open", of_os_open)
    for name in ("rename", "replace"):
        wrap(os, name, "rename", lambda _, to, **__: named(to) if ours(to) else "")
    _wrap_sockets(injector)


def install_store(injector: Injector, store: type[Any], unavailable: type[Exception]) -> None:
    """Wrap the writes of a store, which raise `unavailable` where the disk fails."""
    put_if = store.put_if

    def put(self: Any, key: str, *args: Any) -> Any:
        try:
            with injector.reach("save", key.replace("/", ".")) as lost:
                entry = put_if(self, key, *args)
        except OSError as error:
            raise unavailable(f"store: {error}") from error
        if lost:
            raise unavailable("store: the answer was lost (injected)")
        return entry

    store.put_if = put


def _wrap_sockets(injector: Injector) -> None:
    kept = threading.local()
    make, accept, send = socket.socket.__init__, socket.socket.accept, socket.socket.send

    def made(self: socket.socket, family: int = -1, *args: Any, **kwargs: Any) -> None:
        given = kwargs.get("fileno", args[2] if len(args) > 2 else None) is not None
        if given:
            make(self, family, *args, **kwargs)
            return
        try:
            with injector.reach("socket", f"new {int(family) if family >= 0 else 2}"):
                make(self, family, *args, **kwargs)
        except OSError:
            make(self, family, *args, **kwargs)
            self.close()
            raise

    def accepted(self: socket.socket) -> Any:
        with injector.reach("socket", f"accept {int(self.family)}"):
            pass
        return accept(self)

    def sent(self: socket.socket, data: Any, flags: int = 0) -> int:
        if bytes(memoryview(data)[4:5]) != b"{" and not hasattr(kept, "detail"):
            return send(self, data, flags)  # not a thread that sends frames
        kind, detail = _frame(data, kept)
        with injector.reach(kind, detail):
            return send(self, data, flags)

    socket.socket.__init__ = made  # type: ignore[method-assign]
    socket.socket.accept = accepted  # type: ignore[method-assign]
    socket.socket.send = sent  # type: ignore[method-assign,assignment]


def _frame(data: Any, kept: threading.local) -> tuple[str, str]:
    """Return kind and detail of a send. Frames begin with four bytes and a JSON object
    (`elastic.rpc.frames`); other bytes are the payload of the thread's last frame."""
    start = bytes(memoryview(data)[:5])
    if start[4:] != b"{":
        return "send", f"payload of {kept.detail}"
    text = bytes(memoryview(data)[4:])
    length = int.from_bytes(start[:4], "little")
    frame = json.loads(text[:length])
    name, body = str(frame.get("kind", "Reply")), frame.get("body", frame)
    detail = " ".join([name, *_content(body)])
    kept.detail = detail
    kinds = {"Published": "publish", **dict.fromkeys(ACKNOWLEDGEMENTS, "ack")}
    return kinds.get(name, "send"), detail


def _content(body: Any) -> list[str]:
    """Return the words of a message that tell it from others of its kind in every run."""
    if not isinstance(body, dict):
        return []
    words = [f"{key}={body[key]}" for key in ("epoch", "bundle", "step") if key in body]
    copies = [c.get("copy", c) for c in body.get("copies", ()) if isinstance(c, dict)]
    words += [f"{c['kind']}.{c['layer']}.{c['step']}" for c in copies[:1] if "layer" in c]
    if isinstance(body.get("key"), str):
        words.append("/".join(body["key"].split("/")[:4]))
    return words
