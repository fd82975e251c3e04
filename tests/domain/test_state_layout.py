"""Byte layout of a layer's state: aligned, self-describing, refused if damaged."""

from __future__ import annotations

from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from elastic.domain.errors import ElasticError
from elastic.domain.state_layout import (
    ALIGNMENT,
    COPY_BYTES,
    ITEM_BYTES,
    align,
    copy_bytes,
    plan_layout,
    read_header,
)

tensors = st.lists(
    st.tuples(
        st.text("abc/.", min_size=1, max_size=30),
        st.sampled_from(sorted(ITEM_BYTES)),
        st.lists(st.integers(0, 9), max_size=3).map(tuple),
        st.integers(-1, 2),
    ),
    max_size=6,
)


@given(
    st.integers(0, 10**9),
    tensors,
    st.dictionaries(st.text(max_size=9), st.text(max_size=9), max_size=3),
)
def test_layout_is_aligned_and_reads_back(
    version: int, wanted: list[tuple[str, str, tuple[int, ...], int]], extra: dict[str, str]
) -> None:
    header_bytes, header, total = plan_layout(version, wanted, extra)
    assert read_header(memoryview(header_bytes)) == header
    assert (header.version, header.extra) == (version, extra)
    assert [(t.name, t.dtype, t.shape, t.shard_dim) for t in header.tensors] == wanted
    end = len(header_bytes)
    assert end % ALIGNMENT == 0
    for tensor in header.tensors:
        assert tensor.offset % ALIGNMENT == 0
        assert tensor.offset >= end
        end = tensor.offset + tensor.nbytes
    assert total == align(end)


def test_sizes() -> None:
    _, header, total = plan_layout(0, [("a", "bfloat16", (3, 5), -1), ("b", "int64", (), -1)], {})
    assert [t.nbytes for t in header.tensors] == [30, 8]
    assert total == header.tensors[0].offset + 128


def test_long_header_grows() -> None:
    names = [(f"param/{'x' * 200}{i}", "float32", (2,), 0) for i in range(200)]
    header_bytes, header, _ = plan_layout(7, names, {"k": "v" * 5000})
    assert len(header_bytes) > 40_000
    assert read_header(memoryview(header_bytes)) == header
    assert header.tensors[0].offset == len(header_bytes)


def test_same_shape_same_layout_for_every_version() -> None:
    wanted = [("param/w", "float32", (4, 4), -1)]
    first, second = (plan_layout(version, wanted, {})[1] for version in (0, 10**6))
    assert first.tensors == second.tensors


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"\x00" * 4,
        b"\x00" * 64,
        b"\xff" * 64,
        (60).to_bytes(8, "little") + b"x" * 56,
        (8).to_bytes(8, "little") + b"\xff" * 56,
        (8).to_bytes(8, "little") + b"[1,2,3] " + bytes(48),
        (2).to_bytes(8, "little") + b"{}" + bytes(54),
    ],
)
def test_damaged_header_is_refused(data: bytes) -> None:
    with pytest.raises(ElasticError):
        read_header(memoryview(data))


@given(st.integers(0, 200), st.binary(min_size=1, max_size=8))
def test_any_damage_is_refused_or_harmless(position: int, noise: bytes) -> None:
    header_bytes, _, _ = plan_layout(3, [("param/w", "float32", (4, 4), -1)], {"a": "b"})
    data = bytearray(header_bytes)
    data[position : position + len(noise)] = noise
    try:
        read_header(memoryview(bytes(data)))
    except ElasticError:
        return


class RecordingTarget:
    """Records the ranges that are written."""

    def __init__(self) -> None:
        self.ranges: list[slice] = []

    def __setitem__(self, where: slice, data: memoryview) -> None:
        assert len(data) <= COPY_BYTES
        self.ranges.append(slice(where.start, where.start + len(data)))


def test_bytes_are_copied_in_pieces() -> None:
    """The interpreter's lock is held for one piece at a time, so the pieces must be small."""
    target, nbytes = RecordingTarget(), 3 * COPY_BYTES + 5
    copy_bytes(target, memoryview(bytes(nbytes)))  # type: ignore[arg-type]
    found = target.ranges
    assert COPY_BYTES <= 1 << 20 and len(found) == 4
    assert (found[0].start, found[-1].stop) == (0, nbytes)
    assert all(one.stop == other.start for one, other in pairwise(found))
