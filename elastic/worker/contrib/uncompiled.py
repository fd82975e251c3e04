"""Importing megatron-core without the compiler that it asks for."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch


def _as_it_is(function: Any = None, **options: Any) -> Any:
    """Stands in for `torch.compile`, as a function or as a decorator with options."""
    return function if function is not None else _as_it_is


@contextmanager
def uncompiled() -> Iterator[None]:
    """Leave megatron's fused helpers as they are written where there is no GPU.

    It passes them to `torch.compile` while it is imported, which brings in the whole compiler: 1.7 s of CPU
    time a worker, at every start and restart, for helpers that only a GPU gains from.
    """
    compiler = torch.compile
    if not torch.cuda.is_available():
        torch.compile = _as_it_is  # type: ignore[assignment]
    try:
        yield
    finally:
        torch.compile = compiler
