"""Worker processes: environment, output, exit codes and ends. Uses real processes."""

from __future__ import annotations

import json
import os
import queue
import re
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from elastic.agent.workers import processes
from elastic.agent.workers.output import Output
from elastic.agent.workers.processes import (
    IDLE_S,
    DescendantSampler,
    WorkerExit,
    WorkerGroup,
    descendant_cpu_s,
    process_sample,
    queued_s,
    worker_environment,
)
from elastic.config import JobConfig, WorkerCommand
from elastic.console import Console
from elastic.core.node.node import ProcessSample
from elastic.core.protocol.fault_spec import load_faults, parse_fault
from elastic.core.protocol.messages import Launch
from elastic.domain.types import NodeInfo
from elastic.logs import LogSource
from tests.disks import fill, small_disk
from tests.launcher.helpers import gone, wait_until
from tests.patience import LONG_S

LAUNCH = Launch(
    group_rank=1,
    group_world_size=2,
    rank=2,
    world_size=4,
    master_addr="10.0.0.1",
    master_port=1234,
    restart=3,
)
PLACE = NodeInfo("node1", "", "", host="10.0.0.2")
SLEEP = "import time; print('up', flush=True); time.sleep(60)"
Running = tuple[WorkerGroup, "queue.Queue[WorkerExit]"]
MakeConfig = Callable[..., JobConfig]


@contextmanager
def running(config: JobConfig, console: tuple[int, int] = (1, 2)) -> Iterator[Running]:
    exits: queue.Queue[WorkerExit] = queue.Queue()
    group = WorkerGroup(config, LAUNCH, PLACE, exits.put, Console(console))
    group.start()
    try:
        yield group, exits
    finally:
        group.kill()


def log(config: JobConfig, rank: int, stream: str = "stdout") -> str:
    return (config.log_path("node1", 3, rank) / f"{stream}.log").read_text()


def test_workers_may_start_while_they_are_sampled(make_config: MakeConfig) -> None:
    """The agent polls on one thread, and starts workers on another one."""
    group = WorkerGroup(make_config(), LAUNCH, PLACE, lambda ended: None, Console())
    with subprocess.Popen([sys.executable, "-c", SLEEP], stdout=subprocess.DEVNULL) as process:

        class StartsOne(threading.Condition):
            """A worker has started whenever somebody leaves the lock."""

            def __exit__(self, *args: Any) -> None:
                super().__exit__(*args)
                group._processes[0] = process

        group._changed = StartsOne()
        try:
            assert group.samples() == ()
            assert [one.rank for one in group.samples()] == [0]
        finally:
            process.kill()


def test_environment_is_torchruns(make_config: MakeConfig) -> None:
    config = make_config(
        "import json, os, sys; print(json.dumps([dict(os.environ), sys.argv[1:]]))",
        ("--x", "1"),
        nproc_per_node=2,
        max_restarts=5,
        run_id="abc",
        role="trainer",
        faults=(parse_fault("kill node=1 step=2"),),
    )
    with running(config, (os.open(os.devnull, os.O_WRONLY), 2)) as (group, exits):
        assert group.wait(LONG_S)
        assert {exits.get(timeout=LONG_S).returncode for _ in range(2)} == {0}
    env, argv = json.loads(log(config, 1))
    expected = {
        "RANK": "3", "LOCAL_RANK": "1", "GROUP_RANK": "1", "ROLE_RANK": "3", "ROLE_NAME": "trainer",
        "LOCAL_WORLD_SIZE": "2", "WORLD_SIZE": "4", "GROUP_WORLD_SIZE": "2", "ROLE_WORLD_SIZE": "4",
        "MASTER_ADDR": "10.0.0.1", "MASTER_PORT": "1234", "TORCHELASTIC_RESTART_COUNT": "3",
        "TORCHELASTIC_MAX_RESTARTS": "5", "TORCHELASTIC_RUN_ID": "abc", "OMP_NUM_THREADS": "1",
        "ELASTIC_AGENT": f"{config.memory_dir}/node1/agent.sock",
        "ELASTIC_NODE": "node1", "ELASTIC_LOCAL_RANK": "1",
        "ELASTIC_HOST": "10.0.0.2", "ELASTIC_RUN_DIR": config.run_dir,
        "ELASTIC_MEMORY_DIR": config.memory_dir, "ELASTIC_ACCUMULATE": "fast",
        "ELASTIC_VERIFY_EVERY": "1", "ELASTIC_ON_NONFINITE": "stop",
        "ELASTIC_TP_STORE": group.tp_store,
    }  # fmt: skip
    assert {key: env.get(key) for key in expected} == expected
    assert Path(env["TORCHELASTIC_ERROR_FILE"]).parent == config.log_path("node1", 3, 1)
    assert load_faults(env["ELASTIC_FAULTS"]) == config.faults
    assert argv == ["--x", "1"]


@pytest.mark.parametrize(
    ("nproc", "nodes", "given", "threads"),
    [(1, 1, None, None), (2, 1, None, "1"), (1, 4, None, "1"), (2, 1, "6", "6"), (1, 1, "6", "6")],
)
def test_omp_threads(
    make_config: MakeConfig, nproc: int, nodes: int, given: str | None, threads: str | None
) -> None:
    config = make_config(nproc_per_node=nproc, max_nodes=nodes, local_nodes=nodes)
    base = {} if given is None else {"OMP_NUM_THREADS": given}
    assert worker_environment(config, LAUNCH, PLACE, 0, "", base).get("OMP_NUM_THREADS") == threads


def test_virtual_local_rank(make_config: MakeConfig) -> None:
    config = make_config(nproc_per_node=2, virtual_local_rank=True)
    env = worker_environment(config, LAUNCH, PLACE, 1, "", {"CUDA_VISIBLE_DEVICES": "4,6"})
    assert (env["LOCAL_RANK"], env["CUDA_VISIBLE_DEVICES"], env["ELASTIC_LOCAL_RANK"]) == (
        "0",
        "6",
        "1",
    )
    assert worker_environment(config, LAUNCH, PLACE, 1, "", {})["CUDA_VISIBLE_DEVICES"] == "1"


@pytest.mark.parametrize(
    ("source", "code"),
    [
        ("", 0),
        ("raise SystemExit(7)", 7),
        ("raise ValueError('boom')", 1),
        ("import os; os.kill(os.getpid(), 9)", -9),
        ("import os; os.abort()", -6),
    ],
)
def test_exit_codes(make_config: MakeConfig, source: str, code: int) -> None:
    with running(make_config(source)) as (_, exits):
        ended = exits.get(timeout=LONG_S)
    assert (ended.returncode, ended.local_rank) == (code, 0)


def test_command_that_cannot_run(make_config: MakeConfig) -> None:
    config = make_config(command=WorkerCommand(script="/nonexistent/tool", python=False))
    with running(config) as (_, exits):
        assert exits.get(timeout=LONG_S).returncode == 127
    assert "cannot start /nonexistent/tool" in log(config, 0, "stderr")


def test_kinds_of_commands(make_config: MakeConfig, tmp_path: Path) -> None:
    script = tmp_path / "other.py"
    script.write_text("import sys; print(__name__, sys.argv[1:])")
    commands = {
        WorkerCommand(script=str(script), args=("a",)): "__main__ ['a']",
        WorkerCommand(script=str(script), args=("a",), run_path=True): "__main__ ['a']",
        WorkerCommand(script="echo", args=("a", "b"), python=False): "a b",
        WorkerCommand(script="json.tool", args=("--help",), module=True): "usage",
    }
    for i, (command, expected) in enumerate(commands.items()):
        config = make_config(command=command, log_dir=str(tmp_path / f"logs{i}"))
        with running(config) as (group, _):
            assert group.wait(LONG_S)
        assert expected in log(config, 0)


def test_a_killed_worker_is_known(make_config: MakeConfig) -> None:
    with running(make_config(SLEEP)) as (group, exits):
        os.kill(group.pids[0], signal.SIGKILL)
        assert exits.get(timeout=LONG_S).returncode == -9


def _is_up(config: JobConfig) -> bool:
    return "up" in log(config, 0)


def test_terminate_then_kill(make_config: MakeConfig) -> None:
    stubborn = "import signal; signal.signal(15, signal.SIG_IGN)\n" + SLEEP
    for source, grace, code in ((SLEEP, 10.0, -15), (stubborn, 0.1, -9)):
        config = make_config(source, log_dir=str(make_config().run_dir) + f"/{code}")
        with running(config) as (group, exits):
            assert wait_until(partial(_is_up, config))
            group.terminate(grace)
            assert exits.get(timeout=LONG_S).returncode == code
            assert group.alive() == ()


def test_kill_takes_descendants(make_config: MakeConfig) -> None:
    source = (
        "import subprocess, sys; p = subprocess.Popen(['sleep', '60']); "
        "print(p.pid, flush=True); p.wait()"
    )
    config = make_config(source)
    with running(config) as (group, _):
        assert wait_until(lambda: log(config, 0).endswith("\n"))
        group.kill()
    assert wait_until(lambda: gone(int(log(config, 0))))


def test_a_worker_that_the_kernel_does_not_end_counts_as_ended(
    make_config: MakeConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As one that waits for a broken device. Its end is passed on once."""
    with running(make_config(SLEEP)) as (group, exits):
        pid = group.pids[0]
        with monkeypatch.context() as patched:
            patched.setattr(processes, "KILL_S", 0.01)
            patched.setattr(group, "_signal", lambda rank, number: None)
            group.kill()
        assert exits.get(timeout=LONG_S) == WorkerExit(0, pid, -signal.SIGKILL)
        assert group.alive() == () and group.samples() == () and not gone(pid)
        os.kill(pid, signal.SIGKILL)
        assert wait_until(lambda: not threads("worker-0"))
        assert exits.empty()


def test_no_worker_is_left_if_its_thread_cannot_start(
    make_config: MakeConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    start = threading.Thread.start

    def start_or_fail(thread: threading.Thread) -> None:
        if thread.name == "worker-1":
            raise RuntimeError("can't start new thread")
        start(thread)

    monkeypatch.setattr(threading.Thread, "start", start_or_fail)
    monkeypatch.setattr(processes, "KILL_S", 0.01)
    config = make_config(SLEEP, nproc_per_node=2)
    group = WorkerGroup(config, LAUNCH, PLACE, lambda ended: None, Console())
    with pytest.raises(RuntimeError):
        group.start()
    assert group.alive() == () and all(
        wait_until(partial(gone, pid)) for pid in group.pids.values()
    )


def threads(name: str) -> list[threading.Thread]:
    return [thread for thread in threading.enumerate() if thread.name == name]


def test_stopped_process_is_seen_and_killed(make_config: MakeConfig) -> None:
    with running(make_config(SLEEP)) as (group, exits):
        pid = group.pids[0]
        os.kill(pid, signal.SIGSTOP)
        assert wait_until(lambda: group.samples()[0].stopped)
        group.kill()
        assert exits.get(timeout=LONG_S).returncode == -9
    assert process_sample(0, pid) is None
    mine = process_sample(0, os.getpid())
    assert mine is not None and not mine.stopped and not mine.on_disk and mine.cpu_s > 0


def _was_queued(pid: int) -> bool:
    return queued_s(pid) > 0.1


@pytest.mark.skipif(not Path("/proc/self/schedstat").exists(), reason="the kernel does not count")
def test_the_time_that_a_worker_waits_for_a_processor_is_known() -> None:
    """Two processes share one processor."""
    cpu = min(os.sched_getaffinity(0))
    code = f"import os; os.sched_setaffinity(0, {{{cpu}}})\nwhile True: pass"
    spinning = [subprocess.Popen([sys.executable, "-c", code]) for _ in range(2)]
    try:
        for process in spinning:
            assert wait_until(partial(_was_queued, process.pid))
    finally:
        for process in spinning:
            process.kill()
            process.wait()


PARENT = """
import subprocess, sys
child = (
    "import time\\nend = time.monotonic() + 9\\n"
    "while time.process_time() < 0.5 and time.monotonic() < end: pass"
)
subprocess.run([sys.executable, "-c", child])
nap = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(99)"])
nap.wait()
"""


def test_what_descendants_used_is_seen_once_a_worker_looks_idle(make_config: MakeConfig) -> None:
    """Ended descendants count, too. Descendants of a busy worker are not read."""
    now = 0.0
    families = DescendantSampler(lambda: now)
    with running(make_config(PARENT)) as (group, _):
        pid = group.pids[0]
        assert wait_until(lambda: descendant_cpu_s(pid) >= 0.2)

        def seen(used_s: float) -> float:
            return families.add(pid, ProcessSample(0, False, used_s)).family_cpu_s

        assert seen(1.0) == 0.0, "the first sample has nothing to compare with"
        now = IDLE_S / 2
        assert seen(1.0) == 0.0
        now = IDLE_S
        assert seen(1.0) >= 0.2
        assert seen(1.1) == 0.0, "the main thread used CPU time"


TALK = (
    "import sys\nprint('to out'); print('to err', file=sys.stderr); sys.stdout.write('no newline')"
)


@pytest.mark.parametrize(
    ("changes", "out", "err"),
    [
        ({}, "to out\nno newline", "to err\n"),
        ({"redirects": (3,)}, "", ""),
        ({"redirects": (1,)}, "", "to err\n"),
        ({"tee": (3,)}, "[node1:2]: to out\n[node1:2]: no newline\n", "[node1:2]: to err\n"),
        ({"tee": (2,), "redirects": (3,)}, "", "[node1:2]: to err\n"),
        (
            {"tee": (1,), "log_line_prefix": "<${role_name}/${local_rank}>"},
            "<default/0>to out\n<default/0>no newline\n",
            "to err\n",
        ),
        ({"local_ranks_filter": (1,), "nproc_per_node": 2}, "to out\nno newline", "to err\n"),
    ],
)
def test_console_and_log_files(
    make_config: MakeConfig, tmp_path: Path, changes: dict[str, object], out: str, err: str
) -> None:
    config = make_config(TALK, **changes)
    console = [
        os.open(tmp_path / name, os.O_CREAT | os.O_WRONLY | os.O_APPEND) for name in ("out", "err")
    ]
    with running(config, (console[0], console[1])) as (group, _):
        assert group.wait(LONG_S)
    assert ((tmp_path / "out").read_text(), (tmp_path / "err").read_text()) == (out, err)
    for rank in range(config.nproc_per_node):
        assert log(config, rank) == "to out\nno newline"
        assert log(config, rank, "stderr") == "to err\n"


def test_lines_of_the_script_are_messages_of_json_lines(
    make_config: MakeConfig, tmp_path: Path
) -> None:
    config = make_config(TALK)
    console = os.open(tmp_path / "out", os.O_CREAT | os.O_WRONLY | os.O_APPEND)
    source, exits = LogSource("demo", "node1"), queue.Queue[WorkerExit]()
    source.epoch = lambda: 5
    shown = Console((console, console), source=source)
    group = WorkerGroup(config, LAUNCH, PLACE, exits.put, shown)
    group.start()
    assert group.wait(LONG_S)
    group.kill()
    found = [json.loads(line) for line in (tmp_path / "out").read_text().splitlines()]
    said = {(one["stream"], one["message"]) for one in found}
    assert said == {("stdout", "to out"), ("stdout", "no newline"), ("stderr", "to err")}
    for one in found:
        assert (one["logger"], one["node"], one["rank"], one["epoch"]) == ("script", "node1", 2, 5)
    assert log(config, 0) == "to out\nno newline", "the file has what the script printed"
    for name in ("stdout.log", "stderr.log"):
        assert (config.log_path("node1", 3, 0) / name).stat().st_mode & 0o777 == 0o600


def test_console_that_went_away(make_config: MakeConfig) -> None:
    read, write = os.pipe()
    os.close(read)
    config = make_config("for i in range(1000): print('line', i)")
    with running(config, (write, write)) as (_, exits):
        assert exits.get(timeout=LONG_S).returncode == 0
    assert log(config, 0).endswith("line 999\n")


@pytest.mark.parametrize("changes", [{}, {"tee": (3,)}])
def test_a_full_disk_costs_the_log_alone(
    make_config: MakeConfig,
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
    changes: dict[str, object],
) -> None:
    """A worker prints more than a pipe holds. It ends, and the console has all of the output."""
    config = make_config("for i in range(30000): print('line', i)", **changes)
    folder = config.log_path("node1", 3, 0)
    folder.mkdir(parents=True)
    (folder / "stdout.log").symlink_to("/dev/full")
    console = os.open(tmp_path / "out", os.O_CREAT | os.O_WRONLY | os.O_APPEND)
    with running(config, (console, console)) as (_, exits):
        assert exits.get(timeout=LONG_S).returncode == 0
    assert (tmp_path / "out").read_text().endswith("line 29999\n")
    assert (tmp_path / "out").read_text().count("\n") == 30000
    words = [record.message for record in caplog.records if "stdout.log" in record.message]
    assert len(words) == 2 and "No space left" in words[0], words
    assert re.search(r"lacks its last \d{6} bytes", words[1])


def test_a_log_goes_on_when_there_is_room_again(
    tmp_path: Path, make_config: MakeConfig, caplog: pytest.LogCaptureFixture
) -> None:
    with small_disk(tmp_path / "disk", "1m"):
        output = Output(make_config(SLEEP), Console((-1, -1)))
        out, err = output.open(tmp_path / "disk", 0, {})
        os.close(err)
        output.start()
        filler = fill(tmp_path / "disk")
        os.write(out, b"lost\n")
        assert wait_until(lambda: "output is lost" in caplog.text)
        filler.unlink()
        os.write(out, b"kept\n")
        os.close(out)
        output.finish(10.0)
        assert (tmp_path / "disk" / "stdout.log").read_text() == "kept\n"
    assert "can be written again; 5 bytes are missing" in caplog.text


AGENT = """
import sys, signal
from elastic import lifeline
from elastic.config import load_config
from elastic.console import Console
from elastic.agent.workers.processes import WorkerGroup
from elastic.core.protocol.messages import Launch
from elastic.domain.types import NodeInfo
if len(sys.argv) > 2: lifeline.watch(int(sys.argv[2]))
launch = Launch(0, 1, 0, 2, "127.0.0.1", 1, 0)
group = WorkerGroup(load_config(sys.argv[1]), launch, NodeInfo("n", "", ""), print, Console())
group.start()
print(*group.pids.values(), flush=True)
signal.pause()
"""


@pytest.mark.parametrize("stop_first", [False, True])
def test_no_orphan_after_the_agent_is_killed(
    make_config: MakeConfig, environment: dict[str, str], stop_first: bool
) -> None:
    make_config(SLEEP, nproc_per_node=2, redirects=(3,)).save()
    run_dir = make_config(SLEEP).run_dir
    agent = subprocess.Popen(
        [sys.executable, "-c", AGENT, run_dir], env=environment, stdout=subprocess.PIPE, text=True
    )
    assert agent.stdout is not None
    pids = [int(pid) for pid in agent.stdout.readline().split()]
    assert len(pids) == 2
    logs = [Path(run_dir, "logs/n/0", str(rank), "stdout.log") for rank in range(2)]
    assert wait_until(lambda: all("up" in path.read_text() for path in logs))
    if stop_first:
        os.kill(pids[0], signal.SIGSTOP)
    agent.kill()
    agent.wait()
    agent.stdout.close()
    assert wait_until(lambda: all(gone(pid) for pid in pids))


def test_lifeline_ends_the_whole_group(
    make_config: MakeConfig, environment: dict[str, str]
) -> None:
    config = make_config(SLEEP, nproc_per_node=2, redirects=(3,))
    config.save()
    read, write = os.pipe()
    agent = subprocess.Popen(
        [sys.executable, "-c", AGENT, config.run_dir, str(read)],
        env=environment,
        stdout=subprocess.PIPE,
        text=True,
        pass_fds=(read,),
        start_new_session=True,
    )
    os.close(read)
    assert agent.stdout is not None
    pids = [int(pid) for pid in agent.stdout.readline().split()]
    assert len(pids) == 2 and agent.poll() is None
    os.close(write)
    assert agent.wait(LONG_S) == -signal.SIGKILL
    agent.stdout.close()
    assert wait_until(lambda: all(gone(pid) for pid in pids))
