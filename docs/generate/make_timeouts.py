"""Write docs/operate/timeouts.md: python docs/generate/make_timeouts.py

The values come from `elastic/core/protocol/timeouts.py`.
"""

from __future__ import annotations

from dataclasses import fields
from pathlib import Path

from elastic.core.protocol.timeouts import Timeouts, budget

OUT = Path(__file__).parents[1] / "operate" / "timeouts.md"
SHOWN = (1.0, 3.0, 30.0)
"""Values of `--silence` in the tables, seconds."""

HEAD = """# Timeouts

Written by `python docs/generate/make_timeouts.py`. Do not edit.

This page is for operators who want to change how long a job waits for a silent node. You set one
number, `--silence` (default 3 s; `--lease` is the same flag), and all other limits follow from it:

    elastic run --standalone --nnodes 4 --silence 10 -m examples.train_gpt
    elastic status --json            # `timeouts`: the limits of the running job

- Raise it where networks or hypervisors pause. A live migration pauses a machine for 1 to 10 s.
- Lower it where each second until a loss is detected is expensive.
- A dead process frees its ports, so it is detected at once, whatever the value is.
- A coordinator that hears only a minority of the nodes suspects its own network. It waits for
  `doubt_s`, or, if it hears nobody, for as long as that lasts.

The tables give each limit in seconds for `--silence` of 1, 3 and 30.
"""
SECTIONS = {
    "Nodes and coordinators": {
        "silence_s": "The value of `--silence`.",
        "heartbeat_s": "A node sends a heartbeat at this interval.",
        "lease_s": "A node that is silent for this long is lost.",
        "closed_s": "An accused node whose connection closed may return so long.",
        "starved_s": "A coordinator that is itself delayed longer extends the nodes' limits.",
        "adopt_s": "Nodes report to a restarted coordinator within this time.",
        "keepalive_s": "Ping interval; a connection closes after two without an answer.",
        "path_s": "Without an answer for this long, two nodes cannot reach each other.",
        "alone_s": "With no node left, the coordinator may take this long to end.",
        "doubt_s": "A coordinator that hears a minority of nodes blames itself so long.",
        "return_s": "How long the job waits for nodes with its copies, or for a disk that hangs.",
        "orphan_s": "An idle agent ends if it reaches no coordinator for this long.",
        "save_s": "A job that failed waits this long for a checkpoint that is due.",
        "disk_s": "Writes of the last checkpoint are repeated for this long.",
    },
    "Workers": {
        "contact_s": "If workers lost contact, a new epoch begins after this time.",
        "silent_s": "A worker is hung if it is silent and uses no CPU for this long.",
        "stuck_s": "A worker that should compute or halt is hung if it uses no CPU for this long.",
        "sibling_s": "A worker waits this long for orders after a failed collective.",
        "progress_s": "A job without a sign of progress for this long is stalled.",
        "open_s": "Workers that have loaded their layers connect within this time.",
        "link_s": "Last-resort timeout of gloo and NCCL operations.",
    },
    "Transfers and joins": {
        "bulk_s": "A transfer has failed if it moves less than 256 KiB within this time.",
        "serve_s": "A vault drops a client whose request moves less than 256 KiB in this time.",
        "prefetch_s": "A joining node enters after this time, even with partial state.",
        "preflight_s": "The pre-flight waits so long for an answer of the coordinator or a peer.",
        "preflight_disk_s": "The pre-flight waits so long for all directories of the node.",
        "trial_cpu_s": "CPU time after which the trial of the devices counts as endless.",
    },
    "Notices": {
        "leave_s": "With less notice than this, a node leaves in mid-step.",
        "overdue_s": "A notice was false if the node lives this long after it.",
    },
}
"""Section title -> limit -> one sentence about it."""
TAIL = """
Formulas are in `elastic/core/protocol/timeouts.py`. `tests/core/protocol/test_timeouts.py` checks
the order of the limits for all values of `--silence`.

## Limits that grow with measurements

Measurements only lengthen limits. They are rounded up to 1, 2 or 5 times a power of ten, so that
limits change seldom. Each change is a `timeouts` event in
[events.jsonl](../guide/summary.md#eventsjsonl).

| limit | grows with |
| --- | --- |
| `stuck_s` | 20 times the longest computation of one micro-batch on one worker |
| `progress_s` | 20 times that computation, and 5 times the longest step |
| `prefetch_s` | 5 times the longest step |
| `leave_s` | 2 times the longest pause of training for a change of plan, at most 20 s |
| the limits below | 10 times the longest round trip to the coordinator, if it is at least 10 ms |

The round trips are added to `lease_s`, `closed_s`, `contact_s`, `adopt_s`, `doubt_s`, `path_s`,
`open_s`, `preflight_s` and the least value of `progress_s`.

`heartbeat_s` grows with the number of nodes, the MAX of `--nnodes MIN:MAX`: a coordinator receives
at most 2000 heartbeats per second, but each node sends at least three per `--silence`.
`--heartbeat` sets the interval by hand, to at most half of `--silence`.
"""


def text() -> str:
    """The whole page."""
    limits = [budget(silence_s) for silence_s in SHOWN]
    columns = " | ".join(f"{silence_s:g} s" for silence_s in SHOWN)
    lines = [HEAD.rstrip("\n")]
    for title, section in SECTIONS.items():
        lines += ["", f"## {title}", "", f"| limit | {columns} | meaning |"]
        lines.append("| --- |" + " --- |" * len(SHOWN) + " --- |")
        for name, meaning in section.items():
            values = " | ".join(f"{round(getattr(limit, name), 3):g}" for limit in limits)
            lines.append(f"| `{name}` | {values} | {meaning} |")
    shown = {name for section in SECTIONS.values() for name in section}
    assert shown == {field.name for field in fields(Timeouts)}
    return "\n".join(lines) + "\n" + TAIL


if __name__ == "__main__":
    OUT.write_text(text())
