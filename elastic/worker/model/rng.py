"""Makes random numbers a function of (seed, step, micro-batch, layer), not of the worker.

`seed_forward` seeds the default generators right before a layer's forward pass. Everything that
draws from them, such as torch's dropout, then repeats its numbers on any worker at any time. Within
the pass, `rank_stream` gives each tensor-parallel rank its own numbers for tensors that the ranks
split, such as attention heads. Whole tensors, such as hidden states, get equal numbers everywhere.
"""

from __future__ import annotations

import hashlib
import struct
from collections.abc import Iterator
from contextlib import contextmanager

import torch

_MASK = (1 << 64) - 1


def derive_seed(seed: int, step: int, microbatch: int, layer: int, stream: int = 0) -> int:
    """Return 63 well-mixed bits that depend on all arguments (integers, taken modulo 2**64)."""
    return _hash(struct.pack("<5Q", *(n & _MASK for n in (seed, step, microbatch, layer, stream))))


def derive_parameter_seed(seed: int, layer: int, name: str) -> int:
    """Return 63 bits for the initial value of parameter `name` of `layer`."""
    return _hash(struct.pack("<2Q", seed & _MASK, layer & _MASK) + name.encode())


def _hash(key: bytes) -> int:
    return int.from_bytes(hashlib.blake2b(key, digest_size=8).digest(), "little") >> 1


def default_generator(device: torch.device) -> torch.Generator:
    if device.type == "cuda":
        index = torch.cuda.current_device() if device.index is None else device.index
        return torch.cuda.default_generators[index]
    return torch.default_generator


def seed_forward(seed: int, step: int, microbatch: int, layer: int, device: torch.device) -> None:
    """Seed the default generators of the CPU and of `device` for one forward pass of a layer."""
    key = derive_seed(seed, step, microbatch, layer)
    torch.default_generator.manual_seed(key)
    if device.type != "cpu":
        default_generator(device).manual_seed(key)


@contextmanager
def rank_stream(rank: int, device: torch.device) -> Iterator[None]:
    """Inside the block, draw the numbers of TP rank `rank`; then restore the generator's state."""
    base = int(torch.randint(1 << 62, ()).item())
    generator = default_generator(device)
    state = generator.get_state()
    generator.manual_seed(derive_seed(base, rank, 0, 0, 1))
    try:
        yield
    finally:
        generator.set_state(state)
