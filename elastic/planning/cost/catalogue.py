"""Published sizes of well-known models and rates of well-known devices.

`published_profiles` makes profiles from them. Achieved fractions without a source are marked as
assumed.
"""

from __future__ import annotations

from dataclasses import dataclass

from elastic.domain.errors import FieldError


@dataclass(frozen=True, slots=True, kw_only=True)
class PublishedModel:
    """Published sizes of a transformer."""

    name: str
    blocks: int
    hidden: int
    feed: int
    """Width of the feed-forward layer."""
    key_value: int
    """Width of the keys over all heads, and of the values; below `hidden` if heads share them."""
    vocabulary: int
    sequence: int
    positions: int = 0
    """Learned position embeddings; 0: rotary."""
    gated: bool = False
    source: str


@dataclass(frozen=True, slots=True)
class Hardware:
    """Published rates of a device type, and the fraction of its peak that training achieves."""

    name: str
    peak: float
    """Dense half-precision matrix operations per second."""
    achieved: float
    """Fraction of `peak` that a block's forward and backward pass achieve."""
    memory: int
    """Memory, GiB."""
    bandwidth: float
    """Memory bandwidth, bytes per second."""
    source: str
    """Source of the achieved fraction."""


def _gpt(
    name: str, blocks: int, hidden: int, sequence: int, source: str, vocabulary: int = 50257
) -> PublishedModel:
    return PublishedModel(
        name=name,
        blocks=blocks,
        hidden=hidden,
        feed=4 * hidden,
        key_value=hidden,
        vocabulary=vocabulary,
        sequence=sequence,
        positions=sequence,
        source=source,
    )


def _llama(name: str, blocks: int, hidden: int, feed: int) -> PublishedModel:
    return PublishedModel(
        name=name,
        blocks=blocks,
        hidden=hidden,
        feed=feed,
        key_value=1024,
        vocabulary=128256,
        sequence=8192,
        gated=True,
        source="Grattafiori et al. 2024, table 3: 8 key/value heads of 128",
    )


_BERT, _GPT2 = "Devlin et al. 2018, section 3", "Radford et al. 2019, table 2"
_GPT3 = "Brown et al. 2020, table 2.1"
MODELS = (
    _gpt("bert-large", 24, 1024, 512, _BERT, 30522),
    _gpt("gpt2-small", 12, 768, 1024, _GPT2),
    _gpt("gpt2-medium", 24, 1024, 1024, _GPT2),
    _gpt("gpt2", 48, 1600, 1024, _GPT2),
    _gpt("gpt3-medium", 24, 1024, 2048, _GPT3),
    _gpt("gpt3-2.7b", 32, 2560, 2048, _GPT3),
    _gpt("gpt3-6.7b", 32, 4096, 2048, _GPT3),
    _llama("llama3-8b", 32, 4096, 14336),
    _llama("llama3-70b", 80, 8192, 28672),
    _llama("llama3-405b", 126, 16384, 53248),
)

_V100 = "39 Tflop/s, 30 %: Shoeybi et al. 2019, abstract"
_A100 = "44 to 52 % with everything: Narayanan et al. 2021, table 1"
_H100 = "38 to 43 % with everything: Grattafiori et al. 2024, table 4; a block alone somewhat more"
_ASSUMED = "assumed"
HARDWARE = (
    Hardware("V100", 125e12, 0.30, 16, 900e9, _V100),
    Hardware("V100-32", 125e12, 0.30, 32, 900e9, _V100),
    Hardware("A100-40", 312e12, 0.50, 40, 1555e9, _A100),
    Hardware("A100-80", 312e12, 0.50, 80, 2039e9, _A100),
    Hardware("H100", 989e12, 0.45, 80, 3350e9, _H100),
    Hardware("L40S", 362e12, 0.40, 48, 864e9, _ASSUMED),
    Hardware("A40", 149.7e12, 0.40, 48, 696e9, _ASSUMED),
    Hardware("A10G", 70e12, 0.45, 24, 600e9, _ASSUMED),
    Hardware("T4", 65e12, 0.30, 16, 320e9, _ASSUMED),
)
"""Peak, memory and bandwidth are from NVIDIA's data sheets, SXM variants where offered."""


def find_model(name: str) -> PublishedModel:
    """Return the published sizes of a model. Raises FieldError for an unknown name."""
    for model in MODELS:
        if model.name == name:
            return model
    names = ", ".join(model.name for model in MODELS)
    raise FieldError("model.name", name, f"one of {names}; or give a profile")


def known_peak(name: str) -> float:
    """Return the peak of a device type in 10^12 operations per second; 0: it is not known."""
    found = (device.peak for device in HARDWARE if device.name.lower() == name.lower())
    return next(found, 0.0) / 1e12


def find_hardware(name: str) -> Hardware:
    """Return a device type by name, ignoring case. Raises FieldError for an unknown name."""
    for device in HARDWARE:
        if device.name.lower() == name.lower():
            return device
    names = ", ".join(device.name for device in HARDWARE)
    raise FieldError("device", name, f"one of {names}; or give a profile")
