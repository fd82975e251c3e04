"""Random small clusters with whole-number times, so that sums are exact and ties occur."""

from __future__ import annotations

import random
from dataclasses import dataclass

from elastic.domain.types import JobSpec, LayerSpec, NodeInfo
from elastic.planning.cost.profile import Device, LayerTimes, LinkProfile, Profile
from elastic.planning.search.request import PlanRequest
from tests.planning.search.brute_force import Node


@dataclass(frozen=True)
class Case:
    """A cluster and a model."""

    profile: Profile
    kinds: tuple[Node, ...]
    """(device, slow factor, memory, units) of each kind."""
    counts: tuple[int, ...]
    microbatches: int
    stream: bool

    @property
    def nodes(self) -> tuple[Node, ...]:
        return tuple(
            kind for kind, n in zip(self.kinds, self.counts, strict=True) for _ in range(n)
        )

    def named(self) -> dict[str, Node]:
        return {f"node{i}": node for i, node in enumerate(self.nodes)}

    def request(self, schedule: str = "1f1b") -> PlanRequest:
        infos = tuple(
            NodeInfo(name, "", "", workers=units, memory_bytes=memory, device=device)
            for name, (device, _, memory, units) in self.named().items()
        )
        return PlanRequest(
            spec=JobSpec(self.profile.layers, self.microbatches, n_steps=1),
            nodes=infos,
            epoch=1,
            profile=self.profile,
            slow=tuple((name, node[1]) for name, node in self.named().items() if node[1] != 1.0),
            schedule=schedule,
            backup="stream+none" if self.stream else "none+none",
        )


def random_case(
    seed: int,
    *,
    nodes: int = 7,
    layers: int = 9,
    microbatches: int = 8,
    units: int = 1,
    tight: bool | None = None,
) -> Case:
    """A case of up to these sizes and two device types; `tight`: memory is short; None: random."""
    rng = random.Random(seed)
    n_layers, n_nodes = rng.randint(1, layers), rng.randint(1, nodes)
    equal, linked = rng.random() < 0.5, rng.random() < 0.4
    updates = rng.random() < 0.3

    def layer() -> LayerSpec:
        gradient = 10 if equal else rng.choice((5, 10))
        return LayerSpec(10, 20, gradient, 0, 0, rng.randint(0, 20), rng.choice((0, 4, 8)))

    def times() -> LayerTimes:
        forward, whole, entry, weight = (rng.randint(1, 6) for _ in range(4))
        return LayerTimes(forward, whole, entry, weight, rng.randint(0, 2) if updates else 0)

    def many(make: object) -> tuple[object, ...]:
        assert callable(make)
        return (make(),) * n_layers if equal else tuple(make() for _ in range(n_layers))

    specs = many(layer)
    profile = Profile(
        model="random",
        layers=specs,  # type: ignore[arg-type]
        devices=tuple(Device(name, many(times)) for name in "ab"),  # type: ignore[arg-type]
        inside=LinkProfile(0.0, 0.125),
        link=LinkProfile(8.0, 0.5) if linked else LinkProfile(),
        contention=rng.choice((0.0, 0.25)),
        copy_bytes_per_s=rng.choice((0.0, 16.0)),
    )
    whole = sum(
        la.param_bytes + la.state_bytes + la.gradient_bytes + la.activation_bytes
        for la in profile.layers
    )
    short = rng.random() < 0.5 if tight is None else tight
    kinds = tuple(
        (
            name,
            1.0 if name == "a" else rng.choice((1.0, 2.0)),
            int(whole * rng.choice((0.3, 0.5, 0.7, 1.0, 1.5))) + 1 if short else 0,
            rng.randint(1, units),
        )
        for name in "ab"
    )
    first = rng.randint(0, n_nodes)
    return Case(
        profile,
        kinds,
        (first, n_nodes - first),
        rng.randint(1, microbatches),
        linked and rng.random() < 0.5,
    )
