"""Decisions and checkpoints of a coordinator in a process of its own, with one injected fault.

Store, saver and commits are the product's. The script decides ten times. Decisions 3 and 6 find all
parts of a checkpoint written. If the process ends, or is stopped, another coordinator takes over.
"""

from __future__ import annotations

import contextlib
import os
import queue
import select
import signal
import sys
import time
import traceback
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from elastic.coordinator.leadership import STATE_KEY
from elastic.coordinator.records import state_saver
from elastic.coordinator.records.checkpoint_commit import CheckpointCommits
from elastic.coordinator.records.saved_state import read_state
from elastic.coordinator.records.state_saver import StateSaver
from elastic.core.job import checkpoints
from elastic.core.job.state import CheckpointCommitted, JobState, Policy
from elastic.domain.errors import StaleError
from elastic.store import checkpoint_directory
from elastic.store.interface import StoreUnavailable
from elastic.store.sqlite import SqliteStore
from tests.agent.vault.checkpoints import verified, write_all
from tests.faultpoints.injection import Injector, Point, install, install_store
from tests.faultpoints.mini_job import SPEC, Failed, Fault

N_DECISIONS, CHECKPOINTS = 10, (3, 6)
SLOTS = tuple((layer, 0) for layer in range(SPEC.n_layers))
DEADLINE_S, STOP_S = 60.0, 1.0
STALE = 5
"""Exit code of a coordinator that was replaced."""


@dataclass
class CoordinatorResult:
    """How the script ended."""

    points: list[str]
    reached: bool
    coordinators: int
    failed: list[str]
    """Reasons for which checkpoints were given up."""


class MiniCoordinator:
    """One term. Appends a line per action to the file `acts`."""

    def __init__(self, root: Path, name: str, now: float) -> None:
        self._acts = os.open(root / "acts", os.O_WRONLY | os.O_APPEND | os.O_CREAT)
        store = SqliteStore(root / "store.db")
        lease = store.acquire(name, 10.0, now)
        entry = store.get(STATE_KEY)
        state = JobState(policy=Policy()).of(spec=SPEC)
        self._state = read_state(entry.value) if entry is not None else state
        self._act("adopt", self._state.epoch)
        self._saver = StateSaver(store, lease, STATE_KEY, entry)
        self._events: queue.SimpleQueue[Any] = queue.SimpleQueue()
        self._commits = CheckpointCommits(root / "checkpoints", self._events.put)

    def run(self) -> None:
        for order in checkpoints.commits_to_repeat(self._state):
            self._commits.begin(order.step, SPEC)
        for number in range(self._state.epoch + 1, N_DECISIONS + 1):
            state = self._state.of(epoch=number)
            if number in CHECKPOINTS:
                parts = (*state.checkpoint_parts, (number, SLOTS))
                state = state.of(checkpoint_parts=parts)
            self._decide(state, number)
            self._take_commits()
        while self._commits.pending():
            self._take_commits(wait=True)

    def _decide(self, state: JobState, number: int) -> None:
        """Save the state; afterwards act. Wait while the store is away."""
        self._state = state
        self._saver.hold(None, lambda: self._act("act", number))
        if number in CHECKPOINTS:
            self._saver.hold(None, lambda: self._commits.begin(number, SPEC))
        self._saver.save(state)
        while self._saver.away:
            time.sleep(0.001)
            if self._saver.due():
                self._saver.retry()

    def _take_commits(self, *, wait: bool = False) -> None:
        with contextlib.suppress(queue.Empty):
            event = self._commits.take(self._events.get(wait))
            if isinstance(event, CheckpointCommitted):
                self._state, _, _ = checkpoints.committed(self._state, event)
                self._saver.save(self._state)
            elif event is not None:
                self._act("failed", " ".join(event.error.split()))
                parts = tuple(p for p in self._state.checkpoint_parts if p[0] != event.step)
                self._state = self._state.of(checkpoint_parts=parts)

    def _act(self, *words: object) -> None:
        os.write(self._acts, (" ".join(map(str, words)) + "\n").encode())


def _fork(root: Path, number: int, fault: Fault | None, record: bool, pipe: int) -> int:
    """Start coordinator `number`; return its process id. Writes to `pipe` before it stops."""
    sys.stdout.flush()
    pid = os.fork()
    if pid:
        return pid
    code = 1
    try:
        with (root / f"coordinator{number}.log").open("ab") as out:
            os.dup2(out.fileno(), 2)

        def claim(point: Point) -> bool:
            (root / "reached").write_text(point.text)
            return True

        injector = Injector(
            "coordinator",
            record=str(root / "points") if record else "",
            target=fault.point if fault else None,
            fault=fault.how if fault else "",
            claim=claim,
            stopping=lambda: os.write(pipe, b"s"),
        )
        install(injector, (str(root / "checkpoints"),))
        install_store(injector, SqliteStore, StoreUnavailable)
        checkpoint_directory.RETRY_S = (0.001, 0.003, 0.009)
        vars(state_saver)["retry_s"] = lambda failures: 0.001
        try:
            MiniCoordinator(root, f"c{number}", 1000.0 * number).run()
            code = 0
        except StaleError:
            code = STALE
    except BaseException:  # noqa: BLE001 - the process ends in any case
        traceback.print_exc()
        sys.stderr.flush()
    finally:
        os._exit(code)


def run_coordinator(
    root: Path, fault: Fault | None = None, *, record: bool = False
) -> CoordinatorResult:
    """Run the script in the new folder `root`. Raises Failed."""
    root.mkdir(parents=True)
    for step in CHECKPOINTS:
        write_all(root / "checkpoints", step)
    heard, said = os.pipe()
    os.set_blocking(heard, False)
    number, stopped, until = 1, 0, time.monotonic() + DEADLINE_S
    pids = {_fork(root, number, fault, record, said)}
    try:
        done = False
        while pids:
            if time.monotonic() > until:
                raise Failed(f"the coordinators {pids} do not end")
            if not stopped and select.select([heard], [], [], 0.002)[0] and os.read(heard, 1):
                (stopped,) = pids  # another one takes over meanwhile, and then this one continues
                number += 1
                pids.add(_fork(root, number, None, False, said))
                _await_adoption(root, time.monotonic() + STOP_S)
                os.kill(stopped, signal.SIGCONT)
            for pid in list(pids):
                ended, status = os.waitpid(pid, os.WNOHANG)
                if not ended:
                    continue
                pids.discard(pid)
                code = os.waitstatus_to_exitcode(status)
                done = done or code == 0
                if code > 0 and code != STALE:
                    raise Failed(f"a coordinator ended with code {code}: {_log(root)}")
                if code and not pids and not done:
                    number += 1
                    pids.add(_fork(root, number, None, False, said))
            if number > 3:
                raise Failed("more than three coordinators")
    finally:
        for pid in pids:
            os.kill(pid, signal.SIGKILL)
            os.waitpid(pid, 0)
        os.close(heard)
        os.close(said)
    failed = _check(root)
    points = (root / "points").read_text().splitlines() if record else []
    result = CoordinatorResult(points, (root / "reached").exists(), number, failed)
    return result


def _await_adoption(root: Path, until: float) -> None:
    """Wait until the second coordinator has adopted the state. It waits itself if the first one was
    stopped inside a transaction of the store, or holds the lock of the checkpoints."""
    while time.monotonic() < until:
        if sum(line.startswith("adopt") for line in _acts(root)) > 1:
            return
        time.sleep(0.002)


def _acts(root: Path) -> list[str]:
    path = root / "acts"
    return path.read_text().splitlines() if path.exists() else []


def _log(root: Path) -> str:
    return "".join(path.read_text()[-1500:] for path in root.glob("*.log"))


def _check(root: Path) -> list[str]:
    """Check the order of saves and acts, and the checkpoints; return the named failures."""
    acted, failed = 0, list[str]()
    for line in _acts(root):
        word, _, rest = line.partition(" ")
        if word == "failed":
            failed.append(rest)
        elif word == "adopt" and int(rest) < acted:
            raise Failed(f"decision {acted} was carried out, but state {rest} was saved")
        elif word == "act":
            acted = max(acted, int(rest))
    numbers = {int(line.split()[1]) for line in _acts(root) if line.startswith("act ")}
    adopted = {int(line.split()[1]) for line in _acts(root) if line.startswith("adopt ")}
    lost = set(range(1, N_DECISIONS + 1)) - numbers  # the successor of a lost one goes on from it
    if max(numbers | adopted, default=0) != N_DECISIONS or len(lost) > 1:
        raise Failed(f"decisions {sorted(lost)} were never carried out")
    for step in CHECKPOINTS:
        path = root / "checkpoints" / f"step-{step:08d}"
        if path.is_dir():
            if verified(path).step != step:
                raise Failed(f"{path.name} has another step")
        elif not failed:
            raise Failed(f"the checkpoint of step {step} is missing: {_log(root)}")
    return failed
