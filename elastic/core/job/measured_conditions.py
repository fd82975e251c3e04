"""Measurements for the choice of backup schemes: links, copying, contention and losses."""

from __future__ import annotations

from dataclasses import astuple, replace
from statistics import median

from elastic.core.health import backup_metrics
from elastic.core.health.backup_metrics import BackupMetrics, median_of_nodes
from elastic.core.job import join_policy
from elastic.core.job.state import Heartbeat, JobState
from elastic.core.job.stragglers import of_members, profile_for, slowdowns, speed_of
from elastic.planning.backup.backup_cost import Weighing
from elastic.planning.cost.profile import LayerTimes, Profile


def observe_backup(state: JobState, event: Heartbeat) -> JobState:
    """Record the backup measurements of a heartbeat."""
    member = state.members.get(event.node)
    if member is None or state.plan is None:
        return state
    fresh = [one for one in event.measured if one.epoch == state.plan.epoch]
    key = member.report.info.incarnation
    known = state.gauges.get(key, BackupMetrics())
    gauge = backup_metrics.record_measurements(known, state.plan.epoch, fresh)
    if gauge is known:
        return state
    return state.of(gauges={**of_members(state, state.gauges), key: gauge})


def backup_conditions(state: JobState) -> Weighing | None:
    """Return the planner's figures for the choice of backup schemes. None: the user chose the
    schemes, or the rate of the links is unknown."""
    if state.policy.backup != "auto" or state.spec is None:
        return None
    profile = measured_profile(state)
    if not profile.link.bytes_per_s:
        return None
    ahead = join_policy.outlook(state, state.updated_at)
    return Weighing(
        profile=profile,
        slow=slowdowns(state),
        hazard_per_s=ahead.hazard_per_s,
        pause_s=ahead.pause_out_s,
        room_bytes=state.policy.room_bytes,
    )


def measured_profile(state: JobState) -> Profile:
    """Return the job's profile, with measured link rate, copy rate and contention if known.

    Without a profile of the user, the layers' times are scaled to measured seconds.
    """
    profile = profile_for(state)
    here = {mb.report.info.incarnation for mb in state.members.values()}
    seen = [gauge for key, gauge in state.gauges.items() if key in here]
    link = median_of_nodes(gauge.sending for gauge in seen)
    copying = median_of_nodes(gauge.copying for gauge in seen)
    slowed = median_of_nodes(gauge.slowed for gauge in seen)
    if link:
        profile = replace(profile, link=replace(profile.link, bytes_per_s=link))
    if copying:
        profile = replace(profile, copy_bytes_per_s=copying)
    if slowed:
        profile = replace(profile, contention=max(0.0, 1 - 1 / slowed))
    units = _units(state)
    return _scaled(profile, median(units)) if state.policy.profile is None and units else profile


def fetch_time(state: JobState) -> float:
    """Return the time to fetch a byte from another node, measured like `LayerSpec.forward_s`.

    0: the rate of the links or the speed of the nodes is unknown; or all pipelines begin at the
    same time, as on GPUs (`elastic.worker.transport.links`).
    """
    assert state.spec is not None
    if any(member.report.accelerated for member in state.members.values()):
        return 0.0
    if state.policy.profile is None and not _units(state):
        return 0.0
    profile = measured_profile(state)
    seconds = sum(t.forward_s + t.backward_s for t in profile.devices[0].layers)
    relative = sum(layer.forward_s + layer.backward_s for layer in state.spec.layers)
    return profile.link.s_per_byte * relative / seconds if seconds > 0 else 0.0


def _units(state: JobState) -> list[float]:
    """Return the seconds per unit of `LayerSpec.forward_s` of the nodes where they are known."""
    return [unit for node in state.members if (unit := speed_of(state, node).unit)]


def _scaled(profile: Profile, unit: float) -> Profile:
    """Multiply all layers' times by `unit` in a profile with a single device type."""
    (device,) = profile.devices
    layers = tuple(LayerTimes(*(unit * s for s in astuple(t))) for t in device.layers)
    return replace(profile, devices=(replace(device, layers=layers),))
