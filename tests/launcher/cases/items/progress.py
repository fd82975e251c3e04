"""Item 5: lines about progress agree with each other, and with `elastic status`."""

from __future__ import annotations

from elastic.domain.errors import EXIT_FAILURE
from tests.launcher.cases.case import Case, Command, Covered
from tests.launcher.cases.scripts import train

TRAINS = Command(line="elastic run --standalone --run-dir run train.py")
JOB = {"train.py": train()}
FAILS = {"train.py": train("trainer(data=fails_at_step_2).run()")}

CASES = (
    Case(
        item=5,
        title="The last line of a job, without tokens",
        files=JOB,
        is_long=True,
        command=Command(
            line=TRAINS.line,
            shows=(
                "step 6/6: loss N, 1 node, plan 1",
                "finished at step 6: 1 node, plan 1",
                "all 6 steps done; FOLDER/run/summary.json has losses",
            ),
            hides=("tokens/s",),
        ),
    ),
    Case(
        item=5,
        title="A job that fails after two of six steps",
        files=FAILS,
        is_long=True,
        command=Command(
            line=TRAINS.line,
            code=EXIT_FAILURE,
            shows=("step 2/6: ", "failed at step 2"),
            hides=("failed at step 0",),
        ),
    ),
    Case(
        item=5,
        title="The status of a run that is over",
        files=JOB,
        is_long=True,
        before=TRAINS,
        command=Command(
            line="elastic status --run-dir run",
            shows=("phase: finished", "exit_code: 0", "step: 6"),
            hides=("lease_s",),
        ),
        then=Command(
            line="elastic status --run-dir run --json",
            shows=('{"phase": "finished"', '"exit_code": 0'),
        ),
    ),
    Case(
        item=5,
        title="The status of a run that failed",
        files=FAILS,
        is_long=True,
        before=Command(line=TRAINS.line, code=EXIT_FAILURE),
        command=Command(
            line="elastic status --run-dir run",
            shows=("phase: failed", "FileNotFoundError: no shard for step 2", "exit_code: 1"),
        ),
    ),
)
COVERED = (
    Covered(
        item=5,
        title="The scheme of the backups changes, not the nodes",
        command="elastic run --backup auto ...",
        test="tests/launcher/run/test_progress.py::test_reports",
        prints="elastic: the plan changed after step 3 (CAUSE): 3 nodes as before; training paused "
        "for N s",
    ),
)
