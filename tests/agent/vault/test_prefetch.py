"""A node that is about to join fetches states from vaults over loopback."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from elastic.agent.vault.prefetch import prefetch
from elastic.core.protocol.messages import Prefetch
from elastic.domain.types import STATE, Copy
from tests.agent.vault.copies import LocalWriter, content, gradient, make, put
from tests.agent.vault.nodes import MiniNode, nodes


@pytest.fixture
def three(tmp_path: Path) -> Iterator[list[MiniNode]]:
    with nodes(tmp_path, "joining", "b", "c") as made:
        yield made


def order(made: list[MiniNode], *sources: tuple[int, int, str]) -> Prefetch:
    return Prefetch(3, sources, tuple((node.name, node.server.address) for node in made))


def own(node: MiniNode, layer: int, step: int, shard: int = 0) -> Copy:
    """A state of `node` itself, with content of its own."""
    data = content(50 * layer + 5 * step + shard, 70_000)
    return put(node.vault, make(data, layer=layer, step=step, shard=shard, owner=node.name), data)


def described(copies: tuple[Copy, ...]) -> set[tuple[str, int, int, int, str]]:
    return {(c.kind, c.layer, c.shard, c.step, c.owner) for c in copies}


def test_the_newest_state_of_every_layer_comes_from_its_holder(three: list[MiniNode]) -> None:
    joining, b, c = three
    wanted = [own(b, 0, 3), own(b, 0, 4), own(b, 1, 4), own(b, 1, 4, shard=1), own(c, 2, 4)][1:]
    own(b, 5, 4)  # not in the order
    data = content(1)
    put(b.vault, make(data, layer=2, step=9, owner="c"), data)  # a copy of c, which b keeps
    put(b.vault, gradient(data, 4, {0}, owner="b"), data)
    joining.vault.fence(8)  # does not concern copies that the node fetches itself
    fetched = prefetch(
        joining.vault, order(three, (0, 0, "b"), (2, 0, "c"), (1, 0, "b"), (1, 1, "b"))
    )
    assert fetched == sum(copy.nbytes for copy in wanted)
    assert described(joining.vault.inventory()) == described(tuple(wanted))
    for copy in wanted:
        source = b if copy.owner == "b" else c
        assert joining.vault.read(copy.key) == source.vault.read(copy.key)
    assert {copy.node for copy in joining.vault.inventory()} == {"joining"}
    assert joining.vault.check_integrity() == ()


def test_again_brings_what_is_newer_also_from_slots(three: list[MiniNode], tmp_path: Path) -> None:
    joining, b, _ = three
    writer = LocalWriter(tmp_path / "worker")
    for step in range(5):
        data = content(step, 9_000)
        b.vault.publish(writer.write(step % 2, make(data, step=step, owner="b"), data))
        assert prefetch(joining.vault, order(three, (0, 0, "b"))) == 9_000
        (newest,) = [copy for copy in joining.vault.inventory() if copy.step == step]
        assert bytes(joining.vault.read(newest.key)) == data
    assert described(joining.vault.inventory()) == {(STATE, 0, 0, step, "b") for step in (3, 4)}


def test_what_a_source_does_not_have_is_left_out(three: list[MiniNode]) -> None:
    joining, b, _ = three
    copy = own(b, 1, 2)
    assert (
        prefetch(joining.vault, order(three, (0, 0, "b"), (1, 0, "b"), (1, 0, "c"))) == copy.nbytes
    )
    assert described(joining.vault.inventory()) == described((copy,))
    assert prefetch(joining.vault, order(three)) == 0


def test_a_source_that_is_gone_costs_its_own_layers_alone(three: list[MiniNode]) -> None:
    joining, b, c = three
    copy = own(b, 0, 2)
    wanted = order(three, (0, 0, "b"), (2, 0, "c"))
    own(c, 2, 2)
    c.server.close()
    assert prefetch(joining.vault, wanted) == copy.nbytes
    assert described(joining.vault.inventory()) == described((copy,))


def test_corrupt_bytes_are_refused_and_their_room_comes_back(
    three: list[MiniNode], tmp_path: Path
) -> None:
    joining, b, _ = three
    writer = LocalWriter(tmp_path / "worker")
    data = content(1, 9_000)
    rooms = set()
    for _ in range(3):
        b.vault.publish(writer.write(0, make(data, owner="b"), data))
        writer.slots[0].view(10)[5] ^= 1
        assert prefetch(joining.vault, order(three, (0, 0, "b"))) == 0
        rooms.add(joining.vault.allocated_bytes)
    assert joining.vault.inventory() == () and len(rooms) == 1


def test_a_former_member_costs_its_own_layers_alone(three: list[MiniNode]) -> None:
    joining, b, _ = three
    copy = own(b, 0, 2)
    wanted = order(three[:2], (2, 0, "c"), (0, 0, "b"))
    assert prefetch(joining.vault, wanted) == copy.nbytes
