"""Injected faults: texts round-trip, wrong texts name their part, and faults are due on time."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from elastic.core.protocol.fault_spec import (
    LAUNCHER_KINDS,
    NODE_KINDS,
    FaultKind,
    FaultSpec,
    Phase,
    due,
    dump_faults,
    launcher_due,
    load_faults,
    parse_fault,
)
from elastic.domain import codec
from elastic.domain.errors import FieldError

counts = st.integers(0, 10**6)
seconds = st.floats(0, 1e5, allow_nan=False).map(lambda v: v + 0.0)


@st.composite
def specs(draw: st.DrawFn) -> FaultSpec:
    kind = draw(st.sampled_from(list(FaultKind)))
    phases = (
        [Phase.RECOVERY] if kind in LAUNCHER_KINDS else [p for p in Phase if p is not Phase.START]
    )
    phase = draw(st.none() | st.sampled_from(phases))
    batched = phase in (None, Phase.FORWARD, Phase.BACKWARD)
    return FaultSpec(
        kind=kind,
        node=draw(st.sampled_from(["node0", "node12", "gpu-host.3", "node007"]))
        if kind in NODE_KINDS
        else "",
        peer=draw(st.sampled_from(["node1", "gpu-host.4"])) if kind is FaultKind.CUT else "",
        worker=draw(st.none() | counts)
        if kind in (FaultKind.KILL_WORKER, FaultKind.STOP, FaultKind.SLOW)
        else None,
        step=draw(counts),
        microbatch=draw(st.none() | counts) if batched else None,
        phase=phase,
        after=draw(counts) if phase is Phase.RECOVERY else 0,
        factor=draw(st.floats(1.001, 1000))
        if kind in (FaultKind.SLOW, FaultKind.SLOW_LINK)
        else 3.0,
        duration_s=draw(seconds) if kind in (FaultKind.PARTITION, FaultKind.CUT) else 5.0,
        down_s=draw(seconds) if kind is FaultKind.KILL_COORDINATOR else 5.0,
        deadline_s=draw(seconds) if kind is FaultKind.DRAIN else 30.0,
    )


@given(specs())
@settings(max_examples=150, deadline=None)
def test_text_reads_back(spec: FaultSpec) -> None:
    assert parse_fault(spec.text) == spec
    assert codec.loads(FaultSpec, codec.dumps(spec)) == spec
    assert load_faults(dump_faults((spec, spec))) == (spec, spec)


@given(st.text(alphabet="kil node=23stp-microbach phasew0.'\"", max_size=40))
@settings(max_examples=150, deadline=None)
def test_any_text_is_a_spec_or_a_clear_error(text: str) -> None:
    try:
        spec = parse_fault(text)
    except FieldError as error:
        assert str(error).startswith("--fault")
    else:
        assert parse_fault(spec.text) == spec


WRONG = [
    ("", "kind and fields"),
    ("explode node=1", "the kind is one of kill"),
    ("kill", "needs node="),
    ("kill node=", "key=value"),
    ("kill node=1 node=2", "twice"),
    ("kill node=1 when=3", "the fields are"),
    ("kill node=1 step=-1", "from 0 up"),
    ("kill node=1 step=three", "from 0 up"),
    ("kill node=a/b", "node's name"),
    ("cut node=1", "needs peer="),
    ("kill node=1 peer=2", "goes with cut"),
    ("kill node=1 worker=0", "goes with kill-worker"),
    ("kill node=1 factor=2", "goes with slow"),
    ("slow node=1 factor=1", "above 1"),
    ("slow node=1 factor=inf", "a number"),
    ("partition node=1 duration=-3", "a number"),
    ("drain node=1 deadline=9h", "a number"),
    ("kill-coordinator node=1", "has no node"),
    ("join node=1", "has no node"),
    ("join phase=reduce", "knows recovery only"),
    ("kill node=1 phase=later", "one of forward"),
    ("kill node=1 phase=start", "one of forward"),
    ("kill node=1 phase=reduce microbatch=2", "has no micro-batch"),
    ("kill node=1 after=2", "goes with phase=recovery"),
    ('kill node="1', "quotes do not match"),
]


@pytest.mark.parametrize(("text", "part"), WRONG, ids=[text or "empty" for text, _ in WRONG])
def test_errors_name_the_wrong_part(text: str, part: str) -> None:
    with pytest.raises(FieldError, match="--fault") as caught:
        parse_fault(text)
    assert part in str(caught.value)


def test_units_and_names() -> None:
    assert parse_fault("partition node=node2 duration=500ms").duration_s == 0.5
    assert parse_fault("drain node=3 deadline=2m").deadline_s == 120.0
    assert parse_fault("kill node=3") == parse_fault("kill node=node3")
    assert load_faults("") == ()
    with pytest.raises(FieldError):
        load_faults("[1]")


def fires(
    text: str, points: Sequence[tuple[int, Phase, int | None]], worker: int = 0, recoveries: int = 0
) -> int | None:
    """Index of the first point at which the fault is due on node2."""
    spec = parse_fault(text)
    for i, (step, phase, microbatch) in enumerate(points):
        if due(
            spec,
            node="node2",
            worker=worker,
            step=step,
            phase=phase,
            microbatch=microbatch,
            recoveries=recoveries,
        ):
            return i
    return None


STEP = [
    (3, Phase.START, None),
    (3, Phase.FORWARD, 4),
    (3, Phase.FORWARD, 6),
    (3, Phase.BACKWARD, 4),
    (3, Phase.BACKWARD, 6),
    (3, Phase.REDUCE, None),
    (3, Phase.OPTIMIZER, None),
]


@pytest.mark.parametrize(
    ("text", "index"),
    [
        ("kill node=2 step=3", 0),
        ("kill node=2 step=3 microbatch=4", 3),
        ("kill node=2 step=3 microbatch=5", 4),
        ("kill node=2 step=3 microbatch=5 phase=forward", 2),
        ("kill node=2 step=3 phase=forward", 1),
        ("kill node=2 step=3 phase=backward", 3),
        ("kill node=2 step=3 phase=reduce", 5),
        ("kill node=2 step=3 phase=optimizer", 6),
        ("kill node=2 step=3 microbatch=7", None),
        ("kill node=2 step=4", None),
        ("kill node=1 step=3", None),
        ("kill node=2 step=3 phase=recovery", None),
        ("kill node=2 step=2 microbatch=9", 0),
        ("kill node=2 step=2 phase=reduce", 5),
        ("join step=3", None),
    ],
)
def test_points_within_a_step(text: str, index: int | None) -> None:
    assert fires(text, STEP) == index


def test_recovery_points() -> None:
    point = [(5, Phase.RECOVERY, None)]
    assert fires("kill node=2 step=3 phase=recovery", point) == 0
    assert fires("kill node=2 step=6 phase=recovery", point) is None
    assert fires("kill node=2 phase=recovery after=1", point) is None
    assert fires("kill node=2 phase=recovery after=1", point, recoveries=1) == 0
    assert fires("kill node=2 step=3", point) is None


def test_workers() -> None:
    assert fires("stop node=2 step=3", STEP, worker=1) is None
    assert fires("stop node=2 step=3 worker=1", STEP, worker=1) == 0
    assert fires("kill node=2 step=3", STEP, worker=1) == 0
    assert fires("slow node=2 step=3", STEP, worker=1) == 0


def test_launcher_points() -> None:
    def at(
        text: str, step: int, microbatch: int = 0, recoveries: int = 0, recovering: bool = False
    ) -> bool:
        return launcher_due(
            parse_fault(text),
            step=step,
            microbatch=microbatch,
            recoveries=recoveries,
            recovering=recovering,
        )

    assert at("join", 0)
    assert not at("join step=2", 1) and at("join step=2", 2)
    assert not at("drain node=1 step=2 microbatch=3", 2, 2) and at(
        "drain node=1 step=2 microbatch=3", 2, 3
    )
    assert at("drain node=1 step=2 microbatch=3", 3)
    assert not at("kill-coordinator phase=recovery", 4) and at(
        "kill-coordinator phase=recovery", 4, recovering=True
    )
    assert not at("kill-coordinator phase=recovery after=1", 4, recovering=True)
    assert not at("kill node=1", 9)
