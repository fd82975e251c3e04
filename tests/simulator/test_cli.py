"""`elastic-sim`, as its user meets it."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

from simulator import reproduce
from simulator.cli import main
from simulator.trace import read

GOOD = "seconds,event,node,zone,type,notice\n0,add,a,,,\n10,remove,a,,,\n20,end,,,,\n"


def run(*words: str) -> Result:
    return CliRunner().invoke(main, list(words))


def test_statistics(tmp_path: Path) -> None:
    path = tmp_path / "t.csv"
    path.write_text(GOOD)
    assert json.loads(run("traces", "stats", str(path), "--json").output)["losses"] == 1
    assert "losses_per_node_hour" in run("traces", "stats", str(path)).output


def test_traces_are_made_imported_and_cut(tmp_path: Path) -> None:
    made, cut, other = (str(tmp_path / name) for name in ("made.csv", "cut.csv", "other.csv"))
    done = run(
        "traces", "generate", made, "--nodes", "8", "--mtbf", "10m", "--bulk", "1:3,2:1", "--seed", "3"
    )
    assert done.exit_code == 0, done.output
    assert len(read(made)[0].at_start()) == 8
    assert run("traces", "convert", made, cut, "--from", "1h", "--to", "2h").exit_code == 0
    assert read(cut)[0].end_s == 3600
    assert run("traces", "generate", other, "--like", made, "--duration", "2d").exit_code == 0
    assert read(other)[0].end_s == 2 * 86400
    assert run("traces", "generate", other, "--inference", "2", "--nodes", "8").exit_code == 0
    source = tmp_path / "p3.csv"
    source.write_text("0,add,n1\n60000,remove,n1\n")
    assert run("traces", "import", "bamboo", str(source), other).exit_code == 0
    assert read(other)[0].end_s == 60


def test_repairs_are_told(tmp_path: Path) -> None:
    path, out = tmp_path / "t.csv", tmp_path / "out.csv"
    path.write_text(GOOD.replace("10,remove,a", "10,remove,b"))
    assert run("traces", "stats", str(path)).exit_code == 2
    done = run("traces", "convert", str(path), str(out), "--repair")
    assert done.exit_code == 0 and "line 3: dropped: b is not there" in done.output


@pytest.mark.parametrize(
    ("words", "why"),
    [
        (("traces", "stats", "absent.csv"), "readable text"),
        (("traces", "generate", "t.csv", "--nodes", "0"), "market.nodes"),
        (("traces", "generate", "t.csv", "--mtbf", "soon"), "30s, 10m, 6h or 2d"),
        (("traces", "generate", "t.csv", "--mtbf", "0s"), "market.mtbf"),
        (("traces", "generate", "t.csv", "--bulk", "many"), "--bulk"),
        (("traces", "generate", "t.csv", "--diurnal", "2"), "market.diurnal"),
        (("traces", "generate", "t.csv", "--inference", "40"), "least"),
        (("traces", "generate", "no/such/folder/t.csv"), "must be writable"),
        (("traces", "generate", "t.csv", "--like", "absent.csv"), "readable text"),
        (("traces", "import", "spot-prices", "good.csv", "t.csv"), "need a bid"),
        (("traces", "import", "tape", "good.csv", "t.csv"), "tape"),
        (("traces", "import", "bamboo", "good.csv", "t.csv"), "3 fields"),
        (("traces", "convert", "good.csv", "t.csv", "--from", "30s"), "a part of 0 to 20 s"),
        (("traces", "fetch", "gold"), "one of p3"),
        (("traces", "fetch", "p3", "--host", "http://127.0.0.1:1"), "must be reachable"),
        (("reproduce", "everything"), "everything"),
        (("reproduce", "oobleck", "--data", "absent"), "--data"),
    ],
)
def test_mistakes_are_one_clear_line(
    words: tuple[str, ...], why: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("good.csv").write_text(GOOD)
    done = run(*words)
    assert done.exit_code == 2 and why in done.output, done.output
    assert "Traceback" not in done.output and not Path("t.csv").exists()


@pytest.mark.parametrize("what", ["meta", "gemini"])
def test_formulas_need_no_traces(what: str) -> None:
    done = run("reproduce", what)
    assert done.exit_code == 0 and "published" in done.output


def test_rows_are_written(tmp_path: Path) -> None:
    out = tmp_path / "rows.json"
    done = run("reproduce", "torchft", "--json", str(out))
    assert done.exit_code == 0, done.output
    rows = json.loads(out.read_text())["rows"]
    assert [set(row) for row in rows] == [{"model", "system", "trace", "value", "published"}] * 2
    assert all(abs(row["value"] - row["published"]) < 1 for row in rows)
    assert "82.3" in done.output


def test_data_come_from_the_flag_then_the_environment(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "traces").mkdir()
    monkeypatch.setenv("ELASTIC_DATA", str(tmp_path))
    assert reproduce.data_directory(None) == tmp_path
    assert reproduce.data_directory(tmp_path) == tmp_path


def test_it_starts_without_torch() -> None:
    program = "import sys, simulator.cli; sys.exit('torch' in sys.modules or 'megatron' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", program], check=False, timeout=60).returncode == 0
