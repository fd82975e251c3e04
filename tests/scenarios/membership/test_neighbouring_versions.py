"""A node of the former or of the next version trains with nodes of this version.

Its agent and its workers announce the other version. A former one has only the kinds and fields of
the frozen samples; a next one sends unknown fields in each object.
"""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from elastic.core.protocol.version import PROTOCOL
from tests.scenarios.harness import ROOT, elastic_run, proved
from tests.scenarios.shared import exact, faults, made_once

SITE = Path(__file__).with_name("versions")
JOB = str(ROOT / "tests/scenarios/faults/small_job.py")
FORMER, NEXT = PROTOCOL - 1, PROTOCOL + 1
EVIDENCE = {
    FORMER: {"not sent: Heartbeat.signs", "not read: Install.assignment.starts"},
    NEXT: {
        "added: Heartbeat.field_of_tomorrow",
        "added: Put.field_of_tomorrow",
        "added: Progress.field_of_tomorrow",
        "added: CheckpointFile.field_of_tomorrow",
    },
}
"""What the processes of the node must have left out or added."""
ALL = pytest.mark.chaos


@pytest.mark.parametrize(
    ("number", "fault"),
    [
        pytest.param(FORMER, "kill-worker node=0 step=2 microbatch=2", id="former"),
        pytest.param(NEXT, "kill-worker node=0 step=2 microbatch=2", id="next", marks=ALL),
        pytest.param(FORMER, "kill-worker node=1 step=2 microbatch=2", id="former-dies", marks=ALL),
        pytest.param(FORMER, "kill node=0 step=2 microbatch=2", id="former-is-left", marks=ALL),
        pytest.param(NEXT, "kill node=0 step=2 phase=optimizer", id="next-is-left", marks=ALL),
    ],
)
def test_two_versions_train_together(number: int, fault: str, tmp_path: Path) -> None:
    """A worker dies, so that copies, recipes and inventories pass between both, too."""
    folder = tmp_path / "told"
    folder.mkdir()
    settings = {"node": "node1", "number": number, "folder": str(folder)}
    environment = {"PYTHONPATH": f"{SITE}:{ROOT}", "OTHER_VERSION": json.dumps(settings)}
    flags = exact("--nnodes", "2", "--pipelines", "1", *faults(fault))
    run = elastic_run(tmp_path / "run", flags, [JOB], environment=environment)
    assert run.code == 0, run.output
    expected = made_once(tmp_path, exact("--nnodes", "1"), [JOB]).summary
    assert run.summary["params_sha256"] == expected["params_sha256"], run.output
    assert run.summary["loss"] == expected["loss"]
    ledger = proved(run.summary)
    if number == FORMER:  # its steps do not tell that the ledgers were proved
        del ledger["proved"]
    assert run.summary["ledger"].items() >= ledger.items()
    assert run.summary["recoveries"]
    told = [set(path.read_text().splitlines()) for path in folder.iterdir()]
    assert len(told) >= 2, "the agent and its worker"
    assert EVIDENCE[number] <= set.union(*told), sorted(set.union(*told))
