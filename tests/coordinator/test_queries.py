"""A running coordinator answers any request, or gives a clear error, and goes on."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from elastic.agent.notices.file import MAX_DEADLINE_S
from elastic.coordinator import service
from elastic.coordinator.event_queue import WallClock
from elastic.coordinator.queries import Query
from elastic.core.coordinator.authorization import MAX_DEADLINE_S as COORDINATOR_MAX_DEADLINE_S
from elastic.domain.errors import ElasticError, StaleError, UsageError
from elastic.rpc.control.client import call
from tests.coordinator.helpers import START
from tests.coordinator.test_batches import Bench, attached, came
from tests.patience import LONG_S

KINDS = ("status", "nodes", "peers", "plan", "drain")
NUMBERS = (
    st.floats()
    | st.integers()
    | st.sampled_from([10**400, -(10**400), 1e308, True, MAX_DEADLINE_S + 1])
)
ANYTHING = st.recursive(
    st.none() | st.booleans() | NUMBERS | st.text(st.characters(), max_size=20),
    lambda inner: (
        st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=8), inner, max_size=3)
    ),
    max_leaves=8,
)
BODIES = st.fixed_dictionaries(
    {}, optional={"node": st.just("a") | ANYTHING, "deadline_s": NUMBERS | ANYTHING, "x": ANYTHING}
)


@pytest.fixture(scope="module")
def leading(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Bench]:
    """A coordinator with three members. Time stands still, so that no node is lost."""
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(WallClock, "now", lambda clock: START)
        made = Bench(tmp_path_factory.mktemp("run"))
        made.take(*map(came, "abc"))
        made.take(*map(attached, "abc"))
        thread = threading.Thread(target=_run, args=(made,), daemon=True)
        thread.start()
        yield made
        made.coordinator._events.put(StaleError("the test is over"))
        thread.join(LONG_S)
        assert not thread.is_alive()


def _run(bench: Bench) -> None:
    with pytest.raises(StaleError):
        bench.coordinator.run()


def ask(bench: Bench, kind: str, body: dict[str, Any]) -> dict[str, Any]:
    return call(bench.coordinator._server.address, kind, body)


def strict(folder: Path) -> list[dict[str, Any]]:
    """All events, parsed as strict JSON."""

    def refuse(word: str) -> None:
        raise AssertionError(f"{word} is no JSON")

    lines = (folder / "events.jsonl").read_text().splitlines()
    return [json.loads(line, parse_constant=refuse) for line in lines]


@pytest.mark.parametrize(
    "deadline",
    [
        10**400,
        -(10**400),
        float("nan"),
        float("inf"),
        1e999,
        -1,
        MAX_DEADLINE_S + 1,
        True,
        "30",
        None,
        [30],
    ],
)
def test_an_invalid_deadline_is_rejected(leading: Bench, deadline: object) -> None:
    with pytest.raises(UsageError, match="deadline_s"):
        ask(leading, "drain", {"node": "a", "deadline_s": deadline})
    assert {node["node"]: node["draining"] for node in ask(leading, "nodes", {})["nodes"]}[
        "a"
    ] is False
    strict(leading.folder)


def test_requests_and_notice_files_allow_the_same_deadline() -> None:
    assert MAX_DEADLINE_S == COORDINATOR_MAX_DEADLINE_S


def test_a_long_request_gets_a_short_error(leading: Bench) -> None:
    with pytest.raises(UsageError, match="node: 'xxx"):
        ask(leading, "drain", {"node": "x" * 60_000})
    with pytest.raises(UsageError, match="kind: 'xxx"):
        ask(leading, "x" * 60_000, {})


@settings(max_examples=120)
@given(kind=st.sampled_from(KINDS), body=BODIES)
@example(kind="peers", body={"node": "\ud800"})
@example(kind="drain", body={"node": "\ud800"})
@example(kind="drain", body={"node": "a", "deadline_s": 10**400})
def test_any_request_is_answered(leading: Bench, kind: str, body: dict[str, Any]) -> None:
    try:
        ask(leading, kind, body)
    except ElasticError as error:
        assert isinstance(error, UsageError) and "did not answer" not in str(error)
    assert ask(leading, "status", {})["epoch"] >= 0


def test_requests_leave_readable_records(leading: Bench) -> None:
    assert leading.coordinator._records.flush(LONG_S)
    assert strict(leading.folder)


def test_an_unexpected_error_is_answered(leading: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*args: object) -> None:
        raise ZeroDivisionError("a bug")

    with monkeypatch.context() as patched:
        patched.setattr(service, "reply", broken)
        with pytest.raises(ElasticError, match="ZeroDivisionError: see the coordinator's log"):
            ask(leading, "status", {})
    assert ask(leading, "status", {})["phase"]


def test_a_request_to_a_replaced_coordinator_fails() -> None:
    query = Query("status", {}, Future())
    query.fail(StaleError("another one leads"))
    assert isinstance(query.answer.exception(), StaleError)
