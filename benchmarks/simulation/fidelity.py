"""Compare the simulator's micro-batch level with the real engine: throughput and recovery phases.

    python -m benchmarks.simulation.fidelity [--quick] [--repeat 3] [--keep DIR]

All runs are `elastic run --emulate` on local nodes: one process per worker, real messages, copies,
planner and recoveries. Workers wait the times of a profile instead of computing, so that two cores
do not distort the result.

Some runs calibrate the constants of this machine (`elastic-sim validate --calibrate`). The others
are compared with their simulation (`elastic-sim validate --physics`); nothing is fitted on them.
Their faults differ from those of the calibration: losses of other nodes at other moments, two
losses close together, and nodes that join in pairs.

A phase of a recovery takes 20 to 200 ms, and a fault 10 ms later may find another worker in the
middle of a long operation. Faults therefore strike at other micro-batches in every run, and all
runs are pooled. The targets apply to means, because throughput follows from means. Medians of a few
values in two clusters are printed beside them.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from dataclasses import dataclass, replace
from pathlib import Path

from elastic_sim.microbatches.validate import (
    ComparedFigure,
    ValidationReport,
    calibrate,
    format_report,
    validate,
)

from benchmarks.emulated import equal_layers, run, shaped
from benchmarks.results import Row, save
from elastic.core.protocol.fault_spec import parse_fault

LINK, BYTES_PER_S = "80Mbit", 10e6
COPY_BYTES_PER_S = 1e9
TAKEN, ATTEMPTS = "is not usable", 3
"""Part of the message of a run that lost the race for a port, and how often to try a run."""


@dataclass(frozen=True)
class FidelityCase:
    """A job and the faults of both of its runs."""

    nodes: int
    layers: int
    parameters: int
    """Parameters per layer."""
    layer_s: float
    microbatches: int
    steps: int
    calibration: tuple[str, ...]
    validation: tuple[str, ...]


FULL = FidelityCase(
    nodes=8,
    layers=16,
    parameters=1 << 16,
    layer_s=0.03,
    microbatches=16,
    steps=68,
    calibration=(
        "kill node=3 step=5 microbatch=5",
        "join step=6",
        "kill node=5 step=16 microbatch=3",
        "join step=17",
        "drain node=2 step=27",
        "join step=28",
        "kill node=0 step=38 microbatch=9",
        "join step=39",
        "kill node=8 step=49 microbatch=12",
        "join step=50",
        "kill node=1 step=60 microbatch=7",
    ),
    validation=(
        "kill node=2 step=4 microbatch=8",
        "join step=5",
        "drain node=4 step=15",
        "join step=16",
        "kill node=0 step=26 microbatch=2",
        "join step=27",
        "kill node=7 step=37 microbatch=13",
        "kill node=8 step=40 microbatch=5",
        "join step=41",
        "join step=42",
        "kill node=1 step=54 microbatch=6",
        "kill node=9 step=58 microbatch=3",
    ),
)
QUICK = FidelityCase(
    nodes=3,
    layers=6,
    parameters=1 << 14,
    layer_s=0.01,
    microbatches=6,
    steps=30,
    calibration=("kill node=1 step=4 microbatch=3", "join step=5"),
    validation=("kill node=2 step=3 microbatch=4", "join step=4"),
)
PHASES = (
    *(f"losses: {phase}, mean" for phase in ("detect", "decide", "transfer", "rebuild", "total")),
    *(f"losses: {phase}, median" for phase in ("detect", "decide", "transfer", "rebuild", "total")),
    *(
        f"planned changes: {phase}, mean"
        for phase in ("decide", "transfer", "rebuild", "total", "pause")
    ),
    *(
        f"planned changes: {phase}, median"
        for phase in ("decide", "transfer", "rebuild", "total", "pause")
    ),
)
THROUGHPUT_TARGET, PHASE_TARGET = 3.0, 10.0
SHIFT = 5
"""Micro-batches by which the faults of each further run come later."""


def real(case: FidelityCase, faults: tuple[str, ...], folder: Path) -> Path:
    """Return the directory of a run, made if missing. Raises RuntimeError if the run fails."""
    profile = equal_layers(
        case.layers, case.parameters, case.layer_s, BYTES_PER_S, COPY_BYTES_PER_S
    )
    flags = [
        "--nnodes",
        str(case.nodes),
        "--backup",
        "stream:4+snapshot",
        "--compress",
        "off",
        *shaped(LINK),
    ]
    for fault in faults:
        flags += ["--fault", fault]
    for attempt in range(ATTEMPTS):
        if (folder / str(attempt) / "run" / "summary.json").exists():
            return folder / str(attempt) / "run"
        try:
            run(profile, flags, case.microbatches, case.steps, folder / str(attempt))
        except RuntimeError as error:
            if TAKEN not in str(error):
                raise
        else:
            return folder / str(attempt) / "run"
    raise RuntimeError(f"{folder}: the coordinator found no free port, {ATTEMPTS} times")


def shifted(case: FidelityCase, faults: tuple[str, ...], number: int) -> tuple[str, ...]:
    """Return the faults of run `number`, at other micro-batches than in the runs before."""
    specs = [parse_fault(text) for text in faults]
    return tuple(
        spec.text
        if spec.microbatch is None
        else replace(spec, microbatch=(spec.microbatch + SHIFT * number) % case.microbatches).text
        for spec in specs
    )


def compared(
    case: FidelityCase, repeat: int, folder: Path
) -> tuple[ValidationReport, list[ValidationReport]]:
    """Return the report of all compared runs together, and the report of each run."""
    known = [
        real(case, shifted(case, case.calibration, n), folder / str(n) / "calibration")
        for n in range(repeat)
    ]
    physics = calibrate(known)
    others = [
        real(case, shifted(case, case.validation, n), folder / str(n) / "validation")
        for n in range(repeat)
    ]
    report, single = validate(others, physics), [validate([one], physics) for one in others]
    print(f"{physics}\n{format_report(report)}", flush=True)
    return report, single


def error(figure: ComparedFigure) -> float:
    """Return the relative error in percent."""
    return abs(figure.ratio - 1) * 100


def rows_of(report: ValidationReport, single: list[ValidationReport]) -> list[Row]:
    """Return rows with each figure of all runs together, and its error in the worst single run."""
    there = {figure.name: figure for figure in report.figures}
    rows = list[Row]()
    for name in ("throughput", *(name for name in PHASES if name in there)):
        figure = there[name]
        target = (
            THROUGHPUT_TARGET if name == "throughput" else PHASE_TARGET if "mean" in name else None
        )
        worst = max(error(one.figure(name)) for one in single)
        rows += [
            Row(f"{name}: error", error(figure), "%", target, "lower"),
            Row(f"{name}: error, worst single run", worst, "%", None, "lower"),
            Row(f"{name}: measured", figure.measured, figure.unit, None, "lower"),
            Row(f"{name}: predicted", figure.predicted, figure.unit, None, "lower"),
        ]
    return [
        *rows,
        Row("runs compared", len(single), "", None, "higher"),
        Row("recoveries compared", len(report.recoveries), "", None, "higher"),
        Row("unmatched recoveries", sum(report.unmatched), "", 0, "lower"),
    ]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument(
        "--quick", action="store_true", help="three nodes, a loss and a join; writes nothing"
    )
    parser.add_argument(
        "--repeat", type=int, default=3, help="runs that are measured, and others that are compared"
    )
    parser.add_argument(
        "--keep", type=Path, help="directory for the runs; those that are there are not made again"
    )
    args = parser.parse_args()
    case = QUICK if args.quick else FULL
    with tempfile.TemporaryDirectory() as scratch:
        folder = args.keep or Path(scratch)
        rows = rows_of(*compared(case, 1 if args.quick else args.repeat, folder))
    if not args.quick:
        print(f"written to {save('fidelity', rows)}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
