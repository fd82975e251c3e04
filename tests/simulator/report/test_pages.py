"""Pages of replays and sweeps: complete, escaped, reproducible and readable in a browser."""

from __future__ import annotations

import html
import json
import os
import re
import shlex
import shutil
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import replace
from functools import lru_cache
from importlib.resources import files
from itertools import pairwise
from pathlib import Path

import pytest
from click.testing import CliRunner
from elastic_sim.cli.cli import main
from elastic_sim.replay.replay import PolicySummary, replay, summarize
from elastic_sim.report import assumptions
from elastic_sim.report.command_line import replay_command
from elastic_sim.report.replay_page import (
    DRAWN_MICROBATCHES,
    headline,
    replay_page,
    throughput,
)
from elastic_sim.steps.physics import ClusterPhysics
from elastic_sim.steps.policies import policy_classes
from elastic_sim.steps.scenario import Scenario
from elastic_sim.steps.time_accounting import Use
from elastic_sim.sweep import sweep
from elastic_sim.sweep.cells import cells_of
from elastic_sim.sweep.sweep_page import sweep_page
from elastic_sim.traces.generate import Market, generate
from elastic_sim.traces.statistics import node_counts
from elastic_sim.traces.trace import format_trace

from elastic.planning.cost.profile import format_profile
from tests.patience import LONG_S
from tests.simulator.report.page_parser import body, figures, parsed

POLICIES = ("ours", "varuna", "bamboo", "oracle")
SCENARIO = Scenario(
    market=Market(nodes=4, mtbf_s=600.0, repair_s=300.0), duration_s=2400.0, model="bert-large"
)
ROOT = Path(__file__).parents[3]
PARTS = ("backward, input part", "backward, weight part")
BROWSER = (
    shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
)


@lru_cache(maxsize=1)
def found() -> list[PolicySummary]:
    return replay(SCENARIO.world(), SCENARIO.trace_of, POLICIES, range(2), keep=True)


@pytest.fixture(scope="module")
def page() -> str:
    return replay_page(SCENARIO, found(), POLICIES, 2)


@pytest.fixture(scope="module")
def swept(tmp_path_factory: pytest.TempPathFactory) -> str:
    markets = [Market(nodes=4, mtbf_s=rate, repair_s=300.0) for rate in (300.0, 900.0)]
    scenarios = [
        Scenario(market=market, duration_s=1800.0, model=model)
        for model in ("bert-large", "gpt2")
        for market in markets
    ]
    return swept_page(scenarios, ("varuna", "torchft"), tmp_path_factory.mktemp("out"))


@pytest.fixture(scope="module")
def crowded(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A sweep of every policy."""
    scenario = Scenario(market=Market(nodes=2, mtbf_s=600.0), duration_s=600.0, model="bert-large")
    return swept_page([scenario], tuple(policy_classes()), tmp_path_factory.mktemp("out"))


def swept_page(scenarios: Sequence[Scenario], policies: Sequence[str], out: Path) -> str:
    cells = cells_of(scenarios, policies, 2)
    rows = sweep.run(out, cells, lambda cells: ((c, c.run()) for c in cells))
    return sweep_page(rows, 2, "elastic-sim sweep OUT")


# ---- what is on a page ----


@pytest.mark.parametrize("which", ["page", "swept"])
def test_a_page_is_whole_and_loads_nothing(which: str, request: pytest.FixtureRequest) -> None:
    text = request.getfixturevalue(which)
    tags = parsed(text)
    assert set(tags.addresses) == {"data:,"}
    assert len(tags.ids) == len(set(tags.ids))
    assert "url(" not in body(text) and "@import" not in text
    assert "default-src 'none'" in text.partition("<script>")[0]
    assert text.count("* plotly.js v") == 1 and len(text) < 6_000_000


def test_a_replay_shows_everything(page: str) -> None:
    text = body(page)
    for name in POLICIES:
        assert text.count(name) >= 4
    for words in (
        "Our policy makes",
        "95 % interval",
        "model of it",
        "per million samples",
        "First plan",
        "pipeline",
    ):
        assert words in text
    for fact in assumptions.constants(ClusterPhysics()):
        assert fact.name in text
    assert "bert-large on 4 a40 nodes, a loss every 10 min" in text
    assert len(re.findall("<details>", text)) == len(POLICIES)
    assert set(figures(page)) == {"goodput", "uses", "over-time", "pipelines-0"}


def test_bars_show_goodput_and_where_the_time_went(page: str) -> None:
    charts = figures(page)
    (goodput,) = charts["goodput"]["data"]
    assert goodput["y"] == list(POLICIES)
    assert goodput["x"] == [100 * one.goodput.value for one in found()]
    assert goodput["error_x"]["array"] == [100 * one.goodput.margin for one in found()]
    assert all(
        low <= value
        for low, value in zip(goodput["error_x"]["arrayminus"], goodput["x"], strict=True)
    )
    uses = {bar["name"]: bar for bar in charts["uses"]["data"]}
    assert list(uses) == [use.value for use in Use]
    assert len({bar["marker"]["color"] for bar in uses.values()}) == len(Use)
    for i, one in enumerate(found()):
        shares = {name: bar["x"][i] for name, bar in uses.items()}
        assert shares == {name: 100 * share for name, share in one.time.items()}
        assert sum(shares.values()) == pytest.approx(100)


def test_nodes_losses_and_throughput_stand_over_time(page: str) -> None:
    chart, trace = figures(page)["over-time"], SCENARIO.trace_of(0)
    nodes, losses, *rest = chart["data"]
    assert list(zip(nodes["x"], nodes["y"], strict=True)) == [
        (at / 60, n) for at, n in node_counts(trace)
    ]
    moments = dict.fromkeys(e.seconds for e in trace.events if e.kind != "add")
    assert losses["x"] == [at / 60 for at in moments] and "lost" in losses["text"][0]
    for one in found():
        outcome = one.runs[0].outcome
        assert outcome is not None
        axis, last = f"y{POLICIES.index(one.policy) + 2}", one.policy == "oracle"
        *behind, rates, changes = [trace for trace in rest if trace["yaxis"] == axis]
        assert len(behind) == (not last)
        assert rates["y"][:-1] == throughput(outcome, 30.0) and rates["x"][-1] == 40.0
        assert changes["x"] == [decision.at / 1000 / 60 for decision in outcome.decisions[1:]]
        assert last or behind[0]["y"] == rest[-2]["y"]
    titles = [title["text"] for title in chart["layout"]["annotations"]]
    assert titles == ["<b>nodes</b>", *(f"<b>{name}</b>, samples/s" for name in POLICIES)]
    assert chart["layout"][f"xaxis{len(POLICIES) + 1}"]["title"]["text"] == "time (min)"


def test_pipelines_show_every_action_once(page: str) -> None:
    chart = figures(page)["pipelines-0"]
    outcome = found()[POLICIES.index("ours")].runs[0].outcome
    assert outcome is not None
    start = outcome.decisions[0].change.in_force
    assert start is not None
    stages = start.plan.pipelines[0].stages
    assert chart["layout"]["yaxis"]["ticktext"] == [
        f"{stage.unit.node} [{stage.first}:{stage.last}]" for stage in stages
    ]
    spans: dict[tuple[int, str], dict[str, tuple[float, float]]] = {}
    for bars in chart["data"]:
        drawn = zip(bars["y"], bars["text"], bars["base"], bars["x"], strict=True)
        for row, microbatch, start, length in drawn:
            actions = spans.setdefault((row, microbatch), {})
            assert bars["name"] not in actions
            actions[bars["name"]] = (start, start + length)
    shown = 2 * len(stages) + DRAWN_MICROBATCHES
    rows = range(len(stages))
    assert set(spans) == {(row, str(number)) for row in rows for number in range(shown)}
    whole, parts = ["forward", "backward"], ["forward", *PARTS]
    for actions in spans.values():
        assert list(actions) in (whole, parts)
        ordered = list(actions.values())
        assert all(a[1] <= b[0] + 1e-9 for a, b in pairwise(ordered))
    label = chart["layout"]["yaxis"]["ticktext"][0]
    assert chart["data"][0]["hovertext"][0].startswith(f"F0 on {label}: 0 s to ")


def test_a_sweep_shows_everything(swept: str) -> None:
    text, charts = body(swept), figures(swept)
    assert "2 models, 4 scenarios, 2 policies on a40 nodes" in text
    assert set(charts) == {"failure-rates-0", "failure-rates-1", "goodput"}
    for name in ("failure-rates-0", "failure-rates-1"):
        assert [line["name"] for line in charts[name]["data"]] == ["varuna", "torchft"]
        assert all(line["x"] == [300.0, 900.0] for line in charts[name]["data"])
        assert charts[name]["layout"]["xaxis"]["ticktext"] == ["5 min", "15 min"]
    (heat,) = charts["goodput"]["data"]
    assert [line["y"] for line in charts["failure-rates-0"]["data"]] == [
        [row[i] for row in heat["z"][:2]] for i in range(2)
    ]
    for values, texts in zip(heat["z"], heat["text"], strict=True):
        best = [value == max(values) for value in values]
        assert [text.startswith("<b>") for text in texts] == best
        assert all(f"{value:.1f}" in text for value, text in zip(values, texts, strict=True))
    assert charts["goodput"]["layout"]["yaxis"]["ticktext"][1] == "bert-large, a loss every 15 min"
    assert "bert-large, a loss every 15 min" in text and "Cost per million samples" in text


def test_the_same_replay_gives_the_same_bytes(tmp_path: Path) -> None:
    """In another process, which hashes otherwise."""
    words = replay_command(SCENARIO, POLICIES, 1).split()[1:]
    out = tmp_path / "page.html"
    program = [sys.executable, "-m", "elastic_sim.cli.cli", *words, "--html", str(out)]
    environment = {
        **os.environ,
        "PYTHONHASHSEED": "7",
        "PYTHONPATH": os.pathsep.join((str(ROOT), str(ROOT / "simulator"))),
    }
    subprocess.run(program, check=True, timeout=LONG_S, env=environment, stdout=subprocess.DEVNULL)
    oracle = next(one for one in found() if one.policy == "oracle")
    first = [summarize(one.runs[:1], oracle.runs[:1]) for one in found()]
    assert out.read_text() == replay_page(SCENARIO, first, POLICIES, 1)


def test_all_that_users_give_is_escaped(tmp_path: Path) -> None:
    evil = tmp_path / "<img src=x onerror=alert(1)>&.csv"
    market = Market(nodes=4, mtbf_s=600.0, repair_s=300.0)
    evil.write_text(format_trace(generate(market, 900.0)))
    out = tmp_path / "page.html"
    words = ("replay", str(evil), "--model", "bert-large", "--policy", "ours", "--html", str(out))
    done = CliRunner().invoke(main, list(words))
    assert done.exit_code == 0, done.output
    page = body(out.read_text())
    assert "<img" not in page
    assert "&lt;img src=x onerror=alert(1)&gt;&amp;.csv" in page
    parsed(out.read_text())


def test_labels_of_charts_are_escaped_for_the_library(tmp_path: Path) -> None:
    """Plotly reads tags in labels, links too."""
    evil = tmp_path / '<a href="x">y<&.csv'
    evil.write_text(format_trace(generate(Market(nodes=4, mtbf_s=600.0, repair_s=300.0), 900.0)))
    cells = cells_of([Scenario(trace=str(evil), model="bert-large")], ("varuna",), 1)
    rows = sweep.run(tmp_path / "out", cells, lambda cells: ((c, c.run()) for c in cells))
    (chart,) = figures(sweep_page(rows, 1, "")).values()
    assert chart["layout"]["yaxis"]["ticktext"] == ['bert-large, &lt;a href="x"&gt;y&lt;&amp;.csv']


def test_one_seed_one_policy(tmp_path: Path) -> None:
    """No rival to compare with, no interval, no oracle row, and nothing that ran."""
    scenario = replace(
        SCENARIO, model="gpt3-6.7b", duration_s=600.0, market=Market(nodes=2, mtbf_s=300.0)
    )
    runs = replay(scenario.world(), scenario.trace_of, ("varuna",), keep=True)
    page = replay_page(scenario, runs, ("varuna",), 1)
    parsed(page)
    assert (
        "none made" in page
        and "One seed: no intervals" in page
        and "Pipelines of our policy" not in page
    )


def test_a_measured_profile(tmp_path: Path) -> None:
    """As `elastic profile` writes it: no list price, no published sizes."""
    profile = tmp_path / "own & measured.json"
    profile.write_text(format_profile(replace(SCENARIO.world().profile, tp=1)))
    scenario = replace(SCENARIO, model=str(profile), microbatches=8, duration_s=900.0)
    page = replay_page(
        scenario,
        replay(scenario.world(), scenario.trace_of, ("varuna",), keep=True),
        ("varuna",),
        1,
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
    for command in (
        ("replay",),
        ("sweep", str(tmp_path / "out"), "--workers", "1", "--seeds", "1"),
    ):
        page = tmp_path / f"{command[0]}.html"
        done = CliRunner().invoke(main, [*command, *words, "--html", str(page)])
        assert done.exit_code == 0, done.output
        parsed(page.read_text())


def test_templates_are_part_of_the_package() -> None:
    folder = files("elastic_sim") / "report" / "templates"
    assert {"base.html", "replay.html", "sweep.html", "style.css"} <= {
        one.name for one in folder.iterdir()
    }
    assert "<!doctype html>" in (folder / "base.html").read_text()


def test_the_command_line_starts_without_the_libraries_of_pages_and_clusters() -> None:
    check = "any(n in sys.modules for n in ('jinja2', 'plotly', 'ray', 'torch'))"
    program = f"import sys, elastic_sim.cli.cli; sys.exit({check})"
    assert (
        subprocess.run([sys.executable, "-c", program], check=False, timeout=LONG_S).returncode == 0
    )


def test_where_a_page_cannot_go_is_refused_first(tmp_path: Path) -> None:
    for command in (("replay",), ("sweep", str(tmp_path / "out"))):
        words = [
            *command,
            "--mtbf",
            "1h",
            "--model",
            "gpt2",
            "--html",
            str(tmp_path / "no" / "p.html"),
        ]
        done = CliRunner().invoke(main, words)
        assert (
            done.exit_code == 2
            and "does not exist" in done.output
            and not (tmp_path / "out").exists()
        )


# ---- claims ----


def test_the_headline_claims_no_more_than_the_seeds_allow() -> None:
    ours, varuna, *_ = found()
    close = replace(
        varuna,
        runs=tuple(
            replace(r, samples=r.samples * f) for r, f in zip(ours.runs, (2, 1), strict=True)
        ),
    )
    assert "either may be ahead" in headline([ours, close])
    clear = replace(
        varuna, runs=tuple(replace(run, samples=run.samples * 3 // 4) for run in ours.runs)
    )
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


# ---- in a browser ----


def opened(path: Path, width: int = 1280) -> tuple[str, str]:
    """(page after its scripts, what the browser says) of a file in headless Chromium."""
    assert BROWSER is not None
    flags = (
        "--headless",
        "--no-sandbox",
        "--disable-gpu",
        "--enable-logging=stderr",
        f"--window-size={width},900",
        "--virtual-time-budget=5000",
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


PROBE = """<script>addEventListener("load", () => setTimeout(() => {
  const flat = [...document.querySelectorAll("section")]
    .filter(s => s.getBoundingClientRect().height < 60);
  const drawn = [...document.querySelectorAll(".js-plotly-plot")]
    .filter(c => c.querySelector(".main-svg"));
  const clipped = drawn.flatMap(chart => {
    const frame = chart.getBoundingClientRect();
    return [...chart.querySelectorAll("text")].filter(text => {
      const box = text.getBoundingClientRect();
      return box.width && (box.left < frame.left - 1 || box.right > frame.right + 1
        || box.top < frame.top - 1 || box.bottom > frame.bottom + 1);
    }).map(text => text.textContent);
  });
  document.body.dataset.seen = JSON.stringify({
    wide: document.documentElement.scrollWidth > innerWidth, flat: flat.length,
    title: document.querySelector("h1").getBoundingClientRect().height > 20,
    drawn: drawn.length, clipped});
}, 1000));</script>"""
"""Script that measures the elements of a page."""


@pytest.mark.skipif(BROWSER is None, reason="no Chromium is installed")
@pytest.mark.parametrize(
    ("which", "text"),
    [("page", "Our policy makes"), ("swept", "2 models, 4 scenarios"), ("crowded", "1 scenario,")],
)
@pytest.mark.parametrize("width", [640, 1280])
def test_a_browser_shows_it(
    which: str, text: str, width: int, tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    """The console stays empty: the page's content policy refuses anything that it loads."""
    path, whole = tmp_path / "page.html", request.getfixturevalue(which)
    path.write_text(whole.replace("</head>", f"{PROBE}</head>"))
    shown, said = opened(path, width)
    assert ":CONSOLE" not in said, said
    assert text in shown
    seen = re.search(r'data-seen="([^"]*)"', shown)
    assert seen is not None
    assert json.loads(html.unescape(seen[1])) == {
        "wide": False,
        "flat": 0,
        "title": True,
        "drawn": len(figures(whole)),
        "clipped": [],
    }


@pytest.mark.skipif(BROWSER is None, reason="no Chromium is installed")
def test_a_browser_would_tell_of_errors(tmp_path: Path) -> None:
    path = tmp_path / "page.html"
    path.write_text("<!doctype html><script>absent()</script>")
    assert ":CONSOLE" in opened(path)[1]


@pytest.mark.skipif(BROWSER is None, reason="no Chromium is installed")
def test_a_browser_would_tell_of_what_is_loaded(page: str, tmp_path: Path) -> None:
    path = tmp_path / "page.html"
    (tmp_path / "other.js").write_text("")
    path.write_text(page.replace("</head>", '<script src="other.js"></script></head>'))
    assert "Content Security Policy" in opened(path)[1]
