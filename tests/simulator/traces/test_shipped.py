"""The shipped traces agree with their README."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

import pytest
from click.testing import CliRunner
from elastic_sim.cli.cli import main
from elastic_sim.report.trace_page import trace_page
from elastic_sim.traces.statistics import statistics
from elastic_sim.traces.trace import ADD, Event, build_trace, read

from tests.simulator.report.page_parser import body, figures

TRACES = Path(__file__).parents[3] / "traces"
COMMANDS = re.findall(
    r"^    elastic-sim (traces generate .*)$", (TRACES / "README.md").read_text(), re.M
)


def test_every_trace_is_named_labelled_and_usable() -> None:
    files = sorted(TRACES.glob("*.csv"))
    assert {f"traces/{file.name}" for file in files} == {
        shlex.split(command)[2] for command in COMMANDS
    }
    for file in files:
        found, repairs = read(file)
        assert found.events and not repairs
        assert found.origin.startswith("generated, not recorded")


@pytest.mark.parametrize("command", [c for c in COMMANDS if "--like" not in c])
def test_the_same_command_gives_the_same_bytes(command: str, tmp_path: Path) -> None:
    words = shlex.split(command)
    shipped = TRACES / Path(words[2]).name
    words[2] = str(tmp_path / "again.csv")
    found = CliRunner().invoke(main, words)
    assert found.exit_code == 0, found.output
    assert (tmp_path / "again.csv").read_bytes() == shipped.read_bytes()


def test_page_of_statistics(tmp_path: Path) -> None:
    """Plots of every shipped trace; the same bytes twice; names are escaped."""
    for file in sorted(TRACES.glob("*.csv")):
        pages = []
        for number in range(2):
            out = tmp_path / f"{number}.html"
            found = CliRunner().invoke(main, ["traces", "stats", str(file), "--html", str(out)])
            assert found.exit_code == 0, found.output
            pages.append(out.read_text())
        assert pages[0] == pages[1]
        assert "Still there after" in body(pages[0])
        charts = figures(pages[0])
        measured = statistics(read(file)[0])
        nodes, longer, bulks, hours = (charts[f"plot-{i}"]["data"][0] for i in range(4))
        assert max(nodes["y"]) == measured.nodes_most
        assert longer["y"][0] == 100 and longer["y"][-1] == pytest.approx(0)
        assert sum(bulks["y"]) == measured.loss_events and sum(hours["y"]) == measured.losses
        pairs = zip(bulks["x"], bulks["y"], strict=True)
        assert sum(n * events for n, events in pairs) == measured.losses
        assert charts["plot-3"]["layout"]["yaxis"]["title"]["text"] == "lost nodes"
    odd = tmp_path / "<b>.csv"
    odd.write_bytes((TRACES / "steady-32.csv").read_bytes())
    out = tmp_path / "odd.html"
    assert (
        CliRunner().invoke(main, ["traces", "stats", str(odd), "--html", str(out)]).exit_code == 0
    )
    assert "<b>" not in body(out.read_text())
    refused = CliRunner().invoke(
        main, ["traces", "stats", str(odd), "--html", str(tmp_path / "no/x.html")]
    )
    assert refused.exit_code == 2 and "does not exist" in refused.output


def test_a_trace_without_losses_has_a_page() -> None:
    charts = figures(trace_page(build_trace([Event(0.0, ADD, "a")], 100.0), "calm"))
    assert charts["plot-0"]["data"][0]["y"] == [1, 1]
    assert charts["plot-2"]["data"][0]["y"] == [0]
