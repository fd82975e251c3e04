"""Plain torch DistributedDataParallel without this project, for torchrun and `elastic run`.

    FLAGS="--standalone --nproc-per-node 2 --max-restarts 1"
    torchrun    $FLAGS examples/ddp.py --out result.json --fail-at 5
    elastic run $FLAGS examples/ddp.py --out result.json --fail-at 5

The script trains a small network on synthetic data. Rank 0 writes a checkpoint after each step,
and all ranks continue from it after a restart. At the end rank 0 writes a JSON file with the keys
steps, loss, params_sha256, world_size and restarts.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import sys
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel


def main() -> None:
    args = parse_args()
    rank, restart = int(os.environ["RANK"]), int(os.environ.get("TORCHELASTIC_RESTART_COUNT", "0"))
    checkpoint = args.out.with_suffix(".checkpoint")
    connect(restart)
    model, optimizer = build(args.seed)
    first = resume(checkpoint, model, optimizer, rank, restart)
    loss = train(args, DistributedDataParallel(model), optimizer, checkpoint, first, restart)
    if rank == 0:
        result = {
            "steps": args.steps,
            "loss": loss,
            "params_sha256": fingerprint(model),
            "world_size": dist.get_world_size(),
            "restarts": restart,
        }
        args.out.write_text(json.dumps(result) + "\n")
        print(json.dumps(result), flush=True)
        checkpoint.unlink(missing_ok=True)
    dist.barrier()  # A rank must not close its connections while another uses them.
    dist.destroy_process_group()


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="plain DistributedDataParallel training")
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path, default=Path("ddp.json"), help="result of rank 0")
    parser.add_argument(
        "--fail-at", type=int, default=-1, metavar="STEP", help="rank 1 fails in it, once"
    )
    return parser.parse_args()


def connect(restart: int) -> None:
    """Join the default group.

    Some versions of torchrun, such as 2.13, keep one store over restarts. A new group could then
    find the addresses of the dead one and hang, so each restart has its own prefix.
    """
    store, rank, world_size = next(dist.rendezvous("env://"))  # type: ignore[attr-defined]
    store = dist.PrefixStore(f"restart-{restart}", store)  # type: ignore[attr-defined]
    dist.init_process_group("gloo", store=store, rank=rank, world_size=world_size)


def build(seed: int) -> tuple[nn.Module, torch.optim.Optimizer]:
    """Return the model, equal on all ranks, and its optimizer."""
    torch.manual_seed(seed)
    torch.set_num_threads(1)
    model = nn.Sequential(nn.Linear(16, 32), nn.Tanh(), nn.Linear(32, 1))
    return model, torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)


def batch(seed: int, step: int, rank: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return inputs [8, 16] and targets [8, 1], which depend only on seed, step and rank."""
    generator = torch.Generator().manual_seed((seed * 1_000_003 + step) * 1009 + rank)
    inputs = torch.randn(8, 16, generator=generator)
    return inputs, inputs.mean(dim=1, keepdim=True).tanh()


def train(
    args: argparse.Namespace,
    model: DistributedDataParallel,
    optimizer: torch.optim.Optimizer,
    checkpoint: Path,
    first: int,
    restart: int,
) -> float:
    """Run the steps from `first` on. Return the last loss, averaged over ranks."""
    rank, loss = dist.get_rank(), torch.zeros(())
    for step in range(first, args.steps):
        if step == args.fail_at and rank == 1 and restart == 0:
            print(f"rank 1 fails in step {step}", file=sys.stderr, flush=True)
            os._exit(1)
        inputs, targets = batch(args.seed, step, rank)
        optimizer.zero_grad()
        loss = nn.functional.mse_loss(model(inputs), targets)
        loss.backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        if rank == 0:
            save(checkpoint, model.module, optimizer, step + 1)
    mean = loss.detach().clone()
    dist.all_reduce(mean)
    return float(mean) / dist.get_world_size()


def save(path: Path, model: nn.Module, optimizer: torch.optim.Optimizer, step: int) -> None:
    """Replace the checkpoint atomically."""
    partial = path.with_suffix(".partial")
    states = {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "step": step}
    torch.save(states, partial)
    partial.replace(path)


def resume(
    path: Path, model: nn.Module, optimizer: torch.optim.Optimizer, rank: int, restart: int
) -> int:
    """Load the checkpoint of this run, if there is one. Return the next step."""
    if restart == 0 and rank == 0:
        path.unlink(missing_ok=True)  # a checkpoint of an earlier run
    if restart == 0 or not path.exists():
        return 0
    state = torch.load(path, weights_only=True)
    model.load_state_dict(state["model"])
    optimizer.load_state_dict(state["optimizer"])
    return int(state["step"])


def fingerprint(model: nn.Module) -> str:
    """Return the SHA-256 of the parameters in name order."""
    digest = hashlib.sha256()
    for _, parameter in sorted(model.named_parameters()):
        digest.update(parameter.detach().numpy().tobytes())
    return digest.hexdigest()


if __name__ == "__main__":
    main()
