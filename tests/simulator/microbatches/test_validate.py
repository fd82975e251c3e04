"""`elastic-sim validate` on simulated runs, whose true delays are known."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from dataclasses import replace
from math import comb
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result
from elastic_sim.cli.cli import main
from elastic_sim.microbatches.physics import MicrobatchPhysics
from elastic_sim.microbatches.recorded_run import read
from elastic_sim.microbatches.validate import ComparedFigure, calibrate, compare, format_report

from elastic.domain.codec import dumps
from elastic.domain.errors import FieldError
from tests.simulator.microbatches.sample_runs import JOB, acted_run, came, lost, profile, steady

TRUE = MicrobatchPhysics(closed_s=0.12, leave_s=0.09, stop_s=0.15, plan_s=0.2, install_s=0.06,
               group_s=0.17, spawn_s=2.0, pair_s=0.0133, prefetch_s=0.04, hop_s=0.002,
               step_s=0.03, resume_s=0.02, start_s=0.5)  # fmt: skip
LONG = replace(JOB, steps=70, min_nodes=4, max_nodes=4, backup="stream:4+snapshot")
ONE = steady(
    4, 200.0, lost(6.0, 1), came(8.0, 4), lost(17.0, 2), came(18.0, 5), lost(45.0, 0, 20.0)
)
TWO = steady(
    4, 200.0, lost(5.0, 3), came(6.0, 4), lost(14.0, 4), came(15.0, 5), lost(26.0, 1), came(27.0, 6)
)


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    folder = tmp_path_factory.mktemp("runs")
    first = acted_run(folder / "one", LONG, profile(), ONE, TRUE, seed=11)
    return first, acted_run(folder / "two", LONG, profile(), TWO, TRUE, seed=12)


def run(*words: object) -> Result:
    return CliRunner().invoke(main, ["validate", *map(str, words)])


@pytest.mark.chaos
def test_physics_of_one_run_predict_another(runs: tuple[Path, Path]) -> None:
    found = calibrate([runs[0]])
    for name in ("closed_s", "leave_s", "stop_s", "plan_s", "install_s"):
        assert getattr(found, name) == pytest.approx(getattr(TRUE, name), rel=0.25, abs=0.02), name
    pairs = comb(4, 2)  # here all come nearly at once: which of both it is cannot be told
    assert found.group_s + pairs * found.pair_s == pytest.approx(
        TRUE.group_s + pairs * TRUE.pair_s, rel=0.2
    )
    report = compare([read(runs[1])], found)
    assert report.figure("throughput").ratio == pytest.approx(1, abs=0.02)
    for phase in ("detect", "decide", "transfer", "rebuild", "total"):
        assert report.figure(f"losses: {phase}, median").ratio == pytest.approx(1, abs=0.15), phase
    assert report.figure("planned changes: pause, median").ratio == pytest.approx(1, abs=0.15)
    assert report.unmatched == (0, 0) and len(report.recoveries) == 6


def test_wrong_physics_give_wrong_predictions(runs: tuple[Path, Path]) -> None:
    report = compare([read(runs[1])], MicrobatchPhysics(plan_s=1.0, group_s=1.0))
    assert report.figure("losses: total, median").ratio > 1.5
    assert report.figure("throughput").ratio < 1


def test_a_run_is_read_from_its_events(runs: tuple[Path, Path]) -> None:
    found = read(runs[0])
    assert sorted(event.node for event in found.trace.events) == [
        "node0",
        "node1",
        "node2",
        "node3",
    ]
    kinds = [(one.event.kind, one.event.node, one.event.notice_s > 0) for one in found.anchored]
    assert kinds == [
        ("remove", "node1", False),
        ("add", "node4", False),
        ("remove", "node2", False),
        ("add", "node5", False),
        ("remove", "node0", True),
    ]
    assert all(one.ready for one in found.anchored if one.event.kind == "add")
    assert (found.spec, found.policy) == (LONG.spec(profile()), LONG.policy(profile()))


def test_the_command_calibrates_and_compares(runs: tuple[Path, Path], tmp_path: Path) -> None:
    physics, out = tmp_path / "physics.json", tmp_path / "out.json"
    done = run(runs[0], "--calibrate", physics)
    assert done.exit_code == 0 and "plan_s" in done.output, done.output
    done = run(runs[1], "--physics", physics, "--json", out)
    assert done.exit_code == 0, done.output
    assert "throughput" in done.output and "losses: transfer, median" in done.output
    told_json = json.loads(out.read_text())
    assert {one["name"] for one in told_json["figures"]} > {"throughput", "all: total, mean"}
    assert len(told_json["recoveries"]) == 6
    done = run(runs[0], "--calibrate", tmp_path / "nowhere" / "physics.json")
    assert done.exit_code == 2 and "nowhere" in done.output
    done = run(runs[1], "--physics", physics, "--calibrate", out)
    assert done.exit_code == 2 and "--calibrate" in done.output


def test_a_figure_of_nothing() -> None:
    assert ComparedFigure("x", "s", 0.0, 0.0).ratio == 1.0
    assert ComparedFigure("x", "s", 0.0, 1.0).ratio == float("inf")


def test_unmatched_recoveries_are_reported(runs: tuple[Path, Path]) -> None:
    found = read(runs[0])
    report = compare([replace(found, anchored=found.anchored[:2])], TRUE)
    assert report.unmatched == (3, 0) and "without a counterpart: 3 of the runs" in format_report(
        report
    )


def edit(name: str, change: Callable[[str], str]) -> Callable[[Path], None]:
    def act(folder: Path) -> None:
        (folder / name).write_text(change((folder / name).read_text()))

    return act


def without(name: str) -> Callable[[Path], None]:
    return lambda folder: (folder / name).unlink()


def config(**changes: Any) -> Callable[[Path], None]:
    return edit("config.json", lambda text: json.dumps(json.loads(text) | changes))


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (without("events.jsonl"), "events.jsonl"),
        (without("config.json"), "config.json"),
        (without("summary.json"), "summary.json"),
        (edit("events.jsonl", lambda text: text[: len(text) // 2]), "events.jsonl:"),
        (edit("events.jsonl", lambda text: "[1]\n" + text), "events.jsonl:1"),
        (edit("events.jsonl", lambda text: text.replace('"seconds"', '"s"')), "seconds"),
        (edit("events.jsonl", lambda text: text.replace('"kind": "job"', '"kind": "jobs"')), "job"),
        (
            edit(
                "events.jsonl",
                lambda text: text.replace('"cause_kind": "start"', '"cause_kind": "other"'),
            ),
            "began to train",
        ),
        (edit("summary.json", lambda text: text[:10]), "summary.json"),
        (edit("summary.json", lambda text: "[]"), "an object is needed"),
        (edit("summary.json", lambda text: '{"step_s": []}'), "step_s"),
        (config(emulate=False), "--emulate"),
        (config(profile=None), "--emulate"),
        (config(profile={"version": 1}), "Profile"),
        (config(min_nodes="many"), "config.json"),
        (config(faults=[]), "--fault"),
    ],
)
def test_damaged_runs_are_refused(
    runs: tuple[Path, Path], tmp_path: Path, damage: Callable[[Path], None], message: str
) -> None:
    folder = tmp_path / "run"
    shutil.copytree(runs[0], folder)
    damage(folder)
    done = run(folder)
    assert done.exit_code == 2 and message in done.output, done.output
    assert len(done.output.strip().splitlines()) == 1 and done.output.startswith(
        "elastic-sim validate: "
    )


def test_there_must_be_a_run(tmp_path: Path) -> None:
    done = run(tmp_path / "none")
    assert done.exit_code == 2 and "RUN_DIR" in done.output
    with pytest.raises(FieldError, match="RUN_DIR"):
        read(tmp_path / "none")


def test_faults_that_are_not_acted_out_are_refused(runs: tuple[Path, Path], tmp_path: Path) -> None:
    folder = tmp_path / "run"
    shutil.copytree(runs[0], folder)
    edit("config.json", lambda text: text.replace('"kind": "kill"', '"kind": "stop"'))(folder)
    done = run(folder)
    assert done.exit_code == 2 and "only kill, drain, join can be simulated" in done.output


def test_wrong_physics(runs: tuple[Path, Path], tmp_path: Path) -> None:
    path = tmp_path / "physics.json"
    path.write_text(dumps(TRUE).replace('"plan_s":0.2', '"plan_s":-1.0'))
    done = run(runs[1], "--physics", path)
    assert done.exit_code == 2 and "plan_s" in done.output
