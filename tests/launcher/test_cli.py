"""The command line: bad input is one message and exit code 2, with nothing started and nothing written."""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from elastic.errors import FieldError, UsageError
from elastic.launcher import cli
from elastic.launcher.flags import OURS, TORCHRUN, run_parser
from elastic.launcher.options import Request, request


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty working directory with a script.py and a package `pack`."""
    here = tmp_path / "here"
    (here / "pack" / "inner").mkdir(parents=True)
    (here / "script.py").write_text("")
    (here / "pack" / "__init__.py").write_text("raise SystemExit('imported')")
    (here / "pack" / "inner" / "tool.py").write_text("")
    monkeypatch.chdir(here)
    for name in [name for name in os.environ if name.startswith("PET_")]:
        monkeypatch.delenv(name)
    return here


def read(*words: str, **environ: str) -> Request:
    return request(run_parser(environ).parse_args(list(words)), environ)


WRONG_FLAGS = [
    (["--nnodes", "0"], "--nnodes"),
    (["--nnodes", "two"], "--nnodes"),
    (["--nnodes", "4:2"], "--nnodes"),
    (["--nnodes", "1:2:3"], "--nnodes"),
    (["--nnodes", "-1"], "--nnodes"),
    (["--nproc-per-node", "0"], "--nproc-per-node"),
    (["--nproc-per-node", "many"], "--nproc-per-node"),
    (["--nproc_per_node", "1.5"], "--nproc-per-node"),
    (["--rdzv-backend", "zeus"], "--rdzv-backend"),
    (["--rdzv-backend", "c10d"], "--rdzv-endpoint"),
    (["--rdzv-endpoint", "host:port"], "--rdzv-endpoint"),
    (["--rdzv-endpoint", "host:99999"], "--rdzv-endpoint"),
    (["--rdzv-endpoint", "a b:1"], "--rdzv-endpoint"),
    (["--rdzv-id", " "], "--rdzv-id"),
    (["--rdzv-conf", "timeout"], "--rdzv-conf"),
    (["--rdzv-conf", "is_host=perhaps"], "--rdzv-conf is_host"),
    (["--max-restarts", "-1"], "--max-restarts"),
    (["--max-restarts", "x"], "--max-restarts"),
    (["--monitor-interval", "0"], "--monitor-interval"),
    (["--monitor-interval", "nan"], "--monitor-interval"),
    (["--start-method", "thread"], "--start-method"),
    (["--event-log-handler", "kafka"], "--event-log-handler"),
    (["--role", ""], "--role"),
    (["--log-dir", ""], "--log-dir"),
    (["--log-dir", "script.py"], "--log-dir"),
    (["--log-dir", "script.py/logs"], "--log-dir"),
    (["--redirects", "4"], "--redirects"),
    (["-r", "1:1"], "--redirects"),
    (["--tee", "0:3,1:3"], "--tee"),
    (["-t", "both"], "--tee"),
    (["--log-line-prefix-template", "${host}"], "--log-line-prefix-template"),
    (["--log-line-prefix-template", "$"], "--log-line-prefix-template"),
    (["--local-ranks-filter", "a"], "--local-ranks-filter"),
    (["--local-ranks-filter", "1"], "--local-ranks-filter"),
    (["--nnodes", "2", "--node-rank", "2"], "--node-rank"),
    (["--node-rank", "first"], "--node-rank"),
    (["--nnodes", "2", "--master-addr", "a:b c"], "--master-addr"),
    (["--nnodes", "2", "--master-port", "0"], "--master-port"),
    (["--nnodes", "2", "--master-port", "http"], "--master-port"),
    (["--local-addr", "no good"], "--local-addr"),
    (["--numa-binding", "node"], "--numa-binding"),
    (["--signals-to-handle", "SIGNOPE"], "--signals-to-handle"),
    (["--signals-to-handle", "SIGKILL"], "--signals-to-handle"),
    (["--shutdown-timeout", "-1"], "--shutdown-timeout"),
    (["--shutdown-timeout", "soon"], "--shutdown-timeout"),
    (["--run-dir", ""], "--run-dir"),
    (["--run-dir", "script.py"], "--run-dir"),
    (["--run-dir", "."], "--run-dir"),
    (["--run-dir", ".", "--resume", "auto"], "--run-dir"),
    (["--backup", "stream"], "--backup"),
    (["--backup", "stream+magic"], "--backup"),
    (["--backup", "stream:0+snapshot"], "--backup"),
    (["--backup", "recompute+none"], "--backup"),
    (["--pipelines", "1", "--backup", "stream+replica"], "--backup"),
    (["--vault-memory", "plenty"], "--vault-memory"),
    (["--compress", "always"], "--compress"),
    (["--link", "fast"], "--link"),
    (["--link", "bandwidth=1"], "--link bandwidth"),
    (["--link", "latency=-1ms"], "--link latency"),
    (["--link", "latency=1ms latency=2ms"], "--link"),
    (["--link", "latency=0s"], "--link"),
    (["--metrics-port", "http"], "--metrics-port"),
    (["--metrics-port", "65535"], "--metrics-port"),
    (["--metrics-host", "no good"], "--metrics-host"),
    (["--accumulate", "slow"], "--accumulate"),
    (["--pipelines", "0"], "--pipelines"),
    (["--pipelines", "2+"], "--pipelines"),
    (["--schedule", "gpipe"], "--schedule"),
    (["--node-memory", "lots"], "--node-memory"),
    (["--node-memory", "0"], "--node-memory"),
    (["--node-memory", "1GiB,,2GiB"], "--node-memory"),
    (["--nnodes", "3", "--node-memory", "1GiB,2GiB"], "--node-memory"),
    (["--checkpoint-dir", "script.py"], "--checkpoint-dir"),
    (["--resume", "nowhere"], "--resume"),
    (["--resume", "pack"], "--resume"),
    (["--standalone", "--nnodes", "3", "--domain", "a,b"], "--domain"),
    (["--standalone", "--domain", "a,,b"], "--domain"),
    (["--nnodes", "2", "--domain", "a,b"], "--domain"),
    (["--standalone", "--nnodes", "3", "--lifetime", "60,0"], "--lifetime"),
    (["--standalone", "--lifetime", "soon"], "--lifetime"),
    (["--standalone", "--lifetime", "-1"], "--lifetime"),
    (["--profile", "missing.json"], "--profile"),
    (["--profile", "script.py"], "--profile"),
    (["--emulate", "missing.json"], "--emulate"),
    (["--emulate", "pack"], "--emulate"),
    (["--device", "h100"], "--device"),
    (["--store", "zookeeper://a:1"], "--store"),
    (["--store", "etcd://a"], "--store"),
    (["--store", "etcd://a:1,"], "--store"),
    (["--store", "etcd://127.0.0.1:1"], "--store"),
    (["--nnodes", "2", "--rdzv-endpoint", "a:1", "--store", "etcd://a:1"], "--rdzv-id"),
    (["--store-ca", "missing.pem"], "--store-ca"),
    (["--store-ca", "script.py"], "--store-ca"),
    (["--store", "etcd://a:1", "--store-cert", "script.py"], "--store-cert"),
    (["--store", "etcd://a:1", "--store-key", "script.py"], "--store-key"),
    (["--store", "etcd://a:1", "--store-user", "root"], "--store-user"),
    (["--store", "etcd://a:1", "--store-password-file", "script.py"], "--store-password-file"),
    (
        ["--store", "etcd://a:1", "--store-user", "root", "--store-password-file", "no"],
        "--store-password-file",
    ),
    (["--coordinators", "0"], "--coordinators"),
    (["--coordinators", "three"], "--coordinators"),
    (["--standalone", "--coordinators", "3"], "--coordinators"),
    (["--nnodes", "2", "--coordinators", "3", "--store", "etcd://a:1", "--rdzv-id", "a"], "--coordinators"),
    (["--rdzv-endpoint", "a:1,b:x"], "--rdzv-endpoint"),
    (["--heartbeat", "0"], "--heartbeat"),
    (["--heartbeat", "x"], "--heartbeat"),
    (["--lease", "0.6"], "--lease"),
    (["--lease", "inf"], "--lease"),
    (["--fault", "explode node=1"], "--fault"),
    (["--standalone", "--nnodes", "2", "--fault", "kill node=2"], "--fault node"),
    (["--standalone", "--fault", "kill-worker node=0 worker=1"], "--fault worker"),
    (["--no-such-flag", "1"], "--no-such-flag"),
    (["-m", "--no-python"], "-m"),
    (["--run-path"], "--run-path"),
    (["--no-python"], "SCRIPT"),
]


@pytest.mark.parametrize(("flags", "field"), WRONG_FLAGS, ids=[" ".join(flags) for flags, _ in WRONG_FLAGS])
def test_wrong_flags(place: Path, capfd: pytest.CaptureFixture[str], flags: list[str], field: str) -> None:
    before = sorted(place.rglob("*"))
    shared = set(os.listdir("/dev/shm")) if os.path.isdir("/dev/shm") else set()
    assert cli.main(["run", *flags, "script.py"]) == 2
    out, err = capfd.readouterr()
    assert out == ""
    assert len(err.splitlines()) == 1 and err.startswith("elastic run: ")
    assert field in err and "Traceback" not in err
    assert sorted(place.rglob("*")) == before
    mine = [name for name in set(os.listdir("/dev/shm")) - shared if name.startswith("elastic-job")]
    assert mine == []


def test_every_flag_with_a_value_is_in_the_table() -> None:
    tested = {field.split()[0] for _, field in WRONG_FLAGS}
    unconstrained = {"--module", "--standalone", "--virtual-local-rank"}
    assert {flag.name for flag in (*TORCHRUN, *OURS)} - unconstrained - tested <= {"--no-python"}


@pytest.mark.parametrize(
    ("words", "part"),
    [
        ([], "SCRIPT is missing"),
        (["--nnodes"], "expected one argument"),
        (["missing.py"], "no such file"),
        (["pack/inner"], "without __main__.py"),
        (["-m", "no_such_module"], "no module named no_such_module"),
        (["-m", "pack.nothing"], "no module named pack.nothing"),
        (["-m", "pack"], "without __main__"),
        (["-m", "json.tool.deeper"], "is not a package"),
        (["--no-python", "no-such-tool"], "executable"),
        (["--run-path", "script.py"], "absolute path"),
    ],
)
def test_wrong_scripts(place: Path, capsys: pytest.CaptureFixture[str], words: list[str], part: str) -> None:
    assert cli.main(["run", *words]) == 2
    assert part in capsys.readouterr().err


@pytest.mark.parametrize(
    ("words", "part"),
    [
        (["fly"], "is no command"),
        ([], "is no command"),
        (["status", "--watch", "--interval", "0"], "--interval"),
        (["status", "--run-dir", "nowhere"], "no coordinator runs there"),
        (["nodes", "--rdzv-endpoint", "x:y"], "--rdzv-endpoint"),
        (["drain"], "NODE"),
        (["drain", "node1", "--deadline", "x"], "--deadline"),
        (["drain", "node1", "--deadline", "-2"], "--deadline"),
        (["plan", "missing.txt"], "FILE"),
        (["plan", "script.py"], "plan"),
        (["export", "missing", "out"], "CHECKPOINT"),
        (["export", "pack", "script.py"], "OUT"),
        (["export", "pack", "no/such/out"], "OUT"),
        (["coordinator", "script.py"], "--address"),
        (["agent", "--coordinator", "h:0", "script.py"], "--coordinator"),
        (["agent", "--coordinator", "h:1", "--node", "a/b", "script.py"], "--node"),
        (["coordinator", "--address", "h:1", "--standalone", "script.py"], "--standalone"),
    ],
)
def test_wrong_other_commands(
    place: Path, capsys: pytest.CaptureFixture[str], words: list[str], part: str
) -> None:
    before = sorted(place.rglob("*"))
    assert cli.main(words) == 2
    out, err = capsys.readouterr()
    assert part in err and len(err.splitlines()) == 1 and out == ""
    assert sorted(place.rglob("*")) == before


def test_status_of_a_run_that_is_over(place: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (place / "coordinator.json").write_text('{"address": "127.0.0.1:1"}')
    (place / "exit.json").write_text('{"code": 3, "reason": "too much was lost"}')
    assert cli.main(["status", "--run-dir", "."]) == 2
    assert "is over: too much was lost (exit code 3)" in capsys.readouterr().err


# ---- right input ---------------------------------------------------------------------------------------


def test_torchruns_meanings(place: Path) -> None:
    config = read("script.py").config
    assert config.standalone and (config.min_nodes, config.max_nodes, config.nproc_per_node) == (1, 1, 1)
    assert (config.max_restarts, config.monitor_interval_s, config.shutdown_timeout_s) == (0, 0.1, 30.0)
    wanted = read(
        "--standalone", "--nnodes=2:4", "--nproc_per_node=2", "--max_restarts=3", "-r", "0:1,1:3", "-t", "3",
        "--role", "trainer", "--rdzv_id", "my job", "--monitor_interval", "1", "--local_ranks_filter", "0",
        "--virtual-local-rank", "--shutdown_timeout", "5", "-m", "json.tool", "--nnodes", "9", "-r",
    )  # fmt: skip
    config = wanted.config
    assert (config.min_nodes, config.max_nodes, config.nproc_per_node) == (2, 4, 2)
    assert (config.redirects, config.tee, config.local_ranks_filter) == ((1, 3), (3,), (0,))
    assert config.run_id == "my job" and config.job_id.startswith("my-job-")
    assert (config.command.module, config.command.script) == (True, "json.tool")
    assert config.command.args == ("--nnodes", "9", "-r")
    assert wanted.nodes == ("node0", "node1", "node2", "node3") and wanted.hosts
    assert config.command.argv("py") == ("py", "-u", "-m", "json.tool", "--nnodes", "9", "-r")


def test_defaults_from_the_environment(place: Path) -> None:
    config = read(
        "script.py", PET_NNODES="3", PET_STANDALONE="1", PET_MAX_RESTARTS="2", PET_BACKUP="none"
    ).config
    assert (config.max_nodes, config.standalone, config.max_restarts, config.backup) == (
        3, True, 2, "none+none",
    )  # fmt: skip
    assert read("--nnodes", "5", "--standalone", "script.py", PET_NNODES="3").config.max_nodes == 5
    with pytest.raises(FieldError, match="PET_STANDALONE"):
        read("script.py", PET_STANDALONE="yes")


def test_who_starts_the_coordinator(place: Path) -> None:
    static = ["--nnodes", "2", "--master-addr", "10.0.0.1", "--master-port", "1234"]
    first, second = read(*static, "script.py"), read(*static, "--node-rank", "1", "script.py")
    assert (first.hosts, first.nodes, first.config.coordinator) == (True, ("node0",), "10.0.0.1:1234")
    assert (second.hosts, second.nodes, second.config.coordinator) == (False, ("node1",), "10.0.0.1:1234")
    dynamic = read("--nnodes", "2", "--rdzv-backend", "c10d", "--rdzv-endpoint", "10.0.0.1", "script.py")
    assert (dynamic.hosts, dynamic.config.coordinator) == (None, "10.0.0.1:29400")
    told = read("--nnodes", "2", "--rdzv-endpoint", "h:5", "--rdzv-conf", "is_host=1,timeout=9", "script.py")
    assert told.hosts is True and told.config.rdzv_conf == (("is_host", "1"), ("timeout", "9"))


def test_modules_are_found_without_importing_them(place: Path) -> None:
    assert read("-m", "pack.inner.tool").config.command.module
    assert "pack" not in sys.modules


def test_configuration_reads_back(place: Path) -> None:
    from elastic.config import load_config

    config = read(
        "--standalone", "--nnodes", "4", "--fault", "kill node=2 step=3",
        "--fault", "join step=4", "--node-memory", "1.5GiB", "--domain", "a,a,b,b",
        "--run-dir", "out", "script.py", "--x", "y",
    ).config  # fmt: skip
    Path(config.run_dir).mkdir()
    config.save()
    assert load_config(config.run_dir) == config
    assert config.node_memory_bytes(1) == config.node_memory_bytes(3) == 3 << 29
    assert [config.domain(i) for i in range(4)] == ["a", "a", "b", "b"]
    (place / "out" / "config.json").write_text('{"job_id": 1}')
    with pytest.raises(FieldError, match="JobConfig"):
        load_config(config.run_dir)
    with pytest.raises(UsageError, match="directory of a run"):
        load_config(place)


def test_resume(place: Path) -> None:
    assert read("--resume", "auto", "--run-dir", "new", "script.py").config.resume == ""
    (place / "saved" / "step-00000004").mkdir(parents=True)
    again = read("--resume", "auto", "--checkpoint-dir", "saved", "script.py").config
    assert again.resume == str(place / "saved")
    assert read("--resume", "saved/step-00000004", "script.py").config.resume.endswith("step-00000004")
    config = read("--run-dir", "used", "script.py").config
    (place / "used").mkdir()
    config.save()
    assert read("--run-dir", "used", "--resume", "auto", "script.py").in_place


def test_torchrun_has_no_flag_that_ours_lacks() -> None:
    run = pytest.importorskip("torch.distributed.run")
    theirs = {
        option
        for action in run.get_args_parser()._actions
        for option in action.option_strings
        if option.startswith("--")
    }
    internal = {"--logs-specs", "--logs_specs", "--help"}
    internal |= {name for name in theirs if "duplicate" in name}
    parser: argparse.ArgumentParser = run_parser({})
    ours = {option for action in parser._actions for option in action.option_strings}
    assert theirs - internal - ours == set()


# ---- start-up ------------------------------------------------------------------------------------------


def test_help_is_quick_and_imports_nothing_heavy(environment: dict[str, str]) -> None:
    code = (
        "import sys, json\nfrom elastic.launcher import cli\n"
        "try: cli.main(['run', '--help'])\nexcept SystemExit: pass\n"
        "import elastic.launcher.local, elastic.launcher.queries, elastic.launcher.services\n"
        "print(json.dumps([m for m in ('torch', 'numpy', 'megatron', 'grpc', 'tqdm') if m in sys.modules]))"
    )
    began = time.monotonic()
    done = subprocess.run(
        [sys.executable, "-c", code], env=environment, capture_output=True, text=True, timeout=30, check=True
    )
    assert json.loads(done.stdout.splitlines()[-1]) == []
    assert "--nproc-per-node" in done.stdout and "--fault" in done.stdout
    assert time.monotonic() - began < 5.0  # a heavy import would be named above; this only catches hangs


def test_version(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["--version"]) == 0
    assert capsys.readouterr().out.startswith("elastic ")
