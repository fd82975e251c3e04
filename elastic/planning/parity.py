"""Who is in which parity group, and who keeps its parity.

A keeper has the XOR of its group's states, so of all members and the keeper one may be lost. Therefore no two of them
lie in one failure domain, as far as there are several: a domain that fails takes one of each group. With D domains a
group has D - 1 members at most, whatever is asked for; a node left without a group has its state kept as it is.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterator, Mapping, Sequence

from elastic.domain.types import Lane, NodeInfo, Plan
from elastic.planning.backup.peer_assignment import domain_of, natural
from elastic.planning.plan.schemes import PARITY, state_of

Groups = tuple[tuple[str, ...], ...]
Peers = tuple[tuple[str, str], ...]


def choose_groups(
    nodes: Sequence[NodeInfo], layers: Mapping[str, frozenset[int]], spares: Sequence[str], most: int
) -> tuple[Groups, Peers]:
    """Return (groups of two or more, (node, keeper) of every node in `layers`, in that order).

    `nodes` describes all at hand, spares included; `layers`: node -> layers that it holds. As few groups as `most`
    members and the domains allow, of even size; where that leaves a choice, members hold different layers. Keepers are
    outside their group and its domains, then as evenly loaded as one after the other can be, then those that hold none
    of the group's layers, then spares. ((), ()) for a lone node.
    """
    known = {*layers, *spares}
    infos = sorted((info for info in nodes if info.node in known), key=lambda info: natural(info.node))
    if len(infos) < 2:
        return (), ()
    domains = {info.node: domain_of(info) for info in infos}
    if len(set(domains.values())) == 1:
        domains = {node: node for node in domains}
    held = {node: sum(1 << layer for layer in layers.get(node, ())) for node in domains}
    holders = [node for node in domains if node in layers]
    groups = _deal(holders, domains, held, min(most, len(set(domains.values())) - 1))
    keeper_of = _keepers(groups, domains, held, frozenset(holders))
    chosen = tuple(tuple(group) for group in groups if len(group) > 1)
    return chosen, tuple((node, keeper_of[node]) for node in layers)


def _deal(
    holders: Sequence[str], domains: Mapping[str, str], held: Mapping[str, int], size: int
) -> list[list[str]]:
    """Groups of at most `size`, no two members of one domain. Domains are dealt out whole, the largest first, each to
    the emptiest groups: so sizes differ by one at most."""
    members: dict[str, list[str]] = {}
    for node in holders:
        members.setdefault(domains[node], []).append(node)
    ordered = sorted(members.values(), key=len, reverse=True)
    groups: list[list[str]] = [[] for _ in range(max(-(-len(holders) // size), len(ordered[0])))]
    masks = [0] * len(groups)
    for nodes in ordered:
        free = sorted(range(len(groups)), key=lambda g: len(groups[g]))
        limit = len(groups[free[len(nodes) - 1]])
        must = {g for g in free if len(groups[g]) < limit}
        may = [g for g in free if len(groups[g]) <= limit]
        for i, node in enumerate(nodes):
            left = may if len(must) < len(nodes) - i else [g for g in may if g in must]
            best = min(left, key=lambda g: (masks[g] & held[node]).bit_count())
            groups[best].append(node)
            masks[best] |= held[node]
            may.remove(best)
            must.discard(best)
    return [group for group in groups if group]


def _keepers(
    groups: Sequence[Sequence[str]],
    domains: Mapping[str, str],
    held: Mapping[str, int],
    holders: frozenset[str],
) -> dict[str, str]:
    """Node -> who keeps for it. Groups that can choose least choose first."""
    loads = dict.fromkeys(domains, 0)
    rings = [[n for n in domains if n not in holders], [n for n in domains if n in holders]]
    size_of = Counter(domains.values())
    result: dict[str, str] = {}
    for group in sorted(groups, key=lambda group: -sum(size_of[domains[node]] for node in group)):
        taken, mask = {domains[node] for node in group}, 0
        for node in group:
            mask |= held[node]
        best, keeper = (len(groups) + 1, 0), ""
        lowest = min(loads.values())
        for node in (n for ring in rings for n in _from(ring, group[-1])):
            cost = loads[node], (held[node] & mask).bit_count()
            if domains[node] not in taken and cost < best:
                best, keeper = cost, node
                if best == (lowest, 0):
                    break
        loads[keeper] += 1
        result.update(dict.fromkeys(group, keeper))
    return result


def _from(ring: list[str], node: str) -> Iterator[str]:
    """The ring from behind `node`, once round."""
    start = ring.index(node) + 1 if node in ring else 0
    yield from ring[start:]
    yield from ring[:start]


def describe(plan: Plan) -> str:
    """Who is in a group with whom, in a few words."""
    if not plan.groups:
        return "no two nodes have a keeper apart from both, so every state is kept as it is"
    text = f"parity groups of {'+'.join(str(len(group)) for group in plan.groups)}"
    alone = [node for node, _ in plan.peers if all(node not in group for group in plan.groups)]
    return f"{text}, {' '.join(alone)} in none" if alone else text


def kept_whole(plan: Plan) -> frozenset[str]:
    """Nodes whose state their peer has, or can make, without the help of others."""
    if not state_of(plan.state).away:
        return frozenset()
    return frozenset(node for node, _ in plan.peers) - {node for group in _groups(plan) for node in group}


def lanes_of(plan: Plan, node: str) -> dict[int, Lane]:
    """Layer -> the lane that its state goes into at the keeper; absent: it is kept there as it is."""
    held = _held(plan)
    for group in _groups(plan):
        if node in group:
            lanes = {}
            for index, layer in enumerate(held[node]):
                members = tuple(member for member in group if len(held[member]) > index)
                if len(members) > 1:
                    lanes[layer] = Lane(index, members)
            return lanes
    return {}


def rebuildable(plan: Plan, dead: Collection[str]) -> dict[int, tuple[str, int]]:
    """Layer of a dead node -> (keeper, how many states' worth of bytes bring it back), where one alone was lost."""
    held = _held(plan)
    found: dict[int, tuple[str, int]] = {}
    for group in _groups(plan):
        lost, keeper = [node for node in group if node in dead], plan.peer_of(group[0])
        if len(lost) == 1 and keeper and keeper not in dead:
            found.update((layer, (keeper, len(group))) for layer in held[lost[0]])
    return found


def _groups(plan: Plan) -> Groups:
    return plan.groups if state_of(plan.state).name == PARITY else ()


def _held(plan: Plan) -> dict[str, list[int]]:
    """Node -> its layers, ascending."""
    held: dict[str, list[int]] = {}
    for _, _, stage in plan.stages():
        held.setdefault(stage.unit.node, []).extend(stage.layers)
    return {node: sorted(layers) for node, layers in held.items()}
