"""The pages of replays and sweeps: whole, escaped, the same bytes each time, and readable in a real browser."""

from __future__ import annotations

import html
import os
import re
import shlex
import shutil
import subprocess
import sys
from dataclasses import replace
from functools import lru_cache
from html.parser import HTMLParser
from importlib.resources import files
from pathlib import Path

import pytest
from click.testing import CliRunner
from elastic_sim.cli.cli import main
from elastic_sim.replay.replay import Mean, Summary, replay, summary
from elastic_sim.report import facts
from elastic_sim.report.charts import (
    Scale,
    duration,
    round_step,
    steps_path,
    throughput,
    time_marks,
    value_marks,
)
from elastic_sim.report.headline import headline
from elastic_sim.report.report import WINDOWS, clock, mean, report
from elastic_sim.report.words import command_line
from elastic_sim.steps.physics import Physics
from elastic_sim.steps.scenario import Scenario
from elastic_sim.steps.time_accounting import Use
from elastic_sim.sweep import sweep
from elastic_sim.sweep.cells import cells_of
from elastic_sim.sweep.sweep_report import sweep_report
from elastic_sim.traces.generate import Market, generate
from elastic_sim.traces.trace import format_trace

from elastic.domain.errors import FieldError
from elastic.planning.cost.profile import format_profile
from tests.patience import LONG_S

POLICIES = ("ours", "varuna", "bamboo", "oracle")
SCENARIO = Scenario(
    market=Market(nodes=4, mtbf_s=600.0, repair_s=300.0), duration_s=2400.0, model="bert-large"
)
ROOT = Path(__file__).parents[3]
BROWSER = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")


@lru_cache(maxsize=1)
def found() -> list[Summary]:
    return replay(SCENARIO.world(), SCENARIO.trace_of, POLICIES, range(2), keep=True)


@pytest.fixture(scope="module")
def page() -> str:
    return report(SCENARIO, found(), POLICIES, 2)


@pytest.fixture(scope="module")
def swept(tmp_path_factory: pytest.TempPathFactory) -> str:
    markets = [Market(nodes=4, mtbf_s=rate, repair_s=300.0) for rate in (300.0, 900.0)]
    scenarios = [
        Scenario(market=market, duration_s=1800.0, model=model)
        for model in ("bert-large", "gpt2")
        for market in markets
    ]
    cells = cells_of(scenarios, ("varuna", "torchft"), 2)
    rows = sweep.run(tmp_path_factory.mktemp("out"), cells, lambda cells: ((c, c.run()) for c in cells))
    return sweep_report(rows, 2, "elastic-sim sweep OUT")


# ---- what is on a page ----


class Tags(HTMLParser):
    """Checks that tags close in order; collects addresses."""

    VOID = ("meta", "link", "rect", "line", "path", "circle", "br")

    def __init__(self) -> None:
        super().__init__()
        self.open: list[str] = []
        self.ids: list[str] = []
        self.addresses: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.ids += [value or "" for name, value in attrs if name == "id"]
        self.addresses += [value or "" for name, value in attrs if name in ("href", "src", "xlink:href")]
        if tag not in ("meta", "link"):
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.addresses += [value or "" for name, value in attrs if name in ("href", "src", "xlink:href")]

    def handle_endtag(self, tag: str) -> None:
        assert self.open and self.open[-1] == tag, f"</{tag}> in {self.open[-5:]}"
        self.open.pop()


def parsed(text: str) -> Tags:
    tags = Tags()
    tags.feed(text)
    tags.close()
    assert not tags.open
    return tags


@pytest.mark.parametrize("which", ["page", "swept"])
def test_a_page_is_whole_and_loads_nothing(which: str, request: pytest.FixtureRequest) -> None:
    text = request.getfixturevalue(which)
    tags = parsed(text)
    assert set(tags.addresses) == {"data:,"}
    assert len(tags.ids) == len(set(tags.ids))
    assert "<script" not in text and "url(" not in text and "@import" not in text
    assert len(text) < 2_000_000


def test_a_replay_shows_everything(page: str) -> None:
    for name in POLICIES:
        assert page.count(name) >= 4
    for use in Use:
        assert f"--c: var(--{use.value})" in page
    for text in (
        "Our policy makes",
        "95 % interval",
        "model of it",
        "per million samples",
        "First plan",
        "pipeline",
    ):
        assert text in page
    for fact in facts.constants(Physics()):
        assert fact.name in page
    assert "bert-large on 4 a40 nodes, a loss every 10 min" in page
    assert len(re.findall("<details>", page)) == len(POLICIES)
    losses = SCENARIO.trace_of(0)
    assert page.count('fill="var(--loss)"') == len({e.seconds for e in losses.events if e.kind != "add"})


def test_a_sweep_shows_everything(swept: str) -> None:
    assert "2 models, 4 scenarios, 2 policies on a40 nodes" in swept
    assert swept.count("<figure>") == 2 and swept.count("<circle") == 8
    assert swept.count('<td class="cell nowrap"') == 8
    assert "bert-large, a loss every 15 min" in swept and "Cost per million samples" in swept


def test_the_same_replay_gives_the_same_bytes(tmp_path: Path) -> None:
    """In another process, which hashes otherwise."""
    words = command_line(SCENARIO, POLICIES, 1).split()[1:]
    out = tmp_path / "page.html"
    program = [sys.executable, "-m", "elastic_sim.cli.cli", *words, "--html", str(out)]
    environment = {**os.environ, "PYTHONHASHSEED": "7", "PYTHONPATH": str(ROOT)}
    subprocess.run(program, check=True, timeout=LONG_S, env=environment, stdout=subprocess.DEVNULL)
    first = [summary(one.runs[:1]) for one in found()]
    assert out.read_text() == report(SCENARIO, first, POLICIES, 1)


def test_all_that_users_give_is_escaped(tmp_path: Path) -> None:
    evil = tmp_path / "<img src=x onerror=alert(1)>&.csv"
    market = Market(nodes=4, mtbf_s=600.0, repair_s=300.0)
    evil.write_text(format_trace(generate(market, 900.0)))
    out = tmp_path / "page.html"
    words = ("replay", str(evil), "--model", "bert-large", "--policy", "ours", "--html", str(out))
    done = CliRunner().invoke(main, list(words))
    assert done.exit_code == 0, done.output
    page = out.read_text()
    assert "<img" not in page
    assert "&lt;img src=x onerror=alert(1)&gt;&amp;.csv" in page
    parsed(page)


def test_one_seed_one_policy(tmp_path: Path) -> None:
    """No rival to compare with, no interval, no oracle row, and nothing that ran."""
    scenario = replace(SCENARIO, model="gpt3-6.7b", duration_s=600.0, market=Market(nodes=2, mtbf_s=300.0))
    runs = replay(scenario.world(), scenario.trace_of, ("varuna",), keep=True)
    page = report(scenario, runs, ("varuna",), 1)
    parsed(page)
    assert "none made" in page and "One seed: no intervals" in page and "Pipelines of our policy" not in page


def test_a_measured_profile(tmp_path: Path) -> None:
    """As `elastic profile` writes it: no list price, no published sizes."""
    profile = tmp_path / "own & measured.json"
    profile.write_text(format_profile(replace(SCENARIO.world().profile, tp=1)))
    scenario = replace(SCENARIO, model=str(profile), microbatches=8, duration_s=900.0)
    page = report(
        scenario, replay(scenario.world(), scenario.trace_of, ("varuna",), keep=True), ("varuna",), 1
    )
    parsed(page)
    assert "a measured profile on 4 profile nodes" in page and "own &amp; measured.json" in page
    assert str(tmp_path) not in page.replace(f"--model {quoted(profile)}", "")


def quoted(path: Path) -> str:
    return html.escape(shlex.quote(str(path)), quote=True).replace("&#x27;", "&#39;")


def test_the_oracle_alone(tmp_path: Path) -> None:
    words = (
        "--mtbf",
        "10m",
        "--nodes",
        "4",
        "--duration",
        "20m",
        "--model",
        "bert-large",
        "--policy",
        "oracle",
    )
    for command in (("replay",), ("sweep", str(tmp_path / "out"), "--workers", "1", "--seeds", "1")):
        page = tmp_path / f"{command[0]}.html"
        done = CliRunner().invoke(main, [*command, *words, "--html", str(page)])
        assert done.exit_code == 0, done.output
        parsed(page.read_text())


def test_templates_are_part_of_the_package() -> None:
    folder = files("elastic_sim") / "report" / "templates"
    assert {"base.html", "replay.html", "sweep.html", "style.css"} <= {one.name for one in folder.iterdir()}
    assert "<!doctype html>" in (folder / "base.html").read_text()


def test_the_command_line_starts_without_the_libraries_of_pages_and_clusters() -> None:
    program = (
        "import sys, elastic_sim.cli.cli; sys.exit(any(n in sys.modules for n in ('jinja2', 'ray', 'torch')))"
    )
    assert subprocess.run([sys.executable, "-c", program], check=False, timeout=LONG_S).returncode == 0


def test_where_a_page_cannot_go_is_refused_first(tmp_path: Path) -> None:
    for command in (("replay",), ("sweep", str(tmp_path / "out"))):
        words = [*command, "--mtbf", "1h", "--model", "gpt2", "--html", str(tmp_path / "no" / "p.html")]
        done = CliRunner().invoke(main, words)
        assert done.exit_code == 2 and "does not exist" in done.output and not (tmp_path / "out").exists()


# ---- claims ----


def test_the_headline_claims_no_more_than_the_seeds_allow() -> None:
    ours, varuna, *_ = found()
    close = replace(
        varuna, runs=tuple(replace(r, samples=r.samples * f) for r, f in zip(ours.runs, (2, 1), strict=True))
    )
    assert "either may be ahead" in headline([ours, close])
    clear = replace(varuna, runs=tuple(replace(run, samples=run.samples * 3 // 4) for run in ours.runs))
    assert "33.3\u00a0% more than our model of varuna" in headline([ours, clear])
    assert "either" not in headline([ours, clear])
    behind = replace(varuna, runs=tuple(replace(run, samples=run.samples * 2) for run in ours.runs))
    assert "50.0\u00a0% less than our model of varuna" in headline([ours, behind])
    single = [replace(one, runs=one.runs[:1]) for one in (ours, clear)]
    assert "one seed: no interval" in headline(single)
    assert headline([varuna]).startswith("Our model of varuna makes")


def test_throughput_adds_up_to_the_samples() -> None:
    for one in found():
        outcome = one.runs[0].outcome
        assert outcome is not None
        windows = throughput(outcome, 300.0)
        assert len(windows) == 8
        assert sum(windows) * 300.0 == pytest.approx(outcome.samples, rel=0.03)


def test_the_command_line_gives_the_same_scenario_again() -> None:
    market = Market(nodes=5, mtbf_s=600.0, repair_s=300.0, bulk=((1, 3.0), (2, 1.0)))
    scenario = replace(SCENARIO, market=market, notice_s=30.0, physics=("boot_s=90",))
    assert command_line(scenario, ("ours", "varuna"), 2) == (
        "elastic-sim replay --model bert-large --policy ours,varuna --seeds 2 --notice 30s --nodes 5 --repair 300s "
        "--duration 2400s --bulk 1:3,2:1 --physics boot_s=90 --mtbf 600s"
    )
    part = Scenario(trace="a b.csv", first_s=60.0, last_s=120.0)
    assert command_line(part, ("ours",), 1).startswith("elastic-sim replay 'a b.csv' ")


def test_every_constant_has_its_source() -> None:
    assert all(fact.source for fact in facts.constants(Physics()))
    changed = [fact.name for fact in facts.constants(Physics(boot_s=90.0)) if fact.changed]
    assert changed == ["boot_s"]


def test_policies_say_what_they_are() -> None:
    assert facts.about("ours:stream:2+snapshot").ours
    assert facts.is_model(facts.about("varuna")) and not facts.is_model(facts.about("ceiling"))
    with pytest.raises(FieldError, match="--policy"):
        facts.about("absent")


@pytest.mark.parametrize(
    ("value", "digits", "wanted"),
    [
        (Mean(12.5), None, "12.5"),
        (Mean(12.5, 0.25), None, "12.5 ± 0.25"),
        (Mean(1234.5, 20.0), 0, "$1,234 ± 20"),
        (Mean(float("inf")), 0, "none made"),
    ],
)
def test_means_print(value: Mean, digits: int | None, wanted: str) -> None:
    assert mean(value, digits, "", "$" if digits == 0 else "") == wanted


def test_axes_are_round() -> None:
    across = Scale(0.0, 43200.0, 100.0, 1100.0)
    assert [mark.text for mark in time_marks(43200.0, across)] == [f"{n} h" for n in range(13)]
    assert across.at(21600.0) == 600.0
    for end in (1.0, 90.0, 3600.0, 86400.0, 90 * 86400.0):
        assert end / round_step(end, WINDOWS) <= WINDOWS
        assert 2 <= len(time_marks(end, Scale(0.0, end, 0.0, 1.0))) <= 13
    assert [mark.text for mark in value_marks(14.0, Scale(0.0, 14.0, 0.0, 60.0), 3)] == ["0", "4", "8", "12"]
    assert steps_path([(0.0, 5.0), (10.0, 2.0)], 20.0) == "M0,5H10V2H20"
    assert [duration(s) for s in (30, 600, 5400, 172800, 601)] == ["30 s", "10 min", "1.5 h", "2 d", "601 s"]
    assert [clock(s) for s in (61, 90061)] == ["00:01:01", "1 d 01:01:01"]


# ---- in a browser ----


def opened(path: Path) -> tuple[str, str]:
    """(page after its scripts, what the browser says) of a file in headless Chromium."""
    assert BROWSER is not None
    flags = (
        "--headless",
        "--no-sandbox",
        "--disable-gpu",
        "--enable-logging=stderr",
        "--window-size=1280,900",
    )
    profile = f"--user-data-dir={path.with_suffix('.profile')}"
    done = subprocess.run(
        [BROWSER, *flags, profile, "--dump-dom", path.as_uri()],
        capture_output=True,
        text=True,
        timeout=LONG_S,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-2000:]
    return done.stdout, done.stderr


@pytest.mark.skipif(BROWSER is None, reason="no Chromium is installed")
@pytest.mark.parametrize(
    ("which", "text"), [("page", "Our policy makes"), ("swept", "2 models, 4 scenarios")]
)
def test_a_browser_shows_it(which: str, text: str, tmp_path: Path, request: pytest.FixtureRequest) -> None:
    """Without a word on the console; a script that is added here looks at the sizes of what is shown."""
    probe = (
        "<script>addEventListener('load', () => { const wide = document.documentElement.scrollWidth > innerWidth;"
        "const flat = [...document.querySelectorAll('section')].filter(s => s.getBoundingClientRect().height < 60);"
        "const title = document.querySelector('h1').getBoundingClientRect().height;"
        "document.body.dataset.seen = `wide=${wide} flat=${flat.length} title=${title > 20}`; });</script>"
    )
    path = tmp_path / "page.html"
    path.write_text(request.getfixturevalue(which).replace("</head>", f"{probe}</head>"))
    shown, said = opened(path)
    assert ":CONSOLE" not in said, said
    assert text in shown and 'data-seen="wide=false flat=0 title=true"' in shown


@pytest.mark.skipif(BROWSER is None, reason="no Chromium is installed")
def test_a_browser_would_tell_of_errors(tmp_path: Path) -> None:
    path = tmp_path / "page.html"
    path.write_text("<!doctype html><script>absent()</script>")
    assert ":CONSOLE" in opened(path)[1]
