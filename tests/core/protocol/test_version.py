"""Neighbouring versions understand each other; all others are refused with both versions named."""

from __future__ import annotations

import pytest

from elastic.core.protocol.version import (
    PROTOCOL,
    UNANNOUNCED,
    ProtocolVersion,
    incompatibility,
    this_version,
)


@pytest.mark.parametrize("number", [PROTOCOL - 1, PROTOCOL, PROTOCOL + 1])
def test_neighbours_fit(number: int) -> None:
    assert incompatibility(this_version(), ProtocolVersion(number), "a", "b") == ""


@pytest.mark.parametrize("number", [PROTOCOL - 2, PROTOCOL + 2, 99, -5, UNANNOUNCED])
def test_others_are_refused_with_versions_and_remedy(number: int) -> None:
    theirs = ProtocolVersion(number, "9.8.7")
    text = incompatibility(this_version(), theirs, "the coordinator", "node3")
    assert "node3" in text and "the coordinator" in text and "install the same version" in text
    assert f"protocol {PROTOCOL}" in text and f"to {PROTOCOL + 1}" in text
    if number != UNANNOUNCED:
        assert f"elastic 9.8.7 with protocol {number}" in text


def test_capabilities() -> None:
    assert ProtocolVersion(2).reads("Anything"), "unknown capabilities restrict nothing"
    some = ProtocolVersion(2, "", ("Halt", "Stop"))
    assert some.reads("Halt") and not some.reads("Trim")
