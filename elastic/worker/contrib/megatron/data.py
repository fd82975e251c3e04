"""Training data that megatron-core prepares: indexed datasets (.bin and .idx) and their blends."""

from __future__ import annotations

import fcntl
import os
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, cast

import torch.distributed as dist

from elastic.domain.errors import FieldError, needs_extra
from elastic.worker.datasets.map_style import MapStyle
from elastic.worker.model.checks import Described, description, whole_number

with needs_extra("megatron", "Data of megatron-core"), warnings.catch_warnings():
    warnings.simplefilter("ignore")
    from megatron.core.datasets.blended_megatron_dataset_builder import (
        BlendedMegatronDatasetBuilder,
    )
    from megatron.core.datasets.blended_megatron_dataset_config import BlendedMegatronDatasetConfig

CONFIG = "a config of megatron-core's datasets, as GPTDatasetConfig(...)"
CACHE = "a folder on a disk of this machine, where indices are kept"
NONE = "it has no training samples; see blend= and split= of the config"


def megatron_dataset(kind: type, config: BlendedMegatronDatasetConfig, samples: int) -> MapStyle:
    """Return megatron-core's training dataset, for `from_dataset(..., shuffle=False)`.

    megatron-core shuffles, splits and blends the documents itself, from `config.random_seed`. All
    workers of a machine may call this at the same time; one after the other reads or writes
    `config.path_to_cache`, which must be on a disk of the machine.

    Args:
        kind: class of the dataset, as `GPTDataset`.
        config: see megatron-core. `config.blend` names the files without their endings.
        samples: samples of the whole training: steps x micro-batches x rows.

    Raises FieldError for an argument that is not usable, or if there are no samples.
    """
    if not isinstance(config, BlendedMegatronDatasetConfig):
        raise FieldError("config", description(config), CONFIG)
    samples = whole_number("samples", samples, 1)
    if not config.path_to_cache:
        raise FieldError("config.path_to_cache", config.path_to_cache, CACHE)
    if dist.is_initialized() and dist.get_world_size() > 1:
        what = Described("a process group that the script made")
        raise FieldError("torch.distributed", what, "call this before the group is made")
    with _locked(config.path_to_cache), _group_of_one():
        builder = BlendedMegatronDatasetBuilder(kind, [samples, 0, 0], lambda: True, config)
        dataset = builder.build()[0]
    if dataset is None:
        raise FieldError("config", description(config), NONE)
    return cast(MapStyle, dataset)


@contextmanager
def _locked(folder: str) -> Iterator[None]:
    """Hold a lock on `folder`, which other processes of this machine wait for."""
    os.makedirs(folder, exist_ok=True)
    with open(os.path.join(folder, "elastic.lock"), "w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


@contextmanager
def _group_of_one() -> Iterator[None]:
    """Give torch.distributed a default group inside the block, unless it has one.

    megatron-core asks for the rank of this process to decide whether it writes its indices.
    """
    if dist.is_initialized():
        yield
        return
    store: Any = dist.HashStore()  # type: ignore[attr-defined]
    dist.init_process_group("gloo", store=store, rank=0, world_size=1)
    try:
        yield
    finally:
        dist.destroy_process_group()
