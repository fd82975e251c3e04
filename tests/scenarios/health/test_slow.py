"""A slow node gets fewer layers or micro-batches and is not evicted. Compute times are emulated."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path
from statistics import median
from typing import Any

import pytest

from elastic.core.health.compute_speed import CHANGED
from elastic.domain.types import LayerSpec, NodeInfo
from elastic.planning.cost.predict import predict
from elastic.planning.cost.profile import Device, LayerTimes, LinkProfile, Profile, format_profile
from elastic.planning.plan.plan import parse_plan
from tests.scenarios.harness import Run, elastic_run
from tests.scenarios.shared import exact, faults

LAYERS, MICROBATCHES, STEPS = 8, 8, 18
FACTOR = 2.0


def profile(scale: float = 1.0) -> Profile:
    """Layers of 60 ms: long enough that a busy machine changes the length of a step little."""
    layer = LayerSpec(4096, 0, 4096, 0.02, 0.04, output_bytes=8192)
    times = LayerTimes(0.02 * scale, 0.04 * scale, 0.02 * scale, 0.02 * scale)
    devices = (Device("a", (times,) * LAYERS),)
    link = LinkProfile(1e9, 0.001)
    return Profile(model="toy", layers=(layer,) * LAYERS, devices=devices, inside=link, link=link)


def run(folder: Path, given: Profile, *flags: str, nodes: str = "4") -> Run:
    folder.mkdir()
    (folder / "profile.json").write_text(format_profile(given))
    emulated = ["--emulate", str(folder / "profile.json"), "--nnodes", nodes]
    script = [
        "-m",
        "benchmarks.waiting",
        "--num-microbatches",
        str(MICROBATCHES),
        "--steps",
        str(STEPS),
    ]
    done = elastic_run(folder / "run", exact(*emulated, *flags), script)
    assert done.code == 0, done.output
    return done


def slowed(folder: Path) -> Run:
    return run(folder / "slow", profile(), *faults(f"slow node=1 factor={FACTOR} step=3"))


def told_of(done: Run, kind: str) -> list[dict[str, Any]]:
    """Findings about this node. On a busy machine other nodes may be slow, too."""
    return [e for e in done.events if e["kind"] == kind and e["node"] == "node1"]


def factor_of(change: dict[str, Any]) -> float:
    told = re.search(r"node1 computes (\d+\.\d)x slower than profiled", change["cause"])
    return float(told[1]) if told else 0.0


def test_a_slow_node_gets_less_to_do(tmp_path: Path) -> None:
    done = slowed(tmp_path)
    summary = done.summary
    assert all(r["planned"] and r["microbatches_lost"] == 0 for r in summary["recoveries"])
    assert max(map(factor_of, summary["recoveries"])) >= CHANGED
    assert not [e for e in done.events if e["kind"] == "lost"]
    evidence = told_of(done, "pace")[0]
    assert len(evidence["steps"]) == 3

    health = next(e for e in told_of(done, "health") if "slow" in e["evidence"])
    assert (health["class"], health["action"]) == ("host", "rebalance")
    assert health["evidence"]["slow"] == evidence["slow"]

    plan = parse_plan(summary["plan"])
    assert sorted(plan.nodes()) == ["node0", "node1", "node2", "node3"]
    work = sum(
        len(stage.layers) * len(plan.pipelines[p].microbatches)
        for p, _, stage in plan.stages()
        if stage.unit.node == "node1"
    )
    assert work < LAYERS * MICROBATCHES / 4, "less than an equal share"

    reference = run(tmp_path / "reference", profile(0.0), nodes="1")
    assert summary["params_sha256"] == reference.summary["params_sha256"]


@pytest.mark.chaos
def test_its_pace_is_measured_and_steps_are_as_long_as_predicted(tmp_path: Path) -> None:
    """Compares times, so it needs a machine without other work."""
    done = slowed(tmp_path)
    (change,) = done.summary["recoveries"]
    assert factor_of(change) == pytest.approx(FACTOR, rel=0.15)
    plan = parse_plan(done.summary["plan"])
    nodes = tuple(NodeInfo(node, "", "") for node in plan.nodes())
    expected = predict(plan, profile(), nodes, (("node1", FACTOR),)).step_s
    after = [e["seconds"] for e in done.events if e["kind"] == "step" and e["epoch"] == plan.epoch][
        1:
    ]
    assert len(after) >= 3, "too few steps after the change"
    assert expected / median(sorted(after)[: len(after) // 2 + 1]) >= 0.95


def test_a_profile_of_another_model_is_refused(tmp_path: Path) -> None:
    """The refusal comes before anything is computed."""
    (tmp_path / "profile.json").write_text(format_profile(profile()))
    flags = ["--nnodes", "1", "--profile", str(tmp_path / "profile.json")]
    done = elastic_run(tmp_path / "run", flags, ["-m", "benchmarks.waiting", "--layers", "5"])
    assert done.code == 2 and "--profile layers: 8" in done.output
    assert done.summary["steps"] == 0


def test_emulation_takes_no_tensor_parallel_profile(tmp_path: Path) -> None:
    (tmp_path / "profile.json").write_text(format_profile(replace(profile(), tp=2)))
    flags = ["--nnodes", "1", "--emulate", str(tmp_path / "profile.json")]
    done = elastic_run(tmp_path / "run", flags, ["-m", "benchmarks.waiting"])
    assert done.code == 2 and "tp 2" in done.output and not (tmp_path / "run").exists()
