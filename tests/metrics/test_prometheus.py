"""A real Prometheus scrapes a job in which a node is killed: names, rules, an alert, all queries of the dashboard."""

from __future__ import annotations

import json
import subprocess
import time
from pathlib import Path

import pytest
import yaml

from tests.metrics.tools import (
    CONFIG,
    DASHBOARD,
    RULES,
    Prometheus,
    events,
    job,
    need,
    prometheus,
    scrape,
    until,
)

WINDOWS = {"$__rate_interval": "5s", "$__range": "60s"}


def queries(name: str) -> list[tuple[str, str]]:
    """(panel, PromQL) of the dashboard, with its variables filled in for the job `name`."""
    found = []
    for panel in json.loads(DASHBOARD.read_text())["panels"]:
        for target in panel.get("targets", ()):
            text = str(target["expr"]).replace("$job", name)
            for variable, value in WINDOWS.items():
                text = text.replace(variable, value)
            assert "$" not in text, text
            found.append((panel["title"], text))
    return found


def test_promtool_accepts_rules_and_configuration() -> None:
    need("promtool")
    for words in (["rules", RULES], ["config", CONFIG]):
        done = subprocess.run(
            ["promtool", "check", *map(str, words)], capture_output=True, text=True, check=False
        )
        assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.slow
def test_a_killed_node_is_seen(tmp_path: Path) -> None:
    need("prometheus", "promtool")
    began = time.time()
    kill = ("--fault", "kill node=1 step=12 microbatch=3")
    with job(tmp_path / "job", "--nnodes", "2:4", *kill) as run_dir:
        until(
            lambda: len(list((run_dir / "metrics").glob("*.json"))) == 5, "five processes tell of themselves"
        )
        with prometheus(tmp_path / "prometheus", run_dir) as server:
            names_are_conventional(run_dir)
            rules_are_loaded(server)
            (name,) = until(lambda: jobs(server), "the job is scraped")
            assert name == json.loads((run_dir / "config.json").read_text())["job_id"]
            until(lambda: events(run_dir, "recovery"), "the kill is recovered from")
            until(lambda: "NodeLost" in alerts(server), "the alert fires")
            for panel, query in queries(name):
                until(lambda q=query: server.finite(q, began), f"{panel} has data: {query}", 20.0)
            figures_are_right(server, name, run_dir)


def jobs(server: Prometheus) -> list[str]:
    data = server.ask("label/job/values", **{"match[]": "elastic_job_info"})
    return list(data or ())


def alerts(server: Prometheus) -> set[str]:
    """Names of the alerts that fire."""
    data = server.ask("alerts") or {"alerts": ()}
    return {
        a["labels"]["alertname"].removeprefix("Elastic") for a in data["alerts"] if a["state"] == "firing"
    }


def names_are_conventional(run_dir: Path) -> None:
    for name in ("coordinator", "node0"):
        done = subprocess.run(
            ["promtool", "check", "metrics"],
            input=scrape(run_dir, name),
            capture_output=True,
            text=True,
            check=False,
        )
        assert (done.returncode, done.stdout + done.stderr) == (0, "")


def rules_are_loaded(server: Prometheus) -> None:
    wanted = {
        rule.get("alert") or rule["record"]
        for group in yaml.safe_load(RULES.read_text())["groups"]
        for rule in group["rules"]
    }

    def evaluated() -> bool:
        groups = (server.ask("rules") or {"groups": ()})["groups"]
        rules = [rule for group in groups for rule in group["rules"]]
        bad = [rule for rule in rules if rule["health"] == "err"]
        assert not bad, bad
        return {rule["name"] for rule in rules if rule["health"] == "ok"} == wanted

    until(evaluated, "every rule is evaluated without an error")


def figures_are_right(server: Prometheus, name: str, run_dir: Path) -> None:
    """What was scraped last is what the event log says."""

    def value(query: str) -> float:
        result = server.ask("query", query=query)["result"]
        return float(result[0]["value"][1]) if result else -1.0

    selector = f'{{job="{name}"}}'
    (recovery,) = events(run_dir, "recovery")
    assert value(f"elastic_nodes_lost_total{selector[:-1]}, reason='closed'}}") == 1
    total = f"elastic_recovery_seconds_sum{selector[:-1]}, phase='total', cause='lost'}}"
    assert value(total) == pytest.approx(recovery["total_s"])
    assert value(f"elastic_microbatches_lost_total{selector}") == recovery["microbatches_lost"]
    used = value(f"sum(elastic_node_seconds_total{selector})")
    useful = value(f"elastic_node_seconds_total{selector[:-1]}, use='useful'}}")
    assert 0 < useful < used
    predicted = value(f"elastic_plan_predicted_step_seconds{selector}")
    measured = until(  # not in the first steps of a plan
        lambda: max(0.0, value(f"elastic_plan_measured_step_seconds{selector}")),
        "the plan's steps are measured",
    )
    assert measured == pytest.approx(predicted, rel=1.0)
