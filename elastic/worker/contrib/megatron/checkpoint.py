"""Parameters in megatron's distributed checkpoints (`--ckpt-format torch_dist`): their names there.

megatron stores a block as `decoder.layers.NUMBER.NAME`. If all blocks are alike, it stores
`decoder.layers.NAME` instead, whose first dimension is the block. The experts of a block are
further dimensions, or numbers in the name. The rows of a gated MLP's first matrix are the gate, and
then the other matrix; here they are two parameters.

Source: `sharded_state_dict` of megatron-core's modules.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path

import torch
from torch import Tensor

from elastic.domain.errors import FieldError, describe
from elastic.store.checkpoints import SavedCheckpoint
from elastic.worker.contrib import distributed_checkpoint
from elastic.worker.contrib.distributed_checkpoint import (
    DistributedCheckpoint,
    Part,
    as_tensor,
)
from elastic.worker.contrib.folders import METADATA, is_file, new_folder
from elastic.worker.model.checks import description
from elastic.worker.replica.export import checkpoint_path, checkpoint_runs, parameters

ITERATION = "latest_checkpointed_iteration.txt"
OUTSIDE = {
    "embedding.word_embeddings.weight": "embedding.word_embeddings.weight",
    "embedding.position_embeddings.weight": "embedding.position_embeddings.weight",
    "norm.weight": "decoder.final_layernorm.weight",
    "norm.bias": "decoder.final_layernorm.bias",
    "output.weight": "output_layer.weight",
}
"""megatron's names of the parameters before and behind the blocks."""
VOCABULARY = ("embedding.word_embeddings.weight", "output.weight")
"""Matrices with a row per token. megatron stores more rows than there are tokens."""
BLOCKS, EXPERTS = "decoder.layers", "mlp.experts.experts"
MODEL = ("embedding.", "decoder.", "output_layer.", "mtp.")
"""How megatron's names of a model's tensors begin. The others are an optimizer's."""
NO_PARAMETER = "_extra_state"
"""How names of tensors end that are no parameters, but settings of Transformer Engine."""
MATRICES_OF_EXPERTS = ("mlp.gate", "mlp.up", "mlp.down")
FOLDER = (
    "a folder of megatron's --save with --ckpt-format torch_dist is needed, or one iteration in it"
)
TRAINED = "a checkpoint of a model of from_megatron is needed"


class MegatronCheckpoint:
    """Parameters of a language model, read from a folder that megatron has written.

    Raises FieldError for what is absent or has another shape.
    """

    def __init__(self, folder: object, blocks: int) -> None:
        """`blocks`: number of blocks of the model."""
        if not isinstance(folder, str | Path):
            raise FieldError("weights", description(folder), FOLDER)
        self._stored = DistributedCheckpoint(_iteration_in(Path(folder)))
        self._blocks = blocks
        for name in self._stored.tensors:
            number = re.match(rf"{re.escape(BLOCKS)}\.(\d+)\.", name)
            if number and int(number[1]) >= blocks:
                remedy = f"it has {name}, and the model has {blocks} blocks"
                raise FieldError("weights", str(folder), remedy)

    def check(self, names: Iterable[tuple[int, str]], /) -> None:
        """Raise FieldError for a stored parameter that the model lacks. `names`: (layer, name) of
        all its parameters."""
        known = {stored for layer, name in names for stored in _stored_names(layer, name)}
        for name in self._stored.tensors:
            plain = re.sub(rf"{re.escape(EXPERTS)}\.\d+\.", f"{EXPERTS}.", name)
            if plain.startswith(MODEL) and not plain.endswith(NO_PARAMETER) and plain not in known:
                remedy = f"it has {name}, which the model lacks: give the config of this model"
                raise FieldError("weights", str(self._stored.folder), remedy)

    def value(self, layer: int, name: str, shape: Sequence[int], *, gated: bool) -> Tensor:
        """Return the whole parameter `name` of a layer, of this shape. `gated`: MLPs are gated."""
        if name in OUTSIDE:
            value = self._stored.read(self._first([OUTSIDE[name]]))
            if name in VOCABULARY and value.shape[0] > shape[0]:
                value = value[: shape[0]]
        else:
            value = self._of_block(layer - 1, name.removeprefix("layer."), shape, gated)
        if value.shape != tuple(shape):
            remedy = f"layer {layer} of the model has {name} of shape {tuple(shape)}"
            raise FieldError("weights", description(value), remedy)
        return value

    def _of_block(self, block: int, name: str, shape: Sequence[int], gated: bool) -> Tensor:
        half = _half(name) if gated else None
        if name.startswith("mlp.") and len(shape) == 3:
            matrix = f"{_linear(name)}.weight"
            value = self._experts(block, matrix, shape[0])
        else:
            names = _names(name)
            value = self._of_blocks(block, names)
        if half is None:
            return value
        dim = _rows(name, value)
        if value.shape[dim] != 2 * shape[dim]:
            remedy = f"block {block} of the model has {name} of shape {tuple(shape)}"
            raise FieldError("weights", description(value), f"{remedy}, one of two halves")
        return value.chunk(2, dim)[half]

    def _of_blocks(self, block: int, names: Sequence[str]) -> Tensor:
        """Return a tensor of one block. It may be a row of a tensor of all blocks."""
        numbered = [f"{BLOCKS}.{block}.{one}" for one in names]
        stored = self._first([*numbered, *(f"{BLOCKS}.{one}" for one in names)])
        if stored in numbered:
            return self._stored.read(stored)
        size = self._stored.tensors[stored].size
        if not size or size[0] != self._blocks:
            remedy = f"{stored} is {size}, and the model has {self._blocks} blocks"
            raise FieldError("weights", str(self._stored.folder), remedy)
        return self._stored.read(stored, (block,))

    def _experts(self, block: int, matrix: str, experts: int) -> Tensor:
        """Return a matrix of all experts of a block, [experts, rows, columns]."""
        each = [f"{BLOCKS}.{block}.{EXPERTS}.{e}.{matrix}" for e in range(experts)]
        if each[0] in self._stored.tensors:
            return torch.stack([self._stored.read(self._first([name])) for name in each])
        return self._of_blocks(block, [f"{EXPERTS}.{matrix}"])

    def _first(self, names: Sequence[str]) -> str:
        """Return the first of `names` that is stored."""
        for name in names:
            if name in self._stored.tensors:
                return name
        remedy = f"it has no tensor {' or '.join(names)}: a checkpoint of this model is needed"
        raise FieldError("weights", str(self._stored.folder), remedy)


def to_megatron(checkpoint: str | Path, out: str | Path) -> dict[str, int | str]:
    """Write the parameters of a checkpoint to the new folder `out`, which megatron's --load reads.

    It appears whole or not at all. A layer is in memory at a time. Raises FieldError if `out`
    exists or cannot be written, or for a checkpoint of another model.
    """
    path = checkpoint_path(checkpoint)
    manifest, digest = SavedCheckpoint(path).manifest, hashlib.sha256()
    common = {"checkpoint_version": 3.0, "iteration": manifest.step}
    backends = {"sharded_backend": "torch_dist", "common_backend": "torch"}
    versions = {"sharded_backend_version": 1, "common_backend_version": 1}
    with new_folder(Path(out), path) as fresh:
        folder = fresh / f"iter_{manifest.step:07}"
        distributed_checkpoint.write(folder, _files(path, digest))
        try:
            torch.save(common, folder / "common.pt")
        except RuntimeError as error:  # how torch.save reports a full disk
            raise OSError(describe(error)) from error
        (folder / "metadata.json").write_text(json.dumps(backends | versions))
        (fresh / ITERATION).write_text(str(manifest.step))
    return {"step": manifest.step, "params_sha256": digest.hexdigest()}


def _files(path: str, digest: hashlib._Hash) -> Iterator[list[Part]]:
    """Yield the parts of each layer of a checkpoint, and add its values to `digest`.

    Raises FieldError for another model.
    """
    manifest = SavedCheckpoint(path).manifest
    blocks = manifest.n_layers - 2
    alike = len(set(manifest.contents[1:-1] or _names_of_blocks(path))) <= 1
    for layer, runs in enumerate(checkpoint_runs(path)):
        values: dict[str, Tensor] = {}
        for name, dtype, held in parameters(runs):
            digest.update(held.data)
            values[name] = as_tensor(dtype, held.tobytes(), held.shape)
        inside = 0 < layer < manifest.n_layers - 1
        known = {name for name in values if name in OUTSIDE or name.startswith("layer.")}
        if values.keys() != known or inside != any(n.startswith("layer.") for n in values):
            what = f"layer {layer} has {', '.join(sorted(values)[:3])}"
            raise FieldError("CHECKPOINT", str(path), f"{what}: {TRAINED}")
        if not inside:
            yield [Part(OUTSIDE[name], value) for name, value in values.items()]
            continue
        place = (layer - 1, blocks) if alike else None
        prefix = BLOCKS if alike else f"{BLOCKS}.{layer - 1}"
        yield [
            _placed(part._replace(name=f"{prefix}.{part.name}"), place)
            for part in _block_parts(values)
        ]


def _names_of_blocks(path: str) -> Iterator[tuple[str, ...]]:
    """Yield the names of each block's parameters, for a checkpoint that does not describe them."""
    layers = [tuple(name for name, _, _ in parameters(runs)) for runs in checkpoint_runs(path)]
    yield from layers[1:-1]


def _block_parts(values: Mapping[str, Tensor]) -> Iterator[Part]:
    """Yield the parameters of a block under megatron's names, without the block's own prefix."""
    gated = any(re.match(r"layer\.mlp\.gate", name) for name in values)
    for name, value in values.items():
        inner = name.removeprefix("layer.")
        half = _half(inner) if gated else None
        names = _names(inner)
        if inner.startswith("mlp.") and value.dim() == 3:
            names = [f"{EXPERTS}.{_linear(inner)}.weight"]
        elif (
            inner.startswith("pre_mlp_layernorm.") and "layer.mlp.router.weight" not in values
        ) or inner.startswith("input_layernorm."):
            names = names[:1]
        if half is None:
            yield from (Part(one, value, (0,) * value.dim(), tuple(value.shape)) for one in names)
            continue
        dim = _rows(inner, value)
        size = [2 * n if d == dim else n for d, n in enumerate(value.shape)]
        offsets = [half * n if d == dim else 0 for d, n in enumerate(value.shape)]
        yield from (Part(one, value, tuple(offsets), tuple(size)) for one in names)


def _placed(part: Part, place: tuple[int, int] | None) -> Part:
    """Return the part as row `place[0]` of a tensor with `place[1]` rows; None: as it is."""
    if place is None:
        return part
    offsets, size = (place[0], *part.offsets), (place[1], *part.size)
    return Part(part.name, part.values.unsqueeze(0), offsets, size)


def _stored_names(layer: int, name: str) -> Iterator[str]:
    """Yield all names under which a parameter may be stored, without the numbers of experts."""
    if name in OUTSIDE:
        yield OUTSIDE[name]
        return
    inner = name.removeprefix("layer.")
    matrix = [f"{EXPERTS}.{_linear(inner)}.weight"] if inner in MATRICES_OF_EXPERTS else []
    for one in (*_names(inner), *matrix):
        yield from (f"{BLOCKS}.{one}", f"{BLOCKS}.{layer - 1}.{one}")


def _names(name: str) -> list[str]:
    """Return megatron's names of a parameter of a block: that of its usual layers, and others.

    Transformer Engine joins a norm with the matrix behind it, and megatron's own layers take over
    these names.
    """
    module, _, kind = name.rpartition(".")
    match module:
        case "input_layernorm":
            return [f"self_attention.linear_qkv.layer_norm_{kind}", name]
        case "pre_mlp_layernorm":
            return [f"mlp.linear_fc1.layer_norm_{kind}", name]
        case "self_attention.q_layernorm.norm" | "self_attention.k_layernorm.norm":
            return [f"{module.removesuffix('.norm')}.{kind}"]
        case "mlp.gate" | "mlp.up" | "mlp.down":
            return [f"mlp.{_linear(module)}.{kind}"]
        case "mlp.shared_experts.gate" | "mlp.shared_experts.up" | "mlp.shared_experts.down":
            return [f"mlp.shared_experts.{_linear(module)}.{kind}"]
        case "mlp" if kind == "shared_expert_gate":
            return ["mlp.shared_experts.gate_weight"]
    return [name]


def _linear(name: str) -> str:
    """Return megatron's name of a matrix of an MLP."""
    return "linear_fc2" if name.endswith("down") else "linear_fc1"


def _half(name: str) -> int | None:
    """Return which half of the first matrix of a gated MLP a parameter is; None: no half of it."""
    found = re.match(r"mlp\.(shared_experts\.)?(gate|up)\b", name)
    return ("gate", "up").index(found[2]) if found else None


def _rows(name: str, value: Tensor) -> int:
    """Return the dimension of a matrix' rows, or of a bias."""
    return value.dim() - (1 if name.endswith("bias") else 2)


def _iteration_in(folder: Path) -> Path:
    """Return the folder of an iteration: `folder`, or the newest one in it. Raises FieldError."""
    if is_file(folder / METADATA):
        return folder
    newest = folder / ITERATION
    if not is_file(newest):
        remedy = f"it has no {METADATA} and no {ITERATION}: {FOLDER}"
        raise FieldError("weights", str(folder), remedy)
    try:
        text = newest.read_text().strip()
    except (OSError, UnicodeDecodeError) as error:
        raise FieldError("weights", str(newest), f"it cannot be read: {error}") from error
    found = folder / ("release" if text == "release" else f"iter_{text[:20]:>07}")
    if not (text == "release" or text.isdigit()) or not is_file(found / METADATA):
        remedy = f"{newest} names it, and it has no {METADATA}: {FOLDER}"
        raise FieldError("weights", str(found), remedy)
    return found
