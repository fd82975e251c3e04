"""Fault-tolerant elastic training. Scripts need `Trainer`, a layer stack and an optimizer; see examples/.

Names are loaded at first use, so that importing the package (the command line does) never loads torch.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from elastic.worker.layers import LayerStack, ListStack, Microbatch
    from elastic.worker.optimizer import OptimizerSpec
    from elastic.worker.runtime import Trainer

__version__ = "0.1.0"
__all__ = ["LayerStack", "ListStack", "Microbatch", "OptimizerSpec", "Trainer", "__version__"]

_HOMES = {
    "LayerStack": "elastic.worker.layers",
    "ListStack": "elastic.worker.layers",
    "Microbatch": "elastic.worker.layers",
    "OptimizerSpec": "elastic.worker.optimizer",
    "Trainer": "elastic.worker.runtime",
}


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(_HOMES[name]), name)
