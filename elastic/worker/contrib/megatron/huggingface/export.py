"""Parameters of a checkpoint of megatron-core's layers, under the names of a transformers model."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from elastic.domain.errors import FieldError
from elastic.store.checkpoints import SavedCheckpoint
from elastic.store.safetensors_stream import RawTensor
from elastic.worker.contrib.huggingface.stack import config_in
from elastic.worker.contrib.megatron.huggingface import names
from elastic.worker.contrib.megatron.huggingface.config import config_and_arguments
from elastic.worker.contrib.megatron.huggingface.names import Heads
from elastic.worker.contrib.megatron.stack import MegatronStack, from_megatron
from elastic.worker.replica.export import checkpoint_runs, parameters

MODEL = "the config.json of the model that was trained is needed"


def tensors_of(
    path: str, source: Path, digest: hashlib._Hash, *, in_memory: bool = False
) -> Iterator[RawTensor]:
    """Yield the parameters of a checkpoint under the names with which transformers stores them.

    `in_memory`: use the names of the model's state_dict instead. It has one tensor for the matrices
    of all experts, and tied parameters under each of their names.

    Values are added to `digest`. Only one layer is in memory at a time. Raises FieldError
    unless the model in the folder `source` is the one that was trained.
    """
    given = config_in(source)
    try:
        config, arguments = config_and_arguments(given, max_sequence_length=1)
    except FieldError as error:
        raise FieldError("--model", str(source), f"its config.json does not fit: {error}") from None
    stack = from_megatron(config, **arguments)
    manifest = SavedCheckpoint(path).manifest
    if manifest.n_layers != stack.n_layers:
        what = f"it has {config.num_layers} blocks, and the checkpoint {manifest.n_layers - 2}"
        raise FieldError("--model", str(source), f"{what}: {MODEL}")
    heads = Heads(config.num_attention_heads, config.num_query_groups, config.kv_channels)
    tied, table = bool(stack.tied), b""
    mixtral = given.model_type == "mixtral" and not in_memory
    for layer, runs in enumerate(checkpoint_runs(path)):
        held = list(parameters(runs))
        _check(stack, source, layer, {name: values.shape for name, _, values in held})
        for name, dtype, values in held:
            digest.update(values.data)
            if tied and name == names.TABLE:
                table = hashlib.sha256(values.data).digest()
            if tied and name == names.HEAD:
                if hashlib.sha256(values.data).digest() != table:
                    what = "head and embedding are tied by its config.json, and differ in the"
                    raise FieldError("--model", str(source), f"{what} checkpoint: {MODEL}")
                if not in_memory:
                    continue
            found = _named(layer - 1, name, values, heads, mixtral=mixtral)
            if in_memory and values.ndim == 3:
                found = _fused(layer - 1, name, {one: value for one, _, value in held})
            for full, part in found:
                yield _raw(full, dtype, part)


def _named(
    block: int,
    name: str,
    values: NDArray[np.generic],
    heads: Heads,
    *,
    mixtral: bool,
) -> Iterator[tuple[str, NDArray[np.generic]]]:
    """Yield a parameter as transformers stores it: name and values of each of its parts."""
    inner = name.removeprefix("layer.")
    if name in names.OUTSIDE:
        yield names.OUTSIDE[name], values
    elif inner.startswith(names.JOINED):
        stored = names.joined_names(block, inner.removeprefix(names.JOINED))
        yield from zip(stored, names.separate(values, heads), strict=True)
    elif inner == names.ROUTER:
        yield names.router_name(block, mixtral=mixtral), values
    elif values.ndim == 3:
        yield from zip(
            names.expert_names(block, inner, len(values), mixtral=mixtral), values, strict=True
        )
    else:
        yield f"{names.block_prefix(block)}{names.BLOCK[inner]}", values


def _fused(
    block: int, name: str, held: Mapping[str, NDArray[np.generic]]
) -> Iterator[tuple[str, NDArray[np.generic]]]:
    """Yield the matrix of all experts that the model's state_dict has. It joins `gate` and `up` in
    one matrix, so `gate` yields nothing, and `up` yields both."""
    prefix, gate, up = f"{names.block_prefix(block)}mlp.experts.", "layer.mlp.gate", "layer.mlp.up"
    if name == up:
        yield f"{prefix}gate_up_proj", np.concatenate([held[gate], held[up]], axis=1)
    elif name != gate:
        yield f"{prefix}down_proj", held[name]


def _raw(name: str, dtype: str, values: NDArray[np.generic]) -> RawTensor:
    whole = np.ascontiguousarray(values)
    return RawTensor(name, dtype, values.shape, memoryview(whole.reshape(-1).view(np.uint8).data))


def _check(
    stack: MegatronStack, source: Path, layer: int, held: dict[str, tuple[int, ...]]
) -> None:
    """Raise FieldError unless a layer has the parameters of the model."""
    wanted = stack.shapes(layer)
    for name in sorted(wanted.keys() | held.keys()):
        if wanted.get(name) != held.get(name):
            absent = "no such parameter"
            what = f"layer {layer} has {name} of {held.get(name, absent)} in the checkpoint"
            remedy = f"{what}, and of {wanted.get(name, absent)} by its config.json: {MODEL}"
            raise FieldError("--model", str(source), remedy)
