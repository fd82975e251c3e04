"""Worker processes of a node, with torchrun's environment variables and log files.

One thread per worker waits for the process, so that an exit is known at once. The kernel kills the
workers if the thread that started them ends (`elastic.lifeline`). Workers stay in the agent's
process group, so that killing the group loses the whole node.
"""

from __future__ import annotations

import contextlib
import itertools
import logging
import os
import signal
import subprocess
import threading
import time
import uuid
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path

import psutil

from elastic import lifeline
from elastic.agent.workers.output import Output
from elastic.config import JobConfig
from elastic.console import Console
from elastic.core.node.node import ProcessSample
from elastic.core.protocol.fault_spec import dump_faults
from elastic.core.protocol.messages import Launch
from elastic.domain import codec
from elastic.domain.errors import MAX_DESCRIPTION_CHARS
from elastic.domain.types import NodeInfo
from elastic.rpc.frames import CHANNEL_VERSION, version_text

log = logging.getLogger("elastic.agent")
CLOCK_HZ = os.sysconf("SC_CLK_TCK")
IDLE_S = 3.0
"""Time without CPU use of a worker's main thread after which the CPU time of its descendants is
read: the worker may be waiting for them."""
DESCENDANTS_POLL_S = 1.0
"""Interval between two reads of that CPU time; each scans all processes of the machine."""
KILL_S = 10.0
"""A worker that the kernel does not end within this time after SIGKILL counts as ended. It waits
for a device or a disk, and runs no more code of its own."""


@dataclass(frozen=True, slots=True)
class WorkerExit:
    """Exit of one worker process."""

    local_rank: int
    pid: int
    returncode: int
    """Exit status, or minus the number of the signal that ended the process."""
    error: str = ""
    """Error that ended the process, as far as known."""


def agent_socket(config: JobConfig, node: str) -> Path:
    """Return the path of the Unix socket at which the agent of `node` listens for its workers."""
    return Path(config.memory_dir, node, "agent.sock")


def process_sample(rank: int, pid: int) -> ProcessSample | None:
    """Return the state of the worker `rank`, which is process `pid`; None if it has ended."""
    try:
        status = psutil.Process(pid).status()
        main = Path(f"/proc/{pid}/task/{pid}/stat").read_text().rpartition(")")[2].split()
    except (FileNotFoundError, ProcessLookupError, psutil.NoSuchProcess):
        return None
    if status == psutil.STATUS_ZOMBIE:
        return None
    stopped = status in (psutil.STATUS_STOPPED, psutil.STATUS_TRACING_STOP)
    main_cpu_s = (int(main[11]) + int(main[12])) / CLOCK_HZ
    return ProcessSample(rank, stopped, main_cpu_s, on_disk=main[0] == "D", queued_s=queued_s(pid))


def queued_s(pid: int) -> float:
    """Return the time for which the main thread of `pid` waited for a processor; 0: unknown. The
    second number of schedstat is in nanoseconds (Documentation/scheduler/sched-stats of Linux)."""
    try:
        text = Path(f"/proc/{pid}/task/{pid}/schedstat").read_text()
        return int(text.split()[1]) / 1e9
    except (OSError, ValueError, IndexError):  # it has ended, or the kernel does not count it
        return 0.0


def descendant_cpu_s(pid: int) -> float:
    """Return the CPU time of the descendants of `pid`, including those already waited for."""
    total = 0.0
    for process in (pid, *(child.pid for child in _descendants(pid))):
        with contextlib.suppress(psutil.NoSuchProcess):
            cpu = psutil.Process(process).cpu_times()
            total += cpu.children_user + cpu.children_system
            total += cpu.user + cpu.system if process != pid else 0.0
    return total


class DescendantSampler:
    """Adds the CPU time of descendants to the samples of workers that seem idle."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._main: dict[int, tuple[float, float]] = {}
        self._seen: dict[int, tuple[float, float]] = {}

    def add(self, pid: int, sample: ProcessSample) -> ProcessSample:
        """Return `sample`, with the CPU time of the descendants if process `pid` seems idle."""
        now = self._clock()
        used, since = self._main.get(pid, (-1.0, now))
        if sample.cpu_s != used:
            self._main[pid] = (sample.cpu_s, now)
            return sample
        if now - since < IDLE_S:
            return sample
        at, cpu_s = self._seen.get(pid, (now - DESCENDANTS_POLL_S, 0.0))
        if now - at >= DESCENDANTS_POLL_S:
            at, cpu_s = now, descendant_cpu_s(pid)
            self._seen[pid] = (at, cpu_s)
        return replace(sample, family_cpu_s=cpu_s)


SECRET_VARIABLES = ("ELASTIC_JOIN_TOKEN", "ELASTIC_NOTICE_TOKEN")
"""Environment variables that training scripts must not see."""


NCCL_VARIABLES = {
    "TORCH_NCCL_ASYNC_ERROR_HANDLING": "0",
    "TORCH_NCCL_ENABLE_MONITORING": "0",
    "TORCH_NCCL_DUMP_ON_TIMEOUT": "0",
    "TORCH_NCCL_RETHROW_CUDA_ERRORS": "0",
    "TORCH_NCCL_DESYNC_DEBUG": "0",
    "TORCH_NCCL_BLOCKING_WAIT": "0",
    "TORCH_NCCL_USE_COMM_NONBLOCKING": "0",
    "TORCH_NCCL_PROPAGATE_ERROR": "0",
    "TORCH_NCCL_WAIT_TIMEOUT_DUMP_MILSEC": "0",
    "TORCH_DISTRIBUTED_DEBUG": "OFF",
}
"""Variables of torch that would end a process or hold it up after a peer has died. They are set
also against the user's environment, because here survivors go on."""


def worker_environment(
    config: JobConfig,
    launch: Launch,
    info: NodeInfo,
    local_rank: int,
    tp_store: str,
    base: Mapping[str, str],
) -> dict[str, str]:
    """Return a worker's variables: `base` minus secrets, torchrun's, and those named ELASTIC_*."""
    rank = launch.rank + local_rank
    threads_unset = "OMP_NUM_THREADS" not in base
    shared = config.nproc_per_node > 1 or config.local_nodes > 1
    profile = "emulate" if config.emulate else "plan"
    profile = "" if config.profile is None else profile
    folder = config.log_path(info.node, launch.restart, local_rank)
    return {
        **{name: value for name, value in base.items() if name not in SECRET_VARIABLES},
        "RANK": str(rank),
        "LOCAL_RANK": "0" if config.virtual_local_rank else str(local_rank),
        "GROUP_RANK": str(launch.group_rank),
        "ROLE_RANK": str(rank),
        "ROLE_NAME": config.role,
        "LOCAL_WORLD_SIZE": str(config.nproc_per_node),
        "WORLD_SIZE": str(launch.world_size),
        "GROUP_WORLD_SIZE": str(launch.group_world_size),
        "ROLE_WORLD_SIZE": str(launch.world_size),
        "MASTER_ADDR": launch.master_addr,
        "MASTER_PORT": str(launch.master_port),
        "TORCHELASTIC_RESTART_COUNT": str(launch.restart),
        "TORCHELASTIC_MAX_RESTARTS": str(config.max_restarts),
        "TORCHELASTIC_RUN_ID": config.run_id,
        "TORCHELASTIC_USE_AGENT_STORE": "False",
        "TORCHELASTIC_ERROR_FILE": str(folder / "error.json"),
        "TORCH_CPP_LOG_LEVEL": base.get("TORCH_CPP_LOG_LEVEL", "ERROR"),
        **NCCL_VARIABLES,
        **({"OMP_NUM_THREADS": "1"} if threads_unset and shared else {}),
        **(_one_device(local_rank, base) if config.virtual_local_rank else {}),
        "ELASTIC_AGENT": str(agent_socket(config, info.node)),
        "ELASTIC_NODE": info.node,
        "ELASTIC_HOST": info.host,
        "ELASTIC_LOCAL_RANK": str(local_rank),
        "ELASTIC_RUN_DIR": config.run_dir,
        "ELASTIC_MEMORY_DIR": config.memory_dir,
        "ELASTIC_ACCUMULATE": config.accumulate.value,
        "ELASTIC_FAULTS": dump_faults(config.faults),
        "ELASTIC_PROFILE": profile,
        "ELASTIC_DEVICE": info.device,
        "ELASTIC_TP_STORE": tp_store,
        "ELASTIC_LINK": codec.dumps(config.link),
        "ELASTIC_SILENCE": repr(config.lease_s),
        "ELASTIC_VERIFY_EVERY": str(config.verify_every),
        "ELASTIC_ON_NONFINITE": config.on_nonfinite.value,
        "ELASTIC_CERTS": config.certs,
        "ELASTIC_CERTS_NAME": config.certs_name,
        "ELASTIC_PROTOCOL": version_text(CHANNEL_VERSION),
    }


class WorkerGroup:
    """The workers of one launch on one node. All methods are thread-safe."""

    def __init__(
        self,
        config: JobConfig,
        launch: Launch,
        info: NodeInfo,
        on_exit: Callable[[WorkerExit], None],
        console: Console,
    ) -> None:
        """`on_exit(exit)` is called once per worker, on its own thread. `start` starts them."""
        self._config, self._launch, self._info, self._on_exit = config, launch, info, on_exit
        self._output, self._descendants = Output(config, console), DescendantSampler()
        self._changed = threading.Condition()
        self._processes: dict[int, subprocess.Popen[bytes]] = {}
        self._exits: dict[int, WorkerExit] = {}
        self._finishing, self._finished = threading.Lock(), False
        self.tp_store = str(
            Path(config.memory_dir, info.node, f"store-{launch.restart}-{uuid.uuid4().hex[:8]}")
        )
        """Path of the FileStore of the TP groups; new at each launch."""

    def start(self) -> None:
        """Start all workers. The calling thread must outlive them. Raises OSError if a log file or
        a process cannot be created, RuntimeError if a thread cannot."""
        Path(self.tp_store).parent.mkdir(parents=True, exist_ok=True)
        streams = [self._open(rank) for rank in range(self._config.nproc_per_node)]
        self._output.start()
        try:
            for rank, ends in enumerate(streams):
                self._spawn(rank, ends)
        except Exception:  # also one of a thread that cannot start
            self.kill()
            raise
        finally:
            for end in itertools.chain(*streams):
                os.close(end)

    @property
    def pids(self) -> dict[int, int]:
        """Process id per local rank of the workers that were started."""
        with self._changed:
            return {rank: process.pid for rank, process in sorted(self._processes.items())}

    def alive(self) -> tuple[int, ...]:
        """Return the local ranks of the workers that have not ended."""
        with self._changed:
            return tuple(rank for rank in sorted(self._processes) if rank not in self._exits)

    def failures(self) -> tuple[WorkerExit, ...]:
        """Return the exits with an error code, by local rank; no signal is among them."""
        with self._changed:
            return tuple(one for _, one in sorted(self._exits.items()) if one.returncode > 0)

    def samples(self) -> tuple[ProcessSample, ...]:
        """Return the kernel's view of each worker that has not ended."""
        with self._changed:  # another thread may start workers
            started = sorted(self._processes.items())
            pids = [(rank, process.pid) for rank, process in started if rank not in self._exits]
        found = [(pid, process_sample(rank, pid)) for rank, pid in pids]
        return tuple(self._descendants.add(pid, one) for pid, one in found if one is not None)

    def wait(self, timeout_s: float | None = None) -> bool:
        """Wait until every worker has ended; return False after `timeout_s` (None: no limit)."""
        with self._changed:
            return self._changed.wait_for(
                lambda: len(self._exits) == len(self._processes), timeout_s
            )

    def terminate(self, grace_s: float) -> None:
        """Send SIGTERM, after `grace_s` SIGKILL, and wait until all workers have ended."""
        for rank in self.alive():
            self._signal(rank, signal.SIGTERM)
        self.wait(grace_s)
        self.kill()

    def kill(self) -> None:
        """Send SIGKILL to all workers and descendants, and wait until all workers have ended, at
        most KILL_S. That takes long if a worker has much memory."""
        pids = self.pids
        descendants = [process for rank in self.alive() for process in _descendants(pids[rank])]
        for rank in self.alive():
            self._signal(rank, signal.SIGKILL)
        for process in descendants:
            with contextlib.suppress(psutil.NoSuchProcess):
                process.kill()
        if not self.wait(KILL_S):
            for rank in self.alive():
                log.error("worker %d (process %d) does not end when killed", rank, pids[rank])
                self._ended(WorkerExit(rank, pids[rank], -signal.SIGKILL))
        self._finish()

    def save_output(self, timeout_s: float) -> None:
        """Wait for the log files, see `Output.save`. Only for the end of the agent."""
        self._output.save(timeout_s)

    def _await_exit(self, rank: int, process: subprocess.Popen[bytes]) -> None:
        code = process.wait()
        error = ""
        if code > 0:  # a signal comes from outside, so its worker has nothing to say about it
            with contextlib.suppress(RuntimeError):  # no thread is left to read the file
                error = self._output.last_error(self._folder(rank), code)
        self._ended(WorkerExit(rank, process.pid, code, error[:MAX_DESCRIPTION_CHARS]))

    def _ended(self, ended: WorkerExit) -> None:
        """Pass on the end of a worker, once."""
        with self._changed:
            if ended.local_rank in self._exits:
                return
            self._exits[ended.local_rank] = ended
            last = len(self._exits) == self._config.nproc_per_node
            self._changed.notify_all()
        self._on_exit(ended)
        if last:
            self._finish()

    def _folder(self, rank: int) -> Path:
        """Return the folder of the worker's log files."""
        return self._config.log_path(self._info.node, self._launch.restart, rank)

    def _open(self, rank: int) -> tuple[int, int]:
        folder = self._folder(rank)
        names = {
            "node": self._info.node,
            "rank": str(self._launch.rank + rank),
            "local_rank": str(rank),
            "role_name": self._config.role,
        }
        ends = self._output.open(folder, rank, names)
        (folder / "error.json").unlink(missing_ok=True)
        return ends

    def _spawn(self, rank: int, ends: tuple[int, int]) -> None:
        env = worker_environment(
            self._config, self._launch, self._info, rank, self.tp_store, os.environ
        )
        argv = lifeline.tied_command(self._config.command.argv(os.environ.get("PYTHON_EXEC", "")))
        process = subprocess.Popen(
            argv, env=env, stdin=subprocess.DEVNULL, stdout=ends[0], stderr=ends[1]
        )
        with self._changed:
            self._processes[rank] = process
        threading.Thread(
            target=self._await_exit, args=(rank, process), name=f"worker-{rank}", daemon=True
        ).start()

    def _signal(self, rank: int, number: signal.Signals) -> None:
        with contextlib.suppress(ProcessLookupError):
            self._processes[rank].send_signal(number)

    def _finish(self) -> None:
        """Flush the output, once. Afterwards all output is in the files."""
        with self._finishing:
            if not self._finished:
                self._finished = True
                self._output.finish()


def _descendants(pid: int) -> list[psutil.Process]:
    try:
        return list(psutil.Process(pid).children(recursive=True))
    except psutil.NoSuchProcess:
        return []


def _one_device(local_rank: int, base: Mapping[str, str]) -> dict[str, str]:
    given = [device for device in base.get("CUDA_VISIBLE_DEVICES", "").split(",") if device]
    return {
        "CUDA_VISIBLE_DEVICES": given[local_rank] if local_rank < len(given) else str(local_rank)
    }
