"""Lets the agent and the workers of one node speak the protocol of the former or next version.

Python imports this module at the start of every process whose PYTHONPATH has this folder. The
variable OTHER_VERSION has the settings as JSON: node ("*": each node, and the coordinator), number
of the protocol, and folder. Each
process records in FOLDER/PROCESS-ID the fields that it left out, did not read, or added.

- The former version knows the kinds and fields of its frozen samples
  (`tests/rpc/frozen`). It neither sends nor reads others.
- The next version sends one more field in each object, and announces one more kind of message.
"""

from __future__ import annotations

import dataclasses
import json
import os
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

FROZEN = Path(__file__).resolve().parents[3] / "rpc/frozen"
NEW_FIELD, NEW_KIND = "field_of_tomorrow", "Tomorrow"
GREETING = "Hello"
"""The former version has it, too: a side without it is refused."""


def is_mine(words: Sequence[str], environment: Mapping[str, str], node: str) -> bool:
    """Return whether this process is the agent or a worker of the node."""
    if node == "*":
        services = {"elastic.agent.service", "elastic.coordinator.service"}
        return bool(services & {*words}) or "LOCAL_RANK" in environment
    if "elastic.agent.service" in words and "--node" in words:
        return words[words.index("--node") + 1] == node
    return environment.get("ELASTIC_NODE") == node and "LOCAL_RANK" in environment


class Dialect:
    """Translates between the objects of this code and the data of another version."""

    def __init__(self, number: int, record: Path) -> None:
        from elastic.core.protocol import version

        self._former = number < version.PROTOCOL
        path = FROZEN / f"protocol-{min(number, version.PROTOCOL)}.json"
        self._samples: dict[str, Any] = json.loads(path.read_text())["samples"]
        self._record, self._told = record, set[str]()

    def speak(self, number: int) -> None:
        """Change the protocol of this process."""
        from elastic.core.protocol import version
        from elastic.domain import codec

        version.PROTOCOL = number  # before other modules read it
        from elastic.rpc import frames
        from elastic.rpc.control import envelope

        known = set(envelope.KINDS)
        if self._former:
            known = (known & self._samples.keys()) | {GREETING}
            for module in (envelope, frames):
                for name in module.KINDS.keys() - known:
                    del module.KINDS[name]
        else:
            known |= {NEW_KIND}
        announced = version.this_version(tuple(sorted(known)))
        envelope.SESSION_VERSION = frames.CHANNEL_VERSION = announced
        encode, decode, encode_body = codec.encode, codec.decode, envelope.encode_body

        def encoded(value: Any) -> Any:
            return self.outgoing(value, encode)

        def decoded(kind: Any, data: Any, path: str = "", *, newer: bool = False) -> Any:
            return decode(kind, self.incoming(kind, data) if newer else data, path, newer=newer)

        codec.encode = encoded
        codec.decode = decoded
        envelope.encode_body = lambda kind, value: encode_body(kind, encoded(value))

    def outgoing(self, value: Any, encode: Any) -> Any:
        """Return the data that this version sends for an object."""
        name = type(value).__name__
        if self._former:
            return self._pruned(name, encode(value), "not sent")
        if name in self._samples:
            self._tell(f"added: {name}.{NEW_FIELD}")
            return {**encode(self._grown(value)), NEW_FIELD: [1]}
        return encode(value)

    def incoming(self, kind: Any, data: Any) -> Any:
        """Return the part of received data that this version knows."""
        return self._pruned(kind.__name__, data, "not read") if self._former else data

    def _grown(self, value: Any) -> Any:
        """Return an object as plain data, in which each inner object has one more field."""
        fields = {f.name: getattr(value, f.name) for f in dataclasses.fields(value)}
        return {name: self._grown_inside(inner) for name, inner in fields.items()}

    def _grown_inside(self, value: Any) -> Any:
        if dataclasses.is_dataclass(value):
            return {**self._grown(value), NEW_FIELD: [1]}
        if isinstance(value, dict):
            return {key: self._grown_inside(inner) for key, inner in value.items()}
        if isinstance(value, (tuple, list)):
            return [self._grown_inside(inner) for inner in value]
        return value

    def _pruned(self, name: str, data: Any, what: str) -> Any:
        sample = self._samples.get(name)
        return data if sample is None else self._prune(data, sample, f"{what}: {name}")

    def _prune(self, data: Any, sample: Any, path: str) -> Any:
        if isinstance(sample, dict) and isinstance(data, dict):
            if set(sample) in ({"text"}, {"3"}):  # a table, not an object
                (inner,) = sample.values()
                return {key: self._prune(value, inner, path) for key, value in data.items()}
            for gone in data.keys() - sample.keys():
                self._tell(f"{path}.{gone}")
            known = data.keys() & sample.keys()
            return {key: self._prune(data[key], sample[key], f"{path}.{key}") for key in known}
        if isinstance(sample, list) and isinstance(data, (list, tuple)) and sample:
            inner = sample if len(sample) == len(data) else [sample[0]] * len(data)
            return [self._prune(*pair, path) for pair in zip(data, inner, strict=True)]
        return data

    def _tell(self, line: str) -> None:
        if line not in self._told:
            self._told.add(line)
            with self._record.open("a") as file:
                file.write(line + "\n")


def begin(settings: Mapping[str, Any]) -> None:
    number, record = int(settings["number"]), Path(settings["folder"], str(os.getpid()))
    Dialect(number, record).speak(number)


if "OTHER_VERSION" in os.environ:
    given = json.loads(os.environ["OTHER_VERSION"])
    if is_mine(sys.orig_argv, os.environ, given["node"]):
        begin(given)
