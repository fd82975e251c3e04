"""Reads the micro-batches that will be asked for next, in other processes.

Each reader is a fork of this process with a pipe of its own. It answers one request after the
other. Results wait in the pipe and in the reader until they are asked for, so a slow consumer stops
the readers. If a reader dies or gives no answer, this process reads the micro-batch itself.
"""

from __future__ import annotations

import io
import logging
import multiprocessing
import os
import struct
import time
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from itertools import islice
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess

import torch
from torch import Tensor

from elastic import lifeline
from elastic.domain.errors import FieldError
from elastic.worker.datasets.data_source import FUNCTION, PURE, equal_fields
from elastic.worker.datasets.stream import StreamSource
from elastic.worker.model.checks import Described, check_callable, whole_number
from elastic.worker.model.microbatch import Microbatch

log = logging.getLogger(__name__)
Source = Callable[[int, int], Microbatch]
Key = tuple[int, int]
Fields = Mapping[str, Tensor]
MOST_AHEAD = 1000
"""Largest number of requests that a pipe holds without blocking."""
ANSWER_S = 120.0
"""A reader that gives no answer for so long is ended."""
END_S = 1.0
"""Time for a killed process to end. One that waits for a disk is left to the kernel."""
_KEY = struct.Struct("<qq")


def prefetch(data: Source, *, processes: int = 2, ahead: int = 4) -> Prefetch:
    """Return `data`, whose next micro-batches are read in advance, for `Trainer(data=...)`.

    A worker usually needs the same micro-batches in each step, in the same order. So those are
    read that followed in the step before. Any other micro-batch is read when it is asked for.

    Args:
        data: function of (step, micro-batch), but none of `from_stream`: each process would read
            the whole stream.
        processes: processes that read. They are forks of this process, made at once, and end with
            the thread that makes them. Call this before anything uses a GPU, and let the dataset
            open its files when it reads: forks share the position in a file that is open.
        ahead: largest number of micro-batches that are read in advance.

    Raises FieldError for an argument that is not usable.
    """
    return Prefetch(data, processes, ahead)


class _Reader:
    """A process that reads, as its user sees it."""

    def __init__(self, data: Source) -> None:
        context = multiprocessing.get_context("fork")
        self.connection, theirs = context.Pipe()
        self.process: BaseProcess = context.Process(
            target=_serve, args=(data, theirs, os.getpid()), daemon=True
        )
        self.process.start()
        theirs.close()  # so that the end of the process ends the pipe
        self.unanswered = 0


class Prefetch:
    """Function of (step, micro-batch), made by `prefetch`."""

    def __init__(self, data: Source, processes: int, ahead: int) -> None:
        check_callable("data", data, 2, FUNCTION)
        if isinstance(data, Prefetch):
            what, remedy = "a source that is read in advance already", "give the source inside"
            raise FieldError("data", Described(what), f"{remedy}; from_dataloader may make one")
        if isinstance(data, StreamSource):
            remedy = "each process would read the whole stream: use it without prefetch"
            raise FieldError("data", Described("a stream"), remedy)
        processes = whole_number("processes", processes, 1)
        if torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
            what = "called when this process uses a GPU already"
            raise FieldError(
                "prefetch", Described(what), "call it first: a fork cannot use the GPU"
            )
        self._data, self._ahead = data, whole_number("ahead", ahead, 1, MOST_AHEAD)
        self._readers = [_Reader(data) for _ in range(processes)]
        self._asked: dict[Key, _Reader] = {}
        self._results: dict[Key, Fields | None] = {}
        self._compared = False
        self._step, self._order, self._former = -1, dict[int, int](), list[int]()
        weakref.finalize(self, _end_all, self._readers)

    @property
    def microbatches(self) -> int | None:
        """Micro-batches per step for which the data was made; None: any."""
        return getattr(self._data, "microbatches", None)

    def __call__(self, step: int, index: int) -> Microbatch:
        """Return micro-batch `index` of `step`. Raises the errors of `data`."""
        key = step, index
        self._note(step, index)
        asked = key in self._asked or key in self._results
        compares, self._compared = not self._compared, True
        if compares:
            self._ask([key])
        self._ask(self.expected(step, index))
        found = self._take(key) if asked or compares else None
        if found is not None and not compares:
            return Microbatch(step, index, found)
        with _one_thread():
            own = self._data(step, index)
        if found is not None and not equal_fields(found, own.fields):
            what = Described("another micro-batch in another process")
            raise FieldError(f"data({step}, {index})", what, PURE)
        return own

    def _note(self, step: int, index: int) -> None:
        """Learn the order of this step, and drop what was read for steps before it."""
        if step != self._step:
            self._step, self._former, self._order = step, list(self._order), {}
            for kept in (self._asked, self._results):
                for key in [key for key in kept if key[0] < step]:
                    del kept[key]
        self._order.setdefault(index, len(self._order))

    def expected(self, step: int, index: int) -> list[Key]:
        """Return the micro-batches that will probably follow."""
        if index not in self._former:
            return [(step, index + 1 + n) for n in range(self._ahead)]
        at = self._former.index(index) + 1
        following = ((step, other) for other in islice(self._former, at, at + self._ahead))
        next_step = ((step + 1, other) for other in islice(self._former, self._ahead))
        return [*following, *next_step][: self._ahead]

    def _ask(self, keys: Iterable[Key]) -> None:
        """Let the least busy readers read `keys`, up to `ahead` at a time."""
        for key in keys:
            if key in self._asked or key in self._results or not self._readers:
                continue
            if len(self._asked) + len(self._results) > self._ahead:
                return
            reader = min(self._readers, key=lambda reader: reader.unanswered)
            if reader.unanswered >= MOST_AHEAD:
                return
            try:
                reader.connection.send_bytes(_KEY.pack(*key))
            except OSError:
                self._lose(reader)
                continue
            reader.unanswered += 1
            self._asked[key] = reader

    def _take(self, key: Key) -> Fields | None:
        """Return the fields that a reader has read; None: it could not."""
        end = time.monotonic() + ANSWER_S
        while key not in self._results:
            reader = self._asked.get(key)
            if reader is None:
                return None
            if reader.connection.poll(max(0.0, end - time.monotonic())):
                self._receive(reader)
            else:
                log.warning("data%s was not read in advance within %g s", key, ANSWER_S)
                self._lose(reader)
        return self._results.pop(key)

    def _receive(self, reader: _Reader) -> None:
        """Take one answer."""
        try:
            answer = reader.connection.recv_bytes()
        except (EOFError, OSError):
            self._lose(reader)
            return
        reader.unanswered -= 1
        key = _KEY.unpack_from(answer)
        if self._asked.pop(key, None) is None:
            return  # of a step that is over
        try:
            found = torch.load(io.BytesIO(answer[_KEY.size :]), weights_only=True)
        except Exception as error:  # noqa: BLE001 - this process reads it itself
            found = str(error)
        if isinstance(found, str):
            log.warning("data%s could not be read in advance: %s", key, found)
        self._results[key] = None if isinstance(found, str) else found

    def _lose(self, reader: _Reader) -> None:
        """Go on without `reader`."""
        if reader not in self._readers:
            return
        self._readers.remove(reader)
        reader.process.kill()
        reader.process.join(END_S)
        log.warning(
            "a process that reads data in advance was lost (exit code %s); %d are left",
            reader.process.exitcode,
            len(self._readers),
        )
        self._asked = {key: other for key, other in self._asked.items() if other is not reader}


@contextmanager
def _one_thread() -> Iterator[None]:
    """Compute with one thread, as readers do: sums depend on the number of threads."""
    before = torch.get_num_threads()
    if before != 1:
        torch.set_num_threads(1)
    try:
        yield
    finally:
        if before != 1:
            torch.set_num_threads(before)


def _end_all(readers: list[_Reader]) -> None:
    for reader in readers:
        reader.process.kill()


def _serve(data: Source, pipe: Connection, parent: int) -> None:
    """Body of a reader. It inherits `data`, which need not be picklable."""
    lifeline.end_with_parent(parent)
    torch.set_num_threads(1)  # the threads of the parent do not exist here
    while True:
        try:
            request = pipe.recv_bytes()
        except (EOFError, OSError):
            return
        answer = io.BytesIO()
        answer.write(request)
        try:
            found: object = dict(data(*_KEY.unpack(request)).fields)
        except Exception as error:  # noqa: BLE001 - the parent raises it where it can be read
            found = f"{type(error).__name__}: {error}"
        torch.save(found, answer)
        pipe.send_bytes(answer.getbuffer())
