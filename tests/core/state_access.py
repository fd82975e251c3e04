"""Access to optional parts of a `JobState` that a test expects to be there."""

from __future__ import annotations

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
