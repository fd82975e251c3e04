"""What the coordinator says to many nodes is encoded once, and each gets its own recipes."""

from __future__ import annotations

import zlib
from typing import Any

import msgspec
import pytest
from msgspec.structs import replace

from elastic.core.protocol import messages as m
from elastic.domain.errors import FieldError
from elastic.domain.types import Assignment, Pipeline, Plan, Recipe, Stage, Unit
from elastic.rpc.control.broadcast import BroadcastEncoder
from elastic.rpc.control.envelope import MAX_BODY_BYTES, from_wire, pack, to_wire, unpack

PLAN = Plan(
    3,
    2,
    2,
    1,
    (Pipeline((Stage(Unit("a"), 0, 1), Stage(Unit("b"), 1, 2)), (0, 1)),),
    reason="three nodes",
)
RECIPES = (("a", Recipe(0, 0, 4)), ("b", Recipe(1, 0, 4)), ("a", Recipe(1, 0, 4)))


def test_an_install_has_the_recipes_of_its_node_alone() -> None:
    parcels, install = BroadcastEncoder(), m.Install(3, Assignment(PLAN, 4, RECIPES, store="s"))
    for node in ("a", "b", "c", "a"):
        got = unpack(parcels.pack(install, term=1, epoch=3, node=node))
        assert got.assignment.recipes == tuple(pair for pair in RECIPES if pair[0] == node)
        assert got.assignment.plan == PLAN and got.assignment.store == "s"
    assert unpack(parcels.pack(install, term=1, epoch=3, node="")) == install


def test_another_assignment_is_another_parcel() -> None:
    parcels = BroadcastEncoder()
    for step in (4, 5):
        envelope = parcels.pack(
            m.Install(3, Assignment(PLAN, step, RECIPES)), term=1, epoch=3, node="b"
        )
        assert unpack(envelope).assignment.step == step


def test_the_same_words_are_encoded_once() -> None:
    parcels = BroadcastEncoder()
    first = parcels.pack(m.Halt(3), term=1, epoch=2, node="a")
    assert first == pack(m.Halt(3), term=1, epoch=2)
    assert parcels.pack(m.Halt(3), term=1, epoch=2, node="b") is first
    assert parcels.pack(m.Halt(3), term=2, epoch=2, node="b").term == 2
    assert parcels.pack(m.Halt(3, True), term=2, epoch=2, node="b") == pack(
        m.Halt(3, True), term=2, epoch=2
    )
    assert unpack(parcels.pack(m.Trim(3), term=2, epoch=2, node="b")) == m.Trim(3)


class _PacksMeanwhile(int):
    """A term during whose comparison another thread packs a message."""

    encoder: BroadcastEncoder

    def __eq__(self, other: object) -> bool:
        self.encoder.pack(m.Trim(3), term=1, epoch=2, node="b")
        return int(self) == other

    __hash__ = int.__hash__


def test_a_message_that_is_packed_meanwhile_takes_nobody_elses_place() -> None:
    encoder = BroadcastEncoder()
    encoder.pack(m.Halt(3), term=1, epoch=2, node="a")
    term = _PacksMeanwhile(1)
    term.encoder = encoder
    assert unpack(encoder.pack(m.Halt(3), term=term, epoch=2, node="c")) == m.Halt(3)


def test_what_is_common_travels_deflated_and_within_bounds() -> None:
    envelope = BroadcastEncoder().pack(
        m.Install(3, Assignment(PLAN, 4, RECIPES)), term=1, epoch=3, node="a"
    )
    assert from_wire(to_wire(envelope)) == envelope
    text = zlib.decompress(envelope.common)
    bombs = (b"no zlib", envelope.common[:-1], zlib.compress(bytes(MAX_BODY_BYTES + 1)))
    values: tuple[Any, ...] = ({}, [], 3, {"assignment": []})
    others = [zlib.compress(msgspec.msgpack.encode(other)) for other in values]
    for wrong in (*bombs, *others, zlib.compress(text + b"\x90")):
        with pytest.raises(FieldError, match=r"Install\.common"):
            unpack(replace(envelope, common=wrong))
    with pytest.raises(FieldError, match=r"Install\.assignment\.recipes"):
        unpack(replace(envelope, body=b"\x03"))
    with pytest.raises(FieldError, match="Trim"):
        unpack(replace(envelope, kind="Trim"))
    with pytest.raises(FieldError, match="Install"):
        unpack(replace(envelope, body=b"\xc1"))
