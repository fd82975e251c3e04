"""Fault-tolerant elastic training with plans over any number of nodes.

A training script needs `Trainer`, a layer stack and an optimizer specification; see examples/. The
subpackages depend on each other in one direction: launcher, then coordinator, agent and worker,
then rpc and store, then core, then planning, then domain. Names of the public interface load at
first use, so that importing the package (as the command line does) never loads torch. To read the
code, start with `elastic.core`.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from elastic.domain.version import VERSION

if TYPE_CHECKING:
    from elastic.launcher.tracking.callback import Callback
    from elastic.worker.contrib.huggingface.stack import from_huggingface
    from elastic.worker.contrib.megatron.data import megatron_dataset
    from elastic.worker.contrib.megatron.huggingface.config import megatron_config
    from elastic.worker.contrib.megatron.stack import from_megatron
    from elastic.worker.contrib.sequential import from_sequential
    from elastic.worker.datasets.dataloader import from_dataloader
    from elastic.worker.datasets.map_style import from_dataset
    from elastic.worker.datasets.packing import PackedDocuments
    from elastic.worker.datasets.prefetch import prefetch
    from elastic.worker.datasets.stream import from_stream
    from elastic.worker.datasets.weighting import label_count
    from elastic.worker.evaluation import Evaluation
    from elastic.worker.model.layers import LayerStack, ListStack
    from elastic.worker.model.learning_rate import from_scheduler
    from elastic.worker.model.loss_scale import LossScale
    from elastic.worker.model.microbatch import Microbatch
    from elastic.worker.model.optimizer import OptimizerSpec
    from elastic.worker.trainer import Trainer

__version__ = VERSION
__all__ = [
    "Callback",
    "Evaluation",
    "LayerStack",
    "ListStack",
    "LossScale",
    "Microbatch",
    "OptimizerSpec",
    "PackedDocuments",
    "Trainer",
    "__version__",
    "from_dataloader",
    "from_dataset",
    "from_huggingface",
    "from_megatron",
    "from_scheduler",
    "from_sequential",
    "from_stream",
    "label_count",
    "megatron_config",
    "megatron_dataset",
    "prefetch",
]

_HOMES = {
    "Callback": "elastic.launcher.tracking.callback",
    "Evaluation": "elastic.worker.evaluation",
    "LayerStack": "elastic.worker.model.layers",
    "ListStack": "elastic.worker.model.layers",
    "LossScale": "elastic.worker.model.loss_scale",
    "Microbatch": "elastic.worker.model.microbatch",
    "OptimizerSpec": "elastic.worker.model.optimizer",
    "label_count": "elastic.worker.datasets.weighting",
    "Trainer": "elastic.worker.trainer",
    "PackedDocuments": "elastic.worker.datasets.packing",
    "from_dataloader": "elastic.worker.datasets.dataloader",
    "from_dataset": "elastic.worker.datasets.map_style",
    "from_stream": "elastic.worker.datasets.stream",
    "megatron_config": "elastic.worker.contrib.megatron.huggingface.config",
    "megatron_dataset": "elastic.worker.contrib.megatron.data",
    "prefetch": "elastic.worker.datasets.prefetch",
    "from_scheduler": "elastic.worker.model.learning_rate",
    "from_huggingface": "elastic.worker.contrib.huggingface.stack",
    "from_megatron": "elastic.worker.contrib.megatron.stack",
    "from_sequential": "elastic.worker.contrib.sequential",
}


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    found = getattr(importlib.import_module(_HOMES[name]), name)
    importlib.import_module("elastic.worker.script_exit").watch_errors()
    return found
