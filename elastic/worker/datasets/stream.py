"""Micro-batches of a dataset that can only be read from its beginning.

Each worker that needs fields reads the whole stream. The samples of the newest two steps stay in
memory, so a recovery finds its micro-batches there. For an older sample, in a newcomer, and in a
worker that needs fields for the first time, the stream is read from its first sample on. States of
streams are not used to shorten that: with a shuffle buffer, a datasets.IterableDataset goes on from
its state with other samples.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

from torch import Tensor
from torch.utils.data import DataLoader

from elastic.domain.errors import FieldError
from elastic.worker.datasets.data_source import equal_fields
from elastic.worker.datasets.samples import Collate, OwnRandom, Samples, check_index
from elastic.worker.model.checks import Described, check_callable, description, whole_number
from elastic.worker.model.microbatch import Microbatch

log = logging.getLogger(__name__)
STREAM = (
    "an iterable that begins anew with each iter(), such as a torch IterableDataset or a streamed "
    "datasets.IterableDataset, or a function without arguments that returns one"
)
REPEATABLE = "make it give the same samples each time, as dataset.shuffle(seed=1) does"
REPORT_S = 5.0
"""Interval of messages while samples are skipped."""
KEPT_STEPS = 2
"""Number of steps whose samples stay in memory."""


def from_stream(
    stream: Iterable[object] | Callable[[], Iterable[object]],
    *,
    rows: int,
    microbatches: int,
    seed: int = 0,
    fields: Sequence[str] | None = None,
    collate: Collate | None = None,
) -> StreamSource:
    """Return the micro-batches of a stream, for `Trainer(data=...)`, in the order of the stream.

    Seed all that the stream shuffles, and do not divide it among workers: each reads all of it.

    At its end the stream begins anew, after `set_epoch(n)` if it has that method. To shuffle it,
    use its own method with a seed, as `dataset.shuffle(seed=1, buffer_size=1000)`. Prefer
    `from_dataset` for data that can be indexed: a newcomer finds its first sample at once there.

    Args:
        stream: an iterable that gives the same samples each time, or a function that returns one.
        rows, microbatches, fields, collate: as for `from_dataset`.
        seed: seed of random numbers that `collate` draws.

    Raises FieldError for an argument that is not usable.
    """
    return StreamSource(stream, rows, microbatches, Samples(fields, collate, seed))


class StreamSource:
    """Function of (step, micro-batch), made by `from_stream`."""

    def __init__(
        self,
        stream: Iterable[object] | Callable[[], Iterable[object]],
        rows: int,
        microbatches: int,
        samples: Samples,
    ) -> None:
        if isinstance(stream, DataLoader):
            raise FieldError("stream", description(stream), "give it to from_dataloader")
        usable = isinstance(stream, Iterable) and not isinstance(stream, Iterator)
        if not usable and not (callable(stream) and not isinstance(stream, Iterator | type)):
            raise FieldError("stream", description(stream), STREAM)
        if not usable:
            check_callable("stream", stream, 0, STREAM)
        self._stream, self._samples = stream, samples
        self.rows = whole_number("rows", rows, 1)
        self.microbatches = whole_number("microbatches", microbatches, 1)
        self._reader: Iterator[object] | None = None
        self._at = 0
        """Number of samples that the reader has read."""
        self._random = OwnRandom(samples.seed)
        """Random numbers that the stream draws."""
        self._kept: dict[int, object] = {}
        """Samples of the newest steps, by position."""

    def __call__(self, step: int, index: int) -> Microbatch:
        check_index(index, self.microbatches)
        first = (step * self.microbatches + index) * self.rows
        positions = range(first, first + self.rows)
        if self._reader is None or any(p < self._at and p not in self._kept for p in positions):
            self._begin()
        oldest = (step + 1 - KEPT_STEPS) * self.microbatches * self.rows
        self._read_to(positions.stop, oldest)
        found = [self._kept[position] for position in positions]
        while (position := next(iter(self._kept))) < oldest:  # they are in order
            del self._kept[position]
        return Microbatch(step, index, self._samples.fields(found, step, index))

    def _begin(self) -> None:
        """Begin to read from the first sample. Raises FieldError if it is another one now."""
        if self._reader is None:
            one, other = self._first_fields(), self._first_fields()
            if not equal_fields(one, other):
                what = Described("other samples when it is read again")
                raise FieldError("stream", what, REPEATABLE)
        self._reader, self._at = self._endless(), 0
        self._random = OwnRandom(self._samples.seed)
        self._kept.clear()

    def _first_fields(self) -> Mapping[str, Tensor]:
        reader = self._endless()
        with OwnRandom(self._samples.seed):
            samples = [next(reader) for _ in range(self.rows)]
        return self._samples.fields(samples, 0, 0)

    def _read_to(self, position: int, oldest: int) -> None:
        """Read up to `position`; keep the samples from `oldest` on.

        After an error the stream begins anew with the next call.
        """
        try:
            with self._random:
                self._read_samples(position, oldest)
        except BaseException:
            self._reader = None
            raise

    def _read_samples(self, position: int, oldest: int) -> None:
        assert self._reader is not None
        report_at = time.monotonic() + REPORT_S
        while self._at < position:
            sample = next(self._reader)
            if self._at >= oldest:
                self._kept[self._at] = sample
            elif time.monotonic() > report_at:
                report_at += REPORT_S
                log.warning("skipping samples of the stream: %d of %d", self._at, oldest)
            self._at += 1

    def _endless(self) -> Iterator[object]:
        """Yield the samples of all passes. Raises FieldError if a pass has none."""
        epoch = 0
        while True:
            empty = True
            for sample in self._pass(epoch):
                empty = False
                yield sample
            if empty:
                what = Described("an iterable without samples")
                raise FieldError("stream", what, "give one with at least one sample")
            epoch += 1

    def _pass(self, epoch: int) -> Iterable[Any]:
        made = self._stream if isinstance(self._stream, Iterable) else self._stream()
        if not isinstance(made, Iterable):
            raise FieldError("stream()", description(made), STREAM)
        set_epoch = getattr(made, "set_epoch", None)
        if callable(set_epoch):
            set_epoch(epoch)
        return made
