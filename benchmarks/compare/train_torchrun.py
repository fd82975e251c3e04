"""Training script for torchrun and NVRx: DistributedDataParallel, checkpoints, restarts.

It follows PyTorch's tutorial on fault-tolerant training with torchrun: each worker loads the newest
checkpoint when the group starts (again), and rank 0 writes one every few steps.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib
import os
import time
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
from torch.nn.functional import mse_loss
from torch.nn.parallel import DistributedDataParallel

from benchmarks.compare.job import (
    LR,
    MICROBATCHES,
    SHARE,
    STEPS,
    Records,
    batch,
    evaluate,
    model,
    wait,
)


def heartbeats() -> Callable[[], None]:
    """Return the call that sends a heartbeat to the monitor of this node."""
    module = importlib.import_module("nvidia_resiliency_ext.fault_tolerance")
    client = module.RankMonitorClient()
    client.init_workload_monitoring()
    send: Callable[[], None] = client.send_heartbeat
    return send


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--checkpoint", type=Path, required=True)
    parser.add_argument("--every", type=int, default=10, help="steps between checkpoints")
    parser.add_argument("--timeout", type=float, default=1800.0, help="seconds of a collective")
    parser.add_argument(
        "--keep-batch", action="store_true", help="divide the global batch by the workers there are"
    )
    parser.add_argument(
        "--heartbeats", action="store_true", help="tell NVRx's monitor after each step"
    )
    args = parser.parse_args()
    beat = heartbeats() if args.heartbeats else lambda: None
    torch.set_num_threads(1)
    dist.init_process_group("gloo", timeout=timedelta(seconds=args.timeout))
    rank, size = dist.get_rank(), dist.get_world_size()
    records, network = Records(), model()
    optimizer, first = torch.optim.AdamW(network.parameters(), lr=LR), 0
    if args.checkpoint.exists():
        saved = torch.load(args.checkpoint)
        network.load_state_dict(saved["model"])
        optimizer.load_state_dict(saved["optimizer"])
        first = saved["step"]
    parallel = DistributedDataParallel(network)
    for step in range(first, STEPS):
        mine = range(rank * SHARE, (rank + 1) * SHARE)
        if args.keep_batch:
            mine = range(rank, MICROBATCHES, size)
        number = MICROBATCHES if args.keep_batch else size * SHARE
        optimizer.zero_grad()
        for index in mine:
            began = time.perf_counter()
            x, y = batch(step, index)
            last = index == mine[-1]
            with contextlib.nullcontext() if last else parallel.no_sync():
                loss = mse_loss(parallel(x), y) * size / number  # DDP divides by `size`
                wait(began)
                records.microbatch(step, index)
                torch.autograd.backward(loss)
        optimizer.step()
        records.write("step", step=step, microbatches=number)
        beat()
        if rank == 0 and (step + 1) % args.every == 0:
            saved = {"model": network.state_dict(), "optimizer": optimizer.state_dict()}
            partial = args.checkpoint.with_suffix(".tmp")
            torch.save({**saved, "step": step + 1}, partial)
            os.replace(partial, args.checkpoint)
    records.write("end", loss=evaluate(network))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
