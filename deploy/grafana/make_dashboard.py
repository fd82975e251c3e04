"""Write dashboard.json: python deploy/grafana/make_dashboard.py"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

OUT = Path(__file__).with_name("dashboard.json")
SOURCE = {"type": "prometheus", "uid": "${datasource}"}
Query = tuple[str, str]
"""(PromQL expression, legend)."""
Panel = tuple[str, str, str, list[Query]]
"""(stat | lines | stack, title, unit, queries)."""


def at(metric: str, where: str = "") -> str:
    """Return PromQL for the series of a metric of the selected job."""
    return f'{metric}{{job="$job"{", " + where if where else ""}}}'


def rate(metric: str, by: str = "job", where: str = "") -> str:
    return f"sum by ({by}) (rate({at(metric, where)}[$__rate_interval]))"


def increase(metric: str, where: str = "") -> str:
    return f"increase({at(metric, where)}[$__range])"


def quantile(metric: str, by: str, q: float) -> str:
    return f"histogram_quantile({q}, {rate(f'{metric}_bucket', f'le, {by}')})"


def mean(metric: str, by: str, where: str = "") -> str:
    total, count = (
        f"sum by ({by}) (increase({at(metric + end, where)}[$__range]))"
        for end in ("_sum", "_count")
    )
    return f"{total} / ({count} > 0)"


USEFUL = rate("elastic_node_seconds_total", where='use="useful"')
TRAINS, TOTAL, JOINED = 'state="training"', 'phase="total"', 'kind="joined"'
GLANCE: list[Panel] = [
    ("stat", "Goodput", "percentunit", [(f"{USEFUL} / {rate('elastic_node_seconds_total')}", "")]),
    ("stat", "Step", "none", [(f"max({at('elastic_step')})", "")]),
    ("stat", "Steps/s", "none", [(rate("elastic_steps_total"), "")]),
    ("stat", "Tokens/s", "short", [(rate("elastic_tokens_total"), "")]),
    ("stat", "Nodes in training", "none", [(f"sum({at('elastic_nodes', TRAINS)})", "")]),
    ("stat", "Phase", "none", [(f"{at('elastic_job_phase')} == 1", "{{phase}}")]),
    ("stat", "Plan", "none", [(at("elastic_plan_info"), "{{shape}} {{gradients}}+{{state}}")]),
    ("stat", "Leader's term", "none", [(f"max({at('elastic_coordinator_term')})", "")]),
]
TRAINING: list[Panel] = [
    ("stack", "Node time by use", "none", [(rate("elastic_node_seconds_total", "use"), "{{use}}")]),
    ("stack", "Nodes", "none", [(f"sum by (state) ({at('elastic_nodes')})", "{{state}}")]),
    ("lines", "Step: predicted and measured", "s", [
        (at("elastic_plan_predicted_step_seconds"), "predicted"),
        (at("elastic_plan_measured_step_seconds"), "measured"),
    ]),
    ("lines", "Tokens/s", "short", [(rate("elastic_tokens_total"), "tokens/s")]),
    ("lines", "Loss", "none", [
        (at("elastic_loss"), "loss"),
        (at("elastic_evaluation_loss"), "evaluation"),
    ]),
    ("lines", "Slowdown of nodes", "none", [(at("elastic_node_slowdown_ratio"), "{{node}}")]),
]  # fmt: skip
RECOVERIES: list[Panel] = [
    ("lines", "Recovery: mean seconds by phase", "s", [
        (mean("elastic_recovery_seconds", "phase", 'phase!~"total|halt"'), "{{phase}}"),
    ]),
    ("lines", "Recoveries by cause", "none", [
        (f"sum by (cause) ({increase('elastic_recovery_seconds_count', TOTAL)})", "{{cause}}"),
    ]),
    ("lines", "Nodes lost and joined", "none", [
        (f"sum by (reason) ({increase('elastic_nodes_lost_total')})", "lost: {{reason}}"),
        (f"sum by (job) ({increase('elastic_events_total', JOINED)})", "joined"),
    ]),
    ("lines", "Micro-batches", "none", [
        (f"sum by (job) ({increase('elastic_microbatches_lost_total')})", "lost"),
        (f"sum by (job) ({increase('elastic_microbatches_rerun_total')})", "run again"),
    ]),
]  # fmt: skip
BACKUPS: list[Panel] = [
    ("lines", "Copies sent and received", "Bps", [
        (rate("elastic_copies_sent_bytes_total", "kind"), "{{kind}} sent"),
        (rate("elastic_copies_received_bytes_total", "kind"), "{{kind}} received"),
    ]),
    ("lines", "Lag: announcement to acknowledgement", "s", [
        (quantile("elastic_copy_lag_seconds", "job", 0.5), "median"),
        (quantile("elastic_copy_lag_seconds", "job", 0.99), "p99"),
    ]),
    ("lines", "Exposure", "s", [
        (at("elastic_backup_exposure_seconds"), "{{instance}}"),
        (at("elastic_protection_pending_seconds"), "since the plan changed"),
    ]),
    ("lines", "Vaults", "bytes", [
        (at("elastic_vault_bytes"), "{{instance}}"),
        (f"min by (job) ({at('elastic_vault_limit_bytes')})", "limit"),
    ]),
    ("lines", "Free space", "bytes", [(at("elastic_storage_free_bytes"), "{{instance}} {{for}}")]),
    ("lines", "Links", "Bps", [(at("elastic_link_bytes_per_second"), "{{instance}}")]),
]  # fmt: skip
SERVICES: list[Panel] = [
    ("lines", "Coordinator: leader and term", "none", [
        (at("elastic_coordinator_leader"), "{{instance}} leads"),
        (at("elastic_coordinator_term"), "{{instance}} term"),
    ]),
    ("lines", "Decisions, p99", "s", [
        (quantile("elastic_decision_seconds", "event", 0.99), "{{event}}"),
    ]),
    ("lines", "Coordinator: late, and waiting events", "s", [
        (quantile("elastic_tick_delay_seconds", "job", 0.99), "tick delay, p99"),
        (at("elastic_coordinator_queue_length"), "events waiting"),
    ]),
    ("lines", "CPU", "percentunit", [
        (rate("process_cpu_seconds_total", "instance"), "{{instance}}"),
    ]),
    ("lines", "Memory", "bytes", [(at("process_resident_memory_bytes"), "{{instance}}")]),
    ("lines", "Refused messages, workers that ended", "none", [
        (rate("elastic_messages_refused_total", "reason"), "{{reason}}"),
        (rate("elastic_worker_exits_total", "instance"), "{{instance}}"),
    ]),
]  # fmt: skip
ROWS = (
    ("At a glance", 3, 4, GLANCE),
    ("Training", 8, 8, TRAINING),
    ("Recoveries", 6, 8, RECOVERIES),
    ("Backups", 8, 8, BACKUPS),
    ("Services", 8, 8, SERVICES),
)
"""(title, width and height of its panels, panels); a dashboard is 24 wide."""


def panel(number: int, grid: dict[str, int], content: Panel) -> dict[str, Any]:
    kind, title, unit, queries = content
    targets = [
        {
            "refId": chr(ord("A") + i),
            "datasource": SOURCE,
            "expr": query,
            "legendFormat": legend or "__auto",
        }
        for i, (query, legend) in enumerate(queries)
    ]
    made: dict[str, Any] = {
        "id": number,
        "type": "stat" if kind == "stat" else "timeseries",
        "title": title,
        "datasource": SOURCE,
        "gridPos": grid,
        "targets": targets,
    }
    custom: dict[str, Any] = {}
    if kind == "stack":
        custom = {"fillOpacity": 60, "lineWidth": 0, "stacking": {"mode": "normal", "group": "A"}}
    made["fieldConfig"] = {"defaults": {"unit": unit, "custom": custom}, "overrides": []}
    if kind == "stat":
        named = bool(queries[0][1])
        calculation = {"values": False, "calcs": ["lastNotNull"], "fields": ""}
        made["options"] = {"reduceOptions": calculation, "textMode": "name" if named else "value"}
    return made


def variable(name: str, label: str, kind: str, query: str, **more: Any) -> dict[str, Any]:
    return {"name": name, "label": label, "type": kind, "query": query, "refresh": 1, **more}


def dashboard() -> dict[str, Any]:
    panels: list[dict[str, Any]] = []
    y = 0
    for title, width, height, row in ROWS:
        grid = {"x": 0, "y": y, "w": 24, "h": 1}
        panels.append(
            {
                "id": len(panels) + 1,
                "type": "row",
                "title": title,
                "collapsed": False,
                "gridPos": grid,
            }
        )
        panels[-1]["panels"] = []
        y += 1
        for i, content in enumerate(row):
            place = {
                "x": width * i % 24,
                "y": y + width * i // 24 * height,
                "w": width,
                "h": height,
            }
            panels.append(panel(len(panels) + 1, place, content))
        y += -(-width * len(row) // 24) * height
    jobs = "label_values(elastic_job_info, job)"
    return {
        "title": "Elastic training",
        "uid": "elastic-training",
        "tags": ["elastic"],
        "schemaVersion": 39,
        "editable": True,
        "refresh": "10s",
        "timezone": "browser",
        "time": {"from": "now-1h", "to": "now"},
        "templating": {
            "list": [
                variable("datasource", "Data source", "datasource", "prometheus"),
                variable("job", "Job", "query", jobs, datasource=SOURCE, sort=2),
            ]
        },
        "annotations": {"list": []},
        "panels": panels,
    }


def text() -> str:
    return json.dumps(dashboard(), indent=1) + "\n"


if __name__ == "__main__":
    OUT.write_text(text())
