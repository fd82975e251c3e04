"""The client of each provider, tested against a server with its protocol."""

from __future__ import annotations

import queue
import time
from collections.abc import Callable, Iterator
from datetime import UTC, datetime, timedelta
from email.utils import format_datetime
from pathlib import Path

import pytest

from elastic.agent.notices import discovery as gather
from elastic.agent.notices.aws import ACTION, REBALANCE, Aws
from elastic.agent.notices.azure import Azure
from elastic.agent.notices.discovery import detect
from elastic.agent.notices.file import NoticeFile
from elastic.agent.notices.gcp import Gcp
from elastic.agent.notices.metadata import MetadataService
from elastic.agent.notices.source import Source, SourceWatcher
from elastic.config import JobConfig
from elastic.core.node.notice_tracker import ProviderNotice
from elastic.core.protocol.messages import NoticeKind
from tests.agent.notices.providers import FakeAws, FakeAzure, FakeGcp, Provider
from tests.patience import LONG_S


@pytest.fixture
def aws() -> Iterator[FakeAws]:
    with_ = FakeAws(uses=3)
    yield with_
    with_.close()


@pytest.fixture
def gcp() -> Iterator[FakeGcp]:
    with_ = FakeGcp()
    yield with_
    with_.close()


@pytest.fixture
def azure() -> Iterator[FakeAzure]:
    with_ = FakeAzure()
    yield with_
    with_.close()


def service(provider: Provider, machine: str = "node0", timeout_s: float = 2.0) -> MetadataService:
    return MetadataService(f"http://{provider.address}/{machine}", timeout_s)


def left_s(heard: ProviderNotice) -> float:
    return heard.deadline - time.monotonic()


def in_(seconds: float) -> datetime:
    return datetime.now(UTC) + timedelta(seconds=seconds)


# ---- AWS ----


def test_aws_tells_of_an_interruption_until_it_is_taken_back(aws: FakeAws) -> None:
    client = Aws(service(aws), ACTION)
    assert client.read() == ()
    action = {"action": "terminate", "time": in_(120).strftime("%Y-%m-%dT%H:%M:%SZ")}
    aws.set("node0", FakeAws.ACTION, action)
    aws.set("node1", FakeAws.REBALANCE, {"noticeTime": "2026-01-01T00:00:00Z"})
    (one,) = client.read()
    assert one.kind is NoticeKind.LEAVE and 110 < left_s(one) <= 120
    assert one.provider == "aws" and "terminate" in one.detail
    (again,) = client.read()
    assert again.identity == one.identity
    aws.forget("node0", FakeAws.ACTION)
    assert client.read() == ()


def test_aws_makes_a_new_token_when_the_old_one_is_refused(aws: FakeAws) -> None:
    client = Aws(service(aws), ACTION)
    for _ in range(6):
        assert client.read() == ()
    puts = [path for method, _, path in aws.asked if method == "PUT"]
    assert len(puts) == 2  # 6 requests, 3 per token
    aws.tokens.clear()
    assert client.read() == ()


def test_aws_recommends_to_rebalance(aws: FakeAws) -> None:
    aws.set("node0", FakeAws.REBALANCE, {"noticeTime": "2026-01-01T00:00:00Z"})
    (one,) = Aws(service(aws), REBALANCE).read()
    assert one.kind is NoticeKind.HINT and left_s(one) > 60
    assert Aws(service(aws), ACTION).read() == ()


def test_aws_hibernates_at_once_and_an_unreadable_time_is_two_minutes(aws: FakeAws) -> None:
    client = Aws(service(aws), ACTION)
    aws.set(
        "node0",
        FakeAws.ACTION,
        {"action": "hibernate", "time": in_(120).strftime("%Y-%m-%dT%H:%M:%SZ")},
    )
    assert left_s(client.read()[0]) <= 0
    aws.set("node0", FakeAws.ACTION, {"action": "stop", "time": "soon"})
    assert 110 < left_s(client.read()[0]) <= 120
    aws.set("node0", FakeAws.ACTION, {"action": "dance"})
    with pytest.raises(ValueError, match="dance"):
        client.read()


def test_aws_interruptions_are_read_although_recommendations_cannot(aws: FakeAws) -> None:
    aws.failing = FakeAws.REBALANCE
    with pytest.raises(ValueError, match="503"):
        Aws(service(aws), REBALANCE).read()
    aws.set("node0", FakeAws.ACTION, {"action": "terminate", "time": "soon"})
    (one,) = Aws(service(aws), ACTION).read()
    assert one.kind is NoticeKind.LEAVE


# ---- GCP ----


def test_gcp_answers_when_the_value_changes(gcp: FakeGcp) -> None:
    found: queue.Queue[tuple[ProviderNotice, ...]] = queue.Queue()
    watcher = SourceWatcher(
        Gcp(service(gcp), "preempted"), lambda name, notices: found.put(notices)
    )
    try:
        gcp.set("node0", FakeGcp.PREEMPTED, "TRUE")
        (one,) = found.get(timeout=LONG_S)
        assert one.kind is NoticeKind.LEAVE and 20 < left_s(one) <= 30
    finally:
        watcher.close()


def test_gcp_waits_instead_of_asking_all_the_time(gcp: FakeGcp) -> None:
    client = Gcp(service(gcp), "preempted")
    assert client.read() == ()
    timer = queue.Queue[str]()

    def change(name: str, notices: tuple[ProviderNotice, ...]) -> None:
        timer.put(name)

    watcher = SourceWatcher(client, change)
    try:
        gcp.set("node1", FakeGcp.PREEMPTED, "TRUE")  # of another machine
        gcp.set("node0", FakeGcp.PREEMPTED, "TRUE")
        assert timer.get(timeout=LONG_S) == "gcp-preempted"
        waits = [path for _, _, path in gcp.asked]
        assert len(waits) <= 5
    finally:
        watcher.close()


def test_gcp_maintenance_that_ends_the_machine_counts_and_migration_does_not(gcp: FakeGcp) -> None:
    gcp.set("node0", FakeGcp.MAINTENANCE, "MIGRATE_ON_HOST_MAINTENANCE")
    assert Gcp(service(gcp), "maintenance-event").read() == ()
    gcp.set("node0", FakeGcp.MAINTENANCE, "TERMINATE_ON_HOST_MAINTENANCE")
    (one,) = Gcp(service(gcp), "maintenance-event").read()
    assert one.kind is NoticeKind.LEAVE and 50 < left_s(one) <= 60


# ---- Azure ----


def test_azure_tells_of_events_that_concern_this_machine(azure: FakeAzure) -> None:
    client = Azure(service(azure), silence_s=3.0)
    assert client.read() == ()
    azure.schedule("other", "Preempt", "node1", not_before=format_datetime(in_(30), usegmt=True))
    assert client.read() == ()
    azure.schedule("mine", "Preempt", "node0", not_before=format_datetime(in_(30), usegmt=True))
    azure.schedule(
        "both", "Reboot", "node0", "node1", not_before=format_datetime(in_(900), usegmt=True)
    )
    first, second = client.read()
    assert (first.identity, second.identity) == ("azure:mine", "azure:both")
    assert 20 < left_s(first) <= 30 and left_s(second) > 800
    client.acknowledge(second)
    assert azure.started == []  # it concerns another machine, too
    client.acknowledge(first)
    assert azure.started == ["mine"]


@pytest.mark.parametrize(("duration_s", "leaves"), [(2, False), (30, True), (-1, True)])
def test_azure_freezes_only_count_when_they_are_felt(
    azure: FakeAzure, duration_s: int, leaves: bool
) -> None:
    azure.schedule("f", "Freeze", "node0", not_before="", duration_s=duration_s)
    assert bool(Azure(service(azure), silence_s=3.0).read()) == leaves


# ---- faults of the services ----


@pytest.mark.parametrize("trouble", ["down", "nonsense", "huge", "silent"])
@pytest.mark.parametrize("cloud", ["aws", "gcp", "azure"])
def test_a_service_in_trouble_raises_and_says_nothing(
    cloud: str, trouble: str, aws: FakeAws, gcp: FakeGcp, azure: FakeAzure
) -> None:
    provider: Provider = {"aws": aws, "gcp": gcp, "azure": azure}[cloud]
    provider.broken = trouble
    base = service(provider, timeout_s=0.2)
    clients: dict[str, Source] = {
        "aws": Aws(base, ACTION),
        "gcp": Gcp(base, "preempted"),
        "azure": Azure(base, 3.0),
    }
    if (cloud, trouble) == ("gcp", "silent"):
        pytest.skip("waiting is what it is asked for")
    with pytest.raises((OSError, ValueError)):
        clients[cloud].read()


def test_trouble_is_logged_once_and_notices_come_through_again(
    aws: FakeAws, caplog: pytest.LogCaptureFixture
) -> None:
    found: queue.Queue[tuple[ProviderNotice, ...]] = queue.Queue()
    client = Aws(service(aws), ACTION)
    client.every_s = 0.05
    aws.broken = "down"
    watcher = SourceWatcher(client, lambda name, notices: found.put(notices))
    try:
        end = time.monotonic() + LONG_S
        while len(aws.asked) < 4 and time.monotonic() < end:
            aws.closing.wait(0.02)
        aws.set("node0", FakeAws.ACTION, {"action": "stop", "time": "soon"})
        aws.broken = ""
        assert found.get(timeout=LONG_S)[0].kind is NoticeKind.LEAVE
    finally:
        watcher.close()
    assert len([r for r in caplog.records if "cannot be read" in r.message]) == 1


def around(make_config: Callable[..., JobConfig], **services: str) -> JobConfig:
    """A configuration in which no metadata service answers except `services`."""
    nowhere = dict.fromkeys(("aws", "gcp", "azure"), "http://127.0.0.1:9")
    return make_config(metadata_services=tuple({**nowhere, **services}.items()))


@pytest.mark.parametrize("cloud", ["aws", "gcp", "azure", ""])
def test_auto_finds_the_cloud_that_answers(
    cloud: str,
    aws: FakeAws,
    gcp: FakeGcp,
    azure: FakeAzure,
    make_config: Callable[..., JobConfig],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(gather, "PROBE_S", LONG_S)  # absent services refuse connections at once
    providers: dict[str, Provider] = {"aws": aws, "gcp": gcp, "azure": azure}
    services = {cloud: f"http://{providers[cloud].address}/${{node}}"} if cloud else {}
    found: queue.Queue[tuple[Source, ...]] = queue.Queue()
    detect(around(make_config, **services), "node0", found.put)
    names = {source.name for source in found.get(timeout=LONG_S)}
    assert names == {
        "aws": {"aws-instance-action", "aws-rebalance"},
        "gcp": {"gcp-preempted", "gcp-maintenance-event"},
        "azure": {"azure"},
    }.get(cloud, set())


def test_auto_takes_no_other_cloud_for_its_own(
    aws: FakeAws, gcp: FakeGcp, azure: FakeAzure, make_config: Callable[..., JobConfig]
) -> None:
    """Each address belongs to another cloud, so that no answer is right."""
    services = {"aws": gcp.address, "gcp": azure.address, "azure": aws.address}
    found: queue.Queue[tuple[Source, ...]] = queue.Queue()
    detect(around(make_config, **services), "node0", found.put)
    assert found.get(timeout=LONG_S) == ()


# ---- a file ----


@pytest.mark.parametrize(
    ("text", "seconds", "detail"),
    [
        ("", 30, None),
        ("45\n", 45, None),
        ('{"deadline_s": 12.5, "reason": "moved"}', 12.5, "moved"),
        ("rubbish", 30, None),
        ('{"deadline_s": -1}', 30, None),
        ('{"deadline": 5}', 30, None),
        ("[" * 5000, 30, None),
        ('{"\\ud800": 1}', 30, None),
    ],
)
def test_a_file_that_is_there_is_a_notice(
    tmp_path: Path, text: str, seconds: float, detail: str | None
) -> None:
    path = tmp_path / "notice"
    source = NoticeFile(str(path))
    assert source.read() == ()
    path.write_text(text)
    (one,) = source.read()
    assert seconds - 5 < left_s(one) <= seconds and one.detail == (detail or str(path))
    assert source.read()[0].identity == one.identity
    path.unlink()
    assert source.read() == ()
