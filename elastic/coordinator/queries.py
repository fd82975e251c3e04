"""Answers the requests of the command line: status, nodes, peers, plan and drain."""

from __future__ import annotations

import logging
from concurrent.futures import Future
from dataclasses import dataclass
from itertools import islice
from typing import Any
from zlib import crc32

from elastic.config import JobConfig
from elastic.coordinator.metrics import CoordinatorMetrics
from elastic.coordinator.records.run_summary import steps_done
from elastic.coordinator.waiting import cause_of
from elastic.core.coordinator.authorization import MAX_DEADLINE_S, MAX_NAME_CHARS
from elastic.core.health.certificates import DAY_S
from elastic.core.health.diagnosis import HealthLimits
from elastic.core.job import quarantine
from elastic.core.job import state as job
from elastic.core.job.stragglers import speed_of
from elastic.core.policy import progress_watchdog
from elastic.core.policy.certificate_warnings import COORDINATOR
from elastic.domain import codec
from elastic.domain.errors import ElasticError, FieldError
from elastic.planning.plan.plan import format_plan
from elastic.rpc.security.roles import BY

log = logging.getLogger("elastic.coordinator")
MAX_CERTIFICATES = 8
"""Maximum number of certificates in the answer to a `status` request."""
MAX_PEERS = 3
"""Maximum number of nodes in the answer to a `peers` request."""


@dataclass(frozen=True, slots=True)
class Query:
    """A request and the future of its answer."""

    kind: str
    body: dict[str, Any]
    answer: Future[dict[str, Any]]

    def fail(self, error: Exception) -> None:
        """Answer with an error. An error that is no ElasticError is logged as a bug."""
        if not isinstance(error, ElasticError):
            log.error("request %.80r failed", self.kind, exc_info=error)
            error = ElasticError(f"unexpected {type(error).__name__}: see the coordinator's log")
        self.answer.set_exception(error)


def reply(
    state: job.JobState, kind: str, body: dict[str, Any]
) -> tuple[dict[str, Any], Any | None]:
    """Return (answer, event for the rules; None: nothing to decide). Raises FieldError."""
    match kind:
        case "status":
            return status(state), None
        case "nodes":
            return {"nodes": nodes(state), "now": state.updated_at}, None
        case "peers":
            return {"peers": peers(state, str(body.get("node", ""))), "now": state.updated_at}, None
        case "plan":
            plan = state.plan
            text = format_plan(plan) if plan else ""
            return {"plan": text, "reason": plan.reason if plan else "no plan yet"}, None
        case "drain":
            return _drain(state, body)
        case _:
            raise FieldError(
                "kind", kind[:MAX_NAME_CHARS], "must be one of status, nodes, peers, plan, drain"
            )


def _drain(state: job.JobState, body: dict[str, Any]) -> tuple[dict[str, Any], job.DrainRequested]:
    node, deadline = body.get("node"), body.get("deadline_s", 30.0)
    if not isinstance(node, str) or node not in state.members:
        known = ", ".join(sorted(state.members)) or "none"
        raise FieldError(
            "node", str(node)[:MAX_NAME_CHARS], f"must be one of the members ({known})"
        )
    number = isinstance(deadline, (int, float)) and not isinstance(deadline, bool)
    if not number or not 0 <= deadline <= MAX_DEADLINE_S:
        raise FieldError(
            "deadline_s", str(deadline)[:40], f"must be from 0 to {MAX_DEADLINE_S:g} seconds"
        )
    asked = job.DrainRequested(node, float(deadline), str(body.get(BY, "")))
    return {"node": node, "deadline_s": deadline}, asked


def policy_of(config: JobConfig) -> job.Policy:
    """Return the part of the configuration on which decisions depend."""
    return job.Policy(
        min_nodes=config.min_nodes,
        max_nodes=config.max_nodes,
        workers_per_node=config.nproc_per_node,
        max_restarts=config.max_restarts,
        shape=config.pipelines,
        schedule=config.schedule,
        backup=config.backup,
        heartbeat_s=config.timeouts.heartbeat_s,
        lease_s=config.timeouts.lease_s,
        master_addr=config.master_addr,
        master_port=config.master_port,
        room_bytes=config.vault_memory_bytes,
        profile=config.profile,
        health=HealthLimits(quarantine_s=config.quarantine_s),
        standbys=config.standbys,
    )


def status(state: job.JobState) -> dict[str, Any]:
    return {
        "phase": state.phase.value,
        "epoch": state.epoch,
        "step": steps_done(state),
        "steps": state.spec.n_steps if state.spec else 0,
        "loss": state.record.loss if state.record else None,
        "evaluation": codec.encode(state.evaluation),
        "nodes": nodes(state),
        "plan": format_plan(state.plan) if state.plan else "",
        "checkpoint": state.checkpoint[0] if state.checkpoint else "",
        "attention": attention(state),
        "stalled": progress_watchdog.summary(state, state.updated_at),
        "timeouts": codec.encode(state.limits),
        "cause": explanation(state),
        "certificates": certificates(state),
    }


def attention(state: job.JobState) -> str:
    """Return what keeps the job from its normal course, for people; "": nothing."""
    texts = []
    if state.doubt_reported:
        seconds = state.updated_at - state.doubt_since
        texts.append(f"the coordinator hears few nodes for {seconds:.0f} s and waits for them")
    if state.missing is not None:
        missing = state.missing
        texts.append(f"{missing.error}; waiting for {' '.join(missing.nodes)}")
    if state.profile_error:
        texts.append(f"all nodes were at least {state.profile_error:g}x slower than profiled")
    texts += filter(None, [progress_watchdog.attention(state)])
    return "; ".join(texts)


def explanation(state: job.JobState) -> str:
    """Return why the job does not train: its end, its pause or the cause of the change under way;
    "": it trains."""
    if state.ending is not None:
        return state.ending.reason
    change = state.change
    if change is None:
        return ""
    paused = state.phase is job.JobPhase.PAUSED and change.reason
    return f"{cause_of(change)}; paused: {change.reason}" if paused else cause_of(change)


def certificates(state: job.JobState) -> list[dict[str, Any]]:
    """Return the certificates that end first, at most one row for equal ones."""
    held = [(COORDINATOR, state.certificates)]
    for node in sorted(state.members):
        report = quarantine.record_of(state, node).report
        held.append((node, report.certificates if report is not None else ()))
    rows = {
        (end.file, end.subject, end.ends_at): {
            "holder": holder,
            "certificate": end.file,
            "subject": end.subject,
            "ends": end.ends,
            "left_days": round((end.ends_at - state.updated_at) / DAY_S, 1),
        }
        for holder, ends in held
        for end in ends
    }
    return [rows[key] for key in sorted(rows, key=lambda key: key[2])[:MAX_CERTIFICATES]]


RECOVERY_FIELDS = (
    "step",
    "cause",
    "planned",
    "nodes_before",
    "nodes_after",
    "microbatches_lost",
    "total_s",
    "pause_s",
)
"""Fields of a recovery in the answer to `status`."""


def recent(metrics: CoordinatorMetrics, state: job.JobState, term: int) -> dict[str, Any]:
    """Return the part of `status` that is not in the state but in this process's metrics."""
    return {
        "term": term,
        "tokens_per_s": round(metrics.tokens_per_s, 1),
        "mfu": round(metrics.utilisation(state), 4),
        "step_s": round(metrics.step_s[-1], 4) if metrics.step_s else None,
        "recoveries": [
            {key: entry[key] for key in RECOVERY_FIELDS} for entry in metrics.recoveries
        ],
    }


def nodes(state: job.JobState) -> list[dict[str, Any]]:
    held = state.plan.nodes() if state.plan else ()
    return [
        {
            "node": node,
            "phase": mb.report.phase.value,
            "role": "stage" if node in held else "spare",
            "connected": mb.connected,
            "draining": mb.drain_deadline > 0,
            "notice": "" if mb.notice is None else f"{mb.notice.kind} ({mb.notice.provider})",
            "domain": mb.report.info.domain,
            "device": mb.report.info.device,
            "slow": speed_of(state, node).factor,
            "vault": mb.report.info.vault,
            **_health(state, node),
            "error": "; ".join(
                filter(None, (mb.agent_error, mb.report.cause, *mb.report.failures))
            ),
        }
        for node, mb in sorted(state.members.items())
    ]


def peers(state: job.JobState, node: str) -> list[dict[str, Any]]:
    """Return a few connected nodes and their vaults, for a node that tests the network.

    A node that leaves is not among them: whoever joins will not work with it. The answer is short
    because thousands of nodes may ask at once. Each node gets other nodes, so that the load is
    spread.
    """
    names = sorted(state.members)
    first = crc32(node.encode(errors="replace")) % max(1, len(names))
    others = (state.members[name] for name in [*names[first:], *names[:first]] if name != node)
    infos = (one.report.info for one in others if one.connected and not one.draining)
    reachable = (info for info in infos if info.vault)
    return [{"node": info.node, "vault": info.vault} for info in islice(reachable, MAX_PEERS)]


def _health(state: job.JobState, node: str) -> dict[str, Any]:
    """Return a node's health: a short text for people, and the findings for programs."""
    record = quarantine.record_of(state, node)
    left_s = max(0.0, record.until - state.updated_at) if record.quarantined else 0.0
    words = [f"{one.kind.value}: {one.action.value}" for one in record.findings]
    words += [f"quarantined {left_s:.0f} s"] if record.quarantined else []
    return {
        "health": ", ".join(words) or "ok",
        "findings": [
            {
                "class": one.kind.value,
                "action": one.action.value,
                "reason": one.reason,
                "evidence": one.evidence,
                "at": round(one.at, 3),
            }
            for one in record.findings
        ],
        "quarantined_s": round(left_s, 1),
        "score": round(record.preflight.score, 2) if record.preflight is not None else 0.0,
    }
