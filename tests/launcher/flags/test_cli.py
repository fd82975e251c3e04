"""The command line: wrong input gives one line and exit code 2; nothing is started or written."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from elastic.core.protocol.fault_spec import parse_fault
from elastic.domain.errors import FieldError, UsageError
from elastic.launcher import cli
from elastic.launcher.commands.run import run
from elastic.launcher.flags.flags import OURS, RAY, TORCHRUN, UNUSED_BY_SERVICES
from elastic.launcher.run.supervisor import agent_args
from tests.agent.vault.checkpoints import whole
from tests.launcher.flags.wrong_flags import WRONG_FLAGS
from tests.launcher.helpers import read
from tests.patience import LONG_S

CLUSTER = str(Path(__file__).parents[3] / "examples" / "clusters" / "small.toml")


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


@pytest.mark.parametrize(
    ("flags", "field"), WRONG_FLAGS, ids=[" ".join(flags) for flags, _ in WRONG_FLAGS]
)
def test_wrong_flags(
    place: Path, capfd: pytest.CaptureFixture[str], flags: list[str], field: str
) -> None:
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
    assert {flag.opts[0] for flag in (*TORCHRUN, *OURS, *RAY)} - unconstrained - tested <= {
        "--no-python"
    }


@pytest.mark.parametrize(
    ("words", "part"),
    [
        ([], "SCRIPT is missing"),
        (["--nnodes"], "requires an argument"),
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
def test_wrong_scripts(
    place: Path, capsys: pytest.CaptureFixture[str], words: list[str], part: str
) -> None:
    assert cli.main(["run", *words]) == 2
    assert part in capsys.readouterr().err


@pytest.mark.parametrize(
    ("words", "part"),
    [
        (["fly"], "No such command"),
        ([], "Missing command"),
        (["status", "--watch", "--interval", "0"], "--interval"),
        (["status", "--run-dir", "nowhere"], "no such directory"),
        (["nodes", "--rdzv-endpoint", "x:y"], "--rdzv-endpoint"),
        (["drain"], "NODE"),
        (["drain", "node1", "--self"], "NODE"),
        (["drain", "--self", "--run-dir", "nowhere"], "nothing runs in nowhere"),
        (["drain", "node1", "--deadline", "x"], "--deadline"),
        (["drain", "node1", "--deadline", "-2"], "--deadline"),
        (["preflight", "--run-dir", "script.py"], "--run-dir"),
        (["preflight", "--checkpoint-dir", ""], "--checkpoint-dir"),
        (["preflight", "--node-memory", "lots"], "--node-memory"),
        (["preflight", "--rdzv-endpoint", "x:y"], "--rdzv-endpoint"),
        (["plan", "missing.txt"], "FILE"),
        (["plan", "script.py"], "plan"),
        (["export", "missing", "out"], "CHECKPOINT"),
        (["export", "pack", "script.py"], "OUT"),
        (["export", "pack", "no/such/out"], "OUT"),
        (["coordinator", "script.py"], "--address"),
        (["kubernetes", "apply"], "render"),
        (["agent", "--coordinator", "h:0", "script.py"], "--coordinator"),
        (["agent", "--coordinator", "h:1", "--node", "a/b", "--insecure", "script.py"], "--node"),
        (["agent", "--coordinator", "10.0.0.1:1", "script.py"], "--certs"),
        (
            ["agent", "--coordinator", "a..b:1", "--insecure", "script.py"],
            "--coordinator: 'a..b:1'",
        ),
        (["coordinator", "--address", "a..b:1", "--insecure", "script.py"], "--address: 'a..b:1'"),
        (["coordinator", "--address", "10.0.0.1:1", "script.py"], "--address: '10.0.0.1'"),
        (["agent", "--coordinator", "127.0.0.1:1,10.0.0.1:1", "script.py"], "--certs"),
        (["agent", "--coordinator", "10.0.0.1:1,127.0.0.1:1", "script.py"], "--certs"),
        (["status", "--rdzv-endpoint", "h:1", "--certs", "nowhere"], "--certs"),
        (
            ["status", "--rdzv-endpoint", "h:1", "--join-token-file", "script.py"],
            "--join-token-file",
        ),
        (
            ["status", "--rdzv-endpoint", "h:1", "--join-token-file", "/dev/zero"],
            "'/dev/zero' is not usable: a token of 16 to 4096",
        ),
        (["plan", "/dev/zero"], "FILE: '/dev/zero' is not usable: it has more than"),
        (["plan", CLUSTER, "--run-dir", "pack"], "--run-dir: 'pack'"),
        (["plan", CLUSTER, "--rdzv-endpoint", "h:1"], "--rdzv-endpoint: 'h:1'"),
        (["profile", "--out", "", "script.py"], "--out: '' is not usable: name a file"),
        (["profile", "--into", "/dev/zero", "script.py"], "--into: '/dev/zero'"),
        (["certs"], "--out"),
        (["certs", "--out", "script.py"], "--out"),
        (["certs", "--out", "new", "--hosts", "a,,b"], "--hosts"),
        (["certs", "--out", "new", "--days", "0"], "--days"),
        (["certs", "--out", "new", "--ca-days", "x"], "--ca-days"),
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


@pytest.mark.parametrize("flag", ["--domain", "--role", "--rdzv-id"])
def test_a_name_that_is_not_utf8(
    place: Path, capsys: pytest.CaptureFixture[str], flag: str
) -> None:
    assert cli.main(["run", "--standalone", flag, os.fsdecode(b"\xff"), "script.py"]) == 2
    assert f"{flag}: " in (err := capsys.readouterr().err) and len(err.splitlines()) == 1


@pytest.mark.parametrize(
    ("command", "variable", "value"),
    [
        ("run", "PET_NNODES", "x"),  # a value that its flag refuses
        ("run", "PET_TEE", "9"),  # that is checked together with other flags
        ("run", "PET_MAX_RESTARTS", "x"),  # that click refuses
        ("run", "PET_FAULT", "kill node=7"),
        ("run", "TORCH_ELASTIC_SHUTDOWN_TIMEOUT", "soon"),
        ("status", "PET_CERTS", "nowhere"),
    ],
)
def test_an_error_names_the_variable_that_gave_the_value(
    place: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    command: str,
    variable: str,
    value: str,
) -> None:
    monkeypatch.setenv(variable, value)
    words = [command, "script.py"] if command == "run" else [command]
    assert cli.main(words) == 2
    err = capsys.readouterr().err
    assert f"given by the environment variable {variable}" in err and len(err.splitlines()) == 1


def test_an_error_names_no_variable_that_a_flag_replaces(
    place: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PET_NNODES", "x")
    assert cli.main(["run", "--nnodes", "y", "script.py"]) == 2
    assert "environment variable" not in capsys.readouterr().err


@pytest.mark.parametrize(
    ("typed", "meant"),
    [("rnu", "run"), ("state", "status"), ("plna", "plan"), ("prefligth", "preflight")],
)
def test_a_mistyped_command_is_suggested(
    capsys: pytest.CaptureFixture[str], typed: str, meant: str
) -> None:
    assert cli.main([typed, "--json"]) == 2
    err = capsys.readouterr().err
    assert f"Did you mean '{meant}'?" in err and len(err.splitlines()) == 1


@pytest.mark.parametrize(
    "words", [["run", "--nnodes"], ["status", "--run-dir"], ["certs", "--out"]]
)
def test_a_missing_value_names_the_command(
    capsys: pytest.CaptureFixture[str], words: list[str]
) -> None:
    assert cli.main(words) == 2
    command, flag = words
    text = (
        f"elastic {command}: Option '{flag}' requires an argument. (see `elastic {command} --help`)"
    )
    assert capsys.readouterr().err == f"{text}\n"


def test_status_of_a_run_that_is_over(place: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (place / "coordinator.json").write_text('{"address": "127.0.0.1:1"}')
    (place / "exit.json").write_text('{"code": 3, "reason": "too much was lost"}')
    assert cli.main(["status", "--run-dir", "."]) == 0
    assert "reason: too much was lost\nexit_code: 3\n" in capsys.readouterr().out
    assert cli.main(["nodes", "--run-dir", "."]) == 2
    assert "is over: too much was lost (exit code 3)" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("job", "code", "phase"),
    [("", 130, "interrupted"), ('{"code": 0, "reason": "x"}', 1, "failed")],
)
def test_status_of_a_launcher_that_ended_otherwise(
    place: Path, capsys: pytest.CaptureFixture[str], job: str, code: int, phase: str
) -> None:
    """A signal ended the launcher, or the script failed after its training."""
    (place / "coordinator.json").write_text('{"address": "127.0.0.1:1"}')
    (place / "launcher-exit.json").write_text(json.dumps({"code": code, "reason": "its cause"}))
    if job:
        (place / "exit.json").write_text(job)
    assert cli.main(["status", "--run-dir", "."]) == 0
    out = capsys.readouterr().out
    assert out.startswith(f"phase: {phase}\nreason: its cause\nexit_code: {code}\n")


def test_preflight_of_a_sound_machine(place: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["preflight", "--json", "--checkpoint-dir", "new"]) == 0
    answer = json.loads(capsys.readouterr().out)
    assert answer["ok"] and answer["score"] > 0 and answer["seconds"] > 0
    assert {"compute", "memory", "disk:run", "disk:memory", "disk:checkpoints"} <= {
        c["check"] for c in answer["checks"]
    }
    assert not (place / "new").exists()


def test_preflight_reports_problems_and_ends_with_1(
    place: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ["preflight", "--node-memory", "1000000TiB"]
    assert cli.main(words) == 0, "a warning"
    assert cli.main([*words, "--strict"]) == 1
    assert "--node-memory" in capsys.readouterr().out


# ---- correct input ----


def test_torchruns_meanings(place: Path) -> None:
    config = read("script.py").config
    assert config.standalone and (config.min_nodes, config.max_nodes, config.nproc_per_node) == (
        1,
        1,
        1,
    )
    assert (config.max_restarts, config.monitor_interval_s, config.shutdown_timeout_s) == (
        0,
        0.1,
        30.0,
    )
    wanted = read(
        "--standalone", "--nnodes=2:4", "--nproc_per_node=2", "--max_restarts=3",
        "-r", "0:1,1:3", "-t", "3", "--role", "trainer", "--rdzv_id", "my job",
        "--monitor_interval", "1", "--local_ranks_filter", "0",
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
    assert read("script.py", PET_FAULT="join step=4").config.faults == (parse_fault("join step=4"),)


def test_a_wrong_variable_is_named(
    place: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("PET_STANDALONE", "perhaps")
    assert cli.main(["run", "script.py"]) == 2
    err = capsys.readouterr().err
    assert "PET_STANDALONE" in err and "'perhaps'" in err and len(err.splitlines()) == 1


@pytest.mark.parametrize(
    ("words", "part"),
    [
        (["--run-dir", "--standalone"], "'--run-dir' requires an argument"),
        (["--run_dir", "--max_restarts=2"], "'--run-dir' requires an argument"),
        (["--nodes", "2"], "'--nnodes'"),
        (["--max_restart", "2"], "'--max-restarts'"),
    ],
)
def test_mistyped_flags(
    place: Path, capsys: pytest.CaptureFixture[str], words: list[str], part: str
) -> None:
    assert cli.main(["run", *words, "script.py"]) == 2
    err = capsys.readouterr().err
    assert part in err and "elastic run --help" in err and len(err.splitlines()) == 1


def test_the_scripts_arguments_are_its_own(place: Path) -> None:
    words = ("--nnodes", "x", "--", "--no_such", "-r", "a=b")
    assert read("--standalone", "script.py", *words).config.command.args == words
    assert read("--", "script.py", *words).config.command.args == words
    assert read("--nnodes=1", "-m", "json.tool", "-m", *words).config.command.args == ("-m", *words)


@pytest.mark.parametrize("pipelines", ["auto", "2", "4", "1+1", "4+4", "3+1+2"])
def test_shapes_that_a_job_may_have(place: Path, pipelines: str) -> None:
    words = ["--standalone", "--nnodes", "1:4", "--nproc-per-node", "2"]
    assert read(*words, "--pipelines", pipelines, "script.py").config.pipelines == pipelines


@pytest.mark.parametrize("flag", ["--backup", "--pipelines"])
def test_a_wrong_scheme_is_told_before_a_wrong_script(
    place: Path, capsys: pytest.CaptureFixture[str], flag: str
) -> None:
    assert cli.main(["run", flag, "snapshott", "no-such.py"]) == 2
    assert capsys.readouterr().err.startswith(f"elastic run: {flag}: 'snapshott'")


@pytest.mark.parametrize("backend", ["static", "c10d", "elastic", "etcd", "etcd-v2"])
def test_every_backend_of_torchrun_goes_with_standalone(place: Path, backend: str) -> None:
    config = read("--standalone", "--nnodes", "2", "--rdzv-backend", backend, "script.py").config
    assert config.standalone and not config.coordinator and not config.store.shared


def test_streams_as_torchrun_takes_them(place: Path) -> None:
    for words in (("-r", "3"), ("-r3",), ("-r=3",), ("--redirects=3",)):
        assert read(*words, "script.py").config.redirects == (3,)


def test_which_node_starts_the_coordinator(place: Path) -> None:
    static = ["--nnodes", "2", "--master-addr", "10.0.0.1", "--master-port", "1234", "--insecure"]
    first, second = read(*static, "script.py"), read(*static, "--node-rank", "1", "script.py")
    assert (first.hosts, first.nodes, first.config.coordinator) == (
        True,
        ("node0",),
        "10.0.0.1:1234",
    )
    assert (second.hosts, second.nodes, second.config.coordinator) == (
        False,
        ("node1",),
        "10.0.0.1:1234",
    )
    there = ["--insecure", "--rdzv-endpoint", "10.0.0.1"]
    dynamic = read("--nnodes", "2", "--rdzv-backend", "c10d", *there, "script.py")
    assert (dynamic.hosts, dynamic.config.coordinator) == (None, "10.0.0.1:29400")
    answer = read(
        "--nnodes",
        "2",
        "--insecure",
        "--rdzv-endpoint",
        "h:5",
        "--rdzv-conf",
        "is_host=1,timeout=9",
        "script.py",
    )
    assert answer.hosts is True and answer.config.rdzv_conf == (("is_host", "1"), ("timeout", "9"))


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
    last = agent_args(config, "node3", 3, "a:1", "b")
    assert last[-4:] == ["--domain", "b", "--memory", str(3 << 29)]
    (place / "out" / "config.json").write_text('{"job_id": 1}')
    with pytest.raises(FieldError, match=r"config\.json' is not usable: the file is damaged"):
        load_config(config.run_dir)
    with pytest.raises(UsageError, match="directory of a run"):
        load_config(place)


@pytest.mark.parametrize("text", ["", '{"job_id": ', "[]"])
def test_status_of_a_run_with_a_damaged_configuration(
    place: Path, capsys: pytest.CaptureFixture[str], text: str
) -> None:
    (place / "coordinator.json").write_text('{"address": "127.0.0.1:9"}')
    (place / "config.json").write_text(text)
    assert cli.main(["status", "--run-dir", "."]) == 2
    err = capsys.readouterr().err
    assert "--run-dir: 'config.json' is not usable: the file is damaged" in err


def test_resume(place: Path) -> None:
    assert read("--resume", "auto", "--run-dir", "new", "script.py").config.resume == ""
    whole(place / "saved", 4)
    again = read("--resume", "auto", "--checkpoint-dir", "saved", "script.py").config
    assert again.resume == str(place / "saved")
    assert read("--resume", "saved/step-00000004", "script.py").config.resume.endswith(
        "step-00000004"
    )
    config = read("--run-dir", "used", "script.py").config
    (place / "used").mkdir()
    config.save()
    assert read("--run-dir", "used", "--resume", "auto", "script.py").in_place


def test_torchrun_has_no_flag_that_ours_lacks() -> None:
    torchrun = pytest.importorskip("torch.distributed.run")
    theirs = {
        option
        for action in torchrun.get_args_parser()._actions
        for option in action.option_strings
        if option.startswith("--")
    }
    internal = {"--logs-specs", "--logs_specs", "--help"}
    internal |= {name for name in theirs if "duplicate" in name}
    ours = {option for param in run.params for option in param.opts}
    assert {name.replace("_", "-") for name in theirs - internal} - ours == set()


# ---- start-up ----


def test_help_is_quick_and_imports_nothing_heavy(environment: dict[str, str]) -> None:
    code = (
        "import sys, json\nfrom elastic.launcher import cli\n"
        "try: cli.main(['run', '--help'])\nexcept SystemExit: pass\n"
        "import elastic.launcher.run.supervisor\n"
        "import elastic.launcher.commands.queries, elastic.launcher.commands.run\n"
        "heavy = ('torch', 'numpy', 'megatron', 'grpc', 'tqdm')\n"
        "print(json.dumps([m for m in heavy if m in sys.modules]))"
    )
    done = subprocess.run(
        [sys.executable, "-c", code],
        env=environment,
        capture_output=True,
        text=True,
        timeout=LONG_S,
        check=True,
    )
    assert json.loads(done.stdout.splitlines()[-1]) == []
    assert "--nproc-per-node" in done.stdout and "--fault" in done.stdout


@pytest.mark.parametrize(
    ("command", "own"), [("coordinator", "--address"), ("agent", "--coordinator")]
)
def test_the_help_of_a_service_begins_with_its_own_flags(
    capsys: pytest.CaptureFixture[str], command: str, own: str
) -> None:
    assert cli.main([command, "--help"]) == 0
    flags = re.findall(r"^  (--[a-z-]+)", capsys.readouterr().out, re.MULTILINE)
    assert flags[0] == own and "--max-restarts" in flags and "--run-dir" in flags
    assert not set(UNUSED_BY_SERVICES) & set(flags)


def test_run_shows_every_flag(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["run", "--help"]) == 0
    flags = re.findall(r"^ .*?(--[a-z-]+)", capsys.readouterr().out, re.MULTILINE)
    assert {flag.opts[0] for flag in (*TORCHRUN, *OURS, *RAY)} <= set(flags)


def test_version(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["--version"]) == 0
    assert capsys.readouterr().out.startswith("elastic ")
