"""Time of each phase of a recovery, by pair of backup schemes.

    python -m benchmarks.recovery.recovery_by_scheme [--nodes 4 8] [--sizes 1 4 16] [--quick]

The runs vary the number of nodes (4 and 8) and the model size (three) on links of 1 Gbit/s. One
node is killed in the fourth step, after four of eight micro-batches. Layers wait 5 ms in each
forward and backward pass instead of computing (`--emulate`); states, gradients and messages are
real.

The table comes from the run's summary: time from the fault to the decision, for halting and
planning, for fetching and installing, for reconnecting, in total, and the bytes that vaults sent.
The bound is these bytes over the bandwidth of one link, as if one vault sent everything. Several
vaults send at once, so a recovery may be faster than the bound.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tqdm import tqdm

from benchmarks.emulated import equal_layers, run, shaped
from benchmarks.results import DIRECTORY, Row, save

PAIRS = {
    1: ("stream+snapshot", "log+snapshot", "recompute+snapshot", "stream+replay"),
    2: ("stream+replica", "reduce+replica"),
}
"""Measured pairs of schemes, by number of pipelines."""
PARAMETERS, LAYERS, MICROBATCHES = 100_000, 16, 8
LAYER_S = 0.005
LINK, BYTES_PER_S = "1Gbit", 125e6
PHASES = ("detect_s", "decide_s", "transfer_s", "rebuild_s", "total_s")


@dataclass(frozen=True)
class Case:
    nodes: int
    size: int
    pipelines: int
    pair: str

    def __str__(self) -> str:
        return f"{self.pair}, {self.nodes} nodes, x{self.size}"


def cases(nodes: list[int], sizes: list[int]) -> Iterator[Case]:
    for n in nodes:
        for size in sizes:
            for pipelines, pairs in PAIRS.items():
                for pair in pairs:
                    yield Case(n, size, pipelines, pair)


def measure(case: Case, folder: Path) -> dict[str, Any]:
    """Run the case; return its first recovery as in the run's summary."""
    profile = equal_layers(LAYERS, PARAMETERS * case.size, LAYER_S, BYTES_PER_S)
    flags = [
        "--nnodes", str(case.nodes), "--pipelines", str(case.pipelines), "--backup", case.pair,
        *shaped(LINK),
        "--fault", "kill node=1 step=3 microbatch=4",
    ]  # fmt: skip
    found: dict[str, Any] = run(profile, flags, MICROBATCHES, 6, folder)["recoveries"][0]
    return found


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.recovery.recovery_by_scheme")
    parser.add_argument("--nodes", type=int, nargs="+", default=[4, 8])
    parser.add_argument(
        "--sizes", type=int, nargs="+", default=[1, 4, 16], help="times 1.6 million parameters"
    )
    parser.add_argument("--quick", action="store_true", help="one case; writes nothing")
    args = parser.parse_args()
    wanted = list(cases(args.nodes, args.sizes))[: 1 if args.quick else None]
    head = [
        "nodes",
        "size",
        "pipelines",
        "pair",
        *PHASES,
        "network_bytes",
        "bound_s",
        "rerun",
        "state_source",
    ]
    lines, rows = [",".join(head)], []
    with tempfile.TemporaryDirectory() as scratch:
        for number, case in enumerate(tqdm(wanted, disable=None)):
            found = measure(case, Path(scratch) / str(number))
            bound_s = found["network_bytes"] / BYTES_PER_S
            figures = [
                *(f"{found[phase]:.4f}" for phase in PHASES),
                str(found["network_bytes"]),
                f"{bound_s:.4f}",
            ]
            told = [case.nodes, case.size, case.pipelines, case.pair, *figures]
            lines.append(
                ",".join(map(str, [*told, found["microbatches_rerun"], found["state_source"]]))
            )
            print(lines[-1], flush=True)
            rows.append(Row(f"recovery, {case}", found["total_s"], "s", None, "lower"))
            rows.append(
                Row(
                    f"of which fetching and installing, {case}",
                    found["transfer_s"],
                    "s",
                    None,
                    "lower",
                )
            )
            rows.append(Row(f"bytes over bandwidth, {case}", bound_s, "s", None, "lower"))
    if not args.quick:
        (DIRECTORY / "recovery-by-scheme.csv").write_text("\n".join(lines) + "\n")
        print(f"written to {save('recovery_by_scheme', rows)}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
