"""Which workers report a finished step."""

from __future__ import annotations

import pytest

from elastic.planning.plan.plan import parse_plan
from elastic.worker.epoch_session import _witness

HEAD = "plan epoch=1 layers=4 microbatches=6 tp={tp} backup=stream+snapshot\n"
ACROSS = HEAD + "pipeline 0 microbatches=0-5: node0[0:2] node1[2:3] node2[3:4]\n"
ALONE = HEAD + "pipeline 0 microbatches=0-5: node0[0:4]\n"


@pytest.mark.parametrize(
    ("text", "tp", "rank"), [(ACROSS, 1, 1), (ACROSS, 2, 2), (ALONE, 1, 0), (ALONE, 2, 0)]
)
def test_a_worker_of_another_node_reports_finished_steps_too(text: str, tp: int, rank: int) -> None:
    """The node of rank 0 may be lost with reports that the coordinator has not read."""
    assert _witness(parse_plan(text.format(tp=tp))) == rank
