"""Random numbers as a function of (seed, step, micro-batch, layer), never of who computes or when.

Right before a layer's forward pass `begin` seeds this process's default generators, so whatever draws from
them (torch's dropout, user code) gives the same numbers wherever and however often the layer runs. Inside
the pass `sharded` lends tensor-parallel ranks different numbers for what they hold a shard of (attention
heads), and leaves the generators in step for what they hold whole (hidden states).
"""

from __future__ import annotations

import hashlib
import struct
from collections.abc import Iterator
from contextlib import contextmanager

import torch

_MASK = (1 << 64) - 1


def keyed(seed: int, step: int, microbatch: int, layer: int, stream: int = 0) -> int:
    """Return 63 well-mixed bits that depend on all arguments (any integers; taken modulo 2**64)."""
    key = struct.pack("<5Q", *(n & _MASK for n in (seed, step, microbatch, layer, stream)))
    return int.from_bytes(hashlib.blake2b(key, digest_size=8).digest(), "little") >> 1


def named(seed: int, layer: int, name: str) -> int:
    """Return 63 bits for the initial value of parameter `name` of `layer`."""
    key = struct.pack("<2Q", seed & _MASK, layer & _MASK) + name.encode()
    return int.from_bytes(hashlib.blake2b(key, digest_size=8).digest(), "little") >> 1


def generator(device: torch.device) -> torch.Generator:
    """The default generator of `device`."""
    if device.type == "cuda":
        index = torch.cuda.current_device() if device.index is None else device.index
        return torch.cuda.default_generators[index]
    return torch.default_generator


def begin(seed: int, step: int, microbatch: int, layer: int, device: torch.device) -> None:
    """Seed the default generators of the CPU and of `device` for one forward pass of one layer."""
    key = keyed(seed, step, microbatch, layer)
    torch.default_generator.manual_seed(key)
    if device.type != "cpu":
        generator(device).manual_seed(key)


@contextmanager
def sharded(rank: int, device: torch.device) -> Iterator[None]:
    """Within: numbers of TP rank `rank` alone. Afterwards the generators are in step on all ranks again."""
    base = int(torch.randint(1 << 62, ()).item())
    own = generator(device)
    state = own.get_state()
    own.manual_seed(keyed(base, rank, 0, 0, 1))
    try:
        yield
    finally:
        own.set_state(state)
