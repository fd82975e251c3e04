"""Every alert fires on its own series and is silent on the series of a healthy job (promtool)."""

from __future__ import annotations

import subprocess
from pathlib import Path
from typing import Any

import yaml

from tests.observability.tools import RULES, need

Series = dict[str, str]
"""Series: values, a minute apart, in promtool's notation."""
STEADY = "x61"
WELL: Series = {
    'up{job="j", instance="coordinator", role="coordinator"}': "1+0" + STEADY,
    'up{job="j", instance="a", role="agent"}': "1+0" + STEADY,
    'elastic_coordinator_connected{job="j", instance="a"}': "1+0" + STEADY,
    'elastic_coordinator_leader{job="j", instance="coordinator"}': "1+0" + STEADY,
    'elastic_coordinator_term{job="j", instance="coordinator"}': "3+0" + STEADY,
    'elastic_job_phase{job="j", phase="running"}': "1+0" + STEADY,
    'elastic_job_phase{job="j", phase="paused"}': "0+0" + STEADY,
    'elastic_job_phase{job="j", phase="failed"}': "0+0" + STEADY,
    'elastic_steps_total{job="j"}': "0+10" + STEADY,
    'elastic_steps_lost_total{job="j"}': "0+0" + STEADY,
    'elastic_node_seconds_total{job="j", use="useful"}': "0+95" + STEADY,
    'elastic_node_seconds_total{job="j", use="lost"}': "0+5" + STEADY,
    'elastic_nodes_lost_total{job="j", reason="closed"}': "0+0" + STEADY,
    'elastic_nodes{job="j", state="training"}': "4+0" + STEADY,
    'elastic_nodes{job="j", state="spare"}': "1+0" + STEADY,
    'elastic_nodes_min{job="j"}': "2+0" + STEADY,
    'elastic_nodes_max{job="j"}': "8+0" + STEADY,
    'elastic_node_slowdown_ratio{job="j", node="a"}': "1+0" + STEADY,
    'elastic_protection_pending_seconds{job="j"}': "0+0" + STEADY,
    'elastic_backup_exposure_seconds{job="j", instance="a"}': "0.1+0" + STEADY,
    'elastic_copies_given_up_total{job="j", instance="a", kind="state"}': "0+0" + STEADY,
    'elastic_copies_corrupt_total{job="j"}': "0+0" + STEADY,
    'elastic_vault_allocated_bytes{job="j", instance="a"}': "10+0" + STEADY,
    'elastic_vault_limit_bytes{job="j", instance="a"}': "100+0" + STEADY,
    'elastic_storage_free_bytes{job="j", instance="a", for="memory"}': "50+0" + STEADY,
    'elastic_storage_size_bytes{job="j", instance="a", for="memory"}': "100+0" + STEADY,
    'elastic_plan_measured_step_seconds{job="j"}': "1.1+0" + STEADY,
    'elastic_plan_predicted_step_seconds{job="j"}': "1+0" + STEADY,
    'elastic_worker_exits_total{job="j", instance="a"}': "0+0" + STEADY,
    'elastic_messages_refused_total{job="j", reason="stale"}': "0+0" + STEADY,
    'elastic_certificate_left_seconds{job="j", instance="a", file="tls.crt"}': "7776000-60"
    + STEADY,
    'elastic_events_total{job="j", kind="quarantine"}': "0+0" + STEADY,
    'elastic_recovery_seconds_bucket{job="j", phase="total", cause="lost", le="1.0"}': "0+1"
    + STEADY,
    'elastic_recovery_seconds_bucket{job="j", phase="total", cause="lost", le="60.0"}': "0+1"
    + STEADY,
    'elastic_recovery_seconds_bucket{job="j", phase="total", cause="lost", le="+Inf"}': "0+1"
    + STEADY,
    'elastic_tick_delay_seconds_bucket{job="j", le="0.1"}': "0+9" + STEADY,
    'elastic_tick_delay_seconds_bucket{job="j", le="3.0"}': "0+9" + STEADY,
    'elastic_tick_delay_seconds_bucket{job="j", le="+Inf"}': "0+9" + STEADY,
}
ILL: dict[str, Series] = {
    "NodeLost": {"elastic_nodes_lost_total": "0x55 1x6"},
    "LosingNodes": {"elastic_nodes_lost_total": "0x50 1 2 3 4 5 5x6"},
    "RecoverySlow": {
        'elastic_recovery_seconds_bucket{job="j", phase="total", cause="lost", le="1.0"}': "0+0"
        + STEADY
    },
    "NoProgress": {"elastic_steps_total": "0+10x30 300x31"},
    "Paused": {'elastic_job_phase{job="j", phase="paused"}': "0x50 1x11"},
    "Failed": {'elastic_job_phase{job="j", phase="failed"}': "0x55 1x6"},
    "LowGoodput": {'elastic_node_seconds_total{job="j", use="lost"}': "0+60" + STEADY},
    "StepsLost": {"elastic_steps_lost_total": "0x50 3x11"},
    "Unprotected": {"elastic_protection_pending_seconds": "0x50 130x11"},
    "BackupLag": {"elastic_backup_exposure_seconds": "0x50 40x11"},
    "CopiesGivenUp": {"elastic_copies_given_up_total": "0x55 2x6"},
    "CopiesCorrupt": {"elastic_copies_corrupt_total": "0x50 1x11"},
    "VaultFull": {"elastic_vault_allocated_bytes": "95+0" + STEADY},
    "StorageFull": {"elastic_storage_free_bytes": "5+0" + STEADY},
    "NoSpare": {'elastic_nodes{job="j", state="spare"}': "0+0" + STEADY},
    "FewNodes": {
        'elastic_nodes{job="j", state="training"}': "1+0" + STEADY,
        'elastic_nodes{job="j", state="spare"}': "1+0" + STEADY,
    },
    "CoordinatorAbsent": {"elastic_coordinator_leader": "1x50 0x11"},
    "AgentCutOff": {"elastic_coordinator_connected": "1x50 0x11"},
    "TwoLeaders": {'elastic_coordinator_leader{job="j", instance="other"}': "1+0" + STEADY},
    "LeaderFlapping": {"elastic_coordinator_term": "3x50 4 5 6 7 8 8x6"},
    "CoordinatorBehind": {'elastic_tick_delay_seconds_bucket{job="j", le="0.1"}': "0+1" + STEADY},
    "PredictionOff": {"elastic_plan_measured_step_seconds": "1.5+0" + STEADY},
    "SlowNode": {"elastic_node_slowdown_ratio": "2+0" + STEADY},
    "Quarantined": {"elastic_events_total": "0x55 1x6"},
    "WorkersCrash": {"elastic_worker_exits_total": "0x40 1 2 3 4 5 5x16"},
    "CertificateExpiresIn30Days": {"elastic_certificate_left_seconds": "2000000-60" + STEADY},
    "CertificateExpiresIn7Days": {"elastic_certificate_left_seconds": "500000-60" + STEADY},
    "CertificateExpiresIn1Day": {"elastic_certificate_left_seconds": "1000-60" + STEADY},
    "MessagesRefused": {"elastic_messages_refused_total": "0+30" + STEADY},
    "TargetDown": {'up{job="j", instance="a", role="agent"}': "1x50 0x11"},
}
"""Alert: series that differ from a healthy job, by full name or, where there is one, by metric."""


def series(changes: Series) -> list[dict[str, str]]:
    found = dict(WELL)
    for name, values in changes.items():
        known = [one for one in WELL if one == name or one.partition("{")[0] == name]
        found.update(dict.fromkeys(known or [name], values))
    return [{"series": name, "values": values} for name, values in found.items()]


def case(changes: Series, alert: str, fires: bool) -> dict[str, Any]:
    wanted = f'ALERTS{{alertname=~"{alert}", alertstate="firing"}}'
    samples = [{"labels": "{}", "value": 1}] if fires else []
    test = {
        "expr": f"count(count by (alertname) ({wanted}))",
        "eval_time": "60m",
        "exp_samples": samples,
    }
    return {"interval": "1m", "input_series": series(changes), "promql_expr_test": [test]}


def test_every_alert_fires_when_it_should(tmp_path: Path) -> None:
    need("promtool")
    rules = [
        rule for group in yaml.safe_load(RULES.read_text())["groups"] for rule in group["rules"]
    ]
    assert {f"Elastic{name}" for name in ILL} == {
        rule["alert"] for rule in rules if "alert" in rule
    }
    tests = [case({}, "Elastic.*", False)]
    tests += [case(changes, f"Elastic{name}", True) for name, changes in ILL.items()]
    told = {"rule_files": [str(RULES)], "evaluation_interval": "1m", "tests": tests}
    (tmp_path / "tests.yml").write_text(yaml.safe_dump(told))
    command = ["promtool", "test", "rules", str(tmp_path / "tests.yml")]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
