"""The job says what it waits for, since when, and what ends the wait."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest

from elastic.config import JobConfig
from elastic.coordinator import service
from elastic.coordinator.records.run_records import RunRecords
from elastic.coordinator.waiting import (
    LASTING_S,
    MAX_NAMES,
    StallWatch,
    Waiting,
    names,
    standby_wait,
    store_wait,
    waiting,
)
from elastic.core.coordinator.transitions import SCRIPT_S
from elastic.core.job.state import (
    Cause,
    CauseKind,
    EpochChange,
    JobFailure,
    JobFinished,
    JobPhase,
    JobState,
    Member,
    MissingCopies,
    Policy,
    ProgressSign,
    ProgressWatch,
)
from elastic.core.protocol import messages as m
from elastic.core.protocol.messages import NodePhase
from elastic.domain.types import JobSpec, LayerSpec, NodeInfo, Pipeline, Plan, Stage, Unit
from elastic.store.interface import StoreFull, StoreUnavailable
from tests.launcher.helpers import wait_until
from tests.patience import LONG_S
from tests.store.memory import MemoryStore

NOW = 100.0
CHANGE = EpochChange(2, (Cause(CauseKind.LOST, "node2 lost"),), False, (), 2, 90.0, None, 3, 0)


def member(node: str, phase: NodePhase, **changes: object) -> Member:
    report = m.NodeReport(NodeInfo(node, f"{node}.1", f"{node}:1"), phase, 2)
    return Member(replace(report, **changes), seen=NOW, rank=0)  # type: ignore[arg-type]


def state(phase: JobPhase, *members: Member, **changes: object) -> JobState:
    known = JobState(
        policy=Policy(min_nodes=2, max_nodes=4),
        phase=phase,
        epoch=2,
        members={one.node: one for one in members},
        watch=ProgressWatch(since=95.0),
        launched_at=98.0,
        updated_at=NOW,
    )
    return known.of(**changes)


def spec(steps: int) -> JobSpec:
    return JobSpec(n_steps=steps, n_microbatches=4, layers=(LayerSpec(1, 1, 1, 1.0, 1.0),))


def found(known: JobState) -> Waiting:
    result = waiting(known)
    assert result is not None
    return result


@pytest.mark.parametrize(
    ("here", "what", "ends"),
    [
        ((), "nodes: 0 of at least 2 are here", "the job starts when 2 more join"),
        (("a",), "nodes: 1 of at least 2 are here (a)", "the job starts when 1 more joins"),
        (("a", "b"), "more nodes: 2 of at most 4 are here (a b)", "after 1 s without them"),
    ],
)
def test_a_job_that_is_short_of_nodes(here: tuple[str, ...], what: str, ends: str) -> None:
    known = state(JobPhase.WAITING, *(member(node, NodePhase.EMPTY) for node in here))
    result = found(known)
    assert result.what == what and result.ends.endswith(ends)
    assert result.since == 95.0


def test_a_script_that_has_not_called_the_trainer_yet() -> None:
    starting = [member(node, NodePhase.STARTING, restart=0) for node in ("a", "b")]
    known = state(JobPhase.LAUNCHED, *starting)
    assert found(known).what == "the script on a b to call Trainer.run()"
    assert found(known).since == 98.0 and not found(known).lasting
    late = found(known.of(updated_at=98.0 + SCRIPT_S))
    assert "as under torchrun until it ends" in late.ends and not late.lasting
    assert found(known.of(updated_at=98.0 + LASTING_S)).lasting


def test_a_script_that_failed_on_one_node() -> None:
    """The others may use elastic, so the job waits for them, and says so at once."""
    failed = member("a", NodePhase.FAILED, restart=0, cause="worker 0: ValueError: no file")
    known = state(JobPhase.LAUNCHED, failed, member("b", NodePhase.STARTING, restart=0))
    result = found(known)
    assert result.what.endswith(
        "the scripts of b, because that of a has failed: worker 0: ValueError: no file"
    )
    assert f"within {SCRIPT_S:g} s" in result.ends


def test_a_script_that_ended_on_one_node_without_training() -> None:
    ended = member("a", NodePhase.FINISHED, restart=0)
    known = state(JobPhase.LAUNCHED, ended, member("b", NodePhase.STARTING, restart=0))
    result = found(known)
    assert result.what == "the script on b to end, because that on a has ended without training"
    assert result.ends == "the job then ends, unless it calls Trainer.run() before"


def test_workers_that_attach() -> None:
    ready = member("a", NodePhase.IDLE, able=True, elastic=True)
    known = state(JobPhase.LAUNCHED, ready, member("b", NodePhase.STARTING))
    assert found(known).what == "the workers of b to start"
    assert found(known.of(spec=spec(9))).what == "the workers of b to start"


def test_an_epoch_that_begins() -> None:
    halted = member("a", NodePhase.HALTED)
    known = state(JobPhase.HALTING, halted, member("b", NodePhase.RUNNING), change=CHANGE)
    result = found(known)
    assert result.what == "b to halt for epoch 2 (node2 lost)" and result.since == 90.0
    planned = known.of(change=replace(CHANGE, boundary=True))
    assert found(planned).what.startswith("the end of the step")
    members = {"a": halted}
    again = known.of(members=members, change=replace(CHANGE, wait_until=NOW + 5.0))
    assert "to start again" in found(again).what
    paused = known.of(
        members=members,
        watch=ProgressWatch(since=99.0, retry_at=107.0, attempts=3, cause="contact lost"),
    )
    assert found(paused) == Waiting(
        "the next attempt, because 3 failed (contact lost)", 99.0, "it begins after a pause of 8 s"
    )


def test_an_installation_waits_for_the_nodes_that_load() -> None:
    """When all have, nothing is awaited, though the phase has not changed yet."""
    plan = Plan(2, 1, 1, 1, (Pipeline((Stage(Unit("a"), 0, 1), Stage(Unit("b"), 1, 2)), (0,)),))
    ready, loads = member("a", NodePhase.RUNNING), member("b", NodePhase.INSTALLING)
    known = state(JobPhase.INSTALLING, ready, loads, change=CHANGE, plan=plan)
    assert found(known).what == "b to load their layers for epoch 2 (node2 lost)"
    assert waiting(known.of(members={"a": ready, "b": member("b", NodePhase.RUNNING)})) is None


def test_a_paused_job() -> None:
    change = replace(CHANGE, reason="layer 0 needs 3 MB on a node")
    paused = state(JobPhase.PAUSED, member("a", NodePhase.RUNNING), change=change)
    result = found(paused)
    assert result.what == "a plan that fits: layer 0 needs 3 MB on a node"
    assert result.ends == "the job continues when more nodes join" and result.since == 95.0
    missing = MissingCopies("no copy of layer 1 is left", 3, ("b",), 97.0)
    away = found(paused.of(missing=missing))
    assert away.what == "b, because no copy of layer 1 is left" and away.since == 97.0


def test_the_end_of_a_job() -> None:
    running = state(JobPhase.RUNNING, member("a", NodePhase.RUNNING), spec=spec(9))
    assert waiting(running) is None
    failure = JobFailure("a", m.Failed("ValueError: bad", 1), 99.0)
    then = found(running.of(failure=failure)).ends
    assert then == "the job then ends: a: ValueError: bad"
    over = running.of(phase=JobPhase.FAILED, ending=JobFinished(1, "a: ValueError: bad"))
    assert waiting(over) is None


def test_names_of_many_nodes() -> None:
    many = [f"n{number:02}" for number in range(MAX_NAMES + 3)]
    assert names(many).endswith(" n07 and 3 more")


def test_the_wait_is_on_disk_for_displays(tmp_path: Path) -> None:
    records = RunRecords(tmp_path)
    records.waiting(Waiting("nodes", 95.0, "they join"))
    assert records.flush(LONG_S)
    entry = {"what": "nodes", "since": 95.0, "ends": "they join", "lasting": False}
    assert json.loads((tmp_path / "waiting.json").read_text()) == entry
    records.waiting(None)
    assert records.flush(LONG_S)
    assert json.loads((tmp_path / "waiting.json").read_text()) == {}
    records.close()


def test_a_standby_says_why_it_does_not_lead(
    tmp_path: Path, make_config: Callable[..., JobConfig], monkeypatch: pytest.MonkeyPatch
) -> None:
    """It must not write waiting.json, which the leader of the same run directory writes."""
    store, config = MemoryStore(), make_config()
    lease, path = store.acquire("other", 9e9, 0.0), Path(config.run_dir) / "standby-0.json"

    def found() -> object:
        return json.loads(path.read_text()).get("what", "") if path.exists() else None

    monkeypatch.setattr(service, "open_store", lambda config: store)
    leader = SimpleNamespace(run=lambda: 0)
    monkeypatch.setattr(service, "Coordinator", lambda *args: leader)
    codes = list[int]()
    lead = threading.Thread(target=lambda: codes.append(service.lead(config, "", 0, -1)))
    lead.start()
    assert wait_until(lambda: found() == "the lead, which another coordinator has")
    store.release(lease)
    lead.join(LONG_S)
    assert codes == [0] and wait_until(lambda: found() == "")
    assert not (path.parent / "waiting.json").exists()


def test_a_standby_without_a_store() -> None:
    away = standby_wait(StoreUnavailable("no etcd answers"), NOW)
    assert away == Waiting("the store: no etcd answers", NOW, "a coordinator then leads")


# ---- stalls ----

PLAN = Plan(2, 0, 4, 1, (Pipeline((Stage(Unit("a"), 0, 1), Stage(Unit("b"), 1, 2)), (0, 1, 2, 3)),))


def training(**signs: float) -> JobState:
    """A job that trains on nodes a and b, which showed signs of progress at these times."""
    members = [member(node, NodePhase.RUNNING) for node in ("a", "b")]
    watch = ProgressWatch(
        since=10.0,
        signs={node: ProgressSign(at, 1, "compute") for node, at in signs.items()},
    )
    return state(JobPhase.RUNNING, *members, spec=spec(9), plan=PLAN, watch=watch)


def test_no_sign_of_any_node_is_a_stall_with_its_reason() -> None:
    stall = StallWatch().look(training(a=40.0, b=30.0), NOW)
    assert stall is not None
    assert (stall.phase, stall.since) == ("running", 40.0)
    assert stall.reason == "b: it stopped first (compute)"
    spinning = training(a=40.0, b=30.0)
    sign = ProgressSign(30.0, 1, "data", spun_s=60.0)
    signs = {**spinning.watch.signs, "b": sign}
    stall = StallWatch().look(spinning.of(watch=replace(spinning.watch, signs=signs)), NOW)
    assert stall is not None
    assert stall.reason == "b: its worker uses CPU time without progress (data)"


def test_long_microbatches_are_no_stall() -> None:
    known = training(a=40.0, b=30.0)
    slow = known.of(seen=replace(known.seen, microbatch_s=25.0))
    assert StallWatch().look(slow, NOW) is None
    assert StallWatch().look(slow, 40.0 + 76.0) is not None


def test_a_stall_lasts_until_a_step_is_finished() -> None:
    """Remedies of the watchdog, which begin epochs, do not hide it."""
    watch = StallWatch()
    known = training(a=40.0, b=30.0)
    first = watch.look(known, NOW)
    tried = replace(known.watch, since=NOW, stalls=1)
    again = watch.look(known.of(watch=tried), NOW + 1.0)
    assert first is not None and again is not None and again.since == first.since == 40.0
    failed = known.of(phase=JobPhase.HALTING, change=CHANGE, watch=replace(tried, attempts=2))
    halting = watch.look(failed, NOW + 2.0)
    assert halting is not None and halting.since == 40.0
    assert halting.phase == "halting" and "node2 lost" in halting.reason
    assert watch.look(training(a=NOW + 3.0, b=NOW + 3.0), NOW + 3.5) is None
    later = watch.look(training(a=NOW + 3.0, b=NOW + 3.0), NOW + 30.0)
    assert later is not None and later.since == NOW + 3.0, "the former stall is over"


def test_paused_doubting_and_without_a_store() -> None:
    watch = StallWatch()
    one = member("a", NodePhase.RUNNING)
    paused = watch.look(state(JobPhase.PAUSED, one, spec=spec(9)), NOW + 10.0)
    assert paused is not None and (paused.phase, paused.since) == ("paused", 95.0)
    assert paused.reason == "a plan that fits"
    doubts = watch.look(training(a=40.0, b=40.0).of(doubt_since=70.0), NOW)
    assert doubts is not None and doubts.since == 70.0 and "hears too few" in doubts.reason
    store = Waiting("the store etcd://e, which does not take the job's state", 80.0, "later")
    assert watch.look(training(a=40.0, b=40.0), NOW, store) is None, "training goes on"
    halting = state(JobPhase.HALTING, change=CHANGE, spec=spec(9))
    found_stall = watch.look(halting, NOW, store)
    assert found_stall is not None and found_stall.since == 80.0
    assert watch.look(state(JobPhase.FINISHED), NOW) is None


def test_a_coordinator_that_doubts_itself_waits_for_the_nodes() -> None:
    halting = state(JobPhase.HALTING, member("a", NodePhase.RUNNING), change=CHANGE, spec=spec(9))
    assert "to halt" in found(halting).what
    doubts = found(halting.of(doubt_since=70.0, doubt_reported=True))
    assert (
        doubts.what.startswith("the nodes: this coordinator hears too few") and doubts.since == 70
    )
    assert "or after up to 30 s; nodes that train go on" in doubts.ends


def test_a_paused_job_without_nodes_says_so() -> None:
    assert found(state(JobPhase.PAUSED, spec=spec(9))).what == "nodes: none is here"


def test_a_job_whose_nodes_all_leave_says_so() -> None:
    here = [replace(member(n, NodePhase.RUNNING), draining=True) for n in ("b", "a")]
    leaving = found(state(JobPhase.PAUSED, *here, spec=spec(9)))
    assert leaving.what == "nodes that stay: all that are here are leaving (a b)"
    stays = state(JobPhase.PAUSED, here[0], member("a", NodePhase.RUNNING), spec=spec(9))
    assert found(stays).what == "a plan that fits"


def test_a_store_without_room() -> None:
    full = store_wait("etcd://a:1", full=True, since=NOW)
    assert full.what == "room in the store etcd://a:1, which is full (NOSPACE)"
    assert "makes room and ends the alarm" in full.ends
    away = standby_wait(StoreFull("etcd at etcd://a:1 is full (NOSPACE)"), NOW)
    assert away.what == "the store: etcd at etcd://a:1 is full (NOSPACE)"
