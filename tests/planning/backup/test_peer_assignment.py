"""Who keeps whose backups."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from elastic.domain.types import NodeInfo
from elastic.planning.backup.peer_assignment import choose_peers, domain_of, natural


def info(name: str, domain: str = "") -> NodeInfo:
    return NodeInfo(name, "i", "h:1", domain=domain)


def layers(**held: tuple[int, int]) -> dict[str, frozenset[int]]:
    return {node: frozenset(range(*span)) for node, span in held.items()}


def test_a_lone_node_has_no_peer() -> None:
    assert choose_peers([info("a")], layers(a=(0, 4))) == ()


def test_a_line_of_stages_becomes_a_ring() -> None:
    nodes = [info(f"n{i}") for i in range(3)]
    held = layers(n0=(0, 1), n1=(1, 2), n2=(2, 3))
    assert choose_peers(nodes, held) == (("n0", "n1"), ("n1", "n2"), ("n2", "n0"))


def test_holders_of_the_same_layers_do_not_keep_each_other() -> None:
    nodes = [info(f"n{i}") for i in range(4)]
    held = layers(n0=(0, 2), n1=(0, 2), n2=(2, 4), n3=(2, 4))
    for node, peer in choose_peers(nodes, held):
        assert not held[node] & held[peer]


def test_spares_come_first_but_not_for_everybody() -> None:
    nodes = [info(f"n{i}") for i in range(4)]
    held = layers(n0=(0, 1), n1=(1, 2), n2=(2, 3))
    peers = dict(choose_peers(nodes, held, ["n3"]))
    assert list(peers.values()).count("n3") == 1
    assert peers["n0"] == "n3"


@pytest.mark.parametrize("domain", ["", "zone"])
def test_nodes_that_cannot_keep_copies_are_no_peers(domain: str) -> None:
    """Unless a node would have no peer then."""
    for size in range(2, 7):
        names = [f"n{i}" for i in range(size)]
        held = {name: frozenset({i}) for i, name in enumerate(names)}
        for bad in range(size + 1):
            nodes = [
                replace(info(n, f"{domain}{i % 2}" if domain else ""), keeps=i >= bad)
                for i, n in enumerate(names)
            ]
            peers = choose_peers(nodes, held)
            assert [node for node, _ in peers] == names
            assert all(node != peer for node, peer in peers)
            if size - bad > 1:
                assert not {peer for _, peer in peers} & set(names[:bad])


def test_numbers_in_names_sort_as_numbers() -> None:
    assert sorted(["n10", "n9", "m", "9"], key=natural) == ["9", "m", "n9", "n10"]


@given(
    st.lists(st.sampled_from(["", "a", "b", "c"]), min_size=2, max_size=9),
    st.integers(0, 3),
    st.integers(1, 4),
)
@settings(max_examples=150, deadline=None)
def test_peers_lie_apart_and_the_load_is_even(
    domains: list[str], n_spares: int, depth: int
) -> None:
    nodes = [info(f"n{i}", domain) for i, domain in enumerate(domains)]
    spares = [node.node for node in nodes[: min(n_spares, len(nodes) - 1)]]
    held = {
        node.node: frozenset({i % depth}) for i, node in enumerate(nodes) if node.node not in spares
    }
    peers = choose_peers(nodes, held, spares)
    assert [node for node, _ in peers] == list(held)
    by_name = {node.node: node for node in nodes}
    loads: dict[str, int] = {}
    for node, peer in peers:
        assert peer != node
        loads[peer] = loads.get(peer, 0) + 1
        apart = [n for n in nodes if domain_of(n) != domain_of(by_name[node])]
        if apart:
            assert domain_of(by_name[peer]) != domain_of(by_name[node])
    assert peers == choose_peers(nodes, held, spares)
    if all(domain == "" for domain in domains):
        assert max(loads.values()) == 1


@pytest.mark.parametrize("depth", [1, 16, 512])
@pytest.mark.parametrize("domains", [0, 2, 8])
def test_many_nodes(depth: int, domains: int) -> None:
    """As for few: one copy each, in another domain, of other layers where there are any."""
    nodes = [info(f"n{i}", f"d{i * domains // 1024}" if domains else "") for i in range(1024)]
    held = {node.node: frozenset({i % depth}) for i, node in enumerate(nodes)}
    peers = dict(choose_peers(nodes, held))
    assert len(set(peers.values())) == 1024
    by_name = {node.node: node for node in nodes}
    assert all(domain_of(by_name[node]) != domain_of(by_name[peer]) for node, peer in peers.items())
    if depth > 1:
        assert not any(held[node] & held[peer] for node, peer in peers.items())


def test_chains_of_changes_even_the_load() -> None:
    """a and b choose each other; c finds only itself free, takes a, and b takes c instead."""
    nodes = [info(name) for name in "abc"]
    held = layers(a=(0, 1), b=(1, 2), c=(1, 2))
    assert choose_peers(nodes, held) == (("a", "b"), ("b", "c"), ("c", "a"))
    many = [info(f"n{i}", "xxxxy"[i % 5]) for i in range(20)]
    held = layers(**{node.node: (i, i + 1) for i, node in enumerate(many)})
    loads = Counter(peer for _, peer in choose_peers(many, held))
    assert max(loads.values()) == 4, "sixteen nodes of x have only the four of y"
