"""Seconds of a step by the closed form: max over pipelines of sum(tau) + (m - 1) max(tau), tau = f + b + hop."""

from __future__ import annotations

from collections.abc import Iterable

from elastic.core.types import NodeInfo, Plan
from elastic.planning.profile import Profile


def step_s(
    plan: Plan, profile: Profile, nodes: Iterable[NodeInfo], slow: tuple[tuple[str, float], ...]
) -> float:
    """Without the tail, which plans of the same layers share."""
    devices, factors = {info.node: info.device for info in nodes}, dict(slow)
    longest = 0.0
    for pipeline in plan.pipelines:
        taus = []
        for stage in pipeline.stages:
            times = profile.device(devices.get(stage.unit.node, "")).layers
            compute = sum(times[i].forward_s + times[i].backward_s for i in stage.layers)
            hop = 0.0
            if stage.last < plan.n_layers:
                hop = 2 * profile.link.seconds(profile.layers[stage.last - 1].output_bytes)
            taus.append(compute * factors.get(stage.unit.node, 1.0) + hop)
        if pipeline.microbatches:
            longest = max(longest, sum(taus) + (len(pipeline.microbatches) - 1) * max(taus))
    return longest
