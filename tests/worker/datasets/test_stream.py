"""Micro-batches of datasets that are read from the beginning."""

from __future__ import annotations

import random
from collections.abc import Iterable, Iterator

import pytest
import torch
from torch.utils.data import DataLoader, IterableDataset

from elastic import from_stream
from elastic.domain.errors import FieldError
from elastic.worker.model.microbatch import Microbatch


class Stream(IterableDataset[dict[str, int]]):
    """Numbers of a pass, ten each; counts how many were read."""

    def __init__(self) -> None:
        self.epoch, self.read = 0, 0

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def __iter__(self) -> Iterator[dict[str, int]]:
        for number in range(10):
            self.read += 1
            yield {"x": 100 * self.epoch + number}


def values(microbatch: Microbatch) -> list[int]:
    return microbatch.fields["x"].tolist()


def test_samples_come_in_the_order_of_the_stream_pass_after_pass() -> None:
    source = from_stream(Stream(), rows=3, microbatches=2)
    read = [values(source(step, index)) for step in range(2) for index in range(2)]
    assert read == [[0, 1, 2], [3, 4, 5], [6, 7, 8], [9, 100, 101]]


def test_any_order_of_requests_gives_the_same() -> None:
    keys = [(step, index) for step in range(12) for index in range(3)]
    wanted = dict(
        zip(
            keys,
            (values(from_stream(Stream(), rows=2, microbatches=3)(*k)) for k in keys),
            strict=True,
        )
    )
    for seed in range(5):
        source = from_stream(Stream(), rows=2, microbatches=3)
        for key in random.Random(seed).sample(keys, len(keys)):
            assert values(source(*key)) == wanted[key]


def test_a_recovery_reads_nothing_again() -> None:
    stream = Stream()
    source = from_stream(stream, rows=2, microbatches=4)
    for index in (0, 2):
        source(5, index)
    read = stream.read
    for index in (2, 1, 0):  # also those of another pipeline, and those of the step before
        source(5, index)
        source(4, index)
    assert stream.read == read


def test_few_samples_stay_in_memory() -> None:
    source = from_stream(Stream(), rows=2, microbatches=4)
    for step in range(20):
        source(step, 3)
    assert len(source._kept) == 16


def test_skipping_is_told(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("elastic.worker.datasets.stream.REPORT_S", 0.0)
    from_stream(Stream(), rows=2, microbatches=4)(3, 0)
    assert "skipping samples of the stream: 1 of 16" in caplog.text


def test_a_function_that_returns_an_iterable_will_do() -> None:
    def lines() -> Iterator[dict[str, int]]:
        yield from ({"x": number} for number in range(4))

    source = from_stream(lines, rows=2, microbatches=1)
    assert [values(source(step, 0)) for step in (2, 1, 0)] == [[0, 1], [2, 3], [0, 1]]


class Changing(Stream):
    """Gives other samples each time."""

    passes = 0

    def __iter__(self) -> Iterator[dict[str, int]]:
        Changing.passes += 1
        yield from ({"x": self.passes} for _ in range(10))


class Drained(Iterable[object]):
    """Gives nothing."""

    def __iter__(self) -> Iterator[object]:
        return iter(())


@pytest.mark.parametrize(
    ("stream", "text"),
    [
        (iter([{"x": 1}]), "begins anew"),
        ((sample for sample in [{"x": 1}]), "begins anew"),
        (7, "begins anew"),
        (lambda: 7, "begins anew"),
        (Changing(), "the same samples each time"),
        (Drained(), "at least one sample"),
        (DataLoader(Stream()), "from_dataloader"),
        (lambda path: [path], "a function without arguments"),
    ],
)
def test_streams_that_cannot_be_repeated_are_refused(stream: object, text: str) -> None:
    with pytest.raises(FieldError, match=text):
        from_stream(stream, rows=1, microbatches=1)(0, 0)  # type: ignore[arg-type]


class Noise(Stream):
    def __iter__(self) -> Iterator[dict[str, int]]:
        yield from ({"x": random.randrange(10**9)} for _ in range(10))


def test_random_numbers_of_a_stream_are_repeatable_and_leave_the_generator_alone() -> None:
    keys = [(step, index) for step in range(3) for index in range(2)]

    def read(mixed: bool) -> list[list[int]]:
        source, found = from_stream(Noise(), rows=2, microbatches=2, seed=1), []
        for key in keys:
            found.append(values(source(*key)))
            if mixed:
                random.random()
        return found

    random.seed(1)
    wanted = random.random()
    random.seed(1)
    assert read(mixed=False) == read(mixed=True)
    random.seed(1)
    read(mixed=False)
    assert random.random() == wanted


def test_a_stream_that_failed_is_read_again() -> None:
    class Flaky(Stream):
        def __iter__(self) -> Iterator[dict[str, int]]:
            for sample in super().__iter__():
                if sample["x"] == 5 and self.read < 40:
                    raise OSError("the network is away")
                yield sample

    source = from_stream(Flaky(), rows=2, microbatches=4)
    for _ in range(3):
        with pytest.raises(OSError, match="away"):
            source(0, 3)
    source._stream.read = 40  # type: ignore[union-attr]
    assert values(source(0, 3)) == [6, 7]


def test_a_function_of_ones_own_may_change_samples() -> None:
    def take(samples: list[dict[str, int]]) -> dict[str, torch.Tensor]:
        return {"x": torch.tensor([sample.pop("x") for sample in samples])}

    source = from_stream(Stream(), rows=2, microbatches=2, collate=take)  # type: ignore[arg-type]
    assert values(source(0, 1)) == values(source(0, 1)) == [2, 3]
