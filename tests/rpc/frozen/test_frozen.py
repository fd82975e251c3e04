"""Messages and saved state that this and the former version wrote are read, from frozen samples."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest

from elastic.coordinator.records.saved_state import read_state
from elastic.core.protocol.version import FIRST, PROTOCOL
from elastic.domain import codec
from elastic.domain.errors import FieldError
from elastic.rpc.control import envelope as wire
from elastic.rpc.control.envelope import Envelope
from elastic.store import checkpoint_directory
from elastic.store.checkpoint_format import CheckpointFile, Manifest
from tests.rpc.frozen.make import enumerations, frozen, kinds

NEIGHBOURS = [PROTOCOL - 1, PROTOCOL]
NEW = {"field_of_tomorrow": {"a": [1]}}


def of(number: int) -> dict[str, Any]:
    """The samples of a protocol, by kind."""
    return dict(frozen(number)["samples"])


CASES = [(number, name) for number in NEIGHBOURS for name in of(number)]


def same(known: Any, read: Any, may_lack: bool, path: str = "") -> None:
    """Assert that `read` has each value of `known`. It may have more fields, and lack some if
    `may_lack`: the version after theirs may have removed them."""
    if isinstance(known, dict):
        for name in known.keys() & read.keys() if may_lack else known:
            same(known[name], read.get(name), may_lack, f"{path}.{name}")
    elif isinstance(known, list):
        for index, pair in enumerate(zip(known, read, strict=True)):
            same(*pair, may_lack, f"{path}[{index}]")
    else:
        assert known == read, path


def with_new_fields(kind: Any, data: Any) -> Any:
    """The same data from a version with one more field in each dataclass."""
    return json.loads(json.dumps(_grown(codec.decode(kind, data, newer=True))))


def _grown(value: Any) -> Any:
    if dataclasses.is_dataclass(value):
        names = [field.name for field in dataclasses.fields(value)]
        return {**{name: _grown(getattr(value, name)) for name in names}, **NEW}
    if isinstance(value, dict):
        return {str(key): _grown(item) for key, item in value.items()}
    if isinstance(value, (tuple, list, frozenset)):
        return [_grown(item) for item in value]
    return codec.encode(value)


def received(name: str, data: Any) -> Any:
    """The message that this version reads from the bytes of an envelope."""
    body = wire._ENCODER.encode(data)
    return wire.unpack(wire.from_wire(wire.to_wire(Envelope(1, 1, name, body))))


@pytest.mark.parametrize(("number", "name"), CASES)
def test_each_sample_is_read_with_all_its_values(number: int, name: str) -> None:
    data = of(number)[name]
    read = json.loads(codec.dumps(codec.decode(kinds()[name], data, newer=True)))
    same(data, read, number < PROTOCOL)


@pytest.mark.parametrize(("number", "name"), CASES)
def test_fields_of_the_next_version_are_ignored(number: int, name: str) -> None:
    """One more field in each object of the sample."""
    kind, data = kinds()[name], of(number)[name]
    grown = with_new_fields(kind, data)
    assert "field_of_tomorrow" in grown
    assert codec.decode(kind, grown, newer=True) == codec.decode(kind, data, newer=True)
    with pytest.raises(FieldError, match="unknown field"):
        codec.decode(kind, grown)


@pytest.mark.parametrize("number", NEIGHBOURS)
@pytest.mark.parametrize("grown", [False, True], ids=["as it was", "with new fields"])
def test_messages_pass_through_an_envelope(number: int, grown: bool) -> None:
    for name in sorted(of(number).keys() & wire.KINDS.keys()):
        kind, data = wire.KINDS[name], of(number)[name]
        sent = with_new_fields(kind, data) if grown else data
        assert received(name, sent) == codec.decode(kind, data, newer=True), name


@pytest.mark.parametrize("number", NEIGHBOURS)
@pytest.mark.parametrize("grown", [False, True], ids=["as it was", "with new fields"])
def test_the_saved_state_is_read(number: int, grown: bool) -> None:
    """The sample's own number is that of no version."""
    kind, data = kinds()["JobState"], of(number)["JobState"]
    sent = {**(with_new_fields(kind, data) if grown else data), "protocol": number}
    if number == FIRST:
        del sent["protocol"]
    expected = codec.decode(kind, data, newer=True).of(protocol=PROTOCOL)
    assert read_state(json.dumps(sent).encode()) == expected


@pytest.mark.parametrize("number", NEIGHBOURS)
def test_no_value_of_an_enumeration_was_removed(number: int) -> None:
    present: dict[str, list[str]] = {}
    for kind in kinds().values():
        enumerations(kind, present, set())
    for name, values in frozen(number)["enumerations"].items():
        assert set(values) <= set(present.get(name, ())), f"{name} lacks values"


def test_each_kind_is_frozen() -> None:
    missing = kinds().keys() - of(PROTOCOL).keys()
    assert not missing, f"run python -m tests.rpc.frozen.make for {sorted(missing)}"


def test_a_checkpoint_of_the_next_version_is_read(tmp_path: Path) -> None:
    """Agents of the next version write the files and their entries; another wrote the manifest."""
    entry = {**of(PROTOCOL)["CheckpointFile"], "portion": [0, 1], "layer": 0, "shard": 0}
    entry = {**entry, "n_layers": 1, "tp": 1, "nbytes": 4, "name": "layer-0000-tp-0.safetensors"}
    staging = checkpoint_directory.staging_path(tmp_path, 3)
    staging.mkdir()
    (staging / entry["name"]).write_bytes(b"abcd")
    (staging / "layer-0000-tp-0.json").write_text(json.dumps({**entry, **NEW}))
    manifest = checkpoint_directory._collect(staging, 3, None)
    assert manifest.parts == (codec.decode(CheckpointFile, entry),)
    text = json.dumps(with_new_fields(Manifest, codec.encode(manifest)))
    (staging / "manifest.json").write_text(text)
    assert checkpoint_directory.read_manifest(staging) == manifest
