"""A wrong ledger travels from the commit to the summary: each station in its turn.

A run without an error shows zeros, and would show them if a station dropped the numbers.
"""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace
from typing import Any, cast

import pytest

from elastic.coordinator.records.run_summary import summarize
from elastic.core.coordinator.transitions import transition
from elastic.core.job.state import LogEntry
from elastic.core.protocol import messages as m
from elastic.core.protocol.messages import NodePhase
from elastic.domain.errors import LedgerError, VaultError
from elastic.worker.epoch_session import EpochSession
from tests.core.coordinator.test_transitions import running


def failure(error: Exception) -> m.Failed:
    """What a worker sends because of `error`."""
    sent: list[m.Failed] = []
    context = SimpleNamespace(settings=SimpleNamespace(local_rank=1), replicas={})
    session: Any = SimpleNamespace(_context=context, _send=sent.append)
    with pytest.raises(SystemExit):
        EpochSession._fail(cast(EpochSession, session), error)
    return sent[0]


def test_a_wrong_ledger_of_a_commit_is_in_the_summary() -> None:
    failed = failure(LedgerError("layer 1: micro-batches doubled: [1], missing: [2, 3]", 1, 2))
    state = running()
    report = replace(state.members["node0"].report, phase=NodePhase.FAILED, failed=failed)
    _, actions, _ = transition(state, report, state.updated_at)
    events = [{"kind": a.kind, **a.data} for a in actions if isinstance(a, LogEntry)]
    assert summarize(events)["ledger"] == {"double": 1, "missing": 2, "proved": 0}


def test_another_error_is_not_a_wrong_ledger() -> None:
    failed = failure(VaultError("gone"))
    assert (failed.doubled, failed.missing) == (0, 0)
