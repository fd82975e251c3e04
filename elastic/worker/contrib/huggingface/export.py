"""Writes a checkpoint's parameters as a folder that transformers loads."""

from __future__ import annotations

import hashlib
import json
import logging
from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray

from elastic.domain.errors import FieldError
from elastic.store import safetensors_stream
from elastic.store.checkpoint_format import Manifest
from elastic.store.checkpoints import SavedCheckpoint
from elastic.store.safetensors_stream import RawTensor
from elastic.worker.contrib.folders import INDEX, SINGLE, new_folder
from elastic.worker.contrib.huggingface.adapter_names import is_adapter
from elastic.worker.contrib.huggingface.stack import HuggingFaceStack, config_in, from_huggingface
from elastic.worker.contrib.huggingface.weights import Weights, weights_in
from elastic.worker.model.checks import whole_number
from elastic.worker.model.layers import FROZEN
from elastic.worker.model.state_codec import as_bytes, as_memory
from elastic.worker.replica.export import checkpoint_path, checkpoint_runs, parameters

log = logging.getLogger(__name__)
COPIED = (
    "tokenizer*",
    "vocab*",
    "merges.txt",
    "special_tokens_map.json",
    "added_tokens.json",
    "generation_config.json",
    "chat_template*",
    "preprocessor_config.json",
    "*.model",
)
"""Names of files that belong to a model beside its weights."""
MEGATRONS_FIRST = "embedding.word_embeddings.weight"
"""Name of a parameter of layer 0 in each model of `from_megatron`, and in no other."""
MODEL = "the folder with the config.json of the model that was trained is needed"
BASE = (
    "the checkpoint has no frozen parameters: the folder must also have the safetensors files with "
    "which the training began"
)
ADAPTERS = "the checkpoint has adapters: use --to peft, with their --lora FOLDER"


def to_huggingface(
    checkpoint: str | Path, model: str | Path, out: str | Path, *, shard_bytes: int = 5 << 30
) -> dict[str, int | str]:
    """Write the parameters of a checkpoint to the new folder `out`, and return what it holds.

    The folder has the safetensors files with their index, the config.json, and other files that
    belong to a model, as those of its tokeniser. It appears whole or not at all. A parameter that
    is tied to another one is left out, as transformers does. A file and a layer are in memory. The
    hash is that of the trained parameters, as in the job's summary.

    Args:
        checkpoint: the directory of one step, or of all steps; then the newest is taken. Its model
            may be one of megatron-core's layers, with the config of `megatron_config`.
        model: folder with the config.json of the model, as `from_huggingface` takes it. Frozen
            parameters, which no checkpoint has, are read from its safetensors files.
        shard_bytes: largest size of a file, unless a tensor is larger.

    Raises FieldError if `out` exists or cannot be written, or for a checkpoint of another model.
    """
    path, source = checkpoint_path(checkpoint), Path(model)
    shard_bytes = whole_number("--shard-size", shard_bytes, 1)
    with new_folder(Path(out), path) as fresh:
        stack = _stack_of(source)
        found = _write(stack, path, source, fresh, shard_bytes)
        _save_config(source, stack.model_name, fresh, str(found.pop("dtype")))
        _copy_others(source, fresh)
    return found


def named_tensors(
    path: str, model: Path, digest: hashlib._Hash, shard_bytes: int
) -> Iterator[Sequence[RawTensor]]:
    """Yield all parameters of a checkpoint under the names of a model, in lists of `shard_bytes`.

    Tied parameters are given under each name, as in a model's state_dict. The values are added to
    `digest`. Raises FieldError for a checkpoint of another model.
    """
    tensors = _tensors(_stack_of(model), path, model, digest, copies=True)
    return _shards(tensors, shard_bytes)


def _stack_of(source: Path) -> HuggingFaceStack:
    """Return the layers of the model whose config is in a folder. Raises FieldError."""
    if not (source / "config.json").is_file():
        raise FieldError("--model", str(source), MODEL)
    try:
        return from_huggingface(config_in(source))
    except FieldError as error:
        remedy = f"its config.json does not fit: {error}"
        raise FieldError("--model", str(source), remedy) from error


def _save_config(source: Path, model_name: str, folder: Path, dtype: str) -> None:
    """Write the config of `source` with the class and the type of the parameters."""
    config = config_in(source)
    config.architectures = [model_name]
    if dtype:
        config.dtype = getattr(torch, dtype)
    config.save_pretrained(folder)


def _write(
    stack: HuggingFaceStack, path: str, source: Path, folder: Path, shard_bytes: int
) -> dict[str, int | str]:
    """Write the weights to `folder`. Return step, number of tensors, bytes and hash; and the type
    of the parameters, if all have the same."""
    digest, files, places, total = hashlib.sha256(), 0, {}, 0
    step, dtypes = SavedCheckpoint(path).manifest.step, set()
    buffers = {
        stack.name_of(layer, name)
        for layer in range(stack.n_layers)
        for name in _buffer_names(stack.empty_layer(layer))
    }
    for shard in _shards(_tensors(stack, path, source, digest), shard_bytes):
        files += 1
        safetensors_stream.write(folder / f"part-{files}", shard, {"format": "pt"})
        for tensor in shard:
            places[tensor.name] = files
            total += tensor.data.nbytes
            if tensor.name not in buffers:
                dtypes.add(tensor.dtype)
    for number in range(1, files + 1):
        (folder / f"part-{number}").rename(folder / _file(number, files))
    if files > 1:
        weight_map = {name: _file(number, files) for name, number in sorted(places.items())}
        index = {"metadata": {"total_size": total}, "weight_map": weight_map}
        (folder / INDEX).write_text(json.dumps(index, indent=2) + "\n")
    found: dict[str, int | str] = {"step": step, "tensors": len(places), "bytes": total}
    found["params_sha256"] = digest.hexdigest()
    found["dtype"] = dtypes.pop() if len(dtypes) == 1 else ""
    return found


def _tensors(
    stack: HuggingFaceStack,
    path: str,
    source: Path,
    digest: hashlib._Hash,
    *,
    copies: bool = False,
) -> Iterator[RawTensor]:
    """Yield the parameters under the model's names; add those of the checkpoint to `digest`.
    `copies`: yield those that are tied to another one, too."""
    saved = SavedCheckpoint(path)
    manifest = saved.manifest
    embedding = parameters([saved.state(0, shard) for shard in range(manifest.tp)])
    if any(name == MEGATRONS_FIRST for name, _, _ in embedding):
        from elastic.worker.contrib.megatron.huggingface.export import tensors_of  # extra megatron

        yield from tensors_of(path, source, digest, in_memory=copies)
        return
    firsts = {owner: group[0] for group in stack.tied for owner in group}
    seen: dict[tuple[int, str], bytes] = {}
    layers = manifest.n_layers
    if layers != stack.n_layers:
        what = f"it is cut into {stack.n_layers} layers, and the checkpoint has {layers}"
        raise FieldError("--model", stack.model_name, f"{what}: {MODEL}")
    base = _take_base(stack, manifest, source, path)
    for layer, runs in enumerate(checkpoint_runs(path)):
        empty = dict(stack.empty_layer(layer).named_parameters())
        wanted = {name: tuple(p.shape) for name, p in empty.items()}
        held = list(parameters(runs))
        names = {name for name, _, _ in held}
        found = {name: values.shape for name, _, values in held}
        if manifest.contents and FROZEN in manifest.contents[layer]:
            absent = [name for name in empty if name not in names]
            for name in sorted(absent):
                stored = firsts.get((layer, name), (layer, name))
                held.append(_base_value(stack, stored, name, empty[name]))
            found |= {name: wanted[name] for name in absent}
        _check(stack, layer, wanted, found)
        for name, dtype, values in held:
            data = memoryview(values.reshape(-1).view(np.uint8).data)
            if name in names:
                digest.update(data)
            first = firsts.get((layer, name))
            if first is not None:
                value = hashlib.sha256(data).digest()
                if seen.setdefault(first, value) != value:
                    what = f"{stack.name_of(layer, name)} and {stack.name_of(*first)} are tied in"
                    remedy = f"{what} config.json, and differ in the checkpoint: {MODEL}"
                    raise FieldError("--model", stack.model_name, remedy)
            if copies or first in (None, (layer, name)):
                yield RawTensor(stack.name_of(layer, name), dtype, values.shape, data)
        yield from _buffers(stack, layer, base)


def _buffers(stack: HuggingFaceStack, layer: int, base: Weights | None) -> Iterator[RawTensor]:
    """Yield the buffers of a layer, for example a table by which experts are chosen. They are
    constant, so no checkpoint has them: their values come from `base`, the result of `_take_base`.
    """
    for name in sorted(_buffer_names(stack.empty_layer(layer))):
        full = stack.name_of(layer, name)
        if base is not None and full not in base:
            text = "the folder has no buffer %s: transformers sets it as in a new model"
            log.warning(text, full)
        elif base is not None:
            value = base(full)
            data = memoryview(as_memory(as_bytes(value))).cast("B")
            dtype = str(value.dtype).removeprefix("torch.")
            yield RawTensor(full, dtype, tuple(value.shape), data)


def _refuse_adapters(stack: HuggingFaceStack, path: str) -> None:
    """Raise FieldError if a block of the checkpoint has adapters."""
    saved = SavedCheckpoint(path)
    for layer in range(1, saved.manifest.n_layers - 1):
        if any(is_adapter(name) for name, _, _ in parameters([saved.state(layer, 0)])):
            raise FieldError("--model", stack.model_name, ADAPTERS)


def _buffer_names(module: torch.nn.Module) -> set[str]:
    own = {name for name, _ in module.named_parameters(remove_duplicate=False)}
    return module.state_dict().keys() - own


def _take_base(
    stack: HuggingFaceStack, manifest: Manifest, source: Path, path: str
) -> Weights | None:
    """Let `stack` know the values with which the training began, and return them, if the model has
    frozen parameters or buffers, which no checkpoint has. None: it has none, or the folder has no
    values; then transformers sets buffers as in a new model. Raises FieldError."""
    frozen = any(FROZEN in text for text in manifest.contents)
    layers = map(stack.empty_layer, range(stack.n_layers))
    if not frozen and not any(map(_buffer_names, layers)):
        return None
    values = weights_in(source)
    if values is not None:
        stack.take_values(values)
    elif frozen:
        _refuse_adapters(stack, path)
        raise FieldError("--model", str(source), BASE)
    return values


def _base_value(
    stack: HuggingFaceStack, first: tuple[int, str], name: str, empty: torch.Tensor
) -> tuple[str, str, NDArray[np.generic]]:
    """Return (name, type, values) of a frozen parameter, in the type of the model's parameter.
    `first`: layer and name of the first one that it is tied to, under which it is stored."""
    full = stack.name_of(*first)
    assert stack.values is not None
    value = stack.values(full).to(empty.dtype)
    if value.shape != empty.shape:
        what = f"{full} is {tuple(value.shape)} in its safetensors files"
        raise FieldError("--model", stack.model_name, f"{what}: {MODEL}")
    dtype = str(value.dtype).removeprefix("torch.")
    raw = np.frombuffer(as_memory(as_bytes(value)), dtype=f"<u{value.element_size()}")
    return name, dtype, raw.reshape(value.shape)


def _check(
    stack: HuggingFaceStack,
    layer: int,
    wanted: dict[str, tuple[int, ...]],
    held: dict[str, tuple[int, ...]],
) -> None:
    """Raise FieldError unless a layer of the checkpoint has the parameters of the model's layer."""
    for name in sorted(wanted.keys() | held.keys()):
        if wanted.get(name) != held.get(name):
            full, absent = stack.name_of(layer, name), "no such parameter"
            what = f"{full} is {wanted.get(name, absent)}, and {held.get(name, absent)} in the"
            remedy = ADAPTERS if is_adapter(name) else f"{what} checkpoint: {MODEL}"
            raise FieldError("--model", stack.model_name, remedy)


def _shards(tensors: Iterator[RawTensor], shard_bytes: int) -> Iterator[Sequence[RawTensor]]:
    shard: list[RawTensor] = []
    for tensor in tensors:
        if shard and sum(t.data.nbytes for t in shard) + tensor.data.nbytes > shard_bytes:
            yield shard
            shard = []
        shard.append(tensor)
    if shard:
        yield shard


def _file(number: int, files: int) -> str:
    return SINGLE if files == 1 else f"model-{number:05}-of-{files:05}.safetensors"


def _copy_others(source: Path, folder: Path) -> None:
    """Copy the files of a model that hold no weights and are not there yet. Raises FieldError."""
    for path in sorted({path for name in COPIED for path in source.glob(name)}):
        weights = path.suffix in (".safetensors", ".bin") or path.name.endswith(".index.json")
        if path.is_file() and not weights and not (folder / path.name).exists():
            try:
                data = path.read_bytes()
            except OSError as error:
                remedy = f"it cannot be read ({error.strerror})"
                raise FieldError("--model", str(path), remedy) from error
            (folder / path.name).write_bytes(data)
