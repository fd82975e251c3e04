"""What is encoded comes back equal; what does not fit is refused by name."""

from __future__ import annotations

import dataclasses
import json
import math
import subprocess
import sys
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from elastic.core.protocol import messages
from elastic.domain import codec, types
from elastic.domain.errors import FieldError
from tests.patience import LONG_S

ROOT = Path(__file__).resolve().parents[2]


class Colour(StrEnum):
    RED = "red"
    BLUE = "blue"


@dataclass(frozen=True)
class Inner:
    number: int
    weight: float = 1.0


@dataclass(frozen=True)
class Outer:
    name: str
    colour: Colour = Colour.RED
    inner: Inner | None = None
    pair: tuple[str, int] = ("", 0)
    many: tuple[Inner, ...] = ()
    numbers: frozenset[int] = frozenset()
    by_name: dict[str, Inner] = dataclasses.field(default_factory=dict)
    by_number: dict[int, str] = dataclasses.field(default_factory=dict)
    counts: dict[str, int] = dataclasses.field(default_factory=dict)
    flag: bool = False
    anything: Any = None


GOOD = Outer(
    "a",
    Colour.BLUE,
    Inner(1, 0.1),
    ("x", 2),
    (Inner(1), Inner(2)),
    frozenset({3, 1}),
    {"k": Inner(4)},
    {7: "seven"},
    {"a": 1},
    True,
    [1, {"b": None}],
)


def test_round_trip() -> None:
    assert codec.loads(Outer, codec.dumps(GOOD)) == GOOD
    assert codec.decode(Outer, codec.encode(GOOD)) == GOOD


def test_text_is_stable() -> None:
    assert codec.encode(GOOD)["numbers"] == [1, 3]
    assert codec.dumps(Outer("a", numbers=frozenset({5, 2, 9}))) == codec.dumps(
        Outer("a", numbers=frozenset({9, 5, 2}))
    )


def test_defaults_may_be_missing() -> None:
    assert codec.loads(Outer, '{"name": "a"}') == Outer("a")


@pytest.mark.parametrize(
    ("change", "field"),
    [
        ({"name": 3}, "Outer.name"),
        ({"name": None}, "Outer.name"),
        ({"colour": "green"}, "Outer.colour"),
        ({"colour": []}, "Outer.colour"),
        ({"inner": []}, "Outer.inner"),
        ({"inner": {}}, "Outer.inner.number"),
        ({"inner": {"number": 1.5}}, "Outer.inner.number"),
        ({"inner": {"number": True}}, "Outer.inner.number"),
        ({"inner": {"number": 1, "weight": "1"}}, "Outer.inner.weight"),
        ({"inner": {"number": 1, "weight": True}}, "Outer.inner.weight"),
        ({"inner": {"number": 1, "extra": 0}}, "Outer.inner.extra"),
        ({"pair": ["x"]}, "Outer.pair"),
        ({"pair": ["x", "y"]}, "Outer.pair[1]"),
        ({"pair": "xy"}, "Outer.pair"),
        ({"many": [{"number": 1}, {"number": "2"}]}, "Outer.many[1].number"),
        ({"numbers": [1, [2]]}, "Outer.numbers[1]"),
        ({"by_name": []}, "Outer.by_name"),
        ({"by_name": {"k": 1}}, "Outer.by_name.k"),
        ({"by_name": {"j": {"number": 1}, "k": {"number": "x"}}}, "Outer.by_name.k.number"),
        ({"by_name": {"k": {"number": 1, "extra": 0}}}, "Outer.by_name.k.extra"),
        ({"by_number": {"7": "seven", "x": "y"}}, "Outer.by_number.x"),
        ({"by_number": {"7": 8}}, "Outer.by_number.7"),
        ({"many": [{"number": 1}, {"number": 2, "extra": 0}]}, "Outer.many[1].extra"),
        ({"counts": {"a": 1, "b": "2"}}, "Outer.counts.b"),
        ({"counts": {"a": None}}, "Outer.counts.a"),
        ({7: 1}, "Outer.7"),
        ({7: 1, "x": 2, None: 3}, "Outer.7"),
        ({"flag": 1}, "Outer.flag"),
        ({"unknown": 1}, "Outer.unknown"),
    ],
)
def test_refused(change: dict[str, Any], field: str) -> None:
    with pytest.raises(FieldError) as caught:
        codec.decode(Outer, codec.encode(GOOD) | change)
    assert caught.value.field == field
    assert str(caught.value).startswith(f"{field}: ")


@pytest.mark.parametrize(
    "change",
    [
        {"unknown": 1},
        {"inner": {"number": 1, "weight": 0.1, "extra": 0}},
        {"by_name": {"k": {"number": 4, "extra": [{"x": 1}]}}},
        {"many": [{"number": 1}, {"number": 2, "extra": 0}]},
    ],
)
def test_fields_of_a_newer_version_are_ignored_on_request(change: dict[str, Any]) -> None:
    data = codec.encode(GOOD) | change
    assert codec.decode(Outer, data, newer=True) == GOOD
    with pytest.raises(FieldError, match="unknown field"):
        codec.decode(Outer, data)


@pytest.mark.parametrize("change", [{"name": 3, "unknown": 1}, {"inner": {"extra": 0}}])
def test_a_wrong_value_is_refused_beside_newer_fields(change: dict[str, Any]) -> None:
    with pytest.raises(FieldError, match=r"Outer\.(name|inner\.number)"):
        codec.decode(Outer, codec.encode(GOOD) | change, newer=True)


def test_the_remedy_names_what_is_expected() -> None:
    with pytest.raises(FieldError, match=r"Outer\.colour: 'green' is not usable: one of red, blue"):
        codec.decode(Outer, {"name": "a", "colour": "green"})
    with pytest.raises(
        FieldError, match=r"Outer\.inner\.number: '1' is not usable: expected `int`, got `str`"
    ):
        codec.decode(Outer, {"name": "a", "inner": {"number": "1"}})


def test_missing_field() -> None:
    with pytest.raises(FieldError, match=r"Outer\.name: None is not usable: missing field"):
        codec.decode(Outer, {})


@pytest.mark.parametrize("text", ["", "{", "nan", b"\xff\xff", "[]", "null", '"text"', "3"])
def test_not_an_object(text: str | bytes) -> None:
    with pytest.raises(FieldError, match="Outer"):
        codec.loads(Outer, text)


def test_path_can_be_given() -> None:
    with pytest.raises(FieldError, match=r"^config\.json\.name"):
        codec.decode(Outer, {"name": 1}, "config.json")


def test_only_plain_values() -> None:
    with pytest.raises(TypeError, match="type object is unsupported"):
        codec.encode(object())


@given(st.floats(allow_nan=False) | st.integers(-(2**53), 2**53))
def test_numbers_come_back_to_the_last_bit(number: float) -> None:
    back = codec.loads(Inner, codec.dumps(Inner(1, number)))
    assert back.weight == number
    assert isinstance(back.weight, float)


def test_not_a_number() -> None:
    assert math.isnan(codec.loads(Inner, codec.dumps(Inner(1, math.nan))).weight)


copies = st.builds(
    types.Copy,
    kind=st.sampled_from([types.STATE, types.GRADIENT]),
    layer=st.integers(0, 99),
    shard=st.integers(0, 7),
    step=st.integers(-1, 10**6),
    epoch=st.integers(0, 10**6),
    owner=st.text(max_size=9),
    sequence=st.integers(0, 2**62),
    nbytes=st.integers(0, 2**62),
    checksum=st.text("0123456789abcdef", min_size=16, max_size=16),
    microbatches=st.frozensets(st.integers(0, 63)),
    losses=st.lists(st.tuples(st.integers(0, 63), st.floats(allow_nan=False))).map(tuple),
    node=st.text(max_size=9),
)
recipes = st.builds(
    types.Recipe,
    layer=st.integers(0, 99),
    shard=st.integers(0, 7),
    version=st.integers(0, 99),
    state=st.none() | copies,
    replay=st.lists(copies, max_size=2).map(tuple),
    gradients=st.lists(copies, max_size=2).map(tuple),
    checkpoint=st.text(max_size=9),
)


@given(st.lists(st.tuples(st.text(max_size=5), recipes), max_size=3).map(tuple))
def test_assignments_travel(what: tuple[tuple[str, types.Recipe], ...]) -> None:
    stage = types.Stage(types.Unit("node0"), 0, 2)
    plan = types.Plan(
        1, 2, 4, 1, (types.Pipeline((stage,), (0, 1, 2, 3)),), peers=(("node0", "node1"),)
    )
    install = messages.Install(1, types.Assignment(plan, 3, what, todo=((0, 1),)))
    text = codec.dumps(install)
    assert codec.loads(messages.Install, text) == install
    assert codec.dumps(codec.loads(messages.Install, text)) == text
    json.loads(text)


def test_endless_nesting_is_refused() -> None:
    nested = codec.encode(types.Recipe(0, 0, 1))
    for _ in range(2000):
        nested = {**codec.encode(types.Recipe(0, 0, 1)), "portions": [nested]}
    with pytest.raises(FieldError, match="nested too deeply"):
        codec.decode(types.Recipe, nested)


FIRST_USE = """
import sys, threading
from dataclasses import make_dataclass
from elastic.domain.codec import decode

sys.setswitchinterval(1e-6)
NAMES, THREADS = [f"a{i}" for i in range(20)], 4
for _ in range(50):
    inner = make_dataclass("Inner", [(name, "int") for name in NAMES], frozen=True)
    outer = make_dataclass("Outer", [(name, inner) for name in NAMES], frozen=True)
    data = dict.fromkeys(NAMES, dict.fromkeys(NAMES, 1))
    ready, found = threading.Barrier(THREADS), []

    def work():
        ready.wait()
        found.append(decode(outer, data))

    threads = [threading.Thread(target=work) for _ in range(THREADS)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert found == [decode(outer, data)] * THREADS
"""


def test_threads_that_meet_a_type_at_the_same_time() -> None:
    """msgspec alone ends the process by a segmentation fault."""
    command = [sys.executable, "-c", FIRST_USE]
    done = subprocess.run(
        command, cwd=ROOT, capture_output=True, text=True, check=False, timeout=LONG_S
    )
    assert done.returncode == 0, done.stderr
