"""Every constant in seconds below elastic/ that does not follow from `--silence`.

`elastic/core/protocol/timeouts.py` derives all limits on waiting for a peer from one number. Every
other constant in seconds needs an entry here that says why it is independent of that number.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

SOURCES = Path(__file__).resolve().parents[2] / "elastic"
BUDGET = SOURCES / "core" / "protocol" / "timeouts.py"

KINDS = {
    "interval": "Polling or retry interval. No peer is waited for.",
    "program": "Time that a program takes to start or end. No peer is silent meanwhile.",
    "person": "Somebody waits at a terminal.",
    "provider": "Promise of a cloud, of its metadata service or of the API of Kubernetes.",
    "evidence": "Bound on a kernel observation or on a question of milliseconds.",
    "decision": "Figure in a decision, not a wait.",
    "lock": "Duration of a lock. The fencing token decides, not the time.",
}
"""Why a constant is independent of `--silence`."""

CONSTANTS = {
    "agent/health/devices.py HUNG_S": "program",
    "agent/health/devices.py MAX_GAP_S": "evidence",
    "agent/health/devices.py READ_S": "interval",
    "agent/health/monitor.py SAMPLE_S": "interval",
    "agent/health/monitor.py WINDOW_S": "interval",
    "agent/health/preflight.py NOTICE_S": "person",
    "agent/health/preflight.py KILL_S": "program",
    "agent/health/preflight.py MAX_CLOCK_OFFSET_S": "decision",
    "agent/health/preflight.py TRIAL_POLL_S": "interval",
    "agent/notices/aws.py HINT_S": "decision",
    "agent/notices/aws.py NOTICE_S": "provider",
    "agent/notices/aws.py READ_EVERY_S": "interval",
    "agent/notices/aws.py TOKEN_TTL_S": "provider",
    "agent/notices/azure.py FIRST_REQUEST_S": "provider",
    "agent/notices/azure.py READ_EVERY_S": "interval",
    "agent/notices/discovery.py PROBE_S": "provider",
    "agent/notices/file.py DEFAULT_DEADLINE_S": "provider",
    "agent/notices/file.py FILE_POLL_S": "interval",
    "agent/notices/file.py MAX_DEADLINE_S": "provider",
    "agent/notices/gcp.py MAINTENANCE_S": "provider",
    "agent/notices/gcp.py PAUSE_S": "interval",
    "agent/notices/gcp.py PREEMPTED_S": "provider",
    "agent/notices/gcp.py WAIT_S": "provider",
    "agent/notices/hook.py CLIENT_S": "provider",
    "agent/notices/hook.py HOOK_POLL_S": "interval",
    "agent/notices/metadata.py REQUEST_S": "provider",
    "agent/notices/source.py MAX_RETRY_S": "interval",
    "agent/service.py CLOSE_S": "program",
    "agent/service.py EXIT_GRACE_S": "program",
    "agent/service.py FREE_GIB_S": "program",
    "agent/service.py OUTPUT_S": "program",
    "agent/service.py POLL_S": "interval",
    "agent/vault/checkpoints.py CLOSE_S": "program",
    "background.py READ_S": "interval",
    "console.py ROOM_S": "evidence",
    "console.py STALL_S": "evidence",
    "agent/vault/replicator.py MAX_RETRY_S": "interval",
    "agent/vault/replicator.py REPORT_S": "interval",
    "agent/vault/replicator.py RETRY_S": "interval",
    "agent/vault/server.py ACCEPT_RETRY_S": "interval",
    "agent/workers/channels.py ACCEPT_RETRY_S": "interval",
    "agent/workers/channels.py DRAIN_S": "program",
    "agent/workers/output.py LAST_OUTPUT_S": "program",
    "agent/workers/output.py finish timeout_s": "program",
    "agent/workers/processes.py DESCENDANTS_POLL_S": "interval",
    "agent/workers/processes.py IDLE_S": "interval",
    "agent/workers/processes.py KILL_S": "program",
    "coordinator/certificate_watch.py READ_EVERY_S": "interval",
    "coordinator/event_queue.py SWITCH_S": "interval",
    "coordinator/event_queue.py WAIT_S": "interval",
    "coordinator/leadership.py FIRST_PAUSE_S": "interval",
    "coordinator/leadership.py LAST_PAUSE_S": "interval",
    "coordinator/leadership.py LEASE_S": "lock",
    "coordinator/leadership.py POLL_S": "interval",
    "coordinator/leadership.py SHARED_LEASE_S": "lock",
    "coordinator/leadership.py STEADY_S": "decision",
    "coordinator/metrics.py PREDICTION_S": "interval",
    "coordinator/metrics.py UPDATE_S": "interval",
    "coordinator/port_watch.py ATTEMPT_S": "evidence",
    "coordinator/port_watch.py FIRST_PAUSE_S": "interval",
    "coordinator/port_watch.py LAST_PAUSE_S": "interval",
    "coordinator/records/run_records.py CLOSE_S": "program",
    "coordinator/records/run_records.py ROOM_POLL_S": "program",
    "coordinator/records/run_records.py ROOM_S": "program",
    "coordinator/records/state_saver.py MAX_DELAY_S": "interval",
    "coordinator/records/state_saver.py MIN_DELAY_S": "interval",
    "coordinator/service.py ANSWER_S": "person",
    "coordinator/service.py LINGER_S": "program",
    "coordinator/service.py RECORD_FIRST_S": "program",
    "coordinator/service.py MAX_TICK_S": "interval",
    "coordinator/service.py OUTPUT_S": "program",
    "coordinator/service.py RECORDS_S": "program",
    "coordinator/service.py TICK_S": "interval",
    "core/coordinator/authorization.py MAX_DEADLINE_S": "provider",
    "core/coordinator/transitions.py SCRIPT_S": "program",
    "core/coordinator/transitions.py LATE_WORKERS_S": "program",
    "core/health/certificates.py DAY_S": "decision",
    "core/health/compute_speed.py SPAN_UNPROFILED_S": "decision",
    "core/health/path_fault.py LONGEST_HOLD_S": "interval",
    "core/job/reachability.py MAX_AGE_S": "decision",
    "core/job/fleet.py FIRST_BACKOFF_S": "interval",
    "core/job/fleet.py LONGEST_BACKOFF_S": "interval",
    "core/job/fleet.py LOST_BACKOFF_S": "interval",
    "core/job/fleet.py STEADY_S": "decision",
    "core/job/membership.py FIRST_RETRY_S": "interval",
    "core/job/membership.py LONGEST_RETRY_S": "interval",
    "core/node/node.py FIRST_STEP_S": "program",
    "core/node/node.py MAX_POLL_GAP_S": "evidence",
    "core/node/node.py FAMILY_CPU_S": "evidence",
    "core/node/node.py STOPPED_S": "evidence",
    "core/node/notice_tracker.py SAME_S": "decision",
    "core/policy/backup_policy.py CHECK_INTERVAL_S": "interval",
    "core/policy/drain.py SAME_S": "decision",
    "core/policy/progress_watchdog.py PAUSES_S": "interval",
    "core/policy/remediation.py SHORTAGE_S": "decision",
    "core/protocol/election.py RETRY_FIRST_S": "interval",
    "core/protocol/election.py RETRY_LAST_S": "interval",
    "launcher/commands/profile.py TELL_S": "person",
    "launcher/commands/queries.py DRAIN_POLL_S": "interval",
    "launcher/commands/watch.py NO_ANSWER_S": "person",
    "launcher/flags/addresses.py RESOLVE_INTERVAL_S": "interval",
    "launcher/flags/addresses.py RESOLVE_TIMEOUT_S": "program",
    "launcher/kubernetes/end.py REQUEST_S": "provider",
    "launcher/ray/ray.py CLAIM_S": "decision",
    "launcher/ray/ray.py FULL_S": "interval",
    "launcher/ray/supervisor.py FIRST_QUERY_S": "interval",
    "launcher/ray/supervisor.py LONGEST_QUERY_S": "interval",
    "launcher/ray/supervisor.py WAKE_S": "interval",
    "launcher/ray/ray.py FINAL_LOGS_S": "program",
    "launcher/ray/remote_agent.py CONNECT_TIMEOUT_S": "program",
    "launcher/ray/remote_agent.py NEW_LOCK_S": "program",
    "launcher/ray/supervisor.py FIRST_NOTICE_S": "person",
    "launcher/run/console.py LAST_OUTPUT_S": "program",
    "launcher/run/console.py QUIET_S": "program",
    "launcher/run/processes.py KILL_S": "program",
    "launcher/run/processes.py MAX_RETRY_S": "interval",
    "launcher/run/processes.py PAUSE_S": "interval",
    "launcher/run/processes.py RETRY_S": "interval",
    "launcher/run/processes.py SETTLED_S": "program",
    "launcher/flags/slow_storage.py HANGING_S": "person",
    "launcher/flags/slow_storage.py OBJECTS_S": "person",
    "launcher/run/trackers.py CHECK_S": "program",
    "launcher/run/trackers.py MAX_PAUSE_S": "interval",
    "launcher/run/trackers.py PAUSE_S": "interval",
    "launcher/tracking/follower.py MAX_PAUSE_S": "interval",
    "launcher/tracking/follower.py PAUSE_S": "interval",
    "launcher/tracking/follower.py POLL_S": "interval",
    "launcher/tracking/follower.py STOP_S": "program",
    "launcher/tracking/follower.py TOLD_S": "person",
    "launcher/run/supervisor.py FAULT_POLL_S": "interval",
    "launcher/run/supervisor.py TRACKER_S": "program",
    "launcher/run/supervisor.py REFUSAL_PAUSE_S": "person",
    "launcher/run/wait_lines.py LASTING_PAUSE_S": "person",
    "reminder.py EVERY_S": "person",
    "coordinator/waiting.py LASTING_S": "person",
    "coordinator/waiting.py SHORT_S": "person",
    "coordinator/service.py SEEK_S": "interval",
    "coordinator/service.py WAITING_S": "interval",
    "logs.py LOG_S": "program",
    "metrics.py FAST_S": "decision",
    "metrics.py RECOVERY_S": "decision",
    "metrics.py REMOVE_S": "program",
    "metrics.py SILENT_S": "program",
    "metrics.py STEP_S": "decision",
    "rpc/bulk/compression.py OVERHEAD_S": "decision",
    "rpc/bulk/handshake.py HANDSHAKE_S": "evidence",
    "rpc/bulk/transfer.py KEEPALIVE_IDLE_S": "evidence",
    "rpc/bulk/transfer.py KEEPALIVE_INTERVAL_S": "evidence",
    "rpc/control/channel_options.py CONNECT_TIMEOUT_S": "interval",
    "rpc/control/channel_options.py IDLE_S": "evidence",
    "rpc/control/channel_options.py RESOLUTION_S": "interval",
    "rpc/control/channel_options.py MAX_ATTEMPTS_PER_S": "interval",
    "rpc/control/channel_options.py REFUSED_RETRY_MAX_S": "interval",
    "rpc/control/channel_options.py RETRY_MAX_S": "interval",
    "rpc/control/channel_options.py RETRY_MIN_S": "interval",
    "rpc/control/client.py call timeout_s": "person",
    "rpc/control/connection_watch.py HANDSHAKE_S": "evidence",
    "rpc/control/connection_watch.py LOOK_S": "interval",
    "rpc/control/connection_watch.py SHORTEST_LOOK_S": "interval",
    "rpc/control/connection_watch.py SPARED_S": "evidence",
    "rpc/control/event_loop.py CANCEL_AGAIN_S": "interval",
    "rpc/control/round_trips.py PING_S": "interval",
    "rpc/security/rejections.py EVERY_S": "interval",
    "rpc/security/token_proof.py GOOD_S": "lock",
    "store/checkpoint_directory.py LOCK_POLL_S": "interval",
    "store/checkpoint_directory.py LOCK_S": "interval",
    "store/checkpoint_directory.py PATIENT_RETRY_S": "interval",
    "store/checkpoint_directory.py RETRY_S": "interval",
    "store/etcd/connection.py CALL_S": "lock",
    "store/etcd/connection.py PATIENCE_S": "lock",
    "store/sqlite.py BUSY_S": "lock",
    "telemetry.py LAST_WORDS_S": "program",
    "worker/control/agent_client.py HEARTBEAT_S": "interval",
    "worker/datasets/prefetch.py ANSWER_S": "program",
    "worker/datasets/prefetch.py END_S": "program",
    "worker/datasets/stream.py REPORT_S": "interval",
    "worker/profiling/emulated.py MAX_CARRYOVER_S": "decision",
    "worker/transport/gloo.py DISCONNECT_GRACE_S": "evidence",
    "worker/transport/gloo.py MAX_PEER_CHECK_S": "interval",
    "worker/transport/gloo.py PEER_CHECK_S": "interval",
    "worker/transport/rendezvous.py AWAIT_POLL_S": "interval",
    "worker/transport/rendezvous.py _MISSING_TIMEOUT_S": "interval",
    "worker/transport/gloo.py _POISON_S": "evidence",
    "worker/transport/link_probe.py PAUSE_S": "interval",
    "worker/transport/link_probe.py TIMEOUT_S": "person",
    "worker/transport/links.py OPEN_RANK_S": "decision",
    "worker/transport/rendezvous.py _AGREE_TIMEOUT_S": "evidence",
    "worker/transport/nccl.py ABORT_S": "program",
    "worker/transport/threads.py JOIN_TIMEOUT_S": "program",
}
"""Kind of each constant. Keys are the path below elastic/ and the name of the constant."""


def found() -> set[str]:
    """Keys of all constants in seconds and of all timeout defaults in the sources."""
    keys = set()
    for path in sorted(SOURCES.rglob("*.py")):
        place = path.relative_to(SOURCES)
        if path != BUDGET and place.parts[0] != "planning" and "_pb2" not in path.name:
            tree = ast.parse(path.read_text())
            keys |= {f"{place} {name}" for name in (*_constants(tree), *_defaults(tree))}
    return keys


def _constants(tree: ast.Module) -> Iterator[str]:
    """Module-level numbers whose name ends in `_S`."""
    for node in tree.body:
        if not isinstance(node, ast.Assign) or len(node.targets) != 1:
            continue
        target, value = node.targets[0], node.value
        names = target.elts if isinstance(target, ast.Tuple) else [target]
        values = value.elts if isinstance(value, ast.Tuple) else [value]
        for one, given in zip(names, values, strict=False):
            if isinstance(one, ast.Name) and one.id.endswith("_S") and _number(given):
                yield one.id


def _defaults(tree: ast.Module) -> Iterator[str]:
    """Numeric defaults of timeout parameters, as "function parameter"."""
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            plain, given = node.args.args, node.args.defaults
            pairs = [*zip(plain[len(plain) - len(given) :], given, strict=True)]
            named = zip(node.args.kwonlyargs, node.args.kw_defaults, strict=True)
            pairs += [(argument, default) for argument, default in named if default]
            for argument, default in pairs:
                limit = argument.arg in ("timeout_s", "keepalive_s", "grace_s")
                if limit and _number(default) and ast.unparse(default) != "0.0":
                    yield f"{node.name} {argument.arg}"


def _number(node: ast.expr) -> bool:
    if isinstance(node, ast.BinOp):
        return _number(node.left) and _number(node.right)
    return isinstance(node, ast.Constant) and isinstance(node.value, int | float)
