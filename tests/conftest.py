"""For every area: one torch thread a process, and property tests that a busy machine cannot fail."""

from __future__ import annotations

import faulthandler
import os
import secrets
import sys
from collections.abc import Generator
from typing import Any

import pytest
from hypothesis import settings

os.environ.setdefault("OMP_NUM_THREADS", "1")
# Only who has it may use the Ray clusters of the tests. Ray reads it when it is imported, which any test may do first.
os.environ["RAY_AUTH_MODE"] = "token"
os.environ["RAY_AUTH_TOKEN"] = secrets.token_hex(32)
os.environ.pop("RAY_ADDRESS", None)

settings.register_profile("suite", deadline=None, derandomize=True, print_blob=True)
settings.load_profile("suite")

TEARDOWN_S = 300.0
"""For the cleaning up of one test. pytest's own watches end when a test fails."""
_stderr = pytest.StashKey[int]()


def pytest_configure(config: pytest.Config) -> None:
    assert sys.__stderr__ is not None
    config.stash[_stderr] = os.dup(sys.__stderr__.fileno())


@pytest.hookimpl(wrapper=True)
def pytest_runtest_teardown(item: pytest.Item) -> Generator[None, Any, Any]:
    """A process whose cleaning up does not end prints all stacks and ends."""
    faulthandler.dump_traceback_later(TEARDOWN_S, file=item.config.stash[_stderr], exit=True)
    try:
        return (yield)
    finally:
        faulthandler.cancel_dump_traceback_later()
