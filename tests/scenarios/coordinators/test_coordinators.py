"""Several coordinators on a real etcd: leaders are killed or paused, etcd fails, training
continues.

On a busy machine a leader may also lose the lead by being slow. Therefore changes of the lead are
not counted.
"""

from __future__ import annotations

import contextlib
import os
import signal
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from elastic.launcher.flags.certs import make_certificates
from tests.launcher.helpers import gone
from tests.observability.tools import scrape
from tests.scenarios.harness import proved
from tests.scenarios.jobs import Job
from tests.scenarios.paced import STEPS, paced, paced_reference
from tests.scenarios.shared import exact, faults
from tests.store.etcds import Etcd, etcd, free_ports
from tests.store.full import fill, make_room

STEADY = exact("--pipelines", "1", "--backup", "stream+snapshot")
"""No epoch changes but those that are provoked."""
Start = Callable[..., Job]
HURRY = "hurry"


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Start]:
    """start(NAME, words...) runs `elastic` in tmp_path/NAME, with steps of fixed length until
    tmp_path/hurry exists."""
    jobs: list[Job] = []

    def begin(name: str, *words: str) -> Job:
        jobs.append(Job(tmp_path / name, words, paced(tmp_path / HURRY)))
        return jobs[-1]

    yield begin
    for job in jobs:
        job.kill()


def undisturbed(job: Job) -> dict[str, Any]:
    """Let the run finish at full speed; return its summary, in which every step counts once."""
    (job.run_dir.parent / HURRY).touch()
    run = job.finish()
    assert run.code == 0, run.output
    summary = run.summary
    assert summary["steps"] == len(summary["loss"]) == STEPS
    assert summary["ledger"] == proved(summary)
    return summary


def newest(job: Job) -> dict[str, Any]:
    """Discovery data of the coordinator that took the lead last; {} if there is none."""
    return max(job.of("coordinator"), key=lambda event: int(event["term"]), default={})


def one_a_term(job: Job) -> bool:
    terms = [event["term"] for event in job.of("coordinator")]
    return len(terms) == len(set(terms))


def metrics(job: Job) -> list[float]:
    """Term of each coordinator according to its metrics; 0 for those that do not lead."""
    found = []
    for file in sorted((job.run_dir / "metrics").glob("coordinator*.json")):
        with contextlib.suppress(OSError):  # left over from one that was killed
            lines = dict(
                line.rsplit(" ", 1)
                for line in scrape(job.run_dir, file.stem).splitlines()
                if line[0] != "#" and line.startswith("elastic_coordinator_")
            )
            leads = float(lines["elastic_coordinator_leader"])
            found.append(float(lines["elastic_coordinator_term"]) if leads else 0.0)
    return found


def one_leads(terms: list[float], term: int) -> bool:
    return 0.0 in terms and [found for found in terms if found] == [term]


def test_leader_killed_and_leader_paused(start: Start, tmp_path: Path) -> None:
    with etcd(tmp_path / "etcd") as cluster:
        flags = [*STEADY, "--nnodes", "2", "--coordinators", "3", "--store", cluster.url]
        flags += ["--metrics-port", "0"]
        job = start(
            "run", "run", "--standalone", *flags, *faults("kill-coordinator step=4 down=60")
        )
        first = job.wait(
            "killed leader", lambda: [e for e in job.of("coordinator") if gone(e["pid"])]
        )[0]
        job.wait("second leader", lambda: newest(job)["term"] > first["term"])
        job.wait("takeover", lambda: job.of("adopted"))
        job.await_steps(2)

        second = newest(job)
        os.kill(second["pid"], signal.SIGSTOP)
        job.wait("third leader", lambda: newest(job)["term"] > second["term"])
        third = newest(job)
        assert second["address"] != third["address"]
        job.await_steps(
            2
        )  # the nodes have left the paused one, although their streams to it are open
        os.kill(second["pid"], signal.SIGCONT)
        logs = [job.run_dir / "logs" / f"coordinator{slot}.log" for slot in ("", "-1", "-2")]
        job.wait(
            "old leader stepping down",
            lambda: any("another coordinator took" in log.read_text() for log in logs),
        )
        job.await_steps(2)
        assert job.leader()["term"] >= third["term"]
        job.wait(
            "one leader and standbys in the metrics",
            lambda: one_leads(metrics(job), newest(job)["term"]),
        )
        summary = undisturbed(job)
    assert summary["params_sha256"] == paced_reference(tmp_path).summary["params_sha256"]
    assert summary["recoveries"] == [], "no step was disturbed"
    assert one_a_term(job) and not job.of("lost")
    assert [event["epoch"] for event in job.of("plan")] == [1], (
        "no decision but the first was made by anybody"
    )
    assert len(job.of("end")) == 1


@pytest.mark.chaos
def test_etcd_member_lost_then_all_of_etcd_and_back(start: Start, tmp_path: Path) -> None:
    with etcd(tmp_path / "etcd", size=3) as cluster:
        flags = [*STEADY, "--nnodes", "3", "--coordinators", "2", "--store", cluster.url]
        job = start("run", "run", "--standalone", *flags)
        job.await_steps(4)
        cluster.members[0].kill()
        job.await_steps(4)  # each of them was saved by the members that are left
        leaders = len(job.of("coordinator"))

        before = len(job.of("store-lost"))
        cluster.kill()
        job.wait("store-lost", lambda: job.of("store-lost")[before:])
        told = max(job.steps())

        def trained() -> bool:
            answer = job.ask("status")
            return bool(answer["step"] >= told + 5 and answer["store"])

        job.wait("steps without etcd", trained)
        assert max(job.steps()) <= told + 1, "nothing is told that was not saved"
        job.agent("node2").kill()
        job.wait("what the coordinator sees", lambda: job.ask("status")["phase"] == "halting")
        assert not any(event["epoch"] > 1 for event in job.of("halt"))
        for member in cluster.members:
            member.start()
        job.wait(
            "store-back, or another leader",
            lambda: (
                job.of("store-back")[len(job.of("store-lost")) - 1 :]
                or job.of("coordinator")[leaders:]
            ),
        )
        summary = undisturbed(job)
    assert summary["params_sha256"] == paced_reference(tmp_path).summary["params_sha256"]
    (recovery,) = summary["recoveries"]
    assert recovery["nodes_after"] == 2 and "node2" in recovery["cause"]
    assert {event["node"] for event in job.of("lost")} == {"node2"}
    assert sorted(set(job.steps())) == list(range(STEPS)), "nothing was forgotten"
    assert one_a_term(job)


@pytest.mark.chaos
def test_etcd_without_room_and_with_room_again(start: Start, tmp_path: Path) -> None:
    cluster = Etcd(tmp_path / "etcd", flags=("--quota-backend-bytes=8000000",))
    try:
        cluster.start()
        cluster.await_ready()
        flags = [*STEADY, "--nnodes", "2", "--coordinators", "2", "--store", cluster.url]
        job = start("run", "run", "--standalone", *flags)
        job.await_steps(4)
        fill(cluster)
        told = max(job.steps())

        def trained() -> bool:
            answer = job.ask("status")
            return bool(
                answer["step"] >= told + 5
                and "full (NOSPACE)" in answer.get("store", "")
                and "which is full (NOSPACE)" in answer["waiting"].get("for", "")
            )

        job.wait("steps without room", trained)
        assert any("full (NOSPACE)" in event["why"] for event in job.of("store-lost"))
        make_room(cluster)
        job.wait("no word of the store", lambda: "store" not in job.ask("status"))
        job.await_steps(2)
        summary = undisturbed(job)
    finally:
        cluster.kill()
    assert summary["params_sha256"] == paced_reference(tmp_path).summary["params_sha256"]
    assert not job.of("lost")
    assert sorted(set(job.steps())) == list(range(STEPS)), "nothing was forgotten"


@pytest.mark.chaos
def test_coordinators_on_several_machines(start: Start, tmp_path: Path) -> None:
    """Each coordinator has a run directory and a certificate of its own.

    They find the job by --rdzv-id; the nodes find them by a list of addresses.
    """
    make_certificates(tmp_path / "certs", [["head0"], ["head1"], ["node0"], ["node1"]])
    token = tmp_path / "token"
    token.write_text("of all machines of this job\n")
    places = ["127.0.0.1:" + str(port) for port in free_ports(2)]
    with etcd(tmp_path / "etcd") as cluster:
        common = [
            "--nnodes",
            "2",
            "--rdzv-id",
            "together",
            "--store",
            cluster.url,
            "--accumulate",
            "exact",
        ]
        common += ["--join-token-file", str(token)]
        common += ["--checkpoint-dir", str(tmp_path / "checkpoints")]

        def begin(name: str, certs: str, *words: str) -> Job:
            return start(name, *words, *common, "--certs", str(tmp_path / "certs" / certs))

        hosts = [
            begin(f"host{i}", f"head{i}", "coordinator", "--address", place)
            for i, place in enumerate(places)
        ]
        nodes = [
            begin(f"machine{i}", f"node{i}", "agent", "--coordinator", ",".join(places))
            for i in range(2)
        ]
        hosts[0].wait("steps", lambda: [host for host in hosts if len(host.steps()) > 3])
        led = max(hosts, key=lambda host: int(newest(host).get("term", 0)))
        (other,) = [host for host in hosts if host is not led]
        led.kill()
        other.wait("takeover", lambda: other.of("adopted"))
        other.await_steps(2)
        (tmp_path / HURRY).touch()
        assert other.finish().code == 0, other.output
        assert [node.finish().code for node in nodes] == [0, 0], [node.output for node in nodes]
        assert other.of("adopted") and max(other.steps()) == STEPS - 1
        assert other.of("end")[0]["params_sha256"]
        assert not {event["reason"] for event in other.of("refused")} - {"stale", "handshake"}, (
            "all are members"
        )
        again = begin("host3", "head0", "coordinator", "--address", places[0])
        again.wait("a new run", lambda: again.of("coordinator"))
        assert not again.of("adopted"), "the name may be used again"
