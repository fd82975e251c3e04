"""Shared setup: one torch thread per process, and property tests that tolerate a busy machine."""

from __future__ import annotations

import faulthandler
import os
import secrets
import sys
from collections.abc import Callable, Generator, Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, settings

from elastic.config import JobConfig, WorkerCommand
from elastic.rpc.security import tls

os.environ.setdefault("OMP_NUM_THREADS", "1")
# Where this is set, each of the many processes of the suite compiles all modules again.
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
sys.dont_write_bytecode = False
# Grants use of the tests' Ray clusters. Ray reads it on import, which any test may do first.
os.environ["RAY_AUTH_MODE"] = "token"
os.environ["RAY_AUTH_TOKEN"] = secrets.token_hex(32)
os.environ.pop("RAY_ADDRESS", None)

# Every run tries new examples. A failing one is printed with the line that repeats it, and is tried
# first in later runs on this machine (.hypothesis). Add it to its test as an `@example`.
# A busy machine may need seconds for one example.
settings.register_profile(
    "suite",
    max_examples=50,
    deadline=None,
    derandomize=False,
    print_blob=True,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.function_scoped_fixture],
)
settings.load_profile("suite")


LATER_S = 100.0
"""Extra seconds after a test's time limit (a signal) for a call that blocks or drops the signal."""
TEARDOWN_S = 300.0
"""For the cleaning up of one test, also of one that failed: the other watches end there."""
_stderr = pytest.StashKey[int]()
_begun: dict[str, None] = {}


def pytest_configure(config: pytest.Config) -> None:
    assert sys.__stderr__ is not None
    config.stash[_stderr] = os.dup(sys.__stderr__.fileno())


def watch(item: pytest.Item, seconds: float) -> None:
    """Print all stacks and end the process when that time is over."""
    faulthandler.dump_traceback_later(seconds, file=item.config.stash[_stderr], exit=True)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol(item: pytest.Item) -> Generator[None, Any, Any]:
    own = item.get_closest_marker("timeout")
    watch(item, LATER_S + float(own.args[0] if own is not None else item.config.getini("timeout")))
    try:
        return (yield)
    finally:
        faulthandler.cancel_dump_traceback_later()


@pytest.hookimpl(wrapper=True)
def pytest_runtest_teardown(item: pytest.Item) -> Generator[None, Any, Any]:
    watch(item, TEARDOWN_S)
    return (yield)


def pytest_runtest_logstart(nodeid: str) -> None:
    _begun[nodeid] = None


def pytest_runtest_logfinish(nodeid: str) -> None:
    _begun.pop(nodeid, None)


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """What ran when the suite was interrupted."""
    for nodeid in _begun:
        terminalreporter.write_line(f"NOT ENDED {nodeid}", red=True)


@pytest.fixture(autouse=True)
def own_security() -> Iterator[None]:
    """A token or certificates that one test uses in this process are not those of the next one."""
    former = tls.current()
    yield
    tls.use(former)


@pytest.fixture
def make_config(tmp_path: Path) -> Callable[..., JobConfig]:
    """Build a JobConfig whose workers run the given Python source."""

    def make(source: str = "", args: tuple[str, ...] = (), **changes: Any) -> JobConfig:
        script = tmp_path / "script.py"
        script.write_text(source)
        run_dir = tmp_path / "run"
        run_dir.mkdir(exist_ok=True)
        values: dict[str, Any] = {
            "job_id": "test",
            "run_dir": str(run_dir),
            "memory_dir": str(tmp_path / "memory"),
            "checkpoint_dir": str(run_dir / "checkpoints"),
            "command": WorkerCommand(script=str(script), args=args),
        }
        return JobConfig(**{**values, **changes})

    return make


@pytest.fixture
def environment() -> dict[str, str]:
    """This environment without PET_* defaults, with the package importable."""
    root = str(Path(__file__).resolve().parents[1])
    kept = {key: value for key, value in os.environ.items() if not key.startswith("PET_")}
    return {**kept, "PYTHONPATH": root}
