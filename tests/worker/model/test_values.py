"""Values survive packing, and headers describe them."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from elastic.domain.errors import FieldError
from elastic.worker.model.values import (
    DTYPES,
    Message,
    Value,
    ValueSpec,
    parts_of,
    separated,
    with_parts,
)
from elastic.worker.transport.value_header import (
    MAX_TEXT_BYTES,
    N_WORDS,
    pack_header,
    text_nbytes,
    unpack_header,
)

TYPES = ("float32", "bfloat16", "float16", "float64", "int64", "bool", "complex64", "uint8")


@st.composite
def tensors(draw: st.DrawFn) -> Tensor:
    shape = draw(st.lists(st.integers(0, 4), max_size=4))
    dtype = DTYPES[draw(st.sampled_from(TYPES))]
    numbers = torch.arange(int(torch.Size(shape).numel())).view(shape).to(dtype)
    if numbers.is_floating_point() and draw(st.booleans()):
        numbers.requires_grad_()
    return numbers.t() if numbers.ndim == 2 and draw(st.booleans()) else numbers


VALUES: st.SearchStrategy[Value] = st.one_of(
    tensors(),
    st.lists(tensors(), max_size=5).map(tuple),
    st.dictionaries(st.text(max_size=3), tensors(), max_size=5),
)


@given(VALUES)
def test_a_value_is_the_same_behind_its_message(value: Value) -> None:
    message = Message.of(value)
    dtype, shape = message.spec.message
    assert (message.tensor.dtype, tuple(message.tensor.shape)) == (dtype, shape)
    assert not message.tensor.requires_grad
    header, text = pack_header(message.spec)
    assert header.shape == (N_WORDS,) and text.numel() == text_nbytes(header)
    spec = unpack_header(header, text)
    assert spec == message.spec
    found = Message(spec, message.tensor).leaves()
    assert type(found) is type(value)
    if isinstance(value, dict):
        assert isinstance(found, dict) and list(found) == list(value)
    for one, other in zip(parts_of(value), parts_of(found), strict=True):
        assert one.dtype == other.dtype and torch.equal(one, other)
        assert other.requires_grad == one.requires_grad


def test_a_tensor_is_its_own_message() -> None:
    """Nothing is copied, and its header has no text."""
    tensor = torch.ones(3, 4, requires_grad=True)
    message = Message.of(tensor)
    assert message.tensor.data_ptr() == tensor.data_ptr()
    assert not pack_header(message.spec)[1].numel()


def test_other_parts_replace_those_of_a_value() -> None:
    one, other = torch.zeros(1), torch.ones(1)
    assert with_parts(one, [other]) is other
    assert with_parts((one, one), [other, one]) == (other, one)
    assert with_parts({"a": one}, [other]) == {"a": other}


def test_a_part_that_nobody_uses_has_a_zero_gradient() -> None:
    """As behind a message. A part without a gradient does not change."""
    source = torch.ones(2, requires_grad=True)
    numbers = torch.arange(3)
    value = separated({"used": source * 2, "unused": torch.sqrt(source - 1), "numbers": numbers})
    assert isinstance(value, dict) and value["numbers"] is numbers
    torch.autograd.backward(value["used"].sum())
    assert source.grad is not None and bool(source.grad.isnan().all())
    assert separated((numbers,)) == (numbers,)


def test_tensors_and_gradients_between_layers_are_contiguous() -> None:
    """As behind a message; kernels may sum in another order for other strides."""
    seen: list[Tensor] = []
    source = torch.ones(2, 3, requires_grad=True)
    hooked = source * 1
    hooked.register_hook(seen.append)  # type: ignore[no-untyped-call]
    value = separated(hooked.t())
    assert isinstance(value, Tensor) and value.is_contiguous()
    torch.autograd.backward(value.sum())  # its gradient has strides of zero
    assert source.grad is not None and torch.equal(source.grad, torch.ones(2, 3))
    assert seen[0].t().is_contiguous() and seen[0].stride() == (1, 2)


def test_the_gradients_of_each_part_are_summed_first() -> None:
    """(1e8 + 1) + (-1e8 + 1), which is 0 in float32, and not another order of the four."""
    source = torch.zeros(1, requires_grad=True)
    one, other = parts_of(separated((source, source)))
    uses = [one * 1e8, other * -1e8, one, other]
    torch.autograd.backward(torch.stack(uses).sum())
    assert source.grad is not None and source.grad.item() == 0.0


@pytest.mark.parametrize(
    "words", [[99, 1], [0, 9], [0, 1, -1], [-2, 0], [-1, 0], [-1, -5], [-1, MAX_TEXT_BYTES + 1]]
)
def test_malformed_headers_are_refused(words: list[int]) -> None:
    header = torch.tensor(words + [0] * (N_WORDS - len(words)))
    with pytest.raises(FieldError):
        text = torch.zeros(text_nbytes(header), dtype=torch.uint8)
        unpack_header(header, text)


@pytest.mark.parametrize(
    "text",
    [
        "",
        "{",
        '{"kind":"set","parts":[]}',
        '{"kind":"tensor","parts":[]}',
        '{"kind":"tuple","parts":[{"dtype":"int128","shape":[1]}]}',
        '{"kind":"tuple","parts":[{"dtype":"int64","shape":[-1]}]}',
        '{"kind":"tuple","parts":[{"dtype":"int64"}]}',
    ],
)
def test_malformed_descriptions_are_refused(text: str) -> None:
    data = torch.tensor(list(text.encode()), dtype=torch.uint8)
    header = torch.tensor([-1, len(text), *[0] * (N_WORDS - 2)])
    with pytest.raises(FieldError):
        unpack_header(header, data)


def test_a_value_of_too_many_tensors_cannot_be_described() -> None:
    with pytest.raises(FieldError, match=r"40000 tensors.* hand on fewer"):
        pack_header(ValueSpec.of((torch.zeros(0),) * 40000))
