"""Parity groups: who is in which, who keeps them, and what can be brought back."""

from __future__ import annotations

import time
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from elastic.domain.types import Lane, LayerSpec, NodeInfo, Pipeline, Plan, Stage, Unit
from elastic.planning.backup.peer_assignment import domain_of
from elastic.planning.parity import choose_groups, describe, kept_whole, lanes_of, rebuildable
from elastic.planning.placement.migration import CHECKPOINT, HELD, KEPT, transition
from elastic.planning.plan.plan import format_plan, parse_plan, validate_plan
from elastic.planning.search.assemble import protect


def info(name: str, domain: str = "") -> NodeInfo:
    return NodeInfo(name, "i", "h:1", domain=domain)


def choose(domains: str, most: int = 3, spares: int = 0, depth: int = 0):  # type: ignore[no-untyped-def]
    """Nodes n0, n1, ... in the domains named by letters ("-": none); the last `spares` hold nothing."""
    nodes = [info(f"n{i}", "" if d == "-" else d) for i, d in enumerate(domains)]
    names = [node.node for node in nodes]
    held = names[: len(names) - spares]
    layers = {name: frozenset({i % depth if depth else i}) for i, name in enumerate(held)}
    return choose_groups(nodes, layers, names[len(held) :], most)


def test_a_lone_node_has_no_keeper() -> None:
    assert choose("-") == ((), ())


def test_two_nodes_keep_each_other_as_they_are() -> None:
    assert choose("--") == ((), (("n0", "n1"), ("n1", "n0")))


def test_four_nodes_are_two_groups_that_keep_each_other() -> None:
    groups, peers = choose("----")
    assert groups == (("n0", "n2"), ("n1", "n3"))
    assert dict(peers)["n0"] in ("n1", "n3") and dict(peers)["n1"] in ("n0", "n2")


def test_a_spare_keeps_a_group_of_all() -> None:
    groups, peers = choose("-----", most=4, spares=1)
    assert groups == (("n0", "n1", "n2", "n3"),)
    assert {keeper for _, keeper in peers} == {"n4"}


def test_with_two_domains_states_are_kept_as_they_are_in_the_other() -> None:
    groups, peers = choose("aabb")
    assert groups == () and all("ab"[int(p[1]) // 2] != "ab"[int(n[1]) // 2] for n, p in peers)


def test_with_three_domains_a_group_and_its_keeper_are_in_one_each() -> None:
    groups, _ = choose("aabbcc")
    assert sorted(map(len, groups)) == [2, 2, 2]


def test_one_domain_for_all_does_not_prevent_groups() -> None:
    assert choose("aaaa") == choose("----")


def test_holders_of_the_same_layers_are_in_different_groups() -> None:
    groups, _ = choose("--------", depth=4)
    for group in groups:
        assert len({int(name[1]) % 4 for name in group}) == len(group)


@given(
    st.lists(st.sampled_from("-abcd"), min_size=2, max_size=14).map("".join),
    st.integers(2, 5),
    st.integers(0, 3),
    st.integers(1, 5),
)
@settings(max_examples=400, deadline=None)
def test_one_domain_takes_one_of_a_group_and_its_keeper(
    domains: str, most: int, spares: int, depth: int
) -> None:
    spares = min(spares, len(domains) - 1)
    groups, peers = choose(domains, most, spares, depth)
    keeper_of = dict(peers)
    assert [node for node, _ in peers] == [f"n{i}" for i in range(len(domains) - spares)]
    grouped = [node for group in groups for node in group]
    assert len(grouped) == len(set(grouped)) and all(2 <= len(group) <= most for group in groups)
    places = [domain_of(info(f"n{i}", "" if d == "-" else d)) for i, d in enumerate(domains)]
    several = len(set(places)) > 1
    for group in (*groups, *((node,) for node in keeper_of if node not in grouped)):
        together = [*group, keeper_of[group[0]]]
        assert {keeper_of[node] for node in group} == {together[-1]}
        assert len(set(together)) == len(together)
        assert len({places[int(node[1:])] for node in together}) == len(together) or not several
    sizes = [len(group) for group in groups] + [1] * (len(keeper_of) - len(grouped))
    assert max(sizes) - min(sizes) <= 1
    assert (groups, peers) == choose(domains, most, spares, depth)


@pytest.mark.parametrize("domains", ["-", "abcdefgh", "ab"])
def test_a_thousand_nodes(domains: str) -> None:
    nodes = [info(f"n{i}", "" if domains == "-" else domains[i % len(domains)]) for i in range(1024)]
    layers = {node.node: frozenset(range(i % 16, i % 16 + 6)) for i, node in enumerate(nodes)}
    began = time.process_time()
    choose_groups(nodes, layers, (), 3)
    assert time.process_time() - began < 1.0


# ---- what follows from a plan

PLAN = Plan(
    epoch=1,
    n_layers=6,
    n_microbatches=2,
    tp=1,
    pipelines=(
        Pipeline(
            (Stage(Unit("a"), 0, 3), Stage(Unit("b"), 3, 4), Stage(Unit("c"), 4, 5), Stage(Unit("d"), 5, 6)), (0, 1)
        ),
    ),
    peers=(("a", "d"), ("b", "d"), ("c", "d"), ("d", "a")),
    groups=(("a", "b", "c"),),
    state="parity",
)  # fmt: skip
LAYERS = tuple(LayerSpec(10, 20, 5, 1.0, 1.0) for _ in range(6))


def test_a_lane_has_one_layer_of_every_member_and_a_lone_layer_is_kept_as_it_is() -> None:
    all_three = Lane(0, ("a", "b", "c"))
    assert lanes_of(PLAN, "a") == {0: all_three}  # 1 and 2 have no counterpart
    assert lanes_of(PLAN, "b") == {3: all_three}
    assert lanes_of(PLAN, "d") == {}
    assert lanes_of(replace(PLAN, state="snapshot"), "a") == {}


def test_the_text_form_has_the_groups() -> None:
    assert parse_plan(format_plan(PLAN)) == PLAN
    validate_plan(PLAN)


def test_what_the_plan_knows_of_lost_nodes() -> None:
    assert kept_whole(PLAN) == {"d"}
    assert kept_whole(replace(PLAN, state="snapshot")) == set("abcd")
    assert rebuildable(PLAN, ["b"]) == {3: ("d", 3)}
    assert rebuildable(PLAN, ["b", "c"]) == {} == rebuildable(PLAN, ["b", "d"])


def test_moves_come_from_the_keeper_while_one_is_lost_and_from_the_checkpoint_after() -> None:
    stages = (Stage(Unit("a"), 0, 3), Stage(Unit("c"), 3, 5), Stage(Unit("d"), 5, 6))
    new = replace(PLAN, pipelines=(Pipeline(stages, (0, 1)),), peers=(), groups=())
    (move,) = transition(PLAN, new, LAYERS, dead=["b"]).moves
    assert (move.layer, move.source, move.nbytes, move.kind) == (3, "d", 90, KEPT)
    stages = (Stage(Unit("a"), 0, 5), Stage(Unit("d"), 5, 6))
    new = replace(new, pipelines=(Pipeline(stages, (0, 1)),))
    assert {move.kind for move in transition(PLAN, new, LAYERS, dead=["b", "c"]).moves} == {CHECKPOINT}
    assert {move.kind for move in transition(PLAN, new, LAYERS, dead=["b"]).moves} == {KEPT, HELD}


def test_protect_makes_groups_and_forgets_those_of_the_plan_before() -> None:
    nodes = tuple(info(name) for name in "abcd")
    plan, why = protect(PLAN, nodes, "stream:2+parity:2")
    assert (plan.gradients, plan.state) == ("stream:2", "parity:2")
    assert len(plan.groups) == 2 and "parity groups of 2+2" in why
    assert protect(plan, nodes, "stream+snapshot")[0].groups == ()
    alone = replace(PLAN, pipelines=(Pipeline((Stage(Unit("a"), 0, 6),), (0, 1)),), peers=(), groups=())
    assert protect(alone, nodes[:1], "stream+parity")[1] == "copies stay on their own node: no peer"
    assert "as it is" in describe(protect(alone, nodes[:1], "stream+parity")[0])
