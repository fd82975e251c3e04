"""Flags and variables without effect: a warning in one line each, and the job runs."""

from __future__ import annotations

import pytest

from elastic.command_line import read_flags
from elastic.launcher import cli
from elastic.launcher.commands import run as commands
from elastic.launcher.commands.run import run
from elastic.launcher.flags.flags import UNUSED_BY_SERVICES
from elastic.launcher.flags.request import Request, request
from elastic.launcher.flags.unused import unused_flags, unused_variables

pytestmark = pytest.mark.usefixtures("place")


def unused(*words: str) -> list[str]:
    """The flags of `elastic run WORDS` that have no effect."""
    flags = read_flags(run, [*words, "script.py"])
    texts = unused_flags(flags, request(flags, {}).config)
    return [text.partition(" has no effect: ")[0] for text in texts]


LOCAL, TWO = ["--standalone", "--nnodes", "2"], ["--nnodes", "2", "--rdzv-backend", "c10d"]
HERE = ["--rdzv-endpoint", "127.0.0.1:29400"]


@pytest.mark.parametrize(
    ("words", "flag"),
    [
        ([*LOCAL, *HERE], "--rdzv-endpoint"),
        ([*LOCAL, "--rdzv-conf", "is_host=true"], "--rdzv-conf"),
        ([*LOCAL, "--local-addr", "10.9.9.9"], "--local-addr"),
        ([*LOCAL, "--insecure"], "--insecure"),
        ([*LOCAL, "--node-rank", "1"], "--node-rank"),
        ([*LOCAL, "--master-addr", "a"], "--master-addr"),
        ([*LOCAL, "--master-port", "5000"], "--master-port"),
        ([*LOCAL, "--metrics-host", "10.9.9.9"], "--metrics-host"),
        ([*LOCAL, "--verify-every", "3"], "--verify-every"),
        ([*LOCAL, "--certs-name", "job"], "--certs-name"),
        ([*LOCAL, "--log-line-prefix-template", "${rank}"], "--log-line-prefix-template"),
        (["--link", "latency=1ms"], "--link"),
        ([*TWO, *HERE, "--node-rank", "1"], "--node-rank"),
        ([*TWO, *HERE, "--rdzv-conf", "is_hots=1"], "--rdzv-conf is_hots"),
        ([*TWO, *HERE, "--rdzv-conf", "is_host=1,timeout=9"], "--rdzv-conf timeout"),
        (["--nnodes", "2", *HERE, "--master-port", "1"], "--master-port"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_a_flag_without_effect_is_told(words: list[str], flag: str) -> None:
    assert unused(*words) == [flag]


@pytest.mark.parametrize(
    "words",
    [
        LOCAL,
        [*LOCAL, "--rdzv-backend", "c10d", "--link", "latency=1ms", "--tee", "3"],
        [*LOCAL, "--metrics-port", "0", "--metrics-host", "127.0.0.1"],
        [*LOCAL, "--accumulate", "exact", "--verify-every", "3"],
        [*TWO, *HERE, "--rdzv-conf", "is_host=1", "--local-addr", "127.0.0.1"],
        [
            "--nnodes",
            "2",
            "--node-rank",
            "1",
            "--master-addr",
            "127.0.0.1",
            "--master-port",
            "5000",
        ],
    ],
)
def test_flags_with_an_effect_are_not_told(words: list[str]) -> None:
    assert unused(*words) == []


def test_a_variable_may_be_for_another_job(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PET_METRICS_HOST", "10.9.9.9")
    monkeypatch.setenv("PET_RDZV_ENDPOINT", "a:1")
    assert unused(*LOCAL) == []


def test_variables_that_are_of_no_flag_are_told() -> None:
    known = {"PET_NNODES": "2", "PET_NPROC_PER_NODE": "1", "PET_FAULT": "join", "PATH": "/"}
    assert unused_variables(known) == []
    (far, near) = unused_variables({**known, "PET_PIPELINE": "3", "PET_GIVEN": "1"})
    assert near.startswith("PET_PIPELINE has no effect") and "mean PET_PIPELINES?" in near
    assert far.startswith("PET_GIVEN has no effect") and "mean" not in far


def test_the_job_runs_after_the_warnings(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("PET_PIPELINE", "3")
    assert cli.main(["run", "--standalone", *HERE, "script.py"]) == 0
    first, second, *_ = capfd.readouterr().err.splitlines()
    assert first.startswith("elastic: warning: --rdzv-endpoint has no effect: with --standalone")
    assert second.startswith("elastic: warning: PET_PIPELINE has no effect")


def test_a_service_does_not_use_flags_of_the_rendezvous() -> None:
    flags = read_flags(run, ["--nnodes", "2", *HERE, "--node-rank", "1", "script.py"])
    texts = unused_flags(flags, request(flags, {}).config, UNUSED_BY_SERVICES)
    assert sorted(text.split()[0] for text in texts) == ["--node-rank", "--rdzv-endpoint"]
    assert all("a flag of its own" in text for text in texts)


@pytest.mark.parametrize("variable", ["PET_COORDINATORS", "PET_NODE_RANK", "PET_RDZV_ENDPOINT"])
def test_a_service_accepts_variables_of_other_commands(
    monkeypatch: pytest.MonkeyPatch, variable: str
) -> None:
    monkeypatch.setenv(variable, "3")
    tasks: list[Request] = []
    monkeypatch.setattr(commands, "_launch", tasks.append)
    assert cli.main(["coordinator", "--address", "127.0.0.1:29400", "script.py"]) == 0
    (task,) = tasks
    assert task.config.coordinator == "127.0.0.1:29400" and task.config.coordinators == 1
