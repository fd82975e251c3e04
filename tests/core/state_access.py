"""Access to optional parts of a `JobState` that a test expects to be there."""

from __future__ import annotations

from dataclasses import replace

from elastic.core.job.state import EpochChange, JobState
from elastic.domain.types import Assignment, JobSpec, Plan


def plan_of(state: JobState) -> Plan:
    assert state.plan is not None
    return state.plan


def change_of(state: JobState) -> EpochChange:
    assert state.change is not None
    return state.change


def assignment_of(state: JobState) -> Assignment:
    assert state.assignment is not None
    return state.assignment


def spec_of(state: JobState) -> JobSpec:
    assert state.spec is not None
    return state.spec


def on_gpus(state: JobState) -> JobState:
    """Return the state with nodes that have GPUs. They all halt at once; without GPUs some may stay
    outside a change (tests/core/job/test_scope.py)."""
    members = {
        node: replace(mb, report=replace(mb.report, accelerated=True))
        for node, mb in state.members.items()
    }
    return state.of(members=members)
