"""Sweeps on a Ray cluster of two nodes: the same bytes as here, whatever happens to a worker."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator, Sequence
from functools import partial
from importlib.util import find_spec
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner
from elastic_sim.cli.cli import main
from elastic_sim.steps.scenario import Scenario
from elastic_sim.sweep import sweep
from elastic_sim.sweep.cells import MAX_DEATHS, SweepCell, cells_of
from elastic_sim.traces.generate import Market, generate
from elastic_sim.traces.trace import format_trace

from tests.scenarios.ray.ray_cluster import ray_cluster
from tests.simulator.sweep.test_sweep import Deadly, here

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(
        not find_spec("ray"), reason="ray is optional: pip install 'elastic-runtime[ray]'"
    ),
]

MARKET = Market(nodes=4, mtbf_s=300.0, repair_s=600.0)


@pytest.fixture(scope="module")
def cluster() -> Iterator[Any]:
    """Two nodes of one CPU each."""
    with ray_cluster(2, _system_config={}) as found:
        yield found


def drive(out: Path, cells: Sequence[SweepCell], address: str) -> str:
    """Run a sweep on the cluster in a process of its own; return the error of a cell, or "".

    Ray ends the process of a driver that has lost its node, and while it waits it drops what a
    signal's handler raises."""
    told = out.with_suffix(".error")
    process = get_context("spawn").Process(target=_drive, args=(out, cells, address, told))
    process.start()
    try:
        process.join()
    finally:
        process.kill()
    assert process.exitcode == 0
    return told.read_text() if told.exists() else ""


def _drive(out: Path, cells: Sequence[SweepCell], address: str, told: Path) -> None:
    from elastic_sim.sweep.cells import CellFailed
    from elastic_sim.sweep.ray_backend import run_on_ray

    try:
        sweep.run(out, cells, partial(run_on_ray, address=address))
    except CellFailed as error:
        told.write_text(str(error))


def test_a_cluster_gives_the_same_though_workers_are_killed(cluster: Any, tmp_path: Path) -> None:
    """One that had done a cell of its batch, and one three times over: its batch is taken apart."""
    from elastic_sim.sweep.ray_backend import batches

    trace = tmp_path / "trace.csv"
    trace.write_text(format_trace(generate(MARKET, 1800.0, 5)))
    recorded = Scenario(trace=str(trace), model="gpt2")
    made_up = Scenario(market=MARKET, duration_s=1800.0, model="bert-large")
    cells = [*cells_of([recorded], ("varuna",), 1), *cells_of([made_up], ("ours", "varuna"), 2)]
    *_, first, second = (list(batch) for batch in batches(cells, 2))
    assert len(first) == len(second) == 3
    once, often = tmp_path / "once", tmp_path / "often"
    doomed = {first[1]: (once, 1), second[-1]: (often, MAX_DEATHS)}
    told = [deadly(cell, *doomed[cell]) if cell in doomed else cell for cell in cells]
    out, wanted = tmp_path / "ray", tmp_path / "here"
    assert not drive(out, told, cluster.address)
    assert (once.read_text(), often.read_text()) == ("x", "x" * MAX_DEATHS)
    sweep.run(wanted, cells, here)
    assert (out / sweep.SUMMARY_FILE).read_bytes() == (wanted / sweep.SUMMARY_FILE).read_bytes()


def deadly(cell: SweepCell, mark: Path, times: int) -> SweepCell:
    return Deadly(cell.scenario, cell.policy, cell.seed, str(mark), times)


def test_the_command(cluster: Any, tmp_path: Path) -> None:
    words = (
        "--mtbf",
        "5m",
        "--nodes",
        "4",
        "--repair",
        "10m",
        "--duration",
        "30m",
        "--model",
        "gpt2",
    )
    more = ("--policy", "varuna", "--seeds", "1", "--ray", "--address", cluster.address)
    command = [sys.executable, "-m", "elastic_sim", "sweep", str(tmp_path), *words, *more]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "2 cells" in done.stdout + done.stderr and (tmp_path / sweep.SUMMARY_FILE).exists()


def test_an_error_in_a_cell_names_it(cluster: Any, tmp_path: Path) -> None:
    cell = SweepCell(Scenario(market=MARKET, duration_s=600.0, model="gpt2"), "absent", 0)
    error = drive(tmp_path / "out", [cell], cluster.address)
    assert error.startswith("absent, gpt2, mtbf 300 s, seed 0: --policy")


def test_batches_are_of_one_world_and_keep_everybody_busy() -> None:
    from elastic_sim.sweep.ray_backend import MAX_BATCH, batches

    scenarios = [Scenario(market=MARKET, model=model) for model in ("gpt2", "bert-large")]
    cells = cells_of(scenarios, ("varuna", "bamboo"), 20)
    found = list(batches(cells, 2))
    assert [cell for batch in found for cell in batch] == cells
    assert all(len({cell.scenario.model for cell in batch}) == 1 for batch in found)
    assert max(map(len, found)) == MAX_BATCH
    assert len(list(batches(cells[:8], 8))) == 8


def test_files_travel(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Machines of the cluster need not have the trace."""
    from elastic_sim.sweep.ray_backend import read_files, with_local_files

    monkeypatch.setattr("tempfile.tempdir", str(tmp_path / "elsewhere"))
    trace = tmp_path / "t.csv"
    trace.write_text(format_trace(generate(MARKET, 600.0)))
    scenario = Scenario(trace=str(trace))
    wanted = scenario.trace_of(0)
    files = read_files([SweepCell(scenario, "varuna", 0)])
    trace.unlink()
    moved = with_local_files(scenario, files)
    assert moved == with_local_files(scenario, files) and moved.trace != scenario.trace
    assert moved.trace_of(0).events == wanted.events


@pytest.mark.parametrize(
    ("missing", "address", "why"),
    [
        (True, "nonsense", r"pip install"),
        (False, "nonsense", "--address"),
        (False, "127.0.0.1:1", "--address: '127.0.0.1:1' is not usable: no Ray cluster can be re"),
        (False, "ray://127.0.0.1:1", "it refuses the connection; name HOST:PORT of its head node"),
        (False, "127.0.0.1:99999", "a port from 1 to 65535"),
    ],
)
def test_no_ray_and_no_cluster_are_told(
    missing: bool, address: str, why: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if missing:
        monkeypatch.setitem(sys.modules, "ray", None)
        monkeypatch.delitem(sys.modules, "elastic_sim.sweep.ray_backend", raising=False)
    words = ["sweep", str(tmp_path / "out"), "--mtbf", "1h", "--model", "gpt2", "--ray"]
    done = CliRunner().invoke(main, [*words, "--address", address])
    assert done.exit_code == 2 and why in done.output and done.output.count("\n") == 1, done.output
