"""Item 4: the last line names the first error of a script, and a restart is announced."""

from __future__ import annotations

from elastic.domain.errors import EXIT_FAILURE
from tests.launcher.cases.case import Case, Command
from tests.launcher.cases.scripts import FAILS, FAILS_ONCE, train

ERROR = "ValueError: train.csv has no rows"

CASES = (
    Case(
        item=4,
        title="A script without elastic fails on one of two nodes",
        files={"train.py": FAILS},
        is_long=True,
        command=Command(
            line="elastic run --standalone --nnodes 2 --run-dir run train.py",
            code=EXIT_FAILURE,
            shows=(ERROR, "train.py:5"),
        ),
    ),
    Case(
        item=4,
        title="It fails once, and may be restarted",
        files={"train.py": FAILS_ONCE},
        command=Command(
            line="elastic run --standalone --max-restarts 1 --run-dir run train.py",
            shows=("all workers start again, restart 1: ", ERROR),
        ),
    ),
    Case(
        item=4,
        title="It fails again after its last restart",
        files={"train.py": FAILS.replace('os.environ["RANK"] == "1"', "True")},
        is_long=True,
        command=Command(
            line="elastic run --standalone --max-restarts 1 --run-dir run train.py",
            code=EXIT_FAILURE,
            shows=("all workers start again, restart 1: ", ERROR),
        ),
    ),
    Case(
        item=4,
        title="Data that fails at step 2 of 6",
        files={"train.py": train("trainer(data=fails_at_step_2).run()")},
        is_long=True,
        command=Command(
            line="elastic run --standalone --run-dir run train.py",
            code=EXIT_FAILURE,
            shows=("FileNotFoundError: no shard for step 2", "train.py:"),
        ),
    ),
)
