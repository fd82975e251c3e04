"""Long training under load with a fault at intervals: nothing may grow.

    python -m benchmarks.soak --minutes 60 --load 8 [--every 20] [--keep DIR]

A coordinator and agents, separate commands as on several machines, train a small model beside
`--load` busy processes. A fault strikes every `--every` seconds, in turn: a worker is killed, a
machine dies and another one joins, the coordinator is paused, an agent is stopped longer than
`--silence`, a worker is stopped, a node is drained and another one joins, the coordinator is
killed. After half of the time the coordinator is paused instead of killed, so that its growth
shows.

Private memory, threads and file descriptors of coordinator, launcher and agents are sampled, and
shared memory and disk of the whole job. The slots of the shared memory are no descriptors here,
because their number follows the plan. Each figure is compared between the second and the last
quarter of the life of the process. Event files and logs grow with steps and faults; they are
counted apart. Old checkpoints are deleted, as operators do.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil
from tqdm import tqdm

from benchmarks.results import Row, show, write
from elastic.launcher.run.event_tail import Follower
from elastic.launcher.run.rundir import free_port

ROOT = Path(__file__).resolve().parents[1]
MARK = "ELASTIC_SOAK_RUN"
"""Environment variable by which the processes of a run are found."""
SHARED_MEMORY = "/dev/shm"
STAYING, SAMPLE_S, AWAY_S, PAUSED_S = 3, 2.0, 5.0, 2.0
"""Nodes that stay; seconds between samples, until a machine is replaced, of a pause."""
PROCESSES = ("coordinator", "launcher", *(f"agent of node{i}" for i in range(STAYING)))
"""Processes that are there from the start to the end."""
RECENT = 2
"""A process that stays may lack this many of the last samples, because it was just replaced."""
LONGEST_S, LOAD_PER_CORE = 60.0, 10.0
"""Longest time between two steps, up to this load average per core; above, it grows in proportion.
It was 10 s in an hour with 180 faults at a load of 11 per core. The last resort against a hung
worker (`Timeouts.stuck_s`) comes after 60 s, and should never be needed."""
IMPOSSIBLE = " (not possible)"
"""Mark of faults whose victim did not run."""
START_S = 300.0
BURN = "import os; parent = os.getppid()\nwhile os.getppid() == parent: sum(range(10000))"
LOGS = ("events.jsonl", "progress.jsonl", "logs")
"""Files of a run directory that grow with steps and faults."""
MIB = 1 << 20
TOLERANCES: dict[str, tuple[float, float]] = {
    "memory": (0.1, 8.0),
    "threads": (0.0, 3.0),
    "descriptors": (0.0, 8.0),
    "shared memory": (0.1, 4.0),
    "disk": (0.1, 4.0),
}
"""Figure: growth that still counts as flat, as a fraction and as an amount (MiB or a number)."""


@dataclass
class Series:
    """Samples of one figure of one process, or of the job."""

    name: str
    figure: str
    values: list[float] = field(default_factory=list)
    newest: int = 0
    """Number of the newest sample; those of all series are counted together."""
    kinds: list[Counter[str]] = field(default_factory=list)
    """What the samples consist of, for descriptors."""

    @property
    def before(self) -> float:
        return statistics.median(_second_quarter(self.values))

    @property
    def after(self) -> float:
        return statistics.median(_last_quarter(self.values))

    @property
    def growth(self) -> str:
        """Say from how much it grew to how much, and which kinds did."""
        text = f"{self.name}: {self.figure} from {self.before:g} to {self.after:g}"
        parts = []
        for kind in sorted(set().union(*self.kinds)):
            counts = [one[kind] for one in self.kinds]
            before = statistics.median(_second_quarter(counts))
            after = statistics.median(_last_quarter(counts))
            if before != after:
                parts.append(f"{kind} from {before:g} to {after:g}")
        return f"{text} ({', '.join(parts)})" if parts else text

    @property
    def flat(self) -> bool:
        fraction, amount = TOLERANCES[self.figure]
        return self.after - self.before <= max(fraction * self.before, amount)


def _second_quarter(values: Sequence[float]) -> Sequence[float]:
    quarter = max(1, len(values) // 4)
    return values[quarter : 2 * quarter] or values


def _last_quarter(values: Sequence[float]) -> Sequence[float]:
    return values[-max(1, len(values) // 4) :]


class SoakJob:
    """The services of the job, in a mount namespace with a /dev/shm of its own."""

    def __init__(self, folder: Path, steps: int, silence_s: float) -> None:
        self.folder = folder
        (folder / "tmp").mkdir(parents=True)
        token = folder / "token"
        token.write_text("of all machines of the soak\n")
        self._address = f"127.0.0.1:{free_port()}"
        self._flags = [
            "--nnodes", f"1:{STAYING + 1}", "--rdzv-id", "soak", "--join-token-file", str(token),
            "--accumulate", "exact", "--silence", str(silence_s),
            "--checkpoint-dir", str(folder / "checkpoints"),
            "-m", "benchmarks.chaos.train", "--steps", str(steps), "--pace", "0.005",
            "--checkpoint-every", "50",
        ]  # fmt: skip
        mount = f"mount -t tmpfs -o size=1g tmpfs {SHARED_MEMORY} && echo ok && exec sleep 1000000"
        self._space = subprocess.Popen(
            ["unshare", "--mount", "sh", "-c", mount], stdout=subprocess.PIPE
        )
        assert self._space.stdout is not None
        if self._space.stdout.readline() != b"ok\n":
            raise RuntimeError("a namespace with its own shared memory cannot be made here")
        self.launchers: dict[str, subprocess.Popen[bytes]] = {}
        self._progress = Follower(self.run_dir / "events.jsonl")
        self.steps = 0
        self.step_at = time.monotonic()
        self.longest_s = 0.0
        """Longest time between two steps."""
        self.kinds: dict[str, int] = {}
        """Number of events by kind."""
        self._start("coordinator", ["coordinator", "--address", self._address])
        for number in range(STAYING + 1):
            self.start_agent(f"node{number}")

    @property
    def run_dir(self) -> Path:
        return self.folder / "coordinator"

    def start_agent(self, node: str) -> None:
        self._start(node, ["agent", "--coordinator", self._address, "--node", node])

    def _start(self, name: str, words: Sequence[str]) -> None:
        command = ["nsenter", "-t", str(self._space.pid), "-m", sys.executable, "-m", "elastic"]
        command += [*words, "--run-dir", str(self.folder / name), *self._flags]
        env = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
        env |= {MARK: str(self.folder), "TMPDIR": str(self.folder / "tmp")}
        with (self.folder / f"{name}.out").open("ab") as out:
            self.launchers[name] = subprocess.Popen(
                command, cwd=ROOT, env=env, stdout=out, stderr=out, start_new_session=True
            )

    def coordinator(self) -> psutil.Process:
        """The coordinator itself. Raises psutil.Error or OSError if none runs."""
        text = (self.run_dir / "coordinator.json").read_text()
        return psutil.Process(int(json.loads(text)["pid"]))

    def agent(self, node: str) -> psutil.Process:
        """The agent of a node. Raises psutil.Error if none runs."""
        for child in psutil.Process(self.launchers[node].pid).children():
            return child
        raise psutil.NoSuchProcess(self.launchers[node].pid)

    def worker(self, node: str) -> psutil.Process:
        """A worker of a node. Raises psutil.Error if none runs."""
        for child in self.agent(node).children():
            return child
        raise psutil.NoSuchProcess(self.launchers[node].pid)

    def drain(self, node: str) -> None:
        """Drain a node. Raises OSError if that is refused."""
        words = ["-m", "elastic", "drain", node, "--run-dir", str(self.run_dir)]
        with (self.folder / "drain.out").open("ab") as out:
            command = [sys.executable, *words]
            done = subprocess.run(command, cwd=ROOT, check=False, stdout=out, stderr=out)
        if done.returncode:
            raise OSError(f"{node} cannot be drained: exit code {done.returncode}")

    def read_events(self) -> None:
        """Count the steps and other events since the last call."""
        for event in self._progress.read():
            kind = str(event["kind"])
            self.kinds[kind] = self.kinds.get(kind, 0) + 1
            if kind == "step":
                now = time.monotonic()
                if self.steps:
                    self.longest_s = max(self.longest_s, now - self.step_at)
                self.steps, self.step_at = self.steps + 1, now

    def shared_bytes(self) -> int:
        found = os.statvfs(f"/proc/{self._space.pid}/root{SHARED_MEMORY}")
        return (found.f_blocks - found.f_bfree) * found.f_frsize

    def check_running(self) -> None:
        """Raise RuntimeError if the job has ended."""
        if self.launchers["coordinator"].poll() is not None:
            text = (self.folder / "coordinator.out").read_text(errors="replace")
            raise RuntimeError(f"the job has ended:\n{text[-2000:]}")

    def end(self) -> list[str]:
        """Interrupt the job; return what is left of it."""
        for launcher in self.launchers.values():
            if launcher.poll() is None:
                launcher.send_signal(2)
        for launcher in self.launchers.values():
            with contextlib.suppress(subprocess.TimeoutExpired):
                launcher.wait(60)
        left = [" ".join(process.cmdline()[:6]) for process in self._everything()]
        shared = Path(f"/proc/{self._space.pid}/root{SHARED_MEMORY}")
        return left + [path.name for path in shared.iterdir()]

    def _everything(self) -> list[psutil.Process]:
        found = []
        for process in psutil.process_iter():
            with contextlib.suppress(psutil.Error):
                if process.environ().get(MARK) == str(self.folder):
                    found.append(process)
        return found

    def close(self) -> None:
        for process in self._everything():
            with contextlib.suppress(psutil.Error):
                process.kill()
        self._space.kill()
        self._space.wait()


class Sampler:
    """Series of all figures. A new process begins a new series."""

    def __init__(self, job: SoakJob) -> None:
        self._job = job
        self._series: dict[tuple[str, int, str], Series] = {}
        self._loads: list[float] = []

    @property
    def load(self) -> float:
        """Median of the machine's load average."""
        return statistics.median(self._loads)

    def sample(self) -> None:
        job = self._job
        self._loads.append(os.getloadavg()[0])
        staying = [f"node{i}" for i in range(STAYING)]
        found: list[tuple[str, Callable[[], psutil.Process]]] = [("coordinator", job.coordinator)]
        found += [("launcher", lambda: psutil.Process(job.launchers["coordinator"].pid))]
        found += [(f"agent of {n}", lambda n=n: job.agent(n)) for n in staying]  # type: ignore[misc]
        for name, get in found:
            with contextlib.suppress(psutil.Error, OSError, ValueError):
                self._sample_process(name, get())
        self._add("job", 0, "shared memory", job.shared_bytes() / MIB)
        self._add("job", 0, "disk", (size(job.folder) - self.log_bytes()) / MIB)

    def log_bytes(self) -> int:
        """Bytes of event files and logs of all services."""
        folders = [path for path in self._job.folder.iterdir() if path.is_dir()]
        logs = [path for path in self._job.folder.iterdir() if path.suffix == ".out"]
        return sum(size(path) for path in logs) + sum(
            size(folder / name) for folder in folders for name in LOGS
        )

    def _sample_process(self, name: str, process: psutil.Process) -> None:
        self._add(name, process.pid, "memory", process.memory_full_info().uss / MIB)
        self._add(name, process.pid, "threads", process.num_threads())
        kinds = descriptors(process.pid)
        self._add(name, process.pid, "descriptors", kinds.total()).kinds.append(kinds)

    def _add(self, name: str, pid: int, figure: str, value: float) -> Series:
        series = self._series.setdefault((name, pid, figure), Series(name, figure))
        series.values.append(value)
        series.newest = len(self._loads)
        return series

    def newest(self) -> list[Series]:
        """Return the series of the newest process of each name."""
        newest = {name: pid for name, pid, _ in self._series}
        return [s for (name, pid, _), s in self._series.items() if newest[name] == pid]


class Faults:
    """Strikes the job with the next fault of the round."""

    def __init__(self, job: SoakJob) -> None:
        self._job, self._number = job, 0
        self._guest, self._guests = f"node{STAYING}", STAYING
        """The node that does not stay, and the number of the newest node."""
        self._later: list[tuple[float, Callable[[], object]]] = []
        self.done: dict[str, int] = {}

    def poll(self) -> None:
        """Do what is due some seconds after a fault."""
        for item in [one for one in self._later if time.monotonic() >= one[0]]:
            self._later.remove(item)
            with contextlib.suppress(psutil.Error):
                item[1]()

    def strike(self, kill_coordinator: bool) -> None:
        kinds = ("kill-worker", "kill", "pause-coordinator", "stop-agent", "stop-worker", "drain",
                 "kill-coordinator" if kill_coordinator else "pause-coordinator")  # fmt: skip
        kind = kinds[self._number % len(kinds)]
        node = f"node{(self._number // len(kinds) + self._number) % STAYING}"
        self._number += 1
        try:
            self._strike(kind, node)
        except (psutil.Error, OSError, ValueError):
            kind += IMPOSSIBLE
        self.done[kind] = self.done.get(kind, 0) + 1

    def _strike(self, kind: str, node: str) -> None:
        job = self._job
        match kind:
            case "kill-worker":
                job.worker(node).kill()
            case "stop-worker":
                job.worker(node).suspend()
            case "kill":
                job.agent(self._guest).kill()
                self._replace_guest()
            case "drain":
                job.drain(self._guest)
                self._replace_guest()
            case "stop-agent":
                self._pause(job.agent(node), AWAY_S)
            case "pause-coordinator":
                self._pause(job.coordinator(), PAUSED_S)
            case "kill-coordinator":
                job.coordinator().kill()

    def _pause(self, process: psutil.Process, seconds: float) -> None:
        process.suspend()
        self._later.append((time.monotonic() + seconds, process.resume))

    def _replace_guest(self) -> None:
        self._guests += 1
        self._guest = f"node{self._guests}"
        name = self._guest
        self._later.append((time.monotonic() + AWAY_S, lambda: self._job.start_agent(name)))


def size(path: Path) -> int:
    """Return the bytes of a file, or of all files below a folder; 0 if there is none."""
    total = 0
    for folder, _, names in os.walk(path):
        for name in names:
            with contextlib.suppress(OSError):
                total += os.lstat(Path(folder, name)).st_size
    if path.is_file():
        total += path.stat().st_size
    return total


def descriptors(pid: int) -> Counter[str]:
    """Return the number of open files of a process by kind, without the slots of its shared memory:
    their number follows the plan, and their bytes are counted. Deleted slots count."""
    found = Counter[str]()
    for link in Path(f"/proc/{pid}/fd").iterdir():
        with contextlib.suppress(OSError):
            target = os.readlink(link)
            if not target.endswith(".slot"):
                found[_kind_of(target)] += 1
    return found


def _kind_of(target: str) -> str:
    """Return the kind of a file by the target of its link in /proc."""
    if target.endswith(".slot (deleted)"):
        return "deleted slots"
    return "files" if target.startswith("/") else target.partition(":")[0]


def prune(checkpoints: Path, kept: int = 2) -> None:
    """Delete all complete checkpoints but the newest ones."""
    whole = sorted(path.parent for path in checkpoints.glob("step-*/manifest.json"))
    for path in whole[:-kept]:
        shutil.rmtree(path, ignore_errors=True)


@contextlib.contextmanager
def busy(count: int) -> Iterator[None]:
    """Run this many processes that only compute."""
    burners = [subprocess.Popen([sys.executable, "-c", BURN]) for _ in range(count)]
    try:
        yield
    finally:
        for burner in burners:
            burner.kill()
            burner.wait()


@dataclass(frozen=True)
class Soaked:
    """Result of a soak."""

    series: list[Series]
    steps: int
    longest_s: float
    faults: dict[str, int]
    events: dict[str, int]
    log_bytes: int
    left: list[str]
    load: float
    """Median of the machine's load average."""

    @property
    def struck(self) -> int:
        """Number of faults that were possible."""
        return sum(n for kind, n in self.faults.items() if not kind.endswith(IMPOSSIBLE))

    @property
    def longest_limit_s(self) -> float:
        """Longest time between two steps that is right at this load."""
        return LONGEST_S * max(1.0, self.load / (LOAD_PER_CORE * (os.cpu_count() or 1)))

    @property
    def absent(self) -> list[str]:
        """Processes that should stay, and did not live until the end."""
        end = max((series.newest for series in self.series), default=0) - RECENT
        here = {series.name for series in self.series if series.newest >= end}
        return [name for name in PROCESSES if name not in here]

    @property
    def missed(self) -> list[str]:
        """Kinds of faults that were not possible more often than they were."""
        kinds = dict.fromkeys(kind.removesuffix(IMPOSSIBLE) for kind in self.faults)
        return [k for k in kinds if self.faults.get(k + IMPOSSIBLE, 0) > self.faults.get(k, 0)]


def soak(folder: Path, faults: int, every_s: float, load: int, silence_s: float = 3.0) -> Soaked:
    """Train while `faults` faults strike. Raises RuntimeError if the job ends before."""
    with busy(load):
        job = SoakJob(folder, 10_000_000, silence_s)
        try:
            return _soak(job, faults, every_s)
        finally:
            job.close()


def _soak(job: SoakJob, faults: int, every_s: float) -> Soaked:
    end = time.monotonic() + START_S
    while job.steps < 5:
        job.check_running()
        job.read_events()
        if time.monotonic() > end:
            raise RuntimeError(f"no five steps within {START_S:g} s; files: {job.folder}")
        time.sleep(0.1)
    sampler, striker = Sampler(job), Faults(job)
    for number in tqdm(range(faults), disable=None, unit="fault"):
        striker.strike(number < faults / 2)
        until = time.monotonic() + every_s
        while time.monotonic() < until:
            _watch(job, sampler, striker, min(SAMPLE_S, every_s / 4))
    here, end = job.steps, time.monotonic() + START_S
    while job.steps < here + 3:  # training goes on after the last fault
        _watch(job, sampler, striker, 0.5)
        if time.monotonic() > end:
            raise RuntimeError(f"no step after the last fault; files: {job.folder}")
    logs = sampler.log_bytes()
    left = job.end()
    return Soaked(
        sampler.newest(),
        job.steps,
        job.longest_s,
        striker.done,
        job.kinds,
        logs,
        left,
        sampler.load,
    )


def _watch(job: SoakJob, sampler: Sampler, striker: Faults, seconds: float) -> None:
    """Wait so long, and take one sample."""
    until = time.monotonic() + seconds
    while time.monotonic() < until:
        job.check_running()
        job.read_events()
        striker.poll()
        time.sleep(0.1)
    prune(job.folder / "checkpoints")
    sampler.sample()


def rows(done: Soaked, minutes: float, load: int) -> list[Row]:
    impossible, limit_s = sum(done.faults.values()) - done.struck, round(done.longest_limit_s, 1)
    found = [
        Row("minutes", minutes, "min", None, "higher"),
        Row("busy processes of the soak", load, "", None, "higher"),
        Row("load average of the machine, median", done.load, "", None, "higher"),
        Row("faults", done.struck, "", None, "higher"),
        Row("faults that were not possible", impossible, "", None, "lower"),
        Row("steps", done.steps, "", None, "higher"),
        Row("longest time between two steps", done.longest_s, "s", limit_s, "lower"),
        Row("recoveries", done.events.get("recovery", 0), "", None, "lower"),
        Row("staying processes that ended early", len(done.absent), "", 0, "lower"),
        Row("processes and files left", len(done.left), "", 0, "lower"),
        Row("event files and logs per step", done.log_bytes / done.steps, "B", None, "lower"),
    ]
    for series in done.series:
        unit = "" if series.figure in ("threads", "descriptors") else "MiB"
        name = f"{series.name}: {series.figure}"
        limit = max(TOLERANCES[series.figure][0] * series.before, TOLERANCES[series.figure][1])
        found.append(Row(f"{name}, second quarter", series.before, unit, None, "lower"))
        growth = series.after - series.before
        found.append(Row(f"{name}, growth until the last", growth, unit, limit, "lower"))
    return found


def verdict(done: Soaked) -> str:
    """Return what was wrong; "": nothing."""
    wrong = [series.growth for series in done.series if not series.flat]
    wrong += [f"left: {item}" for item in done.left]
    wrong += [f"{name} did not live until the end" for name in done.absent]
    if done.longest_s > done.longest_limit_s:
        limit = f"{done.longest_limit_s:.0f} s at this load"
        wrong.append(f"no step for {done.longest_s:.0f} s, the limit is {limit}")
    wrong += [f"{kind} was mostly not possible" for kind in done.missed]
    if not done.struck:
        wrong.append("no fault struck")
    return "; ".join(wrong)


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.soak")
    parser.add_argument("--minutes", type=float, default=10.0)
    parser.add_argument("--load", type=int, default=8, help="busy processes beside the job")
    parser.add_argument("--every", type=float, default=20.0, help="seconds between faults")
    parser.add_argument("--keep", type=Path, help="keep the files of the run in this new folder")
    args = parser.parse_args()
    if args.minutes <= 0 or args.every <= 0 or args.load < 0:
        parser.error("--minutes and --every: above 0; --load: from 0 up")
    folder = args.keep or Path(tempfile.mkdtemp(prefix="soak-")) / "run"
    faults = max(1, round(60 * args.minutes / args.every))
    try:
        done = soak(folder, faults, args.every, args.load)
    except RuntimeError as error:
        print(error, file=sys.stderr)
        return 1
    found: list[Row] = rows(done, args.minutes, args.load)
    show(found)
    more: dict[str, Any] = {"faults": done.faults, "events": done.events}
    print(", ".join(f"{kind} {count}" for kind, count in done.faults.items()))
    wrong = verdict(done)
    print(f"wrong: {wrong}" if wrong else "right: nothing grew, and nothing is left")
    print(f"written to {write('soak', found, **more)}")
    if not args.keep and not wrong:
        shutil.rmtree(folder.parent)
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
