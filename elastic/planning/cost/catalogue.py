"""Sizes of well-known models and rates of well-known devices, as published.

`elastic.planning.cost.published_profiles` makes profiles of them.

Achieved fractions without a source of their own are assumptions, and say so.
"""

from __future__ import annotations

from dataclasses import dataclass

from elastic.domain.errors import FieldError


@dataclass(frozen=True, slots=True, kw_only=True)
class PublishedModel:
    """Sizes of a transformer, as published."""

    name: str
    blocks: int
    hidden: int
    feed: int
    """Width of the feed-forward part."""
    key_value: int
    """Width of keys, and of values, over all their heads: `hidden` unless heads share them."""
    vocabulary: int
    sequence: int
    positions: int = 0
    """Learned positions; 0: rotary."""
    gated: bool = False
    source: str


@dataclass(frozen=True, slots=True)
class Hardware:
    """A device type, as published, and the rate that training reaches on it."""

    name: str
    peak: float
    """Dense half-precision matrix operations a second."""
    achieved: float
    """Fraction of `peak` that a block's forward and backward pass reach."""
    memory: int
    """GiB."""
    bandwidth: float
    """Of the memory, bytes a second."""
    source: str
    """Of the achieved fraction."""


def _gpt(name: str, blocks: int, hidden: int, sequence: int, source: str, vocabulary: int = 50257) -> PublishedModel:
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
"""Peak, memory and bandwidth: NVIDIA's data sheets (SXM where there is a choice)."""


def find_model(name: str) -> PublishedModel:
    """The published sizes of a model. Raises FieldError."""
    found = next((model for model in MODELS if model.name == name), None)
    if found is None:
        raise FieldError("model.name", name, f"one of {', '.join(m.name for m in MODELS)}; or give a profile")
    return found


def find_hardware(name: str) -> Hardware:
    """A device type by name, in any case. Raises FieldError."""
    found = next((device for device in HARDWARE if device.name.lower() == name.lower()), None)
    if found is None:
        raise FieldError("device", name, f"one of {', '.join(d.name for d in HARDWARE)}; or give a profile")
    return found
