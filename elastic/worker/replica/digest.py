"""Hash of a layer's parameters, by which its holders compare their replicas.

Only hashes of the same kind of device are compared, so each kind may have an algorithm of its own:
xxh3-64 on the CPU, and on a GPU a sum that needs no copy to the host.
"""

from __future__ import annotations

import platform
import zlib
from collections.abc import Iterable

import torch
import xxhash
from torch import Tensor

from elastic.worker.model.state_codec import as_bytes, as_memory

CHUNK_WORDS = 1 << 22
"""Words of a parameter that a GPU multiplies at once: 32 MiB of temporary memory each."""


def parameter_digest(parameters: Iterable[Tensor]) -> int:
    """Return a 64-bit hash of the bytes of `parameters`, which are on one device, in order."""
    found = list(parameters)
    if found and found[0].device.type != "cpu":
        return device_digest(found)
    hasher = xxhash.xxh3_64()
    for parameter in found:
        hasher.update(as_memory(as_bytes(parameter)))
    return int(hasher.intdigest())


def host_digest(parameters: Iterable[Tensor]) -> str:
    """Return a hash of the bytes of `parameters`, in order, which does not depend on the device."""
    hasher = xxhash.xxh3_64()
    for parameter in parameters:
        hasher.update(as_memory(as_bytes(parameter.detach().cpu())))
    return hasher.hexdigest()


def device_digest(parameters: Iterable[Tensor]) -> int:
    """Return the sum of all 8-byte words, each times an odd number of its own, modulo 2**64.

    An odd factor is invertible, so any change of a single word changes the sum.
    """
    total, at = None, 0
    for parameter in parameters:
        data = as_bytes(parameter)
        words = torch.zeros(-(-data.numel() // 8) * 8, dtype=torch.uint8, device=data.device)
        words[: data.numel()] = data
        for part in torch.split(words.view(torch.int64), CHUNK_WORDS):
            factors = torch.arange(at, at + part.numel(), device=data.device) * 2 + 1
            summed = (part * factors).sum()
            total = summed if total is None else total + summed
            at += part.numel()
    return int(total.item()) % 2**64 if total is not None else 0


def device_kind(device: torch.device) -> int:
    """Return a 32-bit number that is equal for devices which compute equal bits."""
    if device.type == "cuda":
        name = torch.cuda.get_device_name(device)
    else:
        name = f"{platform.machine()} {torch.backends.cpu.get_cpu_capability()}"
    return zlib.crc32(f"{torch.__version__} {name}".encode())
