"""Writes the LoRA adapters of a checkpoint as a folder that peft loads."""

from __future__ import annotations

import hashlib
from pathlib import Path

import numpy as np

from elastic.domain.errors import FieldError
from elastic.store import safetensors_stream
from elastic.store.checkpoints import SavedCheckpoint
from elastic.store.safetensors_stream import RawTensor
from elastic.worker.contrib.folders import new_folder
from elastic.worker.contrib.huggingface.adapter_names import stored_name
from elastic.worker.contrib.huggingface.adapters import WEIGHTS, Adapters
from elastic.worker.contrib.huggingface.stack import HuggingFaceStack, config_in, from_huggingface
from elastic.worker.replica.export import checkpoint_path, checkpoint_runs, parameters

TRAINED = "the folder with the adapter_config.json of the adapters that were trained is needed"


def to_peft(
    checkpoint: str | Path, model: str | Path, lora: str | Path, out: str | Path
) -> dict[str, int | str]:
    """Write the adapters of a checkpoint to the new folder `out`, and return what it holds.

    The folder has an adapter_config.json and an adapter_model.safetensors, which
    `peft.PeftModel.from_pretrained(model, out)` reads. It appears whole or not at all. The adapters
    are in memory.

    Args:
        checkpoint: the directory of one step, or of all steps; then the newest is taken.
        model: folder with the config.json of the model. Its weights are not read.
        lora: folder with the adapter_config.json of the adapters, as `from_huggingface` takes it.

    Raises FieldError if `out` exists or cannot be written, or for a checkpoint of other adapters.
    """
    path, digest = checkpoint_path(checkpoint), hashlib.sha256()
    adapters = Adapters(lora)
    with new_folder(Path(out), path) as fresh:
        stack = from_huggingface(config_in(Path(model)), lora=adapters.config)
        tensors = _tensors(stack, path, str(lora), digest)
        safetensors_stream.write(fresh / WEIGHTS, tensors, {"format": "pt"})
        adapters.save(fresh, str(model))
    return {
        "step": SavedCheckpoint(path).manifest.step,
        "tensors": len(tensors),
        "bytes": sum(tensor.data.nbytes for tensor in tensors),
        "params_sha256": digest.hexdigest(),
    }


def _tensors(
    stack: HuggingFaceStack, path: str, lora: str, digest: hashlib._Hash
) -> list[RawTensor]:
    """Return the adapters under peft's names; add their values to `digest`."""
    layers, found = SavedCheckpoint(path).manifest.n_layers, []
    if layers != stack.n_layers:
        what = f"it is cut into {stack.n_layers} layers, and the checkpoint has {layers}"
        raise FieldError("--model", stack.model_name, f"{what}: give the model that was trained")
    for layer, runs in enumerate(checkpoint_runs(path)):
        named = stack.empty_layer(layer).named_parameters()
        wanted = {name: tuple(p.shape) for name, p in named if p.requires_grad}
        held = {name: (dtype, values) for name, dtype, values in parameters(runs)}
        for name in sorted(wanted.keys() | held.keys()):
            shape = held[name][1].shape if name in held else None
            if shape != wanted.get(name):
                full, absent = stack.name_of(layer, name), "not trained"
                what = f"{full} is {wanted.get(name, absent)}, and {shape or absent} in the"
                raise FieldError("--lora", lora, f"{what} checkpoint: {TRAINED}")
        for name, (dtype, values) in held.items():
            data = memoryview(values.reshape(-1).view(np.uint8).data)
            digest.update(data)
            stored = stored_name(stack.name_of(layer, name))
            found.append(RawTensor(stored, dtype, values.shape, data))
    return found
