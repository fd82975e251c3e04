"""A loss is right only if the node had ended, or could not be heard because of itself."""

from __future__ import annotations

import dataclasses

import pytest

from elastic.core.job.state import LossKind
from tests.simulation.losses import Life, Loss, healthy_lost

LEAD, NEXT_LEAD = 1000, 1001
REFUSED = "connection closed and its port refuses connections"
ACCUSED = "connection closed and neighbours lost contact"
WELL = Life("node1", heard={LEAD: [0.5 * beat for beat in range(200)]})


def heard_until(at: float, life: Life = WELL) -> Life:
    return dataclasses.replace(life, heard={LEAD: [one for one in life.heard[LEAD] if one < at]})


def right(life: Life, at: float, kind: str = "silent", why: str = "", lead: int = LEAD) -> bool:
    return not healthy_lost([Loss(at, lead, "a", LossKind(kind), why)], {"a": life})


@pytest.mark.parametrize(
    ("kind", "why"),
    [("silent", ""), ("closed", REFUSED), ("closed", ACCUSED), ("replaced", ""), ("stalled", "")],
)
def test_a_healthy_node_is_never_lost_and_one_that_ended_may_be(kind: str, why: str) -> None:
    assert not right(WELL, 60.0, kind, why)
    gone = dataclasses.replace(heard_until(50.0), ended=50.0, by_fault=True)
    assert right(gone, 60.0, kind, why) and not right(gone, 49.0, kind, why)
    alone = dataclasses.replace(gone, by_fault=False)
    assert not right(alone, 60.0, kind, why), "nothing ended it"


def test_silence_needs_a_cause_in_the_node_itself() -> None:
    silent = heard_until(50.0)
    assert not right(silent, 53.2), "it was the coordinator's network, or a bad path"
    assert right(dataclasses.replace(silent, cuts=[(49.9, 65.0)]), 53.2)
    assert right(dataclasses.replace(silent, stops=[(49.9, 65.0)]), 53.2)
    assert not right(dataclasses.replace(silent, cuts=[(40.0, 48.0)]), 53.2 + 2.0), "long over"
    assert not right(dataclasses.replace(WELL, cuts=[(49.9, 65.0)]), 53.2), "it was heard"


def test_a_message_to_another_coordinator_is_no_sign_of_life() -> None:
    cut = dataclasses.replace(heard_until(50.0), cuts=[(49.9, 52.0)])
    late = dataclasses.replace(cut, heard={**cut.heard, NEXT_LEAD: [53.0]})
    assert right(late, 53.2) and not right(late, 53.2, lead=NEXT_LEAD)


@pytest.mark.parametrize(("cut_s", "late_s"), [(0.5, 1.0), (1.0, 1.5), (6.0, 2.5)])
def test_packets_come_late_after_a_cut_as_long_as_it_was(cut_s: float, late_s: float) -> None:
    cut = dataclasses.replace(heard_until(50.0), cuts=[(50.0, 50.0 + cut_s)])
    for at, may in ((50.0 + cut_s + late_s - 0.3, True), (50.0 + cut_s + late_s + 0.3, False)):
        assert right(cut, at + 1.0, "closed", ACCUSED) is may
        assert right(cut, at + 3.0) is may


def test_two_cuts_that_overlap_are_one() -> None:
    cuts = [(50.2, 50.4), (50.0, 50.3)]
    life = dataclasses.replace(heard_until(50.0), cuts=cuts)
    assert right(life, 52.2, "closed", ACCUSED)
    assert not right(dataclasses.replace(life, cuts=cuts[:1]), 52.2, "closed", ACCUSED)


def test_only_the_end_of_an_agent_explains_a_refused_port_or_another_incarnation() -> None:
    cut = dataclasses.replace(heard_until(50.0), cuts=[(49.9, 65.0)])
    assert right(cut, 53.2, "closed", ACCUSED)
    assert not right(cut, 53.2, "closed", REFUSED) and not right(cut, 53.2, "replaced")


def test_a_node_stalls_if_a_worker_hung_or_no_order_reached_it() -> None:
    assert right(dataclasses.replace(WELL, hangs=[40.0]), 60.0, "stalled")
    assert not right(dataclasses.replace(WELL, hangs=[61.0]), 60.0, "stalled")
    assert right(dataclasses.replace(WELL, cuts=[(40.0, 55.0)]), 60.0, "stalled")


def test_a_lost_incarnation_may_be_replaced_and_the_next_one_is_well() -> None:
    """A coordinator may have forgotten that it lost the first one."""
    first = dataclasses.replace(heard_until(50.0), cuts=[(50.0, 54.0)], ended=54.5)
    lives = {"a": first, "b": WELL}
    silent = Loss(53.2, LEAD, "a", LossKind.SILENT, "")
    again = dataclasses.replace(silent, at=55.0, kind=LossKind.REPLACED)
    assert not healthy_lost([silent, again], lives)
    assert len(healthy_lost([again], lives)) == 1, "it began anew for no reason"
    assert len(healthy_lost([silent, dataclasses.replace(silent, incarnation="b")], lives)) == 1
