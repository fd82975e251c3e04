"""Values of a model's parameters from a folder: safetensors, or torch.distributed.checkpoint."""

from __future__ import annotations

from pathlib import Path

from elastic.domain.errors import FieldError
from elastic.worker.contrib.folders import METADATA, is_file
from elastic.worker.contrib.whole_model import WholeModel
from elastic.worker.model.checks import description

FOLDER = (
    "a folder with model.safetensors, or its index, or a folder that torch.distributed.checkpoint "
    "has written"
)


def take_weights(stack: WholeModel, folder: object) -> None:
    """Let the layers of `stack` begin with the values in `folder`. Raises FieldError."""
    if not isinstance(folder, str | Path):
        raise FieldError("weights", description(folder), FOLDER)
    path = Path(folder)
    if is_file(path / METADATA):
        from elastic.worker.contrib.distributed_checkpoint import DistributedCheckpoint  # slow

        read = DistributedCheckpoint(path).values_of(stack.parameter_names(), stack.other_names())
        stack.take_values(read)
        return
    from elastic.worker.contrib.huggingface.weights import weights_in  # needs the extra hf

    found = weights_in(path)
    if found is None:
        raise FieldError("weights", str(path), FOLDER)
    stack.take_values(found)
