"""`elastic plan` for cluster files: output, files and errors."""

from __future__ import annotations

import json
import re
import shutil
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest

from elastic.launcher.cli import main
from elastic.planning.cost.profile import format_profile
from elastic.planning.cost.published_profiles import published_profile
from elastic.planning.plan.plan import parse_plan, validate_plan
from tests.launcher.cases.scripts import CLUSTER

CLUSTERS = Path(__file__).resolve().parents[3] / "examples" / "clusters"


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A directory with a small cluster file, as the working directory."""
    (tmp_path / "small.toml").write_text(CLUSTER)
    monkeypatch.chdir(tmp_path)
    return tmp_path


def answer(capsys: pytest.CaptureFixture[str], *words: str) -> dict[str, Any]:
    assert main(["plan", *words, "--json"]) == 0, capsys.readouterr().err
    found: dict[str, Any] = json.loads(capsys.readouterr().out)
    return found


def refused(capsys: pytest.CaptureFixture[str], *words: str) -> str:
    assert main(["plan", *words]) == 2
    out, err = capsys.readouterr()
    assert out == ""
    return err


@pytest.mark.parametrize("name", ["a40.toml", pytest.param("mixed.toml", marks=pytest.mark.chaos)])
def test_example_clusters_get_a_plan(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    found = answer(capsys, str(CLUSTERS / name))
    plan = parse_plan(found["plan"])
    validate_plan(plan)
    assert found["cluster"] == name
    assert found["nodes"] >= len(plan.nodes()) > 0
    assert found["step_s"] > found["tail_s"] >= 0
    assert found["step_s"] == pytest.approx(
        max(p["finish_s"] for p in found["pipelines"]) + found["tail_s"]
    )
    assert 0 <= found["bubble"] < 1
    assert found["reason"] and found["short"] == []
    assert sum(p["microbatches"] for p in found["pipelines"]) == plan.n_microbatches
    assert len(found["stages"]) == len(plan.units())
    assert all(0 < s["memory_bytes"] <= s["limit_bytes"] for s in found["stages"])


def test_rates_follow_from_the_step(place: Path, capsys: pytest.CaptureFixture[str]) -> None:
    found = answer(capsys, "small.toml")
    assert found["samples_per_s"] == pytest.approx(8 * 2 / found["step_s"])
    assert found["tokens_per_s"] == pytest.approx(8 * 2 * 2048 / found["step_s"])


def test_text_output(place: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", "small.toml"]) == 0
    out = capsys.readouterr().out
    for word in (
        "step: ",
        "samples/s: ",
        "tokens/s: ",
        "idle: ",
        "tail: ",
        "memory: fits",
        "reason ",
        "alternative",
    ):
        assert word in out, word
    assert "pipeline 0 microbatches=" in out


def test_shape_and_schedule_can_be_asked_for(
    place: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    found = answer(capsys, "small.toml", "--shape", "1", "--schedule", "1f1b")
    plan = parse_plan(found["plan"])
    assert len(plan.pipelines) == 1 and plan.pipelines[0].schedule == "1f1b"
    assert found["step_s"] >= answer(capsys, "small.toml")["step_s"]
    assert "--shape: 'x'" in refused(capsys, "small.toml", "--shape", "x")
    assert "schedule" in refused(capsys, "small.toml", "--schedule", "gpipe")


@pytest.mark.parametrize(
    ("shape", "nearest"),
    [
        ("99", "allow 3 instead"),
        ("4", "allow 3 instead"),
        ("99+1", "allow 2+1 instead"),
        ("1+1", "allow 2+1 instead"),
        ("1+1+1+1", "allow 1+1+1 instead"),
    ],
)
def test_a_shape_that_does_not_fit_is_refused(
    place: Path, capsys: pytest.CaptureFixture[str], shape: str, nearest: str
) -> None:
    err = refused(capsys, "small.toml", "--shape", shape)
    assert err.startswith(f"elastic plan: --shape: '{shape}' is not usable: 3 nodes, 26 layers")
    assert nearest in err and len(err.splitlines()) == 1
    (place / "small.toml").write_text(CLUSTER.replace("[[nodes]]", f'shape = "{shape}"\n[[nodes]]'))
    assert f"model.shape: '{shape}'" in refused(capsys, "small.toml")


def test_the_shape_after_a_loss_is_that_of_the_training(
    place: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["plan", "small.toml", "--shape", "2+1", "--without", "node2"]) == 0
    out, err = capsys.readouterr()
    assert "1+1 instead" in err and len(err.splitlines()) == 1 and "pipeline 1" in out
    assert main(["plan", "small.toml", "--shape", "2", "--add", "1xA40"]) == 0
    assert capsys.readouterr().err == ""


def test_a_picture_of_every_pipeline(place: Path, capsys: pytest.CaptureFixture[str]) -> None:
    found = answer(capsys, "small.toml", "--shape", "2", "--svg", "out.svg")
    text = (place / "out.svg").read_text()
    root = ElementTree.fromstring(text)
    boxes = [box for box in root.iter("{http://www.w3.org/2000/svg}rect") if len(box)]
    plan = parse_plan(found["plan"])
    forward = [box for box in boxes if "F" in (box[0].text or "").partition(" on ")[0]]
    assert len(forward) == sum(len(p.stages) * len(p.microbatches) for p in plan.pipelines)
    for unit in plan.units():
        assert f"{unit.node} [" in text
    assert found["svg"] == "out.svg"


def test_a_plan_in_a_file_is_predicted_on_a_cluster(
    place: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    best = answer(capsys, "small.toml")
    (place / "best.plan").write_text(best["plan"])
    again = answer(capsys, "best.plan", "--cluster", "small.toml")
    assert again["step_s"] == best["step_s"]
    worse = "plan epoch=1 layers=26 microbatches=8 tp=1 backup=stream+snapshot\n"
    worse += "pipeline 0 microbatches=0-7: node0[0:1] node1[1:25] node2[25:26]\n"
    worse += "peers node0>node1 node1>node2 node2>node0\n"
    (place / "worse.plan").write_text(worse)
    found = answer(capsys, "worse.plan", "--cluster", "small.toml")
    assert found["step_s"] > best["step_s"]
    assert answer(capsys, "worse.plan") == {"plan": worse.strip(), "reason": ""}


def test_a_plan_without_enough_memory_is_reported(
    place: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (place / "small.toml").write_text(
        CLUSTER.replace('device = "A40"', 'device = "A40"\nmemory = "8GiB"')
    )
    plan = "plan epoch=1 layers=26 microbatches=8 tp=1 backup=none+none\n"
    (place / "one.plan").write_text(plan + "pipeline 0 microbatches=0-7: node1[0:26]\n")
    found = answer(capsys, "one.plan", "--cluster", "small.toml")
    lacking = (found["stages"][0]["memory_bytes"] - (8 << 30)) / 2**30
    assert lacking > 0
    assert found["short"] == [f"node1 lacks {lacking:.2f} GiB per worker"]


def test_a_measured_profile_lies_beside_the_cluster_file(
    place: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (place / "there").mkdir()
    text = CLUSTER.replace('name = "gpt3-medium"', 'profile = "mine.json"').replace(
        "microbatch_size = 2", ""
    )
    (place / "there" / "cluster").write_text(text)
    assert "model.profile" in refused(capsys, "there/cluster")
    (place / "there" / "mine.json").write_text(
        format_profile(published_profile("gpt3-medium", ["A40"], microbatch=2))
    )
    found, best = answer(capsys, "there/cluster"), answer(capsys, "small.toml")
    assert found["step_s"] == best["step_s"]
    assert found["samples_per_s"] == 0.0 and best["samples_per_s"] > 0
    (place / "there" / "mine.json").write_text("{}")
    assert "Profile" in refused(capsys, "there/cluster")


def test_missing_memory_is_reported(place: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The error names the amount and the node."""
    err = refused(capsys, str(CLUSTERS / "too-small.toml"))
    assert "too-small.toml" in err and "memory" in err and "short by" in err and "node0" in err


def test_removed_and_added_nodes(place: Path, capsys: pytest.CaptureFixture[str]) -> None:
    now = answer(capsys, "small.toml")
    less = answer(capsys, "small.toml", "--without", "node1")
    assert less["step_s_before"] == now["step_s"] < less["step_s"]
    assert set(parse_plan(less["plan"]).nodes()) <= {"node0", "node2"}
    more = answer(capsys, "small.toml", "--without", "node1", "--add", "2xH100, 1xT4:2")
    assert more["step_s"] < now["step_s"]
    plan = parse_plan(more["plan"])
    known = {"node0", "node2", "new-a-0", "new-a-1", "new-b-0"}
    assert "new-a-1" in plan.nodes() and {*plan.nodes(), *plan.spares} <= known
    assert main(["plan", "small.toml", "--without", "node1"]) == 0
    assert "change: without node1: -" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("flag", "value"),
    [
        ("--without", "node9"),
        ("--without", ","),
        ("--without", "node0,node1,node2"),
        ("--add", ""),
        ("--add", "0xT4"),
        ("--add", "2T4"),
        ("--add", "1xT5"),
        ("--add", "1xT4:0"),
    ],
)
def test_wrong_removed_or_added_nodes(
    place: Path, capsys: pytest.CaptureFixture[str], flag: str, value: str
) -> None:
    assert flag in refused(capsys, "small.toml", flag, value)


@pytest.mark.parametrize(
    ("words", "part"),
    [
        (["gone.toml"], "FILE"),
        (["small.toml", "--svg", "picture.png"], "--svg"),
        (["small.toml", "--svg", "no/such/picture.svg"], "--svg"),
        (["small.toml", "--cluster", "small.toml"], "--cluster"),
        (["a.plan", "--svg", "picture.svg"], "--svg"),
        (["a.plan", "--shape", "2"], "--shape"),
        (["a.plan", "--cluster", "gone.toml"], "--cluster"),
        (["a.plan", "--cluster", "small.toml", "--schedule", "1f1b"], "--schedule"),
        (["a.plan", "--cluster", "small.toml"], "plan.layers"),
        (["b.plan", "--cluster", "small.toml"], "plan.unit"),
        (["c.plan", "--cluster", "small.toml"], "plan.unit"),
        (["a.plan", "--without", "node1"], "--without"),
        (["--svg", "picture.svg"], "--svg"),
    ],
)
def test_wrong_words(
    place: Path, capsys: pytest.CaptureFixture[str], words: list[str], part: str
) -> None:
    head = (
        "plan epoch=1 layers={} microbatches=1 tp=1 backup=none+none\npipeline 0 microbatches=0: "
    )
    (place / "a.plan").write_text(head.format(2) + "node0[0:2]\n")
    (place / "b.plan").write_text(head.format(26) + "nodeX[0:26]\n")
    (place / "c.plan").write_text(head.format(26) + "node0/1[0:26]\n")
    assert part in refused(capsys, *words)
    assert not (place / "picture.svg").exists()


def test_nothing_is_written_when_there_is_no_plan(
    place: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    shutil.copy(CLUSTERS / "too-small.toml", place)
    (place / "old.svg").write_text("old")
    refused(capsys, "too-small.toml", "--svg", "old.svg")
    assert (place / "old.svg").read_text() == "old"


PAGE = CLUSTERS.parents[1] / "docs" / "guide" / "capacity.md"


@pytest.mark.parametrize(
    "words", re.findall(r"<!-- output: elastic (plan .*?) -->", PAGE.read_text())
)
def test_commands_of_the_page_run(
    words: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(CLUSTERS.parents[1])
    assert main(words.split()) == (2 if "too-small" in words else 0)
    assert f"$ elastic {words}\n" in PAGE.read_text()
