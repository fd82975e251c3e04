"""The profile of a run: the layers that it selects, and the check that it fits the script."""

from __future__ import annotations

from elastic.config import load_config
from elastic.domain.errors import FieldError
from elastic.domain.types import JobSpec
from elastic.planning.cost.profile import Profile
from elastic.worker.control.agent_client import WorkerSettings
from elastic.worker.model.layers import LayerStack
from elastic.worker.profiling.emulated import EmulatedStack

EMULATE = "emulate"
"""Value of `WorkerSettings.profile` under --emulate."""


def select_stack(settings: WorkerSettings, stack: LayerStack) -> LayerStack:
    """Return the script's `stack`, or the profile's emulated layers under --emulate."""
    profile = _profile(settings)
    if settings.profile != EMULATE or profile is None:
        return stack
    return EmulatedStack(profile, settings.device, stack.seed)


def check_profile(settings: WorkerSettings, spec: JobSpec) -> None:
    """Raise FieldError if the run's profile does not fit the script or, emulated, tp is not 1."""
    profile = _profile(settings)
    if profile is None:
        return
    if settings.profile == EMULATE:
        if spec.tp != 1:
            remedy = "one worker emulates a whole layer: run with tp 1"
            raise FieldError("--emulate", f"tp {spec.tp}", remedy)
        return
    pairs = (
        ("layers", len(profile.layers), spec.n_layers),
        ("tp", profile.tp, spec.tp),
        ("tokens_per_microbatch", profile.tokens_per_microbatch, spec.tokens_per_microbatch),
    )
    for name, in_profile, in_script in pairs:
        known = name != "tokens_per_microbatch" or (in_profile and in_script)
        if in_profile != in_script and known:
            remedy = f"the script has {in_script}: measure its own profile with `elastic profile`"
            raise FieldError(f"--profile {name}", in_profile, remedy)


def _profile(settings: WorkerSettings) -> Profile | None:
    return load_config(settings.run_dir).profile if settings.profile else None
