"""Fixtures of the worker's tests."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from elastic.worker.model.layers import TensorParallel


@pytest.fixture(scope="session")
def alone(tmp_path_factory: pytest.TempPathFactory) -> TensorParallel:
    """The tensor-parallel group of one rank that megatron-core needs."""
    from elastic.worker.contrib.megatron.stack import init_tensor_parallel

    store: Path = tmp_path_factory.mktemp("tp") / "store"
    return init_tensor_parallel(0, 1, str(store))
