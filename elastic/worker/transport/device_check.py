"""Program that checks the devices of a node and prints one line of JSON.

    python -m elastic.worker.transport.device_check

It multiplies matrices of small whole numbers in float32, whose product is exact, and compares the
result with the expected one. The reported speed is that of the slowest device.
"""

from __future__ import annotations

import json
import sys
import time

import torch

SIZE, ROUNDS = 2048, 8
"""`SIZE`: rows of the square matrices; `ROUNDS`: number of multiplications."""


def check_device(device: torch.device) -> tuple[float, str]:
    """Return (speed in 10^12 operations per second, error text or "")."""
    a = (torch.arange(SIZE * SIZE, dtype=torch.float32).reshape(SIZE, SIZE) % 3) - 1
    expected = (a[:64].double() @ a.double()).float()
    on_device = a.to(device)
    best, right = float("inf"), True
    for _ in range(ROUNDS):
        began = time.perf_counter()
        result = on_device @ on_device
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        best = min(best, time.perf_counter() - began)
        right = right and bool(torch.equal(result[:64].cpu(), expected))
    error = "" if right else f"{device} computes wrong results: replace it"
    return 2 * SIZE**3 / best / 1e12, error


def main() -> int:
    count = torch.cuda.device_count()
    devices = [torch.device("cuda", i) for i in range(count)] or [torch.device("cpu")]
    results = []
    for device in devices:
        try:
            results.append(check_device(device))
        except RuntimeError as error:
            results.append((0.0, f"{device}: {error}"))
    rate = min(rate for rate, _ in results)
    errors = "; ".join(text for _, text in results if text)
    print(json.dumps({"tflops": rate, "error": errors, "devices": count}))
    return 0


if __name__ == "__main__":
    sys.exit(main())
