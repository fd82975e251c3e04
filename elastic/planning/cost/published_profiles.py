"""Profiles from published sizes and rates, for planning before anything was measured.

The figures below are those of one transformer block on b sequences of s tokens, with hidden size
h, key/value width k and feed-forward width g. Operations are those of matrix products, two per
multiply-add:

    forward products   2 b s (2 h^2 + 2 h k + c h g), c = 2, gated feed-forward c = 3
    forward scores     4 b s^2 h. Narayanan et al. 2021, appendix: 24 b s h^2 + 4 b s^2 h
    backward, input    the products once more + twice the scores (neither factor of a score is a
                       parameter)
    backward, weight   the products once more
    activation bytes   s b h (34 + 5 a s / h) without the scores' part, which fused attention keeps
                       in registers: Korthikanti et al. 2022, eq. 1 and section 5; with TP eq. 2: 10
                       of the 34 are not split
    TP                 two all-reduces of s b h values forward, two backward (Shoeybi et al. 2019,
                       section 3)

Seconds are operations / (peak * achieved fraction). Embedding look-ups and the optimizer are bound
by memory: bytes / bandwidth. Mixed-precision Adam holds 2 bytes of value and 12 of state per
parameter (float32 copy, two moments; Rajbhandari et al. 2020, section 3.1). The runtime accumulates
gradients in an additional float32 value per parameter.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from elastic.domain.errors import FieldError
from elastic.domain.types import LayerSpec
from elastic.planning.cost.catalogue import Hardware, PublishedModel, find_hardware, find_model
from elastic.planning.cost.profile import Device, LayerTimes, LinkProfile, Profile, check_profile

PARAM_BYTES, STATE_BYTES, GRADIENT_BYTES = 2, 12, 4
"""Bytes per parameter."""
UPDATE_BYTES = 2 * (PARAM_BYTES + STATE_BYTES) + GRADIENT_BYTES
"""Bytes that an update moves per parameter: all are read, all but the gradient are written."""
ACTIVATION_BYTES = 2
"""Bytes per value of an activation."""
USABLE_MEMORY = 0.9
"""Fraction of device memory that context, workspace and fragmentation leave (assumed)."""
MEMORY_EFFICIENCY = 0.8
"""Fraction of peak memory bandwidth that look-ups and updates achieve (assumed)."""


@dataclass(frozen=True, slots=True)
class _LayerWork:
    """Operations and bytes of one layer for one micro-batch, over all workers of a unit."""

    parameter_count: int
    forward: float = 0.0
    """Operations of the forward pass."""
    backward_input: float = 0.0
    backward_weight: float = 0.0
    forward_bytes: float = 0.0
    """Memory traffic in the forward pass of layers that are bound by memory."""
    backward_bytes: float = 0.0
    reduced: int = 0
    """TP all-reduces of the activations per direction."""
    activation: float = 0.0
    """Activation bytes per worker."""


def published_profile(
    name: str,
    devices: Sequence[str],
    *,
    microbatch: int = 1,
    tp: int = 1,
    sequence: int = 0,
    inside: LinkProfile | None = None,
    link: LinkProfile | None = None,
    across: LinkProfile | None = None,
) -> Profile:
    """Return the profile of a published model on published device types.

    Args:
        name: name of the model, see `catalogue.MODELS`.
        devices: names of device types, see `catalogue.HARDWARE`; at least one.
        microbatch: sequences per micro-batch.
        tp: workers that share a layer.
        sequence: tokens per sequence; 0: as published.
        inside, link, across: as in `Profile`; None: unknown, treated as infinite.

    Raises FieldError for unknown names or an empty `devices`.
    """
    model = find_model(name)
    tokens = microbatch * (sequence or model.sequence)
    work = _layers(model, microbatch, sequence or model.sequence, tp)
    inside = inside or LinkProfile()
    kinds = [find_hardware(device) for device in dict.fromkeys(devices)]
    if not kinds:
        raise FieldError("devices", devices, "at least one device type is needed")
    output = ACTIVATION_BYTES * tokens * model.hidden
    times = [_times(kind, work, tp, inside, output) for kind in kinds]
    specs = tuple(
        _spec(layer, spent, 0 if i == len(work) - 1 else output)
        for i, (layer, spent) in enumerate(zip(work, times[0], strict=True))
    )
    profile = Profile(
        model=name,
        tp=tp,
        tokens_per_microbatch=tokens,
        layers=specs,
        devices=tuple(
            Device(kind.name, spent, int(USABLE_MEMORY * kind.memory * 2**30))
            for kind, spent in zip(kinds, times, strict=True)
        ),
        inside=inside,
        link=link or LinkProfile(),
        across=across or LinkProfile(),
    )
    check_profile(profile)
    return profile


def parameter_count(name: str) -> int:
    """Return the number of parameters. A tied embedding counts twice: both ends hold it."""
    model = find_model(name)
    return sum(layer.parameter_count for layer in _layers(model, 1, model.sequence, 1))


def _layers(model: PublishedModel, b: int, s: int, tp: int) -> list[_LayerWork]:
    """Return embedding, blocks, head. `b`: sequences per micro-batch; `s`: tokens per sequence."""
    h, v, n = model.hidden, model.vocabulary, b * s
    embedding = _LayerWork(
        parameter_count=(v + model.positions) * h,
        forward_bytes=2 * ACTIVATION_BYTES * n * h,
        backward_bytes=(ACTIVATION_BYTES + 2 * GRADIENT_BYTES) * n * h,
        activation=n * h,
    )
    product = 2.0 * n * h * v
    head = _LayerWork(
        parameter_count=v * h + h,
        forward=product,
        backward_input=product,
        backward_weight=product,
        activation=4 * n * h + GRADIENT_BYTES * n * v / tp,
    )
    return [embedding, *[_block(model, b, s, tp)] * model.blocks, head]


def _block(model: PublishedModel, b: int, s: int, tp: int) -> _LayerWork:
    h, k, g, n = model.hidden, model.key_value, model.feed, b * s
    matrices = 2 * h * h + 2 * h * k + (3 if model.gated else 2) * h * g
    small = 2 * h if model.gated else 2 * h + 2 * k + g + h + 4 * h
    product, scores = 2.0 * n * matrices, 4.0 * n * s * h
    whole = (8 if model.gated else 10) * n * h
    split = (ACTIVATION_BYTES * (2 * h + 2 * k) + (6 if model.gated else 4) * g) * n
    return _LayerWork(
        parameter_count=matrices + small,
        forward=product + scores,
        backward_input=product + 2 * scores,
        backward_weight=product,
        reduced=2,
        activation=whole + split / tp,
    )


def _times(
    kind: Hardware, work: Sequence[_LayerWork], tp: int, inside: LinkProfile, message: int
) -> tuple[LayerTimes, ...]:
    rate, memory = kind.peak * kind.achieved * tp, kind.bandwidth * MEMORY_EFFICIENCY * tp
    reduce_s = inside.seconds(2 * (tp - 1) / tp * message) if tp > 1 else 0.0
    found = []
    for layer in work:
        wait = layer.reduced * reduce_s
        first = layer.backward_input / rate + wait
        second = layer.backward_weight / rate + layer.backward_bytes / memory
        found.append(
            LayerTimes(
                forward_s=layer.forward / rate + layer.forward_bytes / memory + wait,
                backward_s=first + second,
                backward_input_s=first,
                backward_weight_s=second,
                update_s=UPDATE_BYTES * layer.parameter_count / memory,
            )
        )
    return tuple(found)


def _spec(layer: _LayerWork, spent: LayerTimes, output: int) -> LayerSpec:
    n = layer.parameter_count
    return LayerSpec(
        param_bytes=PARAM_BYTES * n,
        state_bytes=STATE_BYTES * n,
        gradient_bytes=GRADIENT_BYTES * n,
        forward_s=spent.forward_s,
        backward_s=spent.backward_s,
        activation_bytes=round(layer.activation),
        output_bytes=output,
        backward_input_s=spent.backward_input_s,
        backward_weight_s=spent.backward_weight_s,
        update_s=spent.update_s,
    )
