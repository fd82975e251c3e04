"""Names of backup schemes: what is understood, and what is refused and why."""

from __future__ import annotations

import pytest

from elastic.domain.errors import FieldError
from elastic.planning.plan.schemes import (
    Gradients,
    State,
    gradients_of,
    refuse_useless,
    schemes_of,
    state_of,
)


@pytest.mark.parametrize(
    ("text", "expected", "share"),
    [
        ("stream", Gradients("stream", 1), 1.0),
        ("stream:4", Gradients("stream", 4), 0.25),
        ("reduce", Gradients("reduce", rounds=1), 1.0),
        ("reduce:4", Gradients("reduce", rounds=4), 0.25),
        ("recompute", Gradients("recompute"), 0.0),
        ("log", Gradients("log"), 0.0),
        ("none", Gradients("none"), 0.0),
    ],
)
def test_gradients(text: str, expected: Gradients, share: float) -> None:
    assert gradients_of(text) == expected and gradients_of(text).share == share


@pytest.mark.parametrize(
    ("text", "expected", "away", "updates"),
    [
        ("snapshot", State("snapshot", 1), True, False),
        ("replay", State("replay", 8), True, True),
        ("replay:2", State("replay", 2), True, True),
        ("replica", State("replica"), False, False),
        ("none", State("none"), False, False),
        ("snapshot/sharded", State("snapshot", 1, sharded=True), True, False),
        ("replay:2/sharded", State("replay", 2, sharded=True), True, True),
    ],
)
def test_states(text: str, expected: State, away: bool, updates: bool) -> None:
    assert state_of(text) == expected
    assert (expected.away, expected.updates) == (away, updates)


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("stream:0+snapshot", "K from 1 up"),
        ("stream:-1+snapshot", "K from 1 up"),
        ("stream:two+snapshot", "K from 1 up"),
        ("stream:²+snapshot", "K from 1 up"),
        ("stream:+snapshot", "K from 1 up"),
        ("stream:9999999+snapshot", "K from 1 up"),
        ("reduce:0+replica", "reduce:K with K from 1 up"),
        ("reduce:+replica", "reduce:K with K from 1 up"),
        ("recompute:2+snapshot", "takes no number"),
        ("log:2+snapshot", "takes no number"),
        ("strem+snapshot", "stream:K"),
        ("stream+", "GRADIENTS"),
        ("stream", "GRADIENTS"),
        ("", "GRADIENTS"),
        ("stream+tape", "GRADIENTS"),
        ("stream+replay:1", "take snapshot"),
        ("stream+replay:65", "N from 2 to 64"),
        ("stream+replay:", "N from 2 to 64"),
        ("stream+replay:²", "N from 2 to 64"),
        ("stream+snapshot:2", "takes no number"),
        ("stream+replica:", "takes no number"),
        ("stream+parity", r"snapshot, replica, replay or replay:N"),
        ("stream+replica/sharded", "no other node has this one's part"),
        ("none+none/sharded", "no other node has this one's part"),
        ("stream+snapshot/shared", "write snapshot/sharded"),
        ("stream+snapshot/sharded/sharded", "write snapshot/sharded"),
        ("stream+replay:1/sharded", "take snapshot"),
        ("stream+/sharded", "GRADIENTS"),
    ],
)
def test_what_is_not_understood_is_refused(text: str, why: str) -> None:
    with pytest.raises(FieldError, match=why):
        schemes_of(text)


@pytest.mark.parametrize(
    ("backup", "pipelines", "why"),
    [
        ("stream+none", "auto", "without the state it belongs to"),
        ("recompute+none", "2", "without the state it belongs to"),
        ("stream:2+replica", "1", "nobody else holds a layer"),
        ("stream+snapshot/sharded", "1", "leave /sharded out"),
        ("stream:2+replay:0", "auto", "N from 2 to 64"),
        ("reduce:2+none", "2", "without the state it belongs to"),
        ("reduce+snapshot", "1", "nobody to sum with"),
    ],
)
def test_pairs_that_protect_nothing_are_refused(backup: str, pipelines: str, why: str) -> None:
    with pytest.raises(FieldError, match=why):
        refuse_useless(backup, pipelines)


@pytest.mark.parametrize(
    "backup",
    [
        "none+none",
        "stream:8+snapshot",
        "recompute+replica",
        "reduce+replica",
        "none+snapshot",
        "recompute+replay:4",
    ],
)
def test_others_are_not(backup: str) -> None:
    refuse_useless(backup, "auto")
