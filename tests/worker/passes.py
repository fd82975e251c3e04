"""Forward passes of layers that hand on one tensor, as most layers of the tests do."""

from __future__ import annotations

from torch import Tensor

from elastic.worker.model.microbatch import Microbatch
from elastic.worker.model.values import Value
from elastic.worker.replica.replica import LayerReplica


def forward(replica: LayerReplica, hidden: Value | None, microbatch: Microbatch) -> Tensor:
    """Run one layer; return its only tensor."""
    value = replica.forward(hidden, microbatch)
    assert isinstance(value, Tensor)
    return value
