"""Item 7: help has groups and defaults, mistyped words are suggested, torchrun's names work."""

from __future__ import annotations

from elastic.domain.errors import EXIT_USAGE
from tests.launcher.cases.case import Case, Command
from tests.launcher.cases.scripts import PLAIN

JOB = {"train.py": PLAIN}

CASES = (
    Case(
        item=7,
        title="Flags of `elastic run` in groups, with defaults",
        command=Command(
            line="elastic run --help",
            shows=(
                "torchrun's flags:",
                "--max-restarts",
                "elastic's flags:",
                "--certs DIR",
                "Ray's flags:",
                "[default: static]",
            ),
            hides=("--certs CERTS",),
        ),
    ),
    Case(
        item=7,
        title="Help of a service",
        command=Command(
            line="elastic coordinator --help",
            shows=("Run a coordinator alone", "--address HOST:PORT"),
            hides=("Train a script",),
        ),
    ),
    Case(
        item=7,
        title="A mistyped flag",
        files=JOB,
        command=Command(
            line="elastic run --nodes 2 train.py",
            code=EXIT_USAGE,
            shows=("--nnodes", "see `elastic run --help`"),
        ),
    ),
    Case(
        item=7,
        title="A mistyped command",
        command=Command(line="elastic statsu", code=EXIT_USAGE, shows=("Did you mean 'status'?",)),
    ),
    Case(
        item=7,
        title="Versions of both programs",
        command=Command(line="elastic --version", shows=("elastic ",)),
        then=Command(line="elastic-sim --version", shows=("elastic-sim ",)),
    ),
    Case(
        item=7,
        title="Torchrun's `--rdzv-backend etcd` on several machines",
        files=JOB,
        command=Command(
            line="elastic run --nnodes 2 --rdzv-backend etcd --rdzv-endpoint etcd:2379 train.py",
            code=EXIT_USAGE,
            shows=("--rdzv-backend: 'etcd' is not usable", "--store etcd://etcd:2379"),
        ),
    ),
    Case(
        item=7,
        title="Torchrun's `--rdzv-backend etcd-v2` on one machine",
        files=JOB,
        command=Command(
            line="elastic run --standalone --rdzv-backend etcd-v2 --run-dir run train.py",
            shows=("done",),
        ),
    ),
)
