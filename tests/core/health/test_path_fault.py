"""Path faults: the history of a pair, and the fewest nodes that cover all bad pairs."""

from __future__ import annotations

from itertools import combinations

from hypothesis import given
from hypothesis import strategies as st

from elastic.core.health.path_fault import (
    LONGEST_HOLD_S,
    MAX_EXACT,
    Pair,
    PathFault,
    judge,
    minimum_covers,
    pair_of,
)
from elastic.core.protocol.health_report import UnreachablePeer

NODES = ("a", "b")
HOLD_S = 3.0


def report(node: str, peer: str) -> tuple[str, UnreachablePeer]:
    return node, UnreachablePeer(peer, f"{peer}:1", 4.0, "timed out")


def pairs_of(names: int) -> st.SearchStrategy[frozenset[Pair]]:
    name = st.integers(0, names - 1).map(lambda i: f"n{i:02}")
    pair = st.tuples(name, name).filter(lambda p: p[0] != p[1]).map(lambda p: pair_of(*p))
    return st.frozensets(pair, max_size=12)


@given(pairs_of(7))
def test_small_covers_are_the_smallest(pairs: frozenset[Pair]) -> None:
    nodes = {node for pair in pairs for node in pair}
    covers = minimum_covers(pairs)
    size = len(covers[0])
    for chosen in covers:
        assert len(chosen) == size and all(chosen & set(pair) for pair in pairs)
    smaller = combinations(nodes, size - 1) if size else ()
    assert not any(all(set(c) & set(pair) for pair in pairs) for c in smaller)
    assert all((set(c) in covers) == all(set(c) & set(p) for p in pairs)
               for c in combinations(nodes, size))  # fmt: skip


@given(pairs_of(60))
def test_large_covers_have_no_node_too_many(pairs: frozenset[Pair]) -> None:
    star = frozenset(pair_of("hub", f"s{i:02}") for i in range(MAX_EXACT + 1))
    (cover,) = minimum_covers(pairs | star)
    assert "hub" in cover
    for node in cover:
        assert not all((cover - {node}) & set(pair) for pair in pairs | star)


def test_no_bad_pair_leaves_nobody_out() -> None:
    assert minimum_covers(frozenset()) == (frozenset(),)


def test_both_directions_are_named() -> None:
    one = judge(None, NODES, (report("a", "b"),), 10.0, HOLD_S)
    assert one is not None and one.directions == (("a", "b"),)
    assert one.text == "a and b cannot reach each other (a -> b: timed out)"
    assert judge(one, NODES, (report("a", "b"),), 11.0, HOLD_S) is one
    both = judge(one, NODES, (report("a", "b"), report("b", "a")), 12.0, HOLD_S)
    assert both is not None and len(both.directions) == 2 and both.since == 10.0
    assert "b -> a: timed out" in both.text
    assert judge(both, NODES, (report("b", "a"),), 13.0, HOLD_S) is both


def test_a_path_that_is_well_is_used_after_a_hold_that_doubles() -> None:
    fault, now = None, 0.0
    for times in range(1, 12):
        fault = judge(fault, NODES, (report("a", "b"),), now, HOLD_S)
        assert fault is not None and fault.times == times and not fault.usable
        fault = judge(fault, NODES, (), now + 1, HOLD_S)
        assert fault is not None and fault.well_since == now + 1 and not fault.usable
        hold_s = min(HOLD_S * 2 ** (times - 1), LONGEST_HOLD_S)
        assert fault.hold_s(HOLD_S) == hold_s
        assert judge(fault, NODES, (), now + 0.9 + hold_s, HOLD_S) is fault
        now += 1 + hold_s
        fault = judge(fault, NODES, (), now, HOLD_S)
        assert fault is not None and fault.usable
        assert judge(fault, NODES, (), now + 1, HOLD_S) is fault


def test_a_relapse_during_the_hold_counts() -> None:
    fault = judge(PathFault(NODES, (NODES,), "", 0.0, 5.0), NODES, (report("b", "a"),), 6.0, HOLD_S)
    assert fault is not None and fault.times == 2 and not fault.well_since
