"""Write docs/operate/timeouts.md from the code: python docs/generate/make_timeouts.py

Limits come from `elastic/core/protocol/timeouts.py`; every other constant in seconds is found in the source, and has to be of
one of the KINDS below.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path

from elastic.core.protocol.timeouts import budget

ROOT = Path(__file__).resolve().parents[2]
OUT = Path(__file__).parents[1] / "operate" / "timeouts.md"
BUDGET = ROOT / "elastic" / "core" / "protocol" / "timeouts.py"
SHOWN = (1.0, 3.0, 30.0)

KINDS = {
    "look": "how often something is looked at or tried again: it waits for nobody",
    "program": "how long programs take to start or end: no peer is silent meanwhile",
    "person": "somebody waits at a terminal",
    "provider": "what a cloud or its metadata service promises",
    "evidence": "what the kernel says of a process, or a bound on a question of milliseconds: it is no silence",
    "weigh": "a figure of a decision, not a wait",
    "lock": "who may write: the token decides, not the time",
}
CONSTANTS = {
    "agent/health/monitor.py SAMPLE_S": "look",
    "agent/health/monitor.py WINDOW_S": "look",
    "agent/notices/aws.py HINT_S": "weigh",
    "agent/notices/aws.py NOTICE_S": "provider",
    "agent/notices/aws.py READ_EVERY_S": "look",
    "agent/notices/aws.py TTL_S": "provider",
    "agent/notices/azure.py FIRST_S": "provider",
    "agent/notices/azure.py READ_EVERY_S": "look",
    "agent/notices/file.py LOOK_EVERY_S": "look",
    "agent/notices/discovery.py PROBE_S": "provider",
    "agent/notices/gcp.py HANG_S": "provider",
    "agent/notices/gcp.py MAINTENANCE_S": "provider",
    "agent/notices/gcp.py PAUSE_S": "look",
    "agent/notices/gcp.py PREEMPTED_S": "provider",
    "agent/notices/hook.py CLIENT_S": "provider",
    "agent/notices/hook.py LOOK_EVERY_S": "look",
    "agent/notices/metadata.py REQUEST_S": "provider",
    "agent/notices/source.py SLOWEST_S": "look",
    "agent/notices/parsing.py DEFAULT_S": "provider",
    "agent/notices/parsing.py LONGEST_S": "provider",
    "agent/workers/output.py finish timeout_s": "program",
    "agent/health/preflight.py CALL_S": "person",
    "agent/health/preflight.py CLOCK_S": "weigh",
    "agent/health/preflight.py DEVICE_S": "program",
    "agent/workers/processes.py FAMILY_S": "look",
    "agent/workers/processes.py IDLE_S": "look",
    "agent/vault/replicator.py REPORT_S": "look",
    "agent/vault/replicator.py RETRY_LIMIT_S": "look",
    "agent/vault/replicator.py RETRY_S": "look",
    "agent/service.py GRACE_S": "program",
    "agent/service.py LOOK_S": "look",
    "agent/vault/server.py ACCEPT_AGAIN_S": "look",
    "agent/workers/channels.py LAST_WORDS_S": "program",
    "coordinator/metrics/gauges.py PREDICT_S": "look",
    "coordinator/inbox.py SWITCH_S": "look",
    "coordinator/inbox.py WAIT_S": "look",
    "coordinator/leadership.py LEASE_S": "lock",
    "coordinator/leadership.py LOOK_S": "look",
    "coordinator/leadership.py SHARED_LEASE_S": "lock",
    "coordinator/metrics/counters.py LOOK_S": "look",
    "coordinator/records/state_saver.py LATEST_S": "look",
    "coordinator/records/state_saver.py SOON_S": "look",
    "coordinator/service.py ANSWER_S": "person",
    "coordinator/service.py LINGER_S": "program",
    "coordinator/service.py SLOWEST_TICK_S": "look",
    "coordinator/service.py TICK_S": "look",
    "core/policy/backup_policy.py LOOK_S": "look",
    "core/coordinator/transitions.py SCRIPT_S": "program",
    "core/coordinator/transitions.py STRAGGLER_S": "program",
    "core/node/notice_tracker.py SAME_S": "weigh",
    "core/protocol/election.py RETRY_FIRST_S": "look",
    "core/protocol/election.py RETRY_LAST_S": "look",
    "core/job/fleet.py FIRST_BACKOFF_S": "look",
    "core/job/fleet.py LONGEST_BACKOFF_S": "look",
    "core/job/fleet.py LOST_BACKOFF_S": "look",
    "core/job/fleet.py STEADY_S": "weigh",
    "core/job/membership.py FIRST_RETRY_S": "look",
    "core/job/membership.py LONGEST_RETRY_S": "look",
    "core/node/node_state.py BLIND_S": "evidence",
    "core/node/node_state.py FAMILY_CPU_S": "evidence",
    "core/node/node_state.py STOPPED_S": "evidence",
    "core/policy/drain.py SAME_S": "weigh",
    "core/health/compute_speed.py SPAN_UNPROFILED_S": "weigh",
    "core/coordinator/authorization.py LONGEST_S": "provider",
    "launcher/flags/addresses.py LOOK_S": "look",
    "launcher/flags/addresses.py NAMES_S": "program",
    "launcher/ray/supervisor.py LOOK_S": "look",
    "launcher/ray/supervisor.py PATIENCE_S": "person",
    "launcher/ray/remote_agent.py FRESH_S": "program",
    "launcher/ray/remote_agent.py REACH_S": "program",
    "launcher/run/supervisor.py FAULT_LOOK_S": "look",
    "launcher/ray/ray.py GOODBYE_S": "program",
    "launcher/commands/selfdrain.py LOOK_S": "look",
    "launcher/commands/watch.py PATIENCE_S": "person",
    "metrics.py FAST_S": "weigh",
    "metrics.py RECOVERY_S": "weigh",
    "metrics.py SILENT_S": "program",
    "metrics.py STEP_S": "weigh",
    "rpc/client.py call timeout_s": "person",
    "rpc/compressing.py TURN_S": "weigh",
    "rpc/front.py HANDSHAKE_S": "evidence",
    "rpc/front.py SPARED_S": "evidence",
    "rpc/greeting.py GREETING_S": "evidence",
    "rpc/loop.py CANCEL_AGAIN_S": "look",
    "rpc/options.py CONNECT_TIMEOUT_S": "look",
    "rpc/options.py RETRY_MAX_S": "look",
    "rpc/options.py RETRY_MIN_S": "look",
    "rpc/proofs.py GOOD_S": "lock",
    "rpc/refusals.py EVERY_S": "look",
    "store/etcd/connection.py CALL_S": "lock",
    "store/etcd/connection.py PATIENCE_S": "lock",
    "store/sqlite.py POLL_S": "look",
    "worker/control/agent_client.py HEARTBEAT_S": "look",
    "worker/profiling/emulated.py MAX_CARRYOVER_S": "weigh",
    "worker/transport/link_probe.py PAUSE_S": "look",
    "worker/transport/link_probe.py TIMEOUT_S": "person",
    "worker/transport/rendezvous.py _AGREE_TIMEOUT_S": "evidence",
    "worker/transport/shaped.py CLOSE_CHECK_S": "look",
    "worker/transport/threads.py JOIN_TIMEOUT_S": "program",
    "worker/transport/gloo.py DISCONNECT_GRACE_S": "evidence",
    "worker/transport/gloo.py MAX_PEER_CHECK_S": "look",
    "worker/transport/gloo.py PEER_CHECK_S": "look",
    "worker/transport/gloo.py _POISON_S": "evidence",
}
"""Constants in seconds, as `found` names them, and of which kind each is."""

HEAD = """# Timeouts

Written by `python docs/generate/make_timeouts.py` from the code. Do not edit.

The user gives at most one number: `--silence`, how long a silent peer is tolerated (3 s; `--lease` is the same flag).
Every other limit on waiting for somebody follows from it, and some from what was measured. `elastic status` shows the
limits of a running job; the event log tells them at the start, and those that change with the measurements that changed
them (`timeouts`, see [summary](../guide/summary.md#eventsjsonl)). Measurements are rounded up to 1, 2 or 5 times a power of ten,
and only lengthen limits. Agents stretch theirs by what their own workers measured.

More silence is worth tolerating where networks or hypervisors pause (live migration: 1 to 10 s); less where seconds
without a node are dear. A dead process is known by its closed connection at once, whatever the number.
"""
AFTER = """
`nodes` is how many there may be (`--nnodes MIN:MAX`): beyond `BEATS` = 2000 signs of life a second each comes less
often, three in the silence tolerated at least. `microbatch_s` is the longest time that one worker computed on one
micro-batch, `step_s` the longest step, `pause_s` the longest time that training stood still for a change of plan. What
has to hold between the limits is a property test
(`tests/core/protocol/test_timeouts.py`).

## What is no limit on waiting

Constants of other kinds. A test keeps the list complete.

| kind | why it does not follow from the budget |
| --- | --- |
"""
FLAGS = """
`--shutdown-timeout` and `--monitor-interval` are torchrun's; `--heartbeat` may be given and then only has to be at most
half of the silence tolerated. With the minimum of nodes there, more are waited for 1 s (`Policy.last_call_s`).
"""


def text() -> str:
    """The whole page."""
    tree = ast.parse(BUDGET.read_text())
    columns = " | ".join(f"at {one:g} s" for one in SHOWN)
    lines = [HEAD, f"| limit | seconds | {columns} | what |", "| --- | --- |" + " --- |" * (len(SHOWN) + 1)]
    formulas, limits = _formulas(tree), [budget(one) for one in SHOWN]
    for name, what in _fields(tree):
        values = " | ".join(f"{getattr(one, name):g}" for one in limits)
        lines.append(f"| `{name}` | `{formulas[name]}` | {values} | {what} |")
    lines.append(AFTER.rstrip("\n"))
    lines += [f"| {kind} | {why} |" for kind, why in KINDS.items()]
    lines += ["", "| constant | seconds | kind | what |", "| --- | --- | --- | --- |"]
    for name, (value, what) in sorted(found().items()):
        path, _, symbol = name.partition(" ")
        lines.append(f"| `{symbol}` in `elastic/{path}` | {value} | {CONSTANTS.get(name, '?')} | {what} |")
    return "\n".join(lines) + "\n" + FLAGS


def found() -> dict[str, tuple[str, str]]:
    """Name -> (value, what it says of itself) of every constant in seconds, and of defaults of timeouts."""
    named = {}
    for path in sorted((ROOT / "elastic").rglob("*.py")):
        place = path.relative_to(ROOT / "elastic")
        if path != BUDGET and place.parts[0] != "planning" and "_pb2" not in path.name:
            tree = ast.parse(path.read_text())
            for name, value, what in (*_constants(tree), *_defaults(tree)):
                named[f"{place} {name}"] = (value, what)
    return named


def _constants(tree: ast.Module) -> Iterator[tuple[str, str, str]]:
    for node, after in pairwise([*tree.body, None]):
        if not isinstance(node, ast.Assign) or len(node.targets) != 1:
            continue
        target, value = node.targets[0], node.value
        names = target.elts if isinstance(target, ast.Tuple) else [target]
        values = value.elts if isinstance(value, ast.Tuple) else [value]
        for one, given in zip(names, values, strict=False):
            if isinstance(one, ast.Name) and one.id.endswith("_S") and _number(given):
                yield one.id, ast.unparse(given), _says(after)


def _defaults(tree: ast.Module) -> Iterator[tuple[str, str, str]]:
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            plain, given = node.args.args, node.args.defaults
            pairs = [*zip(plain[len(plain) - len(given) :], given, strict=True)]
            pairs += [(a, d) for a, d in zip(node.args.kwonlyargs, node.args.kw_defaults, strict=True) if d]
            for argument, default in pairs:
                limit = argument.arg in ("timeout_s", "keepalive_s", "grace_s")
                if limit and _number(default) and ast.unparse(default) != "0.0":
                    yield f"{node.name} {argument.arg}", ast.unparse(default), ""


def _number(node: ast.expr) -> bool:
    if isinstance(node, ast.BinOp):
        return _number(node.left) and _number(node.right)
    return isinstance(node, ast.Constant) and isinstance(node.value, int | float)


def _says(node: ast.stmt | None) -> str:
    """The first line of the text under a constant."""
    if (
        isinstance(node, ast.Expr)
        and isinstance(node.value, ast.Constant)
        and isinstance(node.value.value, str)
    ):
        return " ".join(node.value.value.split())
    return ""


def _fields(tree: ast.Module) -> list[tuple[str, str]]:
    """(name, docstring) of every limit."""
    body = next(n.body for n in tree.body if isinstance(n, ast.ClassDef) and n.name == "Timeouts")
    return [
        (str(node.target.id), _says(after))
        for node, after in pairwise([*body, None])
        if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name)
    ]


def _formulas(tree: ast.Module) -> dict[str, str]:
    """What `budget` makes each limit of."""
    function = next(n for n in tree.body if isinstance(n, ast.FunctionDef) and n.name == "budget")
    call = next(n.value for n in function.body if isinstance(n, ast.Return))
    assert isinstance(call, ast.Call)
    made = {str(word.arg): ast.unparse(word.value) for word in call.keywords}
    return {name: formula.replace("seen.", "") for name, formula in made.items()}


if __name__ == "__main__":
    OUT.write_text(text())
