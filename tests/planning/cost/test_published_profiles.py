"""Published profiles match the figures of the papers."""

from __future__ import annotations

import pytest

from elastic.domain.errors import FieldError
from elastic.planning.cost.catalogue import HARDWARE, MODELS, find_hardware, find_model
from elastic.planning.cost.profile import LinkProfile, check_profile, format_profile, parse_profile
from elastic.planning.cost.published_profiles import parameter_count, published_profile

PUBLISHED = {
    "bert-large": 340e6,
    "gpt2-small": 124e6,
    "gpt2-medium": 355e6,
    "gpt2": 1558e6,
    "gpt3-medium": 350e6,
    "gpt3-2.7b": 2.7e9,
    "gpt3-6.7b": 6.7e9,
    "llama3-8b": 8.03e9,
    "llama3-70b": 70.55e9,
    "llama3-405b": 405e9,
}
"""Parameters. Except for the Llamas, the tied embedding counts once."""


@pytest.mark.parametrize("name", PUBLISHED)
def test_parameters_are_the_published_ones(name: str) -> None:
    model = find_model(name)
    tied = 0 if model.gated else model.vocabulary * model.hidden
    assert parameter_count(name) - tied == pytest.approx(PUBLISHED[name], rel=0.02)


def test_every_model_has_a_published_figure() -> None:
    assert {model.name for model in MODELS} == set(PUBLISHED)


@pytest.mark.parametrize("name", PUBLISHED)
def test_profiles_are_sound_and_come_back_from_text(name: str) -> None:
    profile = published_profile(name, [h.name for h in HARDWARE], microbatch=2)
    check_profile(profile)
    assert parse_profile(format_profile(profile)) == profile
    assert len(profile.layers) == find_model(name).blocks + 2
    for device in profile.devices:
        for times in device.layers:
            assert times.backward_s == pytest.approx(
                times.backward_input_s + times.backward_weight_s
            )
            assert times.forward_s > 0 and times.update_s > 0


def test_operations_are_those_of_narayanan() -> None:
    """A block forward: 24 b s h^2 + 4 b s^2 h; backward twice that."""
    h, s, b = 4096, 2048, 3
    device = find_hardware("A100-80")
    block = published_profile("gpt3-6.7b", ["A100-80"], microbatch=b).devices[0].layers[1]
    rate = device.peak * device.achieved
    assert block.forward_s * rate == pytest.approx(24 * b * s * h * h + 4 * b * s * s * h)
    assert block.backward_s == pytest.approx(2 * block.forward_s)
    assert block.backward_weight_s * rate == pytest.approx(24 * b * s * h * h)


def test_activations_are_those_of_korthikanti() -> None:
    """34 s b h bytes a block with fused attention, 10 + 24 / t of them a worker with TP."""
    h, s = 4096, 2048
    assert published_profile("gpt3-6.7b", ["A40"]).layers[5].activation_bytes == 34 * s * h
    assert (
        published_profile("gpt3-6.7b", ["A40"], tp=4).layers[5].activation_bytes
        == (10 + 24 // 4) * s * h
    )


def test_tensor_parallel_units_are_faster_and_pay_for_it() -> None:
    free = published_profile("gpt3-6.7b", ["A100-80"], tp=2)
    paid = published_profile("gpt3-6.7b", ["A100-80"], tp=2, inside=LinkProfile(300e9, 5e-6))
    alone = published_profile("gpt3-6.7b", ["A100-80"])
    assert free.layers[1].forward_s == pytest.approx(alone.layers[1].forward_s / 2)
    message = 2 * 2048 * 4096
    assert paid.layers[1].forward_s - free.layers[1].forward_s == pytest.approx(
        2 * (message / 300e9 + 5e-6)
    )
    assert paid.layers[1].backward_weight_s == free.layers[1].backward_weight_s


def test_names_in_any_case_and_unknown_ones() -> None:
    assert find_hardware("a100-80").name == "A100-80"
    with pytest.raises(FieldError, match=r"device: 'B9' is not usable: one of V100, .*T4"):
        published_profile("gpt2", ["B9"])
    with pytest.raises(FieldError, match=r"model.name: 'gpt9' .*gpt3-6.7b"):
        published_profile("gpt9", ["A40"])
    with pytest.raises(FieldError, match="at least one device type"):
        published_profile("gpt2", [])
