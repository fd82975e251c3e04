"""Cost of backups on a GPU: copies to host memory and on to another process, against none.

    python -m benchmarks.backup.gpu_backup [--pairs 6] [--layers 24 --hidden 2048]

One node trains a GPT of more than a billion parameters in bf16 with float32 master weights. A
second node has no memory for layers, so it is a spare that keeps the copies. Blocks of steps with
and without backup alternate in one job (`benchmarks.backup.backup_overhead`). Copies leave the GPU
on separate streams (`elastic.worker.backup.copier`). The benchmark needs a GPU with 40 GB free, and
host memory for four copies of the state.
"""

from __future__ import annotations

import argparse
import sys

import torch

from benchmarks.backup.backup_overhead import TARGET, add_sizes, measure, rows_of
from benchmarks.results import save

PAIRS = ("recompute+snapshot", "recompute+replay", "stream:4+replay", "stream:4+snapshot")
FLAGS = ("--nnodes", "2", "--node-memory", "1TiB,1MiB", "--vault-memory", "1TiB")


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.backup.gpu_backup")
    parser.add_argument("--pairs", type=int, default=6, help="of blocks, for each pair of schemes")
    parser.add_argument(
        "--quick", action="store_true", help="one pair, two of blocks; writes nothing"
    )
    parser.add_argument(
        "--cpu", action="store_true", help="run without a GPU: tries it out, measures nothing"
    )
    add_sizes(parser, layers=24, hidden=2048, heads=16, sequence=2048, tokens=8192, dtype="bf16")
    args = parser.parse_args()
    if not torch.cuda.is_available() and not args.cpu:
        print("benchmarks.backup.gpu_backup: not run, it needs a GPU")
        return 0
    rows = []
    for pair in PAIRS[: 1 if args.quick else None]:
        found = measure(pair, 1, 2 if args.quick else args.pairs, args, FLAGS)
        where = (
            f"{args.layers} layers of {args.hidden}, {args.dtype}, "
            f"{args.tokens[0]} tokens a micro-batch"
        )
        rows += rows_of(pair, where, found, TARGET)
    if not args.quick and not args.cpu:
        save("gpu_backup", rows)
    return 0


if __name__ == "__main__":
    sys.exit(main())
