"""Text form and validation of plans."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from elastic.domain.errors import FieldError
from elastic.domain.ledger import format_indices, parse_indices
from elastic.domain.types import Pipeline, Plan, Stage, Unit
from elastic.planning.plan.plan import format_plan, parse_plan, validate_plan
from elastic.planning.schedule.schedule import SCHEDULES

GOLDEN = Path(__file__).parent / "golden" / "uneven.plan"

PLAN = Plan(
    epoch=4,
    n_layers=6,
    n_microbatches=8,
    tp=2,
    pipelines=(
        Pipeline(
            (
                Stage(Unit("node0", 0), 0, 2),
                Stage(Unit("node0", 1), 2, 4),
                Stage(Unit("node3"), 4, 6),
            ),
            (0, 1, 2, 3, 6),
        ),
        Pipeline((Stage(Unit("node4"), 0, 6),), (4, 5, 7)),
    ),
    spares=("node5", "node6"),
    peers=(("node0", "node3"), ("node3", "node4"), ("node4", "node5")),
    reason="lost node1;\nback\\slash, two pipelines ",
)

names = st.from_regex(r"[A-Za-z0-9_.:\-]{1,12}", fullmatch=True)
small = st.integers(0, 99)
stages = st.builds(Stage, st.builds(Unit, names, st.integers(0, 3)), small, small, st.booleans())
plans = st.builds(
    Plan,
    epoch=small,
    n_layers=small,
    n_microbatches=small,
    tp=small,
    pipelines=st.lists(
        st.builds(
            Pipeline,
            st.lists(stages, max_size=4).map(tuple),
            st.lists(small, max_size=9).map(tuple),
            st.sampled_from(SCHEDULES),
        ),
        max_size=3,
    ).map(tuple),
    spares=st.lists(names, max_size=3).map(tuple),
    peers=st.lists(st.tuples(names, names), max_size=3).map(tuple),
    gradients=st.sampled_from(["stream", "stream:4", "recompute", "none"]),
    state=st.sampled_from(["snapshot", "replica", "replay", "replay:12", "none"]),
    reason=st.text(max_size=40),
)


def test_golden() -> None:
    text = GOLDEN.read_text().rstrip("\n")
    assert format_plan(PLAN) == text
    assert parse_plan(text) == PLAN
    validate_plan(PLAN)


@given(plans)
def test_every_plan_round_trips(plan: Plan) -> None:
    assert parse_plan(format_plan(plan)) == plan


@given(st.lists(small).map(tuple))
def test_indices_round_trip_in_their_order(indices: tuple[int, ...]) -> None:
    assert parse_indices(format_indices(indices)) == indices


def test_comments_blank_lines_and_crlf_are_read() -> None:
    text = "\r\n# a comment\r\n" + GOLDEN.read_text().replace("\n", "\r\n\r\n")
    assert parse_plan(text) == PLAN


@pytest.mark.parametrize(
    ("text", "field"),
    [
        ("", "plan"),
        ("plan layers=3", "plan"),
        ("HEAD\nnonsense", "plan"),
        ("HEAD\npipeline 1 microbatches=0: a[0:1]", "plan.pipeline"),
        ("HEAD\npipeline 0 microbatches=0: a[0-1]", "plan.pipeline 0"),
        ("HEAD\npipeline 0 microbatches=3-1: a[0:1]", "plan.pipeline 0.microbatches"),
        ("HEAD\npipeline 0 microbatches=0,,1: a[0:1]", "plan.pipeline 0.microbatches"),
        ("HEAD\npipeline 0 microbatches=0-99999999: a[0:1]", "plan.pipeline 0.microbatches"),
        ("HEAD\npipeline 0 microbatches=0 schedule=: a[0:1]", "plan.pipeline"),
        ("HEAD\npipeline 0 microbatches=0: a[0:1]+cache", "plan.pipeline 0"),
        ("HEAD\npeers a", "plan.peers"),
        ("HEAD\nspares a\nspares b", "plan"),
    ],
)
def test_bad_text_names_the_field(text: str, field: str) -> None:
    head = "plan epoch=1 layers=1 microbatches=1 tp=1 backup=none+none"
    with pytest.raises(FieldError) as caught:
        parse_plan(text.replace("HEAD", head))
    assert caught.value.field == field


def _with_pipeline(index: int, **changes: object) -> Plan:
    pipelines = list(PLAN.pipelines)
    pipelines[index] = replace(pipelines[index], **changes)  # type: ignore[arg-type]
    return replace(PLAN, pipelines=tuple(pipelines))


def _stages(*spans: tuple[str, int, int]) -> tuple[Stage, ...]:
    return tuple(Stage(Unit(node), first, last) for node, first, last in spans)


@pytest.mark.parametrize(
    ("plan", "field", "text"),
    [
        (replace(PLAN, n_layers=0), "plan.layers", "at least 1"),
        (replace(PLAN, pipelines=()), "plan.pipelines", "at least 1"),
        (
            replace(PLAN, gradients="tape"),
            "plan.backup.gradients",
            "stream, reduce, log, recompute, none",
        ),
        (replace(PLAN, state="tape"), "plan.backup.state", "snapshot"),
        (replace(PLAN, state="replay:1"), "plan.backup.state", "N from 2"),
        (replace(PLAN, spares=("a b",)), "plan.node", "a b"),
        (_with_pipeline(1, stages=()), "plan.pipeline 1", "at least one stage"),
        (_with_pipeline(1, stages=_stages(("node4", 0, 5))), "plan.pipeline 1", "layers 0 to 4"),
        (_with_pipeline(1, stages=_stages(("node4", 1, 6))), "plan.pipeline 1", "begin at layer 0"),
        (
            _with_pipeline(1, stages=_stages(("node4", 0, 3), ("x", 4, 6))),
            "plan.pipeline 1",
            "layer 3",
        ),
        (
            _with_pipeline(1, stages=_stages(("node4", 0, 0), ("x", 0, 6))),
            "plan.pipeline 1",
            "at least one layer",
        ),
        (_with_pipeline(1, stages=_stages(("node3", 0, 6))), "plan.unit", "another node"),
        (_with_pipeline(1, schedule="gpipe"), "plan.pipeline 1.schedule", "zero-bubble"),
        (_with_pipeline(1, schedule="interleaved"), "plan.pipeline 1.schedule", "at least 2 units"),
        (
            _with_pipeline(1, stages=_stages(("node4", 0, 3), ("x", 3, 5), ("node4", 5, 6))),
            "plan.pipeline 1.schedule",
            "one stage under 1f1b",
        ),
        (
            _with_pipeline(
                1,
                stages=_stages(("a", 0, 1), ("b", 1, 2), ("b", 2, 3), ("a", 3, 6)),
                schedule="interleaved",
            ),
            "plan.pipeline 1.schedule",
            "stage 2 belongs on a/0",
        ),
        (_with_pipeline(1, stages=(Stage(Unit("node3", 1), 0, 6),)), "plan.unit", "layer 4"),
        (_with_pipeline(1, microbatches=(4, 5)), "plan.microbatches", "'7'"),
        (_with_pipeline(1, microbatches=(4, 5, 7, 3)), "plan.microbatches", "'3'"),
        (_with_pipeline(1, microbatches=(4, 5, 7, 8)), "plan.microbatches", "'8'"),
        (_with_pipeline(0, microbatches=tuple(range(8))), "plan.microbatches", "twice"),
        (replace(PLAN, spares=("node0",)), "plan.spares", "node0"),
        (replace(PLAN, peers=(("node0", "node0"),)), "plan.peers", "its own backup"),
        (replace(PLAN, peers=(("node0", "node9"),)), "plan.peers", "node9 is not"),
        (replace(PLAN, peers=(("node5", "node0"),)), "plan.peers", "must hold a stage"),
        (replace(PLAN, peers=(("node0", "node3"), ("node0", "node4"))), "plan.peers", "one peer"),
    ],
)
def test_invalid_plans_are_refused(plan: Plan, field: str, text: str) -> None:
    with pytest.raises(FieldError) as caught:
        validate_plan(plan)
    assert caught.value.field == field
    assert text in str(caught.value)


def test_a_pipeline_without_microbatches_is_refused() -> None:
    plan = _with_pipeline(0, microbatches=tuple(range(8)))
    plan = replace(plan, pipelines=(plan.pipelines[0], replace(plan.pipelines[1], microbatches=())))
    with pytest.raises(FieldError, match="leave it out"):
        validate_plan(plan)


SCHEDULED = """\
plan epoch=2 layers=4 microbatches=6 tp=1 backup=stream+snapshot
pipeline 0 microbatches=0-2 schedule=interleaved: node0[0:1] node1[1:2] node0[2:3]+recompute node1[3:4]
pipeline 1 microbatches=3-5 schedule=zero-bubble: node2[0:2] node3[2:4]+recompute"""  # noqa: E501


def test_schedules_and_recomputation_are_in_the_text() -> None:
    plan = parse_plan(SCHEDULED)
    assert format_plan(plan) == SCHEDULED
    validate_plan(plan)
    first, second = plan.pipelines
    assert (first.schedule, second.schedule) == ("interleaved", "zero-bubble")
    assert [stage.recompute for stage in (*first.stages, *second.stages)] == [
        False,
        False,
        True,
        False,
        False,
        True,
    ]
    assert [unit.node for unit in plan.holders(2)] == ["node0", "node3"]
    assert plan.nodes() == ("node0", "node1", "node2", "node3")


def test_several_stages_of_one_unit_do_not_make_it_two() -> None:
    """Its group is printed only where the node has another one."""
    assert "/" not in format_plan(parse_plan(SCHEDULED))
