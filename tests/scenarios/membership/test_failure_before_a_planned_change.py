"""Copies of the present epoch cannot be sent while a planned change waits for the step's end.

The workers wait for the acknowledgements of these copies, so the step does not end. The report of
the failure belongs to the present epoch, although the agents already know the next one.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from elastic.planning.plan.plan import parse_plan
from tests.scenarios.harness import ROOT, proved
from tests.scenarios.jobs import Job
from tests.scenarios.paced import TRAIN, paced_reference
from tests.scenarios.shared import exact
from tests.scenarios.storage.progress import check_epochs

SITE = Path(__file__).with_name("failing_puts")
PACE = "0.1"
"""A step takes seconds, so that all that is to happen in it does."""
FLAGS = exact("--pipelines", "1", "--backup", "stream+snapshot")


class Case:
    """A job in which the copies fail once a planned change has been announced."""

    def __init__(self, folder: Path, monkeypatch: pytest.MonkeyPatch, *flags: str) -> None:
        self._folder, self._trigger = folder, folder / "fail"
        monkeypatch.setenv("FAILING_PUTS", str(self._trigger))
        hurry = folder / "hurry"
        script = [*TRAIN, "--pace", PACE, "--hurry", str(hurry)]
        words = ["run", "--standalone", *FLAGS, *flags]
        self.job = Job(folder / "run", words, script, path=(SITE, ROOT))

    def fail_the_copies(self) -> None:
        """Call this once the change is pending; returns when the next epoch has begun."""
        (change,) = self.job.wait("the change", lambda: self._halts(boundary=True)[-1:])
        self._trigger.touch()
        epoch = change["epoch"]
        after = self.job.wait(
            "an epoch because of the failure",
            lambda: [e for e in self._halts(boundary=False) if e["epoch"] > epoch],
        )
        self._trigger.unlink()
        cause = str(after[0]["cause"])
        assert "copies for node" in cause and "VaultUnreachable" in cause, after

    def _halts(self, boundary: bool) -> list[dict[str, object]]:
        return [event for event in self.job.of("halt") if event["boundary"] is boundary]

    def finish(self, nodes: set[str]) -> None:
        """Wait until the change has been made, too, perhaps by the same epoch: the plan has these
        nodes. Then let the job run to its end."""
        self.job.wait("the change", lambda: self._planned() == nodes)
        self.job.await_steps(1)
        (self._folder / "hurry").touch()
        run = self.job.finish()
        assert run.code == 0, run.output
        expected = paced_reference(self._folder)
        assert run.summary["params_sha256"] == expected.summary["params_sha256"]
        assert run.summary["ledger"] == proved(run.summary)
        assert not self.job.of("stalled"), "the report itself is enough"
        check_epochs(run.events)

    def _planned(self) -> set[str]:
        return set(parse_plan(self.job.of("plan")[-1]["text"]).nodes())


@pytest.mark.chaos
def test_a_drain_is_pending(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    case = Case(tmp_path, monkeypatch, "--nnodes", "3")
    try:
        case.job.await_steps(2)
        case.job.ask("drain", node="node2", deadline_s=600.0)
        case.fail_the_copies()
        case.finish({"node0", "node1"})
    finally:
        case.job.kill()


@pytest.mark.chaos
def test_a_join_is_pending(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    case = Case(tmp_path, monkeypatch, "--nnodes", "2:3", "--fault", "join step=2")
    try:
        case.fail_the_copies()
        case.finish({"node0", "node1", "node2"})
    finally:
        case.job.kill()
