"""What a run's profile means for a worker: whether it fits the script, and layers that wait instead of computing."""

from __future__ import annotations

from elastic.config import load_config
from elastic.domain.errors import FieldError
from elastic.domain.types import JobSpec
from elastic.planning.cost.profile import Profile
from elastic.worker.control.agent_client import WorkerSettings
from elastic.worker.model.layers import LayerStack
from elastic.worker.profiling.emulated import EmulatedStack

EMULATE = "emulate"


def select_stack(settings: WorkerSettings, stack: LayerStack) -> LayerStack:
    """The layers to run: the script's own, or under --emulate the profile's."""
    profile = _profile(settings)
    if settings.profile != EMULATE or profile is None:
        return stack
    return EmulatedStack(profile, settings.device, stack.seed)


def check_profile(settings: WorkerSettings, spec: JobSpec) -> None:
    """Raise FieldError when the job is planned by a profile of another model."""
    profile = _profile(settings)
    if profile is None:
        return
    if settings.profile == EMULATE:
        if spec.tp != 1:
            raise FieldError(
                "--emulate", f"tp {spec.tp}", "one worker stands for a whole layer: run with tp 1"
            )
        return
    pairs = (
        ("layers", len(profile.layers), spec.n_layers),
        ("tp", profile.tp, spec.tp),
        ("tokens_per_microbatch", profile.tokens_per_microbatch, spec.tokens_per_microbatch),
    )
    for name, theirs, ours in pairs:
        if theirs != ours and (name != "tokens_per_microbatch" or (theirs and ours)):
            remedy = f"the script has {ours}: give its own profile (`elastic profile`)"
            raise FieldError(f"--profile {name}", theirs, remedy)


def _profile(settings: WorkerSettings) -> Profile | None:
    return load_config(settings.run_dir).profile if settings.profile else None
