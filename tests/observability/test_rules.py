"""Every alert fires on its own series and is silent on the series of a healthy job (promtool)."""

from __future__ import annotations

import subprocess
from pathlib import Path
from typing import Any

import yaml

from tests.observability.tools import RULES, need

FIRING = 'ALERTS{alertname="ElasticStalled", alertstate="firing"}'
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
    'elastic_stalled_seconds{job="j", phase="running", reason=""}': "0+0" + STEADY,
    'elastic_store_away_seconds{job="j", instance="coordinator"}': "0+0" + STEADY,
    'elastic_records_late_seconds{job="j", instance="coordinator"}': "0+0" + STEADY,
    'elastic_records_dropped_total{job="j", instance="coordinator"}': "0+0" + STEADY,
    'up{job="j", instance="etcd-0", role="etcd"}': "1+0" + STEADY,
    'up{job="j", instance="etcd-1", role="etcd"}': "1+0" + STEADY,
    'up{job="j", instance="etcd-2", role="etcd"}': "1+0" + STEADY,
    'etcd_server_has_leader{job="j", instance="etcd-0", role="etcd"}': "1+0" + STEADY,
    'etcd_server_has_leader{job="j", instance="etcd-1", role="etcd"}': "1+0" + STEADY,
    'etcd_mvcc_db_total_size_in_bytes{job="j", instance="etcd-0", role="etcd"}': "30+0" + STEADY,
    'etcd_server_quota_backend_bytes{job="j", instance="etcd-0", role="etcd"}': "100+0" + STEADY,
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
    "Stalled": {
        'elastic_stalled_seconds{job="j", phase="halting", reason="b to halt"}': "_x56 20+60x4"
    },
    "Paused": {'elastic_stalled_seconds{job="j", phase="paused", reason="a plan"}': "_x56 20+60x4"},
    "StoreLost": {"elastic_store_away_seconds": "0x55 10+60x5"},
    "EtcdNoLeader": {"etcd_server_has_leader": "1x55 0x6"},
    "EtcdFewMembers": {'up{job="j", instance="etcd-2", role="etcd"}': "1x50 0x11"},
    "EtcdSpace": {"etcd_mvcc_db_total_size_in_bytes": "90+0" + STEADY},
    "RecordsLate": {"elastic_records_late_seconds": "0x55 10+60x5"},
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


def changed(changes: Series) -> Series:
    """The series of a job that is well, with changes by full name or by metric."""
    found = dict(WELL)
    for name, values in changes.items():
        known = [one for one in WELL if one == name or one.partition("{")[0] == name]
        found.update(dict.fromkeys(known or [name], values))
    return found


def series(changes: Series) -> list[dict[str, str]]:
    return [{"series": name, "values": values} for name, values in changed(changes).items()]


def case(changes: Series, alert: str, fires: bool) -> dict[str, Any]:
    wanted = f'ALERTS{{alertname=~"{alert}", alertstate="firing"}}'
    samples = [{"labels": "{}", "value": 1}] if fires else []
    test = {
        "expr": f"count(count by (alertname) ({wanted}))",
        "eval_time": "60m",
        "exp_samples": samples,
    }
    return {"interval": "1m", "input_series": series(changes), "promql_expr_test": [test]}


def test_lost_records_are_an_alert_too(tmp_path: Path) -> None:
    need("promtool")
    lost = {"elastic_records_dropped_total": "0x55 3x6"}
    tests = [case(lost, "ElasticRecordsLate", True)]
    told = {"rule_files": [str(RULES)], "evaluation_interval": "1m", "tests": tests}
    assert promtool(tmp_path, told) == ""


def test_a_stall_pages_within_two_minutes_with_its_reason(tmp_path: Path) -> None:
    """Prometheus scrapes and evaluates every 15 s, as in the shipped configuration. The stall
    begins right after a scrape."""
    need("promtool")
    reason = "node1 to halt for epoch 3 (node2 lost: silent)"
    stalled = f'elastic_stalled_seconds{{job="j", phase="halting", reason="{reason}"}}'
    test = {
        "interval": "15s",
        "input_series": [{"series": stalled, "values": "14+15x20"}],
        "alert_rule_test": [
            {"eval_time": "45s", "alertname": "ElasticStalled", "exp_alerts": []},
        ],
        "promql_expr_test": [
            {
                "expr": f"count by (reason) ({FIRING})",
                "eval_time": "105s",
                "exp_samples": [{"labels": f'{{reason="{reason}"}}', "value": 1}],
            }
        ],
    }
    told = {"rule_files": [str(RULES)], "evaluation_interval": "15s", "tests": [test]}
    assert promtool(tmp_path, told) == ""


def promtool(folder: Path, tests: dict[str, Any]) -> str:
    """Run tests of rules; return the errors, or ""."""
    (folder / "tests.yml").write_text(yaml.safe_dump(tests))
    command = ["promtool", "test", "rules", str(folder / "tests.yml")]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    return "" if done.returncode == 0 else done.stdout + done.stderr


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
    assert promtool(tmp_path, told) == ""
