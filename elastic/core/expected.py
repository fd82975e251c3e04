"""Seconds of a step under a plan, for the members at hand."""

from __future__ import annotations

from collections.abc import Iterable

from elastic.core.types import NodeInfo, Plan
from elastic.planning.predict import predict
from elastic.planning.profile import Profile


def step_s(
    plan: Plan, profile: Profile, nodes: Iterable[NodeInfo], slow: tuple[tuple[str, float], ...]
) -> float:
    """Predicted (`elastic.planning.predict`). `nodes`: those of the plan at least."""
    return predict(plan, profile, tuple(nodes), slow).step_s
