"""Times and bytes of a model on devices and links: measured by `elastic profile`, or published.

A profile is JSON with a version. Its layers have bytes, and the times of the first device type.
Every device type has its own times of every layer, because the ratio of forward to backward time
differs between devices. A `Measurement` of one device type starts or extends a profile.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, fields, replace
from math import isfinite

from elastic.domain.codec import dumps, loads
from elastic.domain.errors import FieldError
from elastic.domain.types import LayerSpec

VERSION = 1


@dataclass(frozen=True, slots=True)
class LinkProfile:
    """Bandwidth and latency of a link between two devices, in one direction."""

    bytes_per_s: float = 0.0
    """0: unknown, treated as infinite."""
    latency_s: float = 0.0

    @property
    def s_per_byte(self) -> float:
        return 1 / self.bytes_per_s if self.bytes_per_s > 0 else 0.0

    def seconds(self, nbytes: float) -> float:
        """Return the seconds to transfer `nbytes`."""
        return self.latency_s + (nbytes / self.bytes_per_s if self.bytes_per_s > 0 else 0.0)


@dataclass(frozen=True, slots=True)
class LayerTimes:
    """Seconds of one layer on one device type per micro-batch."""

    forward_s: float
    backward_s: float
    """Backward pass that runs as a whole."""
    backward_input_s: float = 0.0
    """Parts of the backward pass run apart, perhaps longer than the whole; 0: unknown."""
    backward_weight_s: float = 0.0
    update_s: float = 0.0
    """Optimizer update, once per step."""


@dataclass(frozen=True, slots=True)
class Device:
    """Layer times and memory of a device type."""

    name: str
    layers: tuple[LayerTimes, ...]
    memory_bytes: int = 0
    """Memory that a worker may use; 0: unknown, treated as unlimited."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Profile:
    """A model's layers, device types and links."""

    version: int = VERSION
    model: str
    tp: int = 1
    """Workers that shared each layer in the measurement; times are those of the whole group."""
    tokens_per_microbatch: int = 0
    layers: tuple[LayerSpec, ...]
    devices: tuple[Device, ...]
    inside: LinkProfile = LinkProfile()
    """Link between devices of one node."""
    link: LinkProfile = LinkProfile()
    """Link between nodes of one failure domain."""
    across: LinkProfile = LinkProfile()
    """Link between failure domains; unknown: `link` is used."""
    contention: float = 0.0
    """Seconds of compute lost per second of concurrent transfer."""
    copy_bytes_per_s: float = 0.0
    """Rate of copying backups to shared memory with a checksum; 0: unknown, treated as free."""

    @property
    def copy_s_per_byte(self) -> float:
        return 1 / self.copy_bytes_per_s if self.copy_bytes_per_s > 0 else 0.0

    def device(self, name: str) -> Device:
        """Return the device type of this name, or the first for "". Raises FieldError."""
        for device in self.devices:
            if name in ("", device.name):
                return device
        known = ", ".join(device.name for device in self.devices)
        raise FieldError("device", name, f"the profile of {self.model} knows {known}")


def format_profile(profile: Profile) -> str:
    """Return the profile as JSON."""
    return dumps(profile)


def parse_profile(text: str) -> Profile:
    """Return the profile of the JSON of `format_profile`. Raises FieldError for unusable values."""
    profile = loads(Profile, text)
    check_profile(profile)
    return profile


def check_profile(profile: Profile) -> None:
    """Raise FieldError for the first unusable value."""
    if profile.version != VERSION:
        raise FieldError(
            "Profile.version", profile.version, f"this program reads version {VERSION}"
        )
    if not profile.layers:
        raise FieldError("Profile.layers", profile.layers, "at least one layer is needed")
    if not profile.devices:
        raise FieldError("Profile.devices", profile.devices, "at least one device type is needed")
    names = [device.name for device in profile.devices]
    for i, device in enumerate(profile.devices):
        if not device.name or names.count(device.name) > 1:
            raise FieldError(
                f"Profile.devices[{i}].name", device.name, "each type needs a name of its own"
            )
        if len(device.layers) != len(profile.layers):
            raise FieldError(
                f"Profile.devices[{i}].layers",
                len(device.layers),
                f"times for all {len(profile.layers)} layers are needed",
            )
    if profile.tp < 1:
        raise FieldError("Profile.tp", profile.tp, "a whole number from 1 up")
    for path, value in _numbers(profile):
        if not isfinite(value) or value < 0:
            raise FieldError(path, value, "a finite number from 0 up")


def _numbers(profile: Profile) -> Iterator[tuple[str, float]]:
    parts: list[tuple[str, object]] = [("Profile", profile)]
    parts += [(f"Profile.{name}", getattr(profile, name)) for name in ("inside", "link", "across")]
    parts += [(f"Profile.layers[{i}]", layer) for i, layer in enumerate(profile.layers)]
    for i, device in enumerate(profile.devices):
        parts.append((f"Profile.devices[{i}]", device))
        parts += [
            (f"Profile.devices[{i}].layers[{j}]", times) for j, times in enumerate(device.layers)
        ]
    for path, part in parts:
        for field in fields(part):  # type: ignore[arg-type]
            value = getattr(part, field.name)
            if isinstance(value, (int, float)) and not isinstance(value, bool):
                yield f"{path}.{field.name}", value


def profile_of(
    layers: tuple[LayerSpec, ...],
    tp: int = 1,
    tokens_per_microbatch: int = 0,
    link: LinkProfile | None = None,
) -> Profile:
    """Return a profile of a job's own layer figures: one unnamed device type, one link."""
    times = tuple(
        LayerTimes(
            la.forward_s, la.backward_s, la.backward_input_s, la.backward_weight_s, la.update_s
        )
        for la in layers
    )
    return Profile(
        model="",
        tp=tp,
        tokens_per_microbatch=tokens_per_microbatch,
        layers=layers,
        devices=(Device("", times),),
        link=link or LinkProfile(),
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class MeasurementRequest:
    """Request from the command line to the script's process to measure a device type."""

    out: str
    """File for the resulting `Measurement` as JSON."""
    progress: str
    """File for a line about what is measured at present; the script's Trainer creates it."""
    device: str = ""
    """Name of the device type; "": the device's own name."""
    repeat: int = 20
    warmup: int = 3


@dataclass(frozen=True, slots=True, kw_only=True)
class Measurement:
    """Figures measured on one device type."""

    layers: tuple[LayerSpec, ...]
    """Measured bytes, and times on this device type."""
    device: Device
    like: tuple[int, ...]
    """Per layer, the index of the equal layer that was measured instead of it."""
    stated: tuple[LayerSpec, ...]
    """Figures that the script states for its layers."""
    tp: int
    tokens_per_microbatch: int


def new_profile(model: str, found: Measurement) -> Profile:
    """Return a profile of this device type alone, with unknown links."""
    return Profile(
        model=model,
        tp=found.tp,
        tokens_per_microbatch=found.tokens_per_microbatch,
        layers=found.layers,
        devices=(found.device,),
    )


def add_measurement(profile: Profile, found: Measurement, force: bool = False) -> Profile:
    """Return `profile` with the measured device type; `force`: replace one of the same name.

    Raises FieldError if the measured model is another one, or the device type exists.
    """
    _check_same_model(profile, found)
    name = found.device.name
    names = [device.name for device in profile.devices]
    if name not in names:
        return replace(profile, devices=(*profile.devices, found.device))
    if not force:
        remedy = "the profile has it already; give another name, or --force"
        raise FieldError("--device", name, remedy)
    devices = tuple(found.device if device.name == name else device for device in profile.devices)
    layers = found.layers if names[0] == name else profile.layers
    return replace(profile, devices=devices, layers=layers)


def _check_same_model(profile: Profile, found: Measurement) -> None:
    pairs = [
        (name, getattr(profile, name), getattr(found, name), "the script")
        for name in ("tp", "tokens_per_microbatch")
    ]
    pairs.insert(0, ("layers", len(profile.layers), len(found.layers), "the script"))
    pairs += [
        (f"layers[{i}].{name}", getattr(a, name), getattr(b, name), f"the script's layer {i}")
        for i, (a, b) in enumerate(zip(profile.layers, found.layers, strict=False))
        for name in ("param_bytes", "frozen_bytes", "state_bytes", "output_bytes")
    ]
    for name, expected, measured, owner in pairs:
        if expected != measured:
            remedy = f"{owner} has {measured}: it is another model; give --out"
            raise FieldError(f"--into {name}", expected, remedy)
