"""Verdict about holders of a layer that disagree, and the copies that a recovery leaves aside."""

from __future__ import annotations

from dataclasses import replace

import pytest

from elastic.core.protocol.messages import Diverged
from elastic.core.recovery.divergence import Distrust, Place, allowed, judge
from elastic.domain.types import NORM, PARAMETERS, Divergence
from tests.core.recovery.copies import gradient, state, update

EPOCH, STEP, LAYER = 3, 7, 1
WRONG = ("a", LAYER, 0)


def report(what: str, values: str, **sound: bool) -> list[Diverged]:
    """Reports of holders a, b, ... that have these values; `sound`: node -> its own check."""
    nodes = "abcdef"[: len(values)]
    found = Divergence(LAYER, 0, what, tuple(zip(nodes, values, strict=True)))
    return [
        Diverged(EPOCH, STEP, (found,), ((n, LAYER, 0, sound[n]),) if n in sound else ())
        for n in nodes
    ]


@pytest.mark.parametrize("what", [NORM, PARAMETERS])
@pytest.mark.parametrize(
    ("values", "sound", "living", "wrong"),
    [
        ("yxx", {}, "abc", "a"),
        ("yxx", {"a": True, "b": False}, "abc", "a"),  # the majority counts more than a self-check
        ("xxyzx", {}, "abcde", "cd"),
        ("xy", {"a": False}, "ab", "a"),
        ("xy", {"a": False, "b": True}, "ab", "a"),
        ("xyxy", {"b": False, "d": False}, "abcd", "bd"),
        ("xyz", {"a": False, "b": False}, "abc", "ab"),
    ],
)
def test_wrong_holders(
    what: str, values: str, sound: dict[str, bool], living: str, wrong: str
) -> None:
    verdict = judge(report(what, values, **sound), living, ())
    places: tuple[Place, ...] = tuple((node, LAYER, 0) for node in wrong)
    assert verdict.distrust == Distrust(EPOCH, STEP, places) and not verdict.fatal
    (reason,) = verdict.reasons
    assert f"layer {LAYER} (TP rank 0): {what} differ: a has {values[0]}, b has" in reason


@pytest.mark.parametrize(("living", "wrong"), [("b", "a"), ("a", "b")])
def test_the_loss_of_a_holder_proves_nothing_about_parameters(living: str, wrong: str) -> None:
    """If only norms differ, the step runs again without the copies of the lost node."""
    verdict = judge(report(NORM, "xy", b=True), living, ())
    assert verdict.distrust.places == ((wrong, LAYER, 0),) and not verdict.fatal
    verdict = judge(report(PARAMETERS, "xy", b=True), living, ())
    assert verdict.distrust.places == () and "no evidence" in verdict.fatal


@pytest.mark.parametrize(
    ("values", "sound"),
    [
        ("xy", {}),
        ("xy", {"a": True}),
        ("xy", {"a": True, "b": True}),
        ("xyxy", {"b": False}),
    ],
)
def test_without_evidence_the_job_ends(values: str, sound: dict[str, bool]) -> None:
    verdict = judge(report(PARAMETERS, values, **sound), "abcd", ())
    assert not verdict.distrust.places
    assert verdict.fatal.startswith("step 7: layer 1 (TP rank 0): parameters differ: a has x, b ")
    assert verdict.fatal.endswith("no evidence tells which holder is right")


def shared(values: str, portions: str, **sound: bool) -> list[Diverged]:
    """Reports of holders that share the state; `portions`: those with a right copy of theirs."""
    nodes = "abcdef"[: len(values)]
    return [
        replace(one, portions=((node, LAYER, 0, nodes.index(node), len(nodes)),))
        if node in portions
        else one
        for node, one in zip(nodes, report(PARAMETERS, values, **sound), strict=True)
    ]


@pytest.mark.parametrize(
    ("values", "portions", "sound", "wrong", "reload"),
    [
        ("xy", "ab", {"a": True, "b": True}, "", "ab"),  # in a portion that the wrong holder lacks
        ("xyxy", "abcd", {}, "", "abcd"),
        ("xy", "ab", {"a": True, "b": False}, "b", "b"),
        ("xxy", "abc", {}, "c", "c"),
    ],
)
def test_right_copies_of_a_shared_state_are_used(
    values: str, portions: str, sound: dict[str, bool], wrong: str, reload: str
) -> None:
    """No other holder has a copy of the same portion, so none is left aside."""
    verdict = judge(shared(values, portions, **sound), "abcd", ())
    assert not verdict.fatal
    assert verdict.wrong == tuple((node, LAYER, 0) for node in wrong)
    suspects = tuple((node, LAYER, 0) for node in reload)
    distrust = verdict.distrust
    assert distrust == Distrust(EPOCH, STEP, (), suspects) and distrust.suspects == suspects
    copies = [state(LAYER, STEP, node, epoch=EPOCH) for node in "ab"]
    used = allowed([*copies, gradient(LAYER, STEP, {0}, "a", epoch=EPOCH)], [distrust])
    assert used == tuple(copies), "the step runs again without its old gradients"
    assert distrust.repaired(reload) == Distrust(EPOCH, STEP)


def test_a_portion_without_a_right_copy_ends_the_job() -> None:
    assert judge(shared("xy", "a", a=True, b=True), "ab", ()).fatal
    verdict = judge(shared("xxy", "ab"), "abc", ())
    assert verdict.distrust == Distrust(EPOCH, STEP, (("c", LAYER, 0),)) and not verdict.fatal


def test_a_norm_without_evidence_is_computed_once_more() -> None:
    """The state is not in question, so the step may run again; but not for ever."""
    first = judge(report(NORM, "xy"), "ab", ())
    assert not first.fatal and first.distrust == Distrust(EPOCH, STEP)
    assert judge(report(NORM, "xy"), "ab", (first.distrust,)).fatal
    elsewhere = replace(first.distrust, step=STEP - 1)
    assert not judge(report(NORM, "xy"), "ab", (elsewhere,)).fatal


def test_a_step_that_diverges_again_and_again_ends_the_job() -> None:
    earlier: tuple[Distrust, ...] = ()
    for _ in range(3):
        verdict = judge(report(PARAMETERS, "yxx"), "abc", earlier)
        assert not verdict.fatal
        earlier = (*earlier, verdict.distrust)
    assert "diverged 3 times before" in judge(report(PARAMETERS, "yxx"), "abc", earlier).fatal


def test_units_of_one_node_are_compared() -> None:
    """The verdict names the node, because its units share a vault."""
    names = ("a", "a/1", "b")
    found = Divergence(LAYER, 0, PARAMETERS, tuple(zip(names, "xyx", strict=True)))
    verdict = judge([Diverged(EPOCH, STEP, (found,))], "ab", ())
    assert verdict.distrust.places == (("a", LAYER, 0),) and "a/1 differs" in verdict.reasons[0]


def test_a_wrong_replica_is_no_source() -> None:
    """States and updates of the wrong replica, and all gradients of the step, are left aside."""
    distrust = Distrust(EPOCH, STEP, (WRONG,))
    used = [
        state(LAYER, STEP, "b", epoch=EPOCH),
        state(0, STEP, "a", epoch=EPOCH),
        state(LAYER, STEP, "a", epoch=EPOCH + 1),
        update(LAYER, STEP - 1, "b", epoch=EPOCH),
        gradient(LAYER, STEP - 1, {0}, "a", epoch=EPOCH),
        gradient(LAYER, STEP, {0}, "a", epoch=EPOCH + 1),
    ]
    unused = [
        state(LAYER, STEP, "a", epoch=EPOCH),
        state(LAYER, STEP, "b", owner="a", epoch=EPOCH),
        state(LAYER, STEP - 1, "b", owner="a", epoch=EPOCH - 1),
        update(LAYER, STEP - 1, "a", epoch=EPOCH),
        gradient(LAYER, STEP, {0}, "b", epoch=EPOCH),
        gradient(0, STEP, {0}, "b", epoch=EPOCH),
    ]
    assert allowed([*used, *unused], [distrust]) == tuple(used)
