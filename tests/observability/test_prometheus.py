"""A real Prometheus scrapes a job that loses a node: names, rules, an alert, dashboard queries."""

from __future__ import annotations

import json
import signal
import subprocess
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.observability.tools import (
    CONFIG,
    DASHBOARD,
    RULES,
    Prometheus,
    events,
    job,
    kill_node,
    need,
    prometheus,
    scrape,
    signal_node,
    until,
)
from tests.patience import LONG_S
from tests.store.etcds import etcd

LOST = "elastic_nodes_lost_total{job='%s', reason='closed'}"
WINDOWS = {"$__rate_interval": "20s", "$__range": "10m"}
"""The range is longer than the test: on a busy machine, scrapes can fail for a minute."""


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
    with job(tmp_path / "job", "--nnodes", "2:4") as run_dir:
        until(
            lambda: len(list((run_dir / "metrics").glob("*.json"))) == 5,
            "five processes serve metrics",
        )
        with prometheus(tmp_path / "prometheus", run_dir) as server:
            names_are_conventional(run_dir)
            rules_are_loaded(server)
            (name,) = until(lambda: jobs(server), "the job is scraped")
            assert name == json.loads((run_dir / "config.json").read_text())["job_id"]
            until(
                lambda: value(server, LOST % name) == 0,
                "the counter of losses is scraped at 0, so that the loss is an increase",
            )
            until(lambda: "node1[" in newest_plan(run_dir), "node1 trains")
            killed = time.time()
            kill_node(run_dir, "node1")
            until(lambda: losses(run_dir, killed), "the job recovers from the kill")
            until(lambda: "NodeLost" in alerts(server), "the alert fires")
            for panel, query in queries(name):
                until(lambda q=query: server.finite(q, began), f"{panel} has data: {query}")  # type: ignore[misc]
            figures_are_right(server, name, run_dir, killed)


@pytest.mark.chaos
@pytest.mark.slow
def test_a_job_that_stalls_pages_with_its_reason(tmp_path: Path) -> None:
    """Both nodes hang. Before, nothing that asks for somebody fires."""
    need("prometheus")
    nodes = ("node0", "node1")
    with (
        job(tmp_path / "job", "--nnodes", "2") as run_dir,
        prometheus(tmp_path / "prometheus", run_dir) as server,
    ):
        until(lambda: len(events(run_dir, "step")) > 20, "the job trains", 2 * LONG_S)
        until(lambda: value(server, "elastic_steps_total") > 20, "its steps are scraped")
        assert value(server, "elastic_stalled_seconds") == 0
        assert not {"Stalled", "Paused", "StoreLost", "RecordsLate", "Failed"} & alerts(server)
        for node in nodes:
            signal_node(run_dir, node, signal.SIGSTOP)
        try:
            query = 'ALERTS{alertname="ElasticStalled", alertstate="firing"}'
            fires = until(lambda: labels(server, query), "the alert fires", 3 * LONG_S)
        finally:
            for node in nodes:
                signal_node(run_dir, node, signal.SIGCONT)
        assert fires["severity"] == "critical" and fires["reason"], fires
        assert fires["phase"] in ("running", "halting"), fires


@pytest.mark.chaos
@pytest.mark.slow
def test_an_etcd_that_loses_its_quorum_pages(tmp_path: Path) -> None:
    """One member of three is killed, then a second one, beside a job that keeps its state there."""
    need("prometheus")
    with etcd(tmp_path / "etcd", 3) as cluster:
        places = [member.endpoint for member in cluster.members]
        with (
            job(tmp_path / "job", "--nnodes", "2", "--store", cluster.url) as run_dir,
            prometheus(tmp_path / "prometheus", run_dir, places) as server,
        ):
            until(lambda: events(run_dir, "step"), "the job trains", 2 * LONG_S)
            until(lambda: value(server, "sum(etcd_server_has_leader)") == 3, "all have a leader")
            used = "max(etcd_mvcc_db_total_size_in_bytes / etcd_server_quota_backend_bytes)"
            assert 0 < value(server, used) < 0.8
            until(lambda: value(server, "elastic_store_away_seconds") == 0, "it is scraped")
            watched = {"EtcdFewMembers", "EtcdNoLeader", "EtcdSpace", "StoreLost"}
            assert not watched & alerts(server)
            cluster.members[0].kill()
            until(lambda: "EtcdFewMembers" in alerts(server), "the first alert", 2 * LONG_S)
            cluster.members[1].kill()
            until(lambda: {"EtcdNoLeader", "StoreLost"} <= alerts(server), "others", 3 * LONG_S)


def labels(server: Prometheus, query: str) -> dict[str, str]:
    """The labels of the first result; {}: there is none."""
    result = (server.ask("query", query=query) or {"result": ()})["result"]
    return dict(result[0]["metric"]) if result else {}


def jobs(server: Prometheus) -> list[str]:
    data = server.ask("label/job/values", **{"match[]": "elastic_job_info"})
    return list(data or ())


def alerts(server: Prometheus) -> set[str]:
    """Names of the alerts that fire."""
    data = server.ask("alerts") or {"alerts": ()}
    return {
        a["labels"]["alertname"].removeprefix("Elastic")
        for a in data["alerts"]
        if a["state"] == "firing"
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


def value(server: Prometheus, query: str) -> float:
    """The value that was scraped last; -1: none was."""
    result = (server.ask("query", query=query) or {"result": ()})["result"]
    return float(result[0]["value"][1]) if result else -1.0


def newest_plan(run_dir: Path) -> str:
    return "".join(str(entry["text"]) for entry in events(run_dir, "plan")[-1:])


def losses(run_dir: Path, killed: float) -> list[dict[str, Any]]:
    """Recoveries from the kill of node1."""
    return [r for r in events(run_dir, "recovery") if "node1" in r["cause"] and r["at"] > killed]


def figures_are_right(server: Prometheus, name: str, run_dir: Path, killed: float) -> None:
    """Wait until the scraped figures equal those of the event log."""

    def comes_to_be(query: str, wanted: Callable[[], float]) -> None:
        until(
            lambda: value(server, query) == pytest.approx(wanted()),
            f"{query} is as in the event log",
        )

    selector = f'{{job="{name}"}}'
    comes_to_be(LOST % name, lambda: 1)
    kind = losses(run_dir, killed)[0]["cause_kinds"][0]
    comes_to_be(
        f"elastic_recovery_seconds_sum{selector[:-1]}, phase='total', cause='{kind}'}}",
        lambda: sum(
            r["total_s"] for r in events(run_dir, "recovery") if r["cause_kinds"][0] == kind
        ),
    )
    comes_to_be(
        f"elastic_microbatches_lost_total{selector}",
        lambda: sum(r["microbatches_lost"] for r in events(run_dir, "recovery")),
    )
    used = f"sum(elastic_node_seconds_total{selector})"
    useful = f"elastic_node_seconds_total{selector[:-1]}, use='useful'}}"
    until(
        lambda: 0 < value(server, useful) < value(server, used),
        "some of the nodes' time was useful",
    )
    for figure in ("predicted", "measured"):  # not in the first steps of a plan
        query = f"elastic_plan_{figure}_step_seconds{selector}"
        until(lambda q=query: value(server, q) > 0, f"the plan's steps are {figure}")  # type: ignore[misc]
