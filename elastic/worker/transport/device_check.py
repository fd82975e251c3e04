"""Tries this node's devices: `python -m elastic.worker.transport.device_check` prints one line of JSON.

Whole numbers are multiplied in float32, so that the result is known to the last bit; the slowest device counts.
"""

from __future__ import annotations

import json
import sys
import time

import torch

SIZE, ROUNDS = 2048, 8


def check_device(device: torch.device) -> tuple[float, str]:
    """(T operations a second, what is wrong or "")."""
    a = (torch.arange(SIZE * SIZE, dtype=torch.float32).reshape(SIZE, SIZE) % 3) - 1
    expected = (a[:64].double() @ a.double()).float()
    there = a.to(device)
    best, right = float("inf"), True
    for _ in range(ROUNDS):
        began = time.perf_counter()
        result = there @ there
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        best = min(best, time.perf_counter() - began)
        right = right and bool(torch.equal(result[:64].cpu(), expected))
    return 2 * SIZE**3 / best / 1e12, "" if right else f"{device} computes wrong results: replace it"


def main() -> int:
    count = torch.cuda.device_count()
    devices = [torch.device("cuda", i) for i in range(count)] or [torch.device("cpu")]
    found = []
    for device in devices:
        try:
            found.append(check_device(device))
        except RuntimeError as error:
            found.append((0.0, f"{device}: {error}"))
    rate = min(rate for rate, _ in found)
    print(
        json.dumps({"tflops": rate, "error": "; ".join(text for _, text in found if text), "devices": count})
    )
    return 0


if __name__ == "__main__":
    sys.exit(main())
