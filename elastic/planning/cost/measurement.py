"""What was measured on one device type, and how profiles are made of it."""

from __future__ import annotations

from dataclasses import dataclass, replace

from elastic.domain.errors import FieldError
from elastic.domain.types import LayerSpec
from elastic.planning.cost.profile import Device, Profile

BYTES = ("param_bytes", "state_bytes", "output_bytes")
"""What must be equal on every device type."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Order:
    """What to measure; written by the command line, read by the script's process."""

    out: str
    """File for the answer, a `Measurement` in JSON."""
    device: str = ""
    """Name of the device type; "": the device's own."""
    repeat: int = 20
    warmup: int = 3


@dataclass(frozen=True, slots=True, kw_only=True)
class Measurement:
    """What was found."""

    layers: tuple[LayerSpec, ...]
    """Bytes as measured, times of this device."""
    device: Device
    like: tuple[int, ...]
    """For each layer the one that was measured for it."""
    stated: tuple[LayerSpec, ...]
    """What the script's stack says of itself."""
    tp: int
    tokens_per_microbatch: int


def new_profile(model: str, found: Measurement) -> Profile:
    """A profile of this device type alone; links unknown."""
    return Profile(
        model=model,
        tp=found.tp,
        tokens_per_microbatch=found.tokens_per_microbatch,
        layers=found.layers,
        devices=(found.device,),
    )


def merge(profile: Profile, found: Measurement, force: bool = False) -> Profile:
    """`profile` with another device type of the same model; `force`: or with new figures of one that it has.

    Raises FieldError when the model is another one.
    """
    _check_same(profile, found)
    name = found.device.name
    names = [device.name for device in profile.devices]
    if name not in names:
        return replace(profile, devices=(*profile.devices, found.device))
    if not force:
        raise FieldError("--device", name, "the profile has it already; give another name, or --force")
    devices = tuple(found.device if device.name == name else device for device in profile.devices)
    layers = found.layers if names[0] == name else profile.layers
    return replace(profile, devices=devices, layers=layers)


def _check_same(profile: Profile, found: Measurement) -> None:
    pairs = (
        ("layers", len(profile.layers), len(found.layers)),
        ("tp", profile.tp, found.tp),
        ("tokens_per_microbatch", profile.tokens_per_microbatch, found.tokens_per_microbatch),
    )
    for name, theirs, ours in pairs:
        if theirs != ours:
            raise FieldError(
                f"--into {name}", theirs, f"the script has {ours}: it is another model; give --out"
            )
    for i, (a, b) in enumerate(zip(profile.layers, found.layers, strict=True)):
        for name in BYTES:
            if getattr(a, name) != getattr(b, name):
                text = f"the script's layer {i} has {getattr(b, name)}: it is another model; give --out"
                raise FieldError(f"--into layers[{i}].{name}", getattr(a, name), text)
