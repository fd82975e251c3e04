"""`elastic-sim`, as its user meets it."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
from click.testing import CliRunner, Result
from elastic_sim.cli.cli import main
from elastic_sim.cli.commands import policies_of
from elastic_sim.reproduce import tables as reproduce
from elastic_sim.steps.policies import policy_classes
from elastic_sim.traces import trace as traces
from elastic_sim.traces.trace import Event, read

from elastic.domain.version import VERSION
from tests.patience import LONG_S

HEADER = "seconds,event,node,zone,type,notice\n"
GOOD = HEADER + "0,add,a,,,\n10,remove,a,,,\n20,end,,,,\n"

PRICES = [
    {
        "Timestamp": f"2026-01-01T0{hour}:00:00Z",
        "AvailabilityZone": "a",
        "InstanceType": "p3",
        "SpotPrice": "0.5",
        "ProductDescription": product,
    }
    for hour, product in enumerate(("Linux/UNIX", "Windows"))
]


def run(*words: str) -> Result:
    return CliRunner().invoke(main, list(words))


@pytest.mark.parametrize("flag", ["--version", "-V"])
def test_version(flag: str) -> None:
    assert run(flag).output == f"elastic-sim {VERSION}\n"


def test_it_runs_as_a_module() -> None:
    words = [sys.executable, "-m", "elastic_sim", "--version"]
    done = subprocess.run(words, capture_output=True, text=True, timeout=LONG_S)
    assert (done.returncode, done.stdout) == (0, f"elastic-sim {VERSION}\n")


def test_no_help_is_cut() -> None:
    for words in ([], ["traces"]):
        assert "..." not in run(*words, "--help").output.partition("Commands:")[2]


def test_statistics(tmp_path: Path) -> None:
    path = tmp_path / "t.csv"
    path.write_text(GOOD)
    assert json.loads(run("traces", "stats", str(path), "--json").output)["losses"] == 1
    assert "losses_per_node_hour" in run("traces", "stats", str(path)).output


def test_traces_are_made_imported_and_cut(tmp_path: Path) -> None:
    made, cut, other = (str(tmp_path / name) for name in ("made.csv", "cut.csv", "other.csv"))
    done = run(
        "traces",
        "generate",
        made,
        "--nodes",
        "8",
        "--mtbf",
        "10m",
        "--bulk",
        "1:3,2:1",
        "--seed",
        "3",
    )
    assert done.exit_code == 0, done.output
    assert sum(e.seconds == 0 for e in read(made)[0].events) == 8
    assert run("traces", "convert", made, cut, "--from", "1h", "--to", "2h").exit_code == 0
    assert read(cut)[0].end_s == 3600
    assert run("traces", "generate", other, "--like", made, "--duration", "2d").exit_code == 0
    assert read(other)[0].end_s == 2 * 86400
    assert run("traces", "generate", other, "--inference", "2", "--nodes", "8").exit_code == 0
    source = tmp_path / "p3.csv"
    source.write_text("0,add,n1\n60000,remove,n1\n")
    done = run("traces", "import", "bamboo", str(source), other)
    assert done.exit_code == 0 and "in 0.01667 h, times read as milliseconds" in done.stdout
    assert read(other)[0].end_s == 60 and done.stderr == ""


def test_a_wrong_unit_causes_a_warning(tmp_path: Path) -> None:
    source, out = tmp_path / "hours.csv", str(tmp_path / "out.csv")
    source.write_text(
        "".join(f"{hour},{4 + hour % 2}\n{hour + 1},{4 + hour % 2}\n" for hour in range(40))
    )
    done = run("traces", "import", "counts", str(source), out)
    assert done.exit_code == 0 and "times read as seconds" in done.stdout
    assert "losses per node and hour" in done.stderr and "--hours" in done.stderr
    done = run("traces", "import", "counts", str(source), out, "--hours")
    assert (
        done.exit_code == 0 and "in 40 h, times read as hours" in done.stdout and done.stderr == ""
    )


def market(hour: float) -> str:
    """40 hours of our own format, each written as `hour`."""
    rows = [
        f"{(number + 0.2511) * hour},{('remove', 'add')[number % 2]},b,,,\n" for number in range(40)
    ]
    return f"{HEADER}0,add,a,,,\n0,add,b,,,\n{''.join(rows)}{40 * hour},end,,,,\n"


@pytest.mark.parametrize(
    ("hour", "why"),
    [(3600, ""), (1, "losses per node and hour"), (3600e3, "longer than any record")],
)
def test_a_wrong_unit_in_a_trace_file_causes_a_warning(
    hour: float, why: str, tmp_path: Path
) -> None:
    source, out = tmp_path / "t.csv", tmp_path / "out.csv"
    source.write_text(market(hour))
    for words in (("stats", str(source), "--json"), ("convert", str(source), str(out))):
        done = run("traces", *words)
        assert done.exit_code == 0 and done.stdout, done.output
        if why:
            assert (
                done.stderr.startswith(f"elastic-sim: {source}: ") and done.stderr.count("\n") == 1
            )
            assert why in done.stderr and "are times really" in done.stderr
        else:
            assert done.stderr == ""
    assert read(out)[0] == read(source)[0]


@pytest.mark.parametrize(
    ("kind", "text", "why"),
    [
        (
            "counts",
            "0,0\n0,4\n500,4\n400,2\n",
            "source, line 4: '400,2' is not usable: times must ascend",
        ),
        (
            "bamboo",
            "0,add,a\n9,remove,b\n",
            "source, line 2: '9,remove,b' is not usable: b is not present",
        ),
    ],
)
def test_a_bad_row_of_another_form_is_one_line(
    kind: str, text: str, why: str, tmp_path: Path
) -> None:
    (tmp_path / "source").write_text(text)
    done = run("traces", "import", kind, str(tmp_path / "source"), str(tmp_path / "out.csv"))
    assert done.exit_code == 2 and why in done.stderr and done.stderr.count("\n") == 1
    assert not (tmp_path / "out.csv").exists()


def test_a_byte_order_mark_is_accepted(tmp_path: Path) -> None:
    source, out = tmp_path / "source", str(tmp_path / "out.csv")
    texts = {
        "bamboo": "0,add,a\n9,remove,a\n",
        "counts": "0,1\n9,1\n",
        "dated-counts": "2021-12-10, 23:59:45, 1\n2021-12-11, 00:00:45, 1\n",
        "parcae": '[0, "add", {"nodes": ["a"], "duration": 60000}]\n',
        "skypilot": '{"metadata": {"gap_seconds": 600}, "data": [1, 2]}',
        "events": '{"at": 1, "kind": "joined", "node": "a"}\n{"at": 9, "kind": "step"}\n',
    }
    (tmp_path / "config.json").write_text('{"devices": ["h100"]}', encoding="utf-8-sig")
    for kind, text in texts.items():
        source.write_text(text, encoding="utf-8-sig")
        done = run("traces", "import", kind, str(source), out)
        assert done.exit_code == 0 and read(out)[0].events, done.output
    source.write_text(GOOD, encoding="utf-8-sig")
    assert run("traces", "stats", str(source)).exit_code == 0
    assert run("traces", "convert", str(source), out).exit_code == 0


def test_a_run_is_imported_with_its_types(tmp_path: Path) -> None:
    (tmp_path / "events.jsonl").write_text(
        '{"at": 1, "kind": "joined", "node": "node0", "domain": ""}\n{"at": 9, "kind": "step"}\n'
    )
    (tmp_path / "config.json").write_text('{"devices": ["h100"], "faults": []}')
    done = run(
        "traces", "import", "events", str(tmp_path / "events.jsonl"), str(tmp_path / "out.csv")
    )
    assert done.exit_code == 0, done.output
    assert [e.type for e in read(tmp_path / "out.csv")[0].events] == ["h100"]


def test_files_that_are_too_large_are_not_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = tmp_path / "p3.csv"
    source.write_text("0,add,n1\n60000,remove,n1\n")
    monkeypatch.setattr(traces, "MAX_BYTES", 20)
    done = run("traces", "import", "bamboo", str(source), str(tmp_path / "out.csv"))
    assert done.exit_code == 2 and "more than 20 bytes" in done.output


def test_losses_in_bursts_are_made_and_fitted(tmp_path: Path) -> None:
    made, like, fixed = (str(tmp_path / name) for name in ("made.csv", "like.csv", "fixed.csv"))
    args = [
        "traces",
        "generate",
        made,
        "--mtbf",
        "10m",
        "--duration",
        "10d",
        "--shape",
        "0.5",
        "--lifetime-shape",
        "0.4",
        "--zones",
        "x,y",
    ]
    assert run(*args, "--notice", "2m", "--diurnal", "0.6").exit_code == 0
    assert "shape=0.5, lifetime_shape=0.4" in read(made)[0].origin
    assert run("traces", "generate", like, "--like", made).exit_code == 0
    origin = read(like)[0].origin
    assert (
        "notice_s=120.0" in origin and "zones=('x', 'y')" in origin and "diurnal=0.0" not in origin
    )
    assert "lifetime_shape=1.0" not in origin
    assert run("traces", "generate", fixed, "--like", made, "--zones", "z").exit_code == 0
    assert "zones=('z',)" in read(fixed)[0].origin


def test_repairs_are_listed(tmp_path: Path) -> None:
    path, out = tmp_path / "t.csv", tmp_path / "out.csv"
    path.write_text(GOOD.replace("10,remove,a", "10,remove,b"))
    assert run("traces", "stats", str(path)).exit_code == 2
    done = run("traces", "convert", str(path), str(out), "--repair")
    assert done.exit_code == 0 and "line 3: dropped: b is not present" in done.output


@pytest.mark.parametrize(
    ("words", "why"),
    [
        (("traces", "stats", "absent.csv"), "FILE: 'absent.csv' is not usable: there is no such"),
        (("traces", "stats", "."), "FILE: '.' is not usable: it is a directory"),
        (("traces", "stats", "bytes"), "FILE: 'bytes' is not usable: it is not text"),
        (("traces", "stats", "/dev/zero"), "FILE: '/dev/zero' is not usable: it has more than"),
        (("traces", "stats", "bad.json"), "FILE: bad.json, line 1: '{' is not usable"),
        (("traces", "convert", "absent.csv", "t.csv"), "SOURCE: 'absent.csv' is not usable"),
        (("traces", "convert", "good.csv", "."), "OUT: '.' is not usable: it is a directory"),
        (("traces", "convert", "good.csv", ""), "OUT: '' is not usable: name a file"),
        (("traces", "import", "counts", "empty", "t.csv"), "SOURCE: empty: '' is not usable"),
        (("traces", "import", "skypilot", "bad.json", "t.csv"), "SOURCE: bad.json: '{' is not"),
        (("traces", "generate", "t.csv", "--nodes", "0"), " --nodes: 0 is not usable"),
        (("traces", "generate", "t.csv", "--mtbf", "soon"), "30s, 2m or 1h"),
        (("traces", "generate", "t.csv", "--mtbf", "0s"), " --mtbf: 0.0 is not usable"),
        (("traces", "generate", "t.csv", "--mtbf", "0.9"), "--mtbf: 0.9 is not usable: seconds fr"),
        (
            ("traces", "generate", "t.csv", "--mtbf", "1s", "--duration", "30000d"),
            "with a loss every 1 s, 5.2e+09 events are expected, and a trace holds 1e+07",
        ),
        (
            (
                "traces",
                "generate",
                "t.csv",
                "--inference",
                "0",
                "--duration",
                "30000d",
                "--nodes",
                "99999",
            ),
            "--duration: 2592000000.0 is not usable: with 99999 nodes, 4.9e+10 events are expected",
        ),
        (("traces", "generate", "t.csv", "--notice", "99999999999"), "--notice: '99999999999' is"),
        (("traces", "generate", "t.csv", "--bulk", "33"), "--bulk: 33 is not usable: at most all"),
        (("traces", "generate", "t.csv", "--bulk", "99999999"), "--bulk: '99999999' is not usable"),
        (("traces", "generate", "t.csv", "--zones", ""), "--zones: '' is not usable"),
        (("traces", "generate", "t.csv", "--zones", "a,,b"), "--zones: 'a,,b' is not usable"),
        (("traces", "generate", "t.csv", "--bulk", "many"), "--bulk"),
        (("traces", "generate", "t.csv", "--bulk", "1:inf"), "--bulk"),
        (("traces", "generate", "t.csv", "--bulk", "1:nan"), "--bulk"),
        (("traces", "generate", "t.csv", "--bulk", "1:-1"), "--bulk"),
        (("traces", "generate", "t.csv", "--bulk", "1:0"), "--bulk"),
        (("traces", "generate", "t.csv", "--bulk", "0"), "--bulk"),
        (("traces", "generate", "t.csv", "--bulk", "1:2:3"), "--bulk"),
        (("traces", "generate", "t.csv", "--bulk", "1:"), "--bulk"),
        (("traces", "generate", "t.csv", "--nodes", "1000000000"), " --nodes: "),
        (("traces", "generate", "t.csv", "--repair", "1e308"), " --repair: '1e308' is not usable"),
        (("traces", "generate", "t.csv", "--duration", "0"), " --duration: 0.0 is not usable"),
        (("traces", "generate", "t.csv", "--duration", "1e308", "--inference", "2"), "--duration:"),
        (("traces", "generate", "t.csv", "--shape", "nan"), " --shape: nan is not usable"),
        (("traces", "generate", "t.csv", "--lifetime-shape", "0"), " --lifetime-shape: 0.0 is"),
        (("traces", "generate", "t.csv", "--diurnal", "nan"), " --diurnal: nan is not usable"),
        (("traces", "generate", "t.csv", "--diurnal", "2"), " --diurnal: 2.0 is not usable"),
        (("traces", "generate", "t.csv", "--inference", "40"), " --inference: 40 is not usable"),
        (("traces", "generate", "no/such/folder/t.csv"), "OUT: 'no/such/folder/t.csv' is not"),
        (
            ("traces", "generate", "/dev/null"),
            "OUT: '/dev/null' is not usable: it is not a regular",
        ),
        (("traces", "generate", "t.csv", "--like", "absent.csv"), "--like: 'absent.csv' is not"),
        (
            ("traces", "import", "spot-prices", "good.csv", "t.csv"),
            " --bid is missing: spot prices need a bid, in dollars per hour\n",
        ),
        (("traces", "import", "spot-prices", "prices.json", "t.csv", "--bid", "nan"), "--bid"),
        (
            (
                "traces",
                "import",
                "spot-prices",
                "prices.json",
                "t.csv",
                "--bid",
                "1",
                "--nodes",
                "-3",
            ),
            "--nodes",
        ),
        (
            (
                "traces",
                "import",
                "spot-prices",
                "prices.json",
                "t.csv",
                "--bid",
                "1",
                "--product",
                "x",
            ),
            "--product",
        ),
        (
            ("traces", "import", "spot-prices", "prices.json", "t.csv", "--bid", "1"),
            "choose one with --product",
        ),
        (("traces", "import", "tape", "good.csv", "t.csv"), "tape"),
        (("traces", "import", "bamboo", "good.csv", "t.csv"), "3 fields"),
        (("traces", "convert", "good.csv", "t.csv", "--from", "30s"), "a part of 0 to 20 s"),
        (("traces", "fetch", "gold"), "TRACE: 'gold' is not usable: one of p3"),
        (
            ("traces", "fetch", "p3", "--host", "http://127.0.0.1:1"),
            "--host: 'http://127.0.0.1:1' is not usable: it cannot be reached: it refuses the conn",
        ),
        (("traces", "fetch", "p3", "--host", "http://a b"), "--host: 'http://a b' is not usable"),
        (("traces", "fetch", "p3", "--host", "nowhere"), "--host: 'nowhere' is not usable"),
        (("traces", "fetch", "p3", "--host", ""), "--host: '' is not usable"),
        (("traces", "fetch", "p3", "--host", "file:///etc"), "--host: 'file:///etc' is not usable"),
        (("traces", "fetch", "p3", "--to", "good.csv"), "--to"),
        (("sweep", ""), "OUT: '' is not usable: name a file or a folder"),
        (("sweep", "t.csv", "--trace", "/dev/zero"), "/dev/zero' is not usable: it has more than"),
        (("replay", "good.csv", "--policy", ","), "--policy: ',' is not usable: name policies"),
        (("replay", "good.csv", "--policy", "ours:xyz"), " --policy: 'xyz' is not usable"),
        (("replay", "absent.csv"), "TRACE: 'absent.csv' is not usable: there is no such file"),
        (("replay", "bytes"), "TRACE: 'bytes' is not usable: it is not text"),
        (("replay", "bad.json"), "TRACE: bad.json, line 1: '{' is not usable"),
        (("replay", "good.csv", "--model", "absent.json"), "--model: 'absent.json' is not usable"),
        (
            ("replay", "good.csv", "--model", "bad.json"),
            "--model: 'bad.json' is not usable: it is not a profile that `elastic profile` wrote: "
            "not JSON: line 1, column 2: ",
        ),
        (
            ("replay", "good.csv", "--model", "list.json"),
            "--model: 'list.json' is not usable: it i",
        ),
        (
            ("replay", "good.csv", "--physics", "boot_s=-1"),
            " --physics boot_s: -1.0 is not usable: a number from 0 up",
        ),
        (
            (
                "replay",
                "good.csv",
                "--physics",
                "stragglers_per_node_h=1e12",
                "--physics",
                "straggler_s=1e-9",
            ),
            " --physics stragglers_per_node_h: 1000000000000.0 is not usable: 2.2e+09 slowdowns",
        ),
        (("replay", "good.csv", "--to", "0"), " --to: 0.0 is not usable: a time after --from"),
        (("advise", "good.csv", "--to", "0"), " --to: 0.0 is not usable: a time after --from"),
        (("replay", "good.csv", "--notice", "99999999999h"), " --notice: '99999999999h' is not"),
        (("replay", "good.csv", "--nodes", "5"), " --nodes: 5 is not usable: it goes with --mtbf"),
        (("replay", "good.csv", "--duration", "1h"), "--from and --to cut a part out of it"),
        (("advise", "good.csv", "--bulk", "2"), " --bulk: ((2, 1.0),) is not usable: it goes with"),
        (("advise", "absent.csv"), " TRACE: 'absent.csv' is not usable: there is no such file"),
        (("sweep", "t.csv", "--trace", "good.csv", "--repair", "1h"), " --repair: 3600.0 is not"),
        (("sweep", "t.csv", "--trace", "absent.csv"), " --trace: 'absent.csv' is not usable"),
        (("replay", "--mtbf", "1e-9s"), " --mtbf: 1e-09 is not usable: seconds from 1 up"),
        (("validate", ""), " RUN_DIR: '' is not usable"),
        (("validate", "."), " RUN_DIR: '.' is not usable: name a directory that `elastic run"),
        (("validate", ".", "--physics", "bad.json"), " --physics: 'bad.json' is not usable: it is"),
        (("reproduce", "everything"), "everything"),
        (("reproduce", "oobleck", "--data", "absent"), "--data"),
    ],
)
def test_mistakes_are_one_clear_line(
    words: tuple[str, ...], why: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(traces, "MAX_BYTES", 1 << 20)
    Path("good.csv").write_text(GOOD)
    Path("prices.json").write_text(json.dumps({"SpotPriceHistory": PRICES}))
    Path("bytes").write_bytes(b"\x96\xff")
    Path("empty").write_text("")
    Path("bad.json").write_text("{")
    Path("list.json").write_text("[1]")
    done = run(*words)
    assert done.exit_code == 2 and why in done.output, done.output
    assert done.output.count("\n") == 1 and not Path("t.csv").exists()
    for alien in ("Traceback", "Errno", "Error", "codec", "None"):
        assert alien not in done.output


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
    check = "'torch' in sys.modules or 'megatron' in sys.modules"
    program = f"import sys, elastic_sim.cli.cli; sys.exit({check})"
    assert (
        subprocess.run([sys.executable, "-c", program], check=False, timeout=LONG_S).returncode == 0
    )


def test_failure_rates_are_of_the_cluster_or_of_each_node(tmp_path: Path) -> None:
    """If each of 32 nodes is lost every 32 hours, the cluster loses one per hour."""
    made = list[tuple[Event, ...]]()
    for rate, bulk in (("1h", "1"), ("32h/node", "1"), ("16h/node", "2"), ("2h", "2")):
        out = tmp_path / f"{len(made)}.csv"
        done = run(
            "traces", "generate", str(out), "--mtbf", rate, "--bulk", bulk, "--duration", "2d"
        )
        assert done.exit_code == 0, done.output
        made.append(read(out)[0].events)
    assert made[0] == made[1] and made[2] != made[3]
    losses = [sum(e.kind == "remove" for e in events) for events in made]
    assert losses[2] == pytest.approx(2 * losses[0], rel=0.5)
    wrong = run("replay", "--mtbf", "1h/zone", "--model", "bert-large")
    assert wrong.exit_code == 2 and "200h/node" in wrong.output
    args = [
        "--nodes",
        "4",
        "--duration",
        "30m",
        "--model",
        "bert-large",
        "--microbatches",
        "16",
        "--policy",
        "varuna",
    ]
    tables = [run("replay", "--mtbf", rate, *args).output for rate in ("10m", "40m/node")]
    assert tables[0] == tables[1] != run("replay", "--mtbf", "40m", *args).output
    swept = run(
        "sweep",
        str(tmp_path / "sweep"),
        "--mtbf",
        "10m,20m/node",
        *args,
        "--seeds",
        "1",
        "--workers",
        "1",
    )
    assert swept.exit_code == 0 and "mtbf 300 s" in swept.output and "mtbf 600 s" in swept.output


def test_implausible_replays_cause_warnings(tmp_path: Path) -> None:
    """Hours instead of seconds, a model that fits nowhere, and two files of one name."""
    small = ["--model", "bert-large", "--microbatches", "16", "--policy", "varuna"]
    hours = tmp_path / "hours.csv"
    rows = "".join(f"{h},add,n{h},,,\n{h + 0.5},remove,n{h},,,\n" for h in range(40))
    hours.write_text(f"seconds,event,node,zone,type,notice\n{rows}40,end,,,,\n")
    assert "losses per node and hour" in run("replay", str(hours), *small).stderr
    large = [
        "--mtbf",
        "30m",
        "--nodes",
        "2",
        "--duration",
        "10m",
        "--model",
        "llama3-405b",
        "--policy",
        "ours",
    ]
    nothing = run("replay", *large, "--nodes-of", "p3.2xlarge")
    assert (
        nothing.exit_code == 0 and "nothing ever runs: llama3-405b does not fit" in nothing.stderr
    )
    for folder in ("a", "b"):
        (tmp_path / folder).mkdir()
        (tmp_path / folder / "t.csv").write_text(hours.read_text())
    twice = ["--trace", str(tmp_path / "a/t.csv"), "--trace", str(tmp_path / "b/t.csv")]
    refused = run("sweep", str(tmp_path / "out"), *twice, *small)
    assert refused.exit_code == 2 and refused.stderr.startswith(
        "elastic-sim sweep: --trace: 't.csv'"
    )


def test_all_policies_and_others_are_each_run_once() -> None:
    names = policies_of(("all,ours", "ours:log+snapshot"))
    assert names == tuple(dict.fromkeys((*policy_classes(), "ours:log+snapshot")))
