"""What is counted, and that docs/operate/metrics.md tells of all of it."""

from __future__ import annotations

import contextlib
import http.client
import importlib.util
import json
import re
import socket
import ssl
import threading
import time
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import GaugeMetricFamily
from prometheus_client.metrics_core import Metric
from prometheus_client.parser import text_string_to_metric_families

from elastic import metrics
from elastic.agent.metrics import GAUGES, AgentMetrics
from elastic.config import JobConfig
from elastic.coordinator.metrics import CoordinatorMetrics, CoordinatorStatus
from elastic.coordinator.waiting import Stall
from elastic.core.health.diagnosis import FaultClass, Finding, HealthAction
from elastic.core.job import quarantine
from elastic.core.job import state as job
from elastic.core.job.goodput import NODE_TIME_USES, NodeTimeAccount, recovery_entry
from elastic.core.job.state import Cause, CauseKind, EpochChange, JobPhase, JobState, Member, Policy
from elastic.core.protocol import messages as m
from elastic.core.protocol.health_report import CertificateEnd
from elastic.domain.types import (
    Copy,
    EvaluationResult,
    JobSpec,
    NodeInfo,
    Pipeline,
    Plan,
    Stage,
    StepRecord,
    Unit,
)
from elastic.launcher.flags.certs import make_certificates
from elastic.metrics import discovery, new_registry, serve
from elastic.rpc.security.rejections import REJECTIONS, Reason
from elastic.rpc.security.tls import CA, CERT, KEY
from elastic.store.interface import Conflict, StoreUnavailable
from tests.observability.tools import DASHBOARD, ROOT, RULES
from tests.patience import LONG_S

PLAN = Plan(
    1,
    2,
    4,
    1,
    (Pipeline((Stage(Unit("a"), 0, 1), Stage(Unit("b"), 1, 2)), (0, 1, 2, 3)),),
    peers=(("a", "b"),),
)
CHANGE = EpochChange(
    2,
    (Cause(CauseKind.LOST, "b lost", ("b",)),),
    False,
    ("b",),
    2,
    10.0,
    PLAN,
    3,
    1,
    rerun=1,
    replayed=frozenset({1}),
    decided=10.2,
)


def state(*nodes: str, **changes: Any) -> JobState:
    members = {
        node: Member(
            m.NodeReport(NodeInfo(node, f"{node}-1", ""), m.NodePhase.RUNNING, 1), seen=5.0
        )
        for node in nodes
    }
    return JobState(policy=Policy(), members=members, epoch=1).of(**changes)


RUNNING = state("a", "b", "c", phase=JobPhase.RUNNING, plan=PLAN)


def values(registry: CollectorRegistry) -> dict[str, float]:
    """Every sample, as its line without the value."""
    found = {}
    for family in text_string_to_metric_families(generate_latest(registry).decode()):
        for sample in family.samples:
            labels = ",".join(f"{k}={v}" for k, v in sorted(sample.labels.items()))
            found[f"{sample.name}{{{labels}}}" if labels else sample.name] = sample.value
    return found


def coordinator(of: JobState, now: float = 10.0) -> CoordinatorMetrics:
    metrics = CoordinatorMetrics("job", lambda: now)
    metrics.lead(lambda: CoordinatorStatus(of, True, 3, 7, 99))
    return metrics


def agent() -> AgentMetrics:
    ends = (CertificateEnd("tls.crt", "CN=a", time.time() + 90.0, "soon"),)
    metrics = AgentMetrics(new_registry(), str(ROOT), str(ROOT / "none"), lambda: ends)
    metrics.read = lambda: {**dict.fromkeys(GAUGES, 0.0), "backup_exposure_seconds": 1.5}
    return metrics


# ---- the page ----


def names(registry: CollectorRegistry) -> dict[str, tuple[str, frozenset[str]]]:
    """Metric: (type, labels)."""
    found = {}
    for family in registry.collect():
        labels = {label for sample in family.samples for label in sample.labels} - {"le"}
        name = f"{family.name}_total" if family.type == "counter" else family.name
        found[name] = (family.type, frozenset(labels))
    return found


def known() -> dict[str, tuple[str, frozenset[str]]]:
    full = RUNNING.of(
        record=StepRecord(1, 1.0, 1.0, 2.0), evaluation=EvaluationResult(2, 1, 1.0, 4, 0.5)
    )
    metrics = coordinator(full)
    metrics.step_s[:] = [0.1, 0.2]
    found = {**names(metrics.registry), **names(agent().registry)}
    found["elastic_plan_predicted_step_seconds"] = ("gauge", frozenset())  # needs a profile
    return {name: told for name, told in found.items() if name.startswith("elastic_")}


def test_the_page_tells_of_every_metric() -> None:
    rows = re.findall(
        r"^\| `(elastic_\w+)` \| (\w+) \| ([^|]*) \| [^|]+ \|$",
        (ROOT / "docs" / "operate" / "metrics.md").read_text(),
        re.M,
    )
    told = {name: (kind, frozenset(re.findall(r"`(\w+)`", labels))) for name, kind, labels in rows}
    assert told == known()


@pytest.mark.parametrize("page", [RULES, DASHBOARD], ids=lambda p: p.name)
def test_rules_and_dashboard_name_metrics_that_exist(page: Path) -> None:
    ends = ("_bucket", "_sum", "_count")
    for name in set(re.findall(r"(?<![:\w])elastic_\w+", page.read_text())):
        plain = next((name.removesuffix(end) for end in ends if name.endswith(end)), name)
        assert {name, plain} & set(known()), name


def test_names_follow_the_conventions() -> None:
    for name, (kind, _) in known().items():
        assert (kind == "counter") == name.endswith("_total"), name
        assert not re.search(r"_(ms|milliseconds|minutes|mb|kb|percent)(_|$)", name), name


def test_every_alert_has_its_entry() -> None:
    alerts = re.findall(r"- alert: (\w+)", RULES.read_text())
    titles = re.findall(r"^## (\w+)$", (ROOT / "docs" / "operate" / "alerts.md").read_text(), re.M)
    assert alerts == titles and len(alerts) > 20
    links = re.findall(r"runbook_url: docs/operate/alerts.md#(\w+)", RULES.read_text())
    assert links == [name.lower() for name in alerts]


def test_the_dashboard_is_current_and_of_grafanas_schema() -> None:
    """Every field comes back through Grafana's own types."""
    from grafana_foundation_sdk.cog.encoder import JSONEncoder
    from grafana_foundation_sdk.models.dashboard import Dashboard

    given = json.loads(DASHBOARD.read_text())
    back = json.loads(JSONEncoder().encode(Dashboard.from_json(given)))
    assert kept(given, back) == given
    spec = importlib.util.spec_from_file_location("made", DASHBOARD.with_name("make_dashboard.py"))
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    assert module.text() == DASHBOARD.read_text(), "run: python deploy/grafana/make_dashboard.py"


def kept(given: Any, back: Any) -> Any:
    """`back` without what was added."""
    if isinstance(given, dict) and isinstance(back, dict):
        return {key: kept(value, back[key]) for key, value in given.items() if key in back}
    if isinstance(given, list) and isinstance(back, list):
        return [kept(a, b) for a, b in zip(given, back, strict=True)]
    return back


# ---- node time ----


def test_every_node_second_has_one_use() -> None:
    usage = NodeTimeAccount()
    usage.advance(RUNNING, 1.0)
    usage.advance(RUNNING, 3.0)
    assert usage.pending == 4.0 and usage.totals["idle"] == 2.0
    usage.step(0)
    assert usage.totals["useful"] == 4.0
    usage.advance(RUNNING, 5.0)
    usage.fault(CHANGE, 0.5)
    assert usage.totals["detect"] == 1.0 and usage.pending == 3.0
    halting = RUNNING.of(phase=JobPhase.HALTING, change=CHANGE)
    usage.advance(halting, 6.0)
    usage.advance(halting.of(phase=JobPhase.INSTALLING), 8.0)
    usage.resumed(CHANGE)
    assert usage.totals["plan"] == 2.0 and usage.totals["transfer"] == 4.0
    assert usage.totals["lost"] == pytest.approx(1.5), (
        "one of the two micro-batches that were begun"
    )
    assert sum(usage.totals.values()) + usage.pending == pytest.approx(3 * 7.0)


def test_nodes_outside_a_change_compute_until_they_enter_the_epoch() -> None:
    change = replace(CHANGE, outside=("a",), rerun=0)
    usage, halting = NodeTimeAccount(), RUNNING.of(epoch=2, phase=JobPhase.HALTING, change=change)
    usage.advance(RUNNING, 1.0)
    usage.advance(RUNNING, 3.0)
    usage.fault(change, 0.5)
    assert usage.totals["detect"] == 0.5, "the node that was lost"
    usage.advance(halting, 4.0)
    assert usage.totals["plan"] == 1.0 and usage.pending == 3.5 + 1.0
    entered = replace(RUNNING.members["a"].report, epoch=2, phase=m.NodePhase.RUNNING)
    members = {**RUNNING.members, "a": replace(RUNNING.members["a"], report=entered)}
    installing = halting.of(phase=JobPhase.INSTALLING)
    usage.advance(installing, 6.0)
    usage.advance(installing.of(members=members), 7.0)
    assert usage.totals["transfer"] == 2.0 + 2.0 and usage.pending == 3.5 + 3.0
    usage.resumed(change)
    usage.step(0)
    assert usage.totals["useful"] == 3.5 + 3.0 and not usage.totals["lost"]


def test_a_step_that_is_made_again_was_lost() -> None:
    usage = NodeTimeAccount()
    for now, step in ((1.0, -1), (2.0, 0), (3.0, 1), (4.0, 1), (5.0, 2)):
        usage.advance(RUNNING, now)
        usage.step(step)
    assert usage.totals["useful"] == 3 * 2.0 and usage.totals["lost"] == 2.0
    assert set(usage.totals) == set(NODE_TIME_USES)


@pytest.mark.parametrize(
    ("phase", "change", "use"),
    [
        (JobPhase.WAITING, None, "plan"),
        (JobPhase.PAUSED, CHANGE, "idle"),
        (JobPhase.HALTING, replace(CHANGE, boundary=True), "useful"),
        (JobPhase.RUNNING, CHANGE, "transfer"),
    ],
)
def test_uses_by_phase(phase: JobPhase, change: EpochChange | None, use: str) -> None:
    usage, here = NodeTimeAccount(), RUNNING.of(phase=phase, change=change)
    usage.advance(here, 1.0)
    usage.advance(here, 2.0)
    usage.step(0)
    assert usage.totals[use] >= 2.0


# ---- the coordinator ----


def test_a_loss_and_its_recovery_are_counted() -> None:
    after = RUNNING.of(epoch=2, phase=JobPhase.HALTING, change=CHANGE)
    metrics = coordinator(after)
    actions = (
        job.LogEntry("lost", {"node": "b", "loss": "silent", "why": "silent for 3.1 s"}),
        job.LogEntry("halt", {"epoch": 2}),
    )
    metrics.decided(RUNNING, after, actions, 10.0)
    event = job.ChangeCompleted(CHANGE, 1, 0.1, 0.05, 10.5)
    metrics.recovered(event, recovery_entry(event, None))
    found = values(metrics.registry)
    assert found["elastic_nodes_lost_total{reason=silent}"] == 1
    assert found["elastic_epoch_changes_total{cause=lost}"] == 1
    assert found["elastic_recovery_seconds_sum{cause=lost,phase=total}"] == pytest.approx(0.5)
    assert (
        found["elastic_microbatches_lost_total"] == found["elastic_microbatches_rerun_total"] == 1
    )


def test_recoveries_of_every_cause_begin_at_zero() -> None:
    """A series that appears with its first recovery would show no increase to Prometheus."""
    found = values(coordinator(RUNNING).registry)
    for cause in CauseKind:
        assert found[f"elastic_recovery_seconds_count{{cause={cause},phase=total}}"] == 0


def test_steps_that_are_told_again_count_once() -> None:
    metrics = coordinator(RUNNING)
    done = m.StepDone(1, StepRecord(4, 1.0, 1.0, 2.0), 0.5, 0.1, tokens=100)
    metrics.stepped(done, RUNNING.of(logged_step=3))
    metrics.stepped(done, RUNNING.of(logged_step=4))
    found = values(metrics.registry)
    assert (found["elastic_steps_total"], found["elastic_tokens_total"]) == (1, 100)
    assert metrics.tokens_per_s == 200


def test_utilisation_is_relative_to_the_devices_of_the_plan() -> None:
    """A step of 0.5 s with 8 micro-batches of 10^12 operations, on a worker of two nodes each."""
    spec = JobSpec((), 8, 10, flops_per_microbatch=1e12)
    metrics, running = coordinator(RUNNING), RUNNING.of(spec=spec)
    metrics.stepped(m.StepDone(1, StepRecord(4, 1.0, 1.0, 2.0), 0.5, 0.1), running)

    def peaks(**of: float) -> JobState:
        members = dict(running.members)
        for node, peak in of.items():
            report = members[node].report
            info = replace(report.info, peak_tflops=peak, workers=2)
            members[node] = replace(members[node], report=replace(report, info=info))
        return running.of(members=members)

    assert metrics.utilisation(peaks(a=10.0, b=6.0, c=100.0)) == pytest.approx(1.0)
    assert metrics.utilisation(peaks(a=40.0, b=24.0)) == pytest.approx(0.25)
    assert metrics.utilisation(peaks(a=5.0)) == 0, "the peak of b is unknown"
    assert metrics.utilisation(peaks(a=5.0, b=3.0).of(spec=None)) == 0


def test_gauges_tell_the_state() -> None:
    members = dict(RUNNING.members)
    members["b"] = replace(members["b"], connected=False)
    members["c"] = replace(members["c"], report=replace(members["c"].report, able=True))
    found = values(
        coordinator(RUNNING.of(members=members, step_finished_at=6.0, trimmed=0)).registry
    )
    counts = {
        s: found[f"elastic_nodes{{state={s}}}"] for s in ("training", "spare", "disconnected")
    }
    assert counts == {"training": 1, "spare": 1, "disconnected": 1}
    assert (
        found["elastic_job_phase{phase=running}"] == 1
        and found["elastic_job_phase{phase=paused}"] == 0
    )
    assert found["elastic_node_silence_seconds{node=a}"] == 5.0
    assert found["elastic_protection_pending_seconds"] == 4.0
    assert (found["elastic_coordinator_term"], found["elastic_coordinator_queue_length"]) == (3, 7)


def test_stalls_late_records_and_a_lost_store_are_gauges() -> None:
    metrics = CoordinatorMetrics("job", lambda: 100.0)
    stall = Stall("halting", "a to halt", 30.0)
    status = CoordinatorStatus(
        RUNNING,
        True,
        stall=stall,
        store_away_s=4.0,
        records_unwritten=3,
        records_late_s=9.0,
        records_dropped=2,
    )
    metrics.lead(lambda: status)
    found = values(metrics.registry)
    assert found["elastic_stalled_seconds{phase=halting,reason=a to halt}"] == 70.0
    assert found["elastic_store_away_seconds"] == 4.0
    assert found["elastic_records_unwritten"] == 3 and found["elastic_records_late_seconds"] == 9.0
    assert found["elastic_records_dropped_total"] == 2
    well = values(coordinator(RUNNING).registry)
    assert well["elastic_stalled_seconds{phase=running,reason=}"] == 0
    assert well["elastic_store_away_seconds"] == well["elastic_records_late_seconds"] == 0


def test_a_standby_that_does_not_reach_the_store_says_so() -> None:
    now = [50.0]
    metrics = CoordinatorMetrics("job", lambda: now[0])
    metrics.standing_by(StoreUnavailable("no answer"))
    now[0] = 70.0
    assert values(metrics.registry)["elastic_store_away_seconds"] == 20.0
    metrics.standing_by(Conflict("another one leads"))
    assert values(metrics.registry)["elastic_store_away_seconds"] == 0.0


def test_rejected_messages_are_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(REJECTIONS, "by_reason", lambda: {"token": 2})
    found = values(coordinator(RUNNING).registry)
    reasons = ("fenced", "token")
    assert [found[f"elastic_messages_refused_total{{reason={r}}}"] for r in reasons] == [0, 2]


# ---- agents, and the endpoint ----


def test_copies_are_counted_by_kind() -> None:
    metrics = agent()
    copy = Copy("gradient", 0, 0, 0, 1, "a", 1, 10, "")
    metrics.sent([copy, copy], 0.2, True)
    metrics.sent([copy], 0.2, False)
    metrics.received([copy])
    found = values(metrics.registry)
    assert found["elastic_copies_sent_bytes_total{kind=gradient}"] == 20
    assert found["elastic_copies_given_up_total{kind=gradient}"] == 1
    assert found["elastic_copies_received_total{kind=gradient}"] == 1
    assert found["elastic_copy_lag_seconds_count"] == 1
    assert found["elastic_vault_limit_bytes"] == found["elastic_storage_size_bytes{for=memory}"] > 0
    assert found["elastic_backup_exposure_seconds"] == 1.5


def test_served_and_announced_until_it_is_closed(make_config: Callable[..., JobConfig]) -> None:
    config = make_config()
    served = serve(agent().registry, config, "node0", "agent", 0)
    assert served is not None
    path = discovery(Path(config.run_dir), "node0")
    (target,) = json.loads(path.read_text())
    assert target["targets"] == [served.address]
    assert target["labels"] == {"job": "test", "instance": "node0", "role": "agent"}
    with urllib.request.urlopen(f"http://{served.address}/metrics", timeout=LONG_S) as answer:
        assert b"elastic_heartbeats_total 0.0" in answer.read()
    taken = int(served.address.rpartition(":")[2])
    again = serve(agent().registry, config, "node1", "agent", taken)
    assert again is None, "nothing stops for its metrics"
    served.close()
    assert not path.exists()
    assert serve(agent().registry, config, "node0", "agent", -1) is None


class LargePage:
    """Collector of more samples than the buffers of a connection hold."""

    def collect(self) -> Iterator[Metric]:
        found = GaugeMetricFamily("large", "...", labels=("text",))
        for number in range(50_000):
            found.add_metric((f"{number} {'x' * 200}",), number)
        yield found


def test_readers_that_stall_delay_no_scrape(
    make_config: Callable[..., JobConfig], monkeypatch: pytest.MonkeyPatch
) -> None:
    """They are disconnected after some time."""
    monkeypatch.setattr(metrics, "SILENT_S", 0.5)
    registry = CollectorRegistry()
    registry.register(LargePage())
    served = serve(registry, make_config(), "node0", "agent", 0)
    assert served is not None
    where = "127.0.0.1", int(served.address.rpartition(":")[2])
    with contextlib.ExitStack() as stack:
        stalled = [stack.enter_context(socket.socket()) for _ in range(4)]
        for number, sock in enumerate(stalled):
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
            sock.connect(where)
            if number % 2:
                sock.sendall(b"GET /metrics HTTP/1.0\r\n\r\n")
        with urllib.request.urlopen(f"http://{served.address}/metrics", timeout=LONG_S) as answer:
            assert answer.read().endswith(b" 49999.0\n")
        served_by = [thread for thread in threading.enumerate() if "process_request" in thread.name]
        for thread in served_by:
            thread.join(LONG_S)
        assert not any(thread.is_alive() for thread in served_by)
    served.close()


def test_with_certificates_only_members_may_read(
    tmp_path: Path, make_config: Callable[..., JobConfig]
) -> None:
    certs = tmp_path / "certs"
    make_certificates(certs, [["localhost"]])
    make_certificates(tmp_path / "others", [["localhost"]])
    ours = certs / "localhost"
    config = make_config(certs=str(ours))
    served = serve(agent().registry, config, "node0", "agent", 0)
    assert served is not None
    (target,) = json.loads(discovery(Path(config.run_dir), "node0").read_text())
    assert target["labels"]["__scheme__"] == "https"

    def read(known: Path, own: Path | None) -> tuple[bytes, bytes]:
        """(page, the server's certificate)"""
        context = ssl.create_default_context(cafile=str(known / CA))
        if own is not None:
            context.load_cert_chain(own / CERT, own / KEY)
        with closing(
            http.client.HTTPSConnection(served.address, context=context, timeout=LONG_S)
        ) as connection:
            connection.request("GET", "/metrics")
            shown = connection.sock.getpeercert(True)
            assert shown is not None
            return connection.getresponse().read(), shown

    page, first = read(ours, ours)
    assert b"elastic_heartbeats_total 0.0" in page
    for stranger in (None, tmp_path / "others" / "localhost"):
        with pytest.raises(OSError):
            read(ours, stranger)
    with pytest.raises((OSError, http.client.HTTPException)):
        urllib.request.urlopen(f"http://{served.address}/metrics", timeout=LONG_S)
    with closing(socket.create_connection(("127.0.0.1", int(served.address.rpartition(":")[2])))):
        make_certificates(certs, [["localhost"]])
        assert read(ours, ours)[1] != first, (
            "somebody who says nothing holds up nobody; the new certificate is used"
        )
    refused = {
        reason
        for (port, reason), number in REJECTIONS.counts().items()
        if port == "metrics" and number
    }
    assert {Reason.NO_CERTIFICATE, Reason.WRONG_CA, Reason.PLAIN_TEXT} <= refused
    served.close()


def test_a_node_that_is_put_aside_is_no_spare_and_is_counted() -> None:
    able = replace(RUNNING.members["c"], report=replace(RUNNING.members["c"].report, able=True))
    state = RUNNING.of(members={**RUNNING.members, "c": able})
    assert values(coordinator(state).registry)["elastic_nodes{state=spare}"] == 1
    aside, actions = quarantine.add_finding(
        state, "c", Finding(FaultClass.PROCESS, HealthAction.QUARANTINE, "it crashes", at=1.0)
    )
    metrics = coordinator(aside)
    metrics.decided(state, aside, actions, 1.0)
    found = values(metrics.registry)
    assert (found["elastic_nodes{state=spare}"], found["elastic_nodes{state=quarantined}"]) == (
        0,
        1,
    )
    assert found["elastic_events_total{kind=quarantine}"] == 1
