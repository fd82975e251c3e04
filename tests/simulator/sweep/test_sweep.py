"""Sweeps give the same bytes for any backend, order of cells, process death or interruption."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Generator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import psutil
import pytest
from click.testing import CliRunner
from elastic_sim.cli.cli import main
from elastic_sim.replay.replay import ORACLE, replay
from elastic_sim.steps.scenario import Scenario
from elastic_sim.sweep import sweep
from elastic_sim.sweep.cells import MAX_DEATHS, CellFailed, Result, SweepCell, cells_of
from elastic_sim.sweep.local_backend import run_locally
from elastic_sim.traces.generate import Market

from elastic.domain.errors import FieldError
from tests.patience import LONG_S

ROOT = Path(__file__).parents[3]


def scenario(mtbf_s: float, model: str = "gpt2") -> Scenario:
    return Scenario(
        market=Market(nodes=4, mtbf_s=mtbf_s, repair_s=600.0), duration_s=1800.0, model=model
    )


CELLS = cells_of([scenario(300.0), scenario(900.0)], ("varuna", "torchft"), 2)


def here(cells: Sequence[SweepCell]) -> Generator[tuple[SweepCell, Result]]:
    """A backend for tests: this process."""
    for cell in cells:
        yield cell, cell.run()


@pytest.fixture(scope="module")
def wanted(tmp_path_factory: pytest.TempPathFactory) -> bytes:
    """sweep.json of an undisturbed sweep."""
    out = tmp_path_factory.mktemp("undisturbed")
    sweep.run(out, CELLS, here)
    return (out / sweep.SUMMARY_FILE).read_bytes()


def test_cells_are_every_combination_and_the_oracle() -> None:
    assert len(CELLS) == 2 * 2 * 3 == len({cell.key for cell in CELLS})
    assert {cell.policy for cell in CELLS} == {ORACLE, "varuna", "torchft"}
    assert cells_of([scenario(300.0), scenario(300.0)], ("varuna", "varuna"), 1) == cells_of(
        [scenario(300.0)], ("varuna",), 1
    )


def test_a_key_follows_the_content_of_files_and_not_their_place(tmp_path: Path) -> None:
    text = "seconds,event,node,zone,type,notice\n0,add,a,,,\n60,end,,,,\n"
    paths = [tmp_path / name / "t.csv" for name in ("one", "two", "three")]
    for path, seconds in zip(paths, (60, 60, 70), strict=True):
        path.parent.mkdir()
        path.write_text(text.replace("60", f"{seconds}"))
    first, again, other = (SweepCell(Scenario(trace=str(path)), ORACLE, 0) for path in paths)
    assert first.key == again.key != other.key
    assert first.key != SweepCell(first.scenario, ORACLE, 1).key
    with pytest.raises(FieldError, match="readable file"):
        _ = SweepCell(Scenario(trace=str(tmp_path / "absent.csv")), ORACLE, 0).key


def test_figures_are_those_of_replay(wanted: bytes) -> None:
    row = json.loads(wanted)["scenarios"][0]
    assert row["trace"] == "mtbf 300 s"
    world = scenario(300.0)
    for one in replay(world.world(), world.trace_of, ("varuna", "torchft"), range(2)):
        told = row["policies"][one.policy]
        assert (
            told["goodput"] == one.goodput.value
            and told["margins"]["goodput"] == one.goodput.margin
        )
        assert told["time"] == pytest.approx(one.time)
    assert row["policies"][ORACLE]["goodput"] == 1.0


def test_the_order_does_not_matter(tmp_path: Path, wanted: bytes) -> None:
    sweep.run(tmp_path, CELLS, lambda cells: here(tuple(reversed(cells))))
    assert (tmp_path / sweep.SUMMARY_FILE).read_bytes() == wanted


def test_processes_give_the_same_and_one_that_dies_is_replaced(
    tmp_path: Path, wanted: bytes
) -> None:
    mark = tmp_path / "died"
    first = Deadly(CELLS[3].scenario, CELLS[3].policy, CELLS[3].seed, str(mark), 1)
    cells = [*CELLS[:3], first, *CELLS[4:]]
    sweep.run(tmp_path, cells, partial(run_locally, workers=2))
    assert mark.read_text() == "x"
    assert (tmp_path / sweep.SUMMARY_FILE).read_bytes() == wanted
    assert not [
        child for child in psutil.Process().children() if "spawn_main" in " ".join(child.cmdline())
    ]


def test_a_cell_that_always_takes_its_process_down_is_named(tmp_path: Path) -> None:
    mark = tmp_path / "died"
    bad = Deadly(scenario(300.0), "varuna", 7, str(mark), 99)
    cells = [CELLS[0], bad]
    with pytest.raises(CellFailed, match="varuna, gpt2, mtbf 300 s, seed 7: 3 processes died"):
        sweep.run(tmp_path, cells, partial(run_locally, workers=2))
    assert len(mark.read_text()) == MAX_DEATHS
    with sweep.open_log(tmp_path, cells) as log:  # what was done is kept
        assert CELLS[0].key in log.done and bad.key not in log.done


def test_an_error_in_a_cell_names_it(tmp_path: Path) -> None:
    cell = SweepCell(scenario(300.0), "absent", 0)
    with pytest.raises(CellFailed, match=r"absent, gpt2, mtbf 300 s, seed 0: --policy"):
        sweep.run(tmp_path, [cell], partial(run_locally, workers=1))


@dataclass(frozen=True, slots=True)
class Deadly(SweepCell):
    """Kills its process the first times that it runs."""

    mark: str = ""
    times: int = 0

    def run(self) -> Result:
        with Path(self.mark).open("a") as file:
            if file.tell() < self.times:
                file.write("x")
                file.flush()
                os.kill(os.getpid(), signal.SIGKILL)
        return SweepCell(self.scenario, self.policy, self.seed).run()


# ---- going on ----


def test_what_is_done_is_not_run_again(tmp_path: Path, wanted: bytes) -> None:
    ran: list[SweepCell] = []

    def some(cells: Sequence[SweepCell], n: int) -> Generator[tuple[SweepCell, Result]]:
        for cell, result in here(cells[:n]):
            ran.append(cell)
            yield cell, result
        if n < len(cells):
            raise KeyboardInterrupt

    for n in (3, 5):
        with pytest.raises(KeyboardInterrupt):
            sweep.run(tmp_path, CELLS, partial(some, n=n))
    assert not (tmp_path / sweep.SUMMARY_FILE).exists()
    sweep.run(tmp_path, CELLS, partial(some, n=99))
    assert ran == list(CELLS)
    assert (tmp_path / sweep.SUMMARY_FILE).read_bytes() == wanted


@pytest.mark.parametrize("cut", [1, 2, 200, 600])
def test_a_torn_last_line_is_run_again(tmp_path: Path, wanted: bytes, cut: int) -> None:
    sweep.run(tmp_path, CELLS, here)
    lines = tmp_path / sweep.CELLS_FILE
    whole = lines.read_bytes()
    lines.write_bytes(whole[:-cut])
    ran: list[SweepCell] = []
    sweep.run(tmp_path, CELLS, here, progress=ran.append)
    assert ran == [CELLS[-1]]
    assert lines.read_bytes() == whole
    assert (tmp_path / sweep.SUMMARY_FILE).read_bytes() == wanted


def test_a_larger_sweep_goes_on_from_a_smaller_one(tmp_path: Path, wanted: bytes) -> None:
    sweep.run(tmp_path, cells_of([scenario(900.0)], ("torchft",), 1), here)
    ran: list[SweepCell] = []
    sweep.run(tmp_path, CELLS, here, progress=ran.append)
    assert len(ran) == len(CELLS) - 2
    assert (tmp_path / sweep.SUMMARY_FILE).read_bytes() == wanted


def test_cells_of_another_sweep_are_refused(tmp_path: Path) -> None:
    sweep.run(tmp_path, CELLS[:1], here)
    with pytest.raises(FieldError, match=r"oracle, gpt2, mtbf 300 s, seed 0.*this sweep has not"):
        sweep.run(tmp_path, cells_of([scenario(900.0)], ("varuna",), 1), here)


@pytest.mark.parametrize("line", ["nonsense", "{}", "[]", '{"key": 1, "cell": 2, "result": 3}'])
def test_lines_that_are_no_cells_are_refused(tmp_path: Path, line: str) -> None:
    (tmp_path / sweep.CELLS_FILE).write_text(line + "\n")
    with pytest.raises(FieldError, match=r"no cell|this sweep has not"):
        sweep.run(tmp_path, CELLS[:1], here)


def test_two_sweeps_do_not_share_a_folder(tmp_path: Path) -> None:
    with (
        sweep.open_log(tmp_path, CELLS),
        pytest.raises(FieldError, match="another sweep is writing"),
    ):
        sweep.run(tmp_path, CELLS, here)


# ---- the command ----

WORDS = (
    "--mtbf",
    "5m,15m",
    "--nodes",
    "4",
    "--repair",
    "10m",
    "--duration",
    "30m",
    "--model",
    "gpt2",
)


def test_the_command(tmp_path: Path, wanted: bytes) -> None:
    words = ("sweep", str(tmp_path / "out"), *WORDS, "--policy", "varuna,torchft", "--seeds", "2")
    done = CliRunner().invoke(main, [*words, "--workers", "1"])
    assert done.exit_code == 0, done.output
    assert (
        "gpt2, mtbf 300 s" in done.output and "torchft" in done.output and "12 cells" in done.output
    )
    assert (tmp_path / "out" / sweep.SUMMARY_FILE).read_bytes() == wanted
    again = CliRunner().invoke(main, [*words, "--workers", "2"])
    assert "12 of 12 cells were done before" in again.output
    other = CliRunner().invoke(main, [*words, "--nodes", "5"])
    assert other.exit_code == 2 and "this sweep has not" in other.output


def test_ctrl_c_leaves_a_folder_to_go_on_from(tmp_path: Path) -> None:
    words = (
        *WORDS[:-1],
        "gpt2,bert-large,gpt3-medium",
        "--policy",
        "varuna",
        "--seeds",
        "500",  # cells for a minute or more
        "--workers",
        "1",
    )
    program = [sys.executable, "-m", "elastic_sim.cli.cli", "sweep", str(tmp_path), *words]
    started = subprocess.Popen(
        program,
        cwd=ROOT,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        start_new_session=True,
        preexec_fn=lambda: signal.signal(
            signal.SIGINT, signal.SIG_DFL
        ),  # background jobs ignore it
    )
    lines = tmp_path / sweep.CELLS_FILE
    until = time.monotonic() + LONG_S
    while time.monotonic() < until and not (lines.exists() and lines.read_bytes().count(b"\n")):
        time.sleep(0.01)
    os.killpg(started.pid, signal.SIGINT)
    _, told = started.communicate(timeout=LONG_S)
    assert started.returncode == 130, told.decode()
    assert b"goes on from here" in told and b"Traceback" not in told
    assert (
        0 < lines.read_bytes().count(b"\n") < 6000 and not (tmp_path / sweep.SUMMARY_FILE).exists()
    )
    until = time.monotonic() + LONG_S
    with pytest.raises(ProcessLookupError):  # nothing of it is left
        while time.monotonic() < until:
            os.killpg(started.pid, 0)
            time.sleep(0.05)


@pytest.mark.parametrize(
    ("words", "why"),
    [
        (("out",), "name traces, or failure rates"),
        (("out", "--mtbf", "soon"), "30s, 2m or 1h"),
        (("out", "--mtbf", "0"), " --mtbf: 0.0 is not usable"),
        (("out", "--mtbf", "1h", "--model", "gpt2,absent"), "--model: 'absent'"),
        (("out", "--mtbf", "1h", "--model", ","), "--model"),
        (("out", "--mtbf", "1h", "--policy", "absent"), "--policy: 'absent'"),
        (("out", "--trace", "absent.csv"), "--trace: 'absent.csv' is not usable: there is no"),
        (("out", "--trace", "text"), "text"),
        (("out", "--mtbf", "1h", "--nodes-of", "abacus"), "--nodes-of"),
        (("out", "--mtbf", "1h", "--physics", "luck=1"), "--physics"),
        (("out", "--mtbf", "1h", "--address", "auto"), "it goes with --ray"),
        (("out", "--mtbf", "1h", "--ray", "--workers", "2"), "goes without --ray"),
        (
            ("text", "--mtbf", "1h"),
            "OUT: 'text' is not usable: it cannot be written (it is not a d",
        ),
    ],
)
def test_mistakes_are_refused_before_anything_starts(
    words: tuple[str, ...], why: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("text").write_text("no trace")
    done = CliRunner().invoke(main, ["sweep", *words])
    assert done.exit_code == 2 and why in done.output, done.output
    assert "Traceback" not in done.output and not Path("out").exists()
