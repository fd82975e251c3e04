"""Model FLOPs utilisation (MFU): the operations that the model needs, divided by the peak of the
devices of the plan in the same time. Repeated and recomputed operations do not count.

Source: Chowdhery et al. 2022, "PaLM", appendix B.
"""

from __future__ import annotations

from collections.abc import Mapping

from elastic.core.job.state import Member
from elastic.domain.types import JobSpec, Plan


def peak_of(plan: Plan, members: Mapping[str, Member]) -> float:
    """Return the peak of all devices of a plan, in 10^12 operations per second; 0: unknown."""
    total = 0.0
    for unit in set(plan.units()):
        member = members.get(unit.node)
        if member is None or not member.report.info.peak_tflops:
            return 0.0
        total += member.report.info.peak_tflops * plan.tp
    return total


def mfu(spec: JobSpec | None, seconds: float, peak_tflops: float) -> float:
    """Return the utilisation of a step that took `seconds`. 0 means that it is unknown."""
    if spec is None or seconds <= 0 or not peak_tflops:
        return 0.0
    return spec.flops_per_microbatch * spec.n_microbatches / (seconds * peak_tflops * 1e12)
