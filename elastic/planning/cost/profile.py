"""What a model costs on which devices and links: measured by `elastic profile`, or worked out from public sizes.

A profile is JSON with a version. Layers carry bytes and the times of the first device type; every device type
has its own times for every layer, because forward and backward scale differently from device to device.
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
    """A link between two devices, one direction."""

    bytes_per_s: float = 0.0
    """0: unknown, taken as infinitely fast."""
    latency_s: float = 0.0

    def seconds(self, nbytes: float) -> float:
        """Seconds to move `nbytes`."""
        return self.latency_s + (nbytes / self.bytes_per_s if self.bytes_per_s > 0 else 0.0)


@dataclass(frozen=True, slots=True)
class LayerTimes:
    """Seconds of one layer on one device type, for one micro-batch."""

    forward_s: float
    backward_s: float
    """The whole backward pass in one go."""
    backward_input_s: float = 0.0
    """Its two parts when run apart (together they may take longer than the whole); 0: unknown."""
    backward_weight_s: float = 0.0
    update_s: float = 0.0
    """The optimizer's update, once a step."""


@dataclass(frozen=True, slots=True)
class Device:
    """A device type."""

    name: str
    layers: tuple[LayerTimes, ...]
    memory_bytes: int = 0
    """What a worker may use; 0: unknown, taken as unlimited."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Profile:
    """A model on device types and links."""

    version: int = VERSION
    model: str
    tp: int = 1
    """Workers that shared a layer when it was measured; times are those of the whole group."""
    tokens_per_microbatch: int = 0
    layers: tuple[LayerSpec, ...]
    devices: tuple[Device, ...]
    inside: LinkProfile = LinkProfile()
    """Between devices of one node."""
    link: LinkProfile = LinkProfile()
    """Between nodes of one failure domain."""
    across: LinkProfile = LinkProfile()
    """Between failure domains; unknown: as `link`."""
    contention: float = 0.0
    """Seconds by which a second of concurrent transfer lengthens compute."""
    copy_bytes_per_s: float = 0.0
    """At which a worker copies what is backed up to shared memory, checksum included; 0: unknown, taken as free."""

    def device(self, name: str) -> Device:
        """The type of this name, or the first for "". Raises FieldError."""
        for device in self.devices:
            if name in ("", device.name):
                return device
        known = ", ".join(device.name for device in self.devices)
        raise FieldError("device", name, f"the profile of {self.model} knows {known}")


def format_profile(profile: Profile) -> str:
    """The JSON text."""
    return dumps(profile)


def parse_profile(text: str) -> Profile:
    """Read and check what `format_profile` writes. Raises FieldError."""
    profile = loads(Profile, text)
    check_profile(profile)
    return profile


def check_profile(profile: Profile) -> None:
    """Raise FieldError for the first value that no real profile holds."""
    if profile.version != VERSION:
        raise FieldError("Profile.version", profile.version, f"this program reads version {VERSION}")
    if not profile.layers:
        raise FieldError("Profile.layers", profile.layers, "at least one layer is needed")
    if not profile.devices:
        raise FieldError("Profile.devices", profile.devices, "at least one device type is needed")
    names = [device.name for device in profile.devices]
    for i, device in enumerate(profile.devices):
        if not device.name or names.count(device.name) > 1:
            raise FieldError(f"Profile.devices[{i}].name", device.name, "each type needs a name of its own")
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
        parts += [(f"Profile.devices[{i}].layers[{j}]", times) for j, times in enumerate(device.layers)]
    for path, part in parts:
        for field in fields(part):  # type: ignore[arg-type]
            value = getattr(part, field.name)
            if isinstance(value, (int, float)) and not isinstance(value, bool):
                yield f"{path}.{field.name}", value


def profile_of(
    layers: tuple[LayerSpec, ...], tp: int = 1, tokens_per_microbatch: int = 0, link: LinkProfile | None = None
) -> Profile:
    """The profile that a job's own figures make: one device type, one kind of link."""
    times = tuple(
        LayerTimes(la.forward_s, la.backward_s, la.backward_input_s, la.backward_weight_s, la.update_s)
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


DEVICE_INDEPENDENT_FIELDS = ("param_bytes", "state_bytes", "output_bytes")
"""What must be equal on every device type."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MeasurementRequest:
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


def add_measurement(profile: Profile, found: Measurement, force: bool = False) -> Profile:
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
        for name in DEVICE_INDEPENDENT_FIELDS:
            if getattr(a, name) != getattr(b, name):
                text = f"the script's layer {i} has {getattr(b, name)}: it is another model; give --out"
                raise FieldError(f"--into layers[{i}].{name}", getattr(a, name), text)
