"""The saved state of the next and of the former version is read, that of others is refused."""

from __future__ import annotations

import json
import time
from contextlib import closing
from dataclasses import MISSING, fields
from pathlib import Path
from typing import Any

import pytest

from elastic.coordinator.leadership import STATE_KEY, RunMembership
from elastic.coordinator.records.saved_state import read_state
from elastic.coordinator.service import lead
from elastic.core.job.state import CauseKind, JobState
from elastic.core.protocol.version import FIRST, PROTOCOL
from elastic.domain import codec
from elastic.domain.errors import EXIT_INCOMPATIBLE, IncompatibleVersion
from elastic.store.open_store import open_store
from tests.coordinator.helpers import three_nodes
from tests.core.world.world import Fault, World


@pytest.fixture(scope="module")
def saved() -> JobState:
    """The state in the middle of a recovery: members, plan, assignment and change are there."""
    world = World(3, 3, steps=400)
    world.inject(Fault("kill", 2.0, 1))
    world.run(limit=4.0)
    states = [s for found in world.coordinator.samples.values() for s in found if s.change]
    return max(states, key=lambda state: len(codec.dumps(state))).of(protocol=PROTOCOL)


TABLES = frozenset(
    [
        "members",
        "health",
        "paces",
        "gauges",
        "expiring",
        "signs",
        "asked",
        "orders",
        "blamed",
        "failures",
    ]
)
"""Fields whose keys are names, not fields."""


def with_new_fields(value: Any) -> Any:
    """The same data from a version with one more field in each object."""
    if isinstance(value, dict):
        new = {
            name: {key: with_new_fields(entry) for key, entry in field.items()}
            if name in TABLES and isinstance(field, dict)
            else with_new_fields(field)
            for name, field in value.items()
        }
        return {**new, "field_of_tomorrow": [1]}
    return [with_new_fields(item) for item in value] if isinstance(value, list) else value


def text_of(state: JobState, **changes: Any) -> bytes:
    return json.dumps({**codec.encode(state), **changes}).encode()


@pytest.mark.parametrize("number", [PROTOCOL - 1, PROTOCOL, PROTOCOL + 1])
def test_neighbours_are_read_and_saved_as_this_version(saved: JobState, number: int) -> None:
    assert saved.plan and saved.change and saved.members
    assert read_state(text_of(saved, protocol=number)) == saved


def test_new_fields_are_ignored(saved: JobState) -> None:
    data = codec.encode(saved)
    new = {**with_new_fields(data), "field_of_tomorrow": {"a": 1}}
    text = json.dumps({**new, "protocol": PROTOCOL + 1})
    assert text.count("field_of_tomorrow") > 12
    assert read_state(text.encode()) == saved


def test_each_field_with_a_default_may_be_missing(saved: JobState) -> None:
    data = codec.encode(saved)
    for field in fields(JobState):
        known = field.default is not MISSING or field.default_factory is not MISSING
        if known and field.name != "protocol":
            del data[field.name]
    assert read_state(json.dumps(data).encode()) == JobState(saved.policy, protocol=PROTOCOL)


def test_a_cause_of_a_new_kind_is_read(saved: JobState) -> None:
    data = codec.encode(saved)
    data["change"]["causes"][0]["kind"] = "sunspots"
    change = read_state(json.dumps(data).encode()).change
    assert change is not None and change.causes[0].kind is CauseKind.OTHER


def test_a_state_without_a_number_is_of_the_first_version(saved: JobState) -> None:
    data = codec.encode(saved)
    del data["protocol"]
    assert FIRST == PROTOCOL - 1, "then this test refuses, like the next one"
    assert read_state(json.dumps(data).encode()) == saved


@pytest.mark.parametrize("number", [PROTOCOL - 2, PROTOCOL + 2, 99])
def test_other_versions_are_refused_with_versions_and_remedy(saved: JobState, number: int) -> None:
    with pytest.raises(IncompatibleVersion) as caught:
        read_state(text_of(saved, protocol=number))
    text = str(caught.value)
    assert f"protocol {PROTOCOL}" in text and "install the same version" in text
    assert number <= 0 or f"protocol {number}" in text
    assert caught.value.exit_code == EXIT_INCOMPATIBLE


@pytest.mark.parametrize("text", [b"", b"{", b"[]", b"3", b"{}", b'{"epoch": "x"}'])
def test_rubbish_is_refused(text: bytes) -> None:
    with pytest.raises(IncompatibleVersion, match=r"cannot read|is not JSON"):
        read_state(text)


def test_a_removed_required_field_is_named(saved: JobState) -> None:
    data = codec.encode(saved)
    del data["policy"]
    with pytest.raises(IncompatibleVersion, match=r"JobState\.policy.*missing field.*protocol"):
        read_state(json.dumps(data).encode())


def test_a_coordinator_that_cannot_read_the_state_gives_the_lease_back(
    saved: JobState, tmp_path: Path
) -> None:
    """So that another coordinator, of the right version, can lead at once."""
    config = three_nodes(tmp_path)
    with closing(open_store(config)) as store:
        lease = store.acquire("before", 1e6, time.time())
        store.put_if(STATE_KEY, text_of(saved, protocol=99), None, lease.token)
        RunMembership(store, tmp_path).begin("j.1", lease.token)
        store.release(lease)
        with pytest.raises(IncompatibleVersion, match="protocol 99"):
            lead(config, "127.0.0.1:0", 0, -1)
        store.release(store.acquire("after", 1e6, time.time()))
        entry = store.get(STATE_KEY)
        assert entry is not None and entry.value == text_of(saved, protocol=99), "left as it was"
