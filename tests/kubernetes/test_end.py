"""`elastic kubernetes end`, with the rights of the rendered Role, at an API server with TLS."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from elastic.domain.errors import EXIT_JOB_FAILED, EXIT_OK, EXIT_UNRECOVERABLE
from elastic.launcher import cli
from elastic.launcher.kubernetes.end import ending_of
from tests.kubernetes.api_server import ApiServer, listen
from tests.kubernetes.jobs import render
from tests.kubernetes.pods import REPOSITORY
from tests.patience import LONG_S

Object = dict[str, Any]
BASIC = ("--name", "demo", "--image", "r.example.com/train:1", "-m", "examples.train_gpt")
COORDINATORS = tuple(f"demo-coordinator-{index}" for index in range(3))
RUNNING: Object = {"state": {"running": {}}}


def ended(code: int, message: str = "") -> Object:
    return {"terminated": {"exitCode": code, **({"message": message} if message else {})}}


def pod(name: str, container: Object) -> Object:
    sidecar = {"name": "proxy", "state": ended(EXIT_OK), "lastState": ended(EXIT_OK)}
    coordinator = {"name": "coordinator", **container}
    return {
        "metadata": {"name": name},
        "status": {"containerStatuses": [sidecar, coordinator]},
    }


class World:
    """A rendered job at an API server, and the command of its end Job."""

    def __init__(self, folder: Path) -> None:
        self.objects = render(*BASIC)
        self.pods = {name: pod(name, RUNNING) for name in COORDINATORS}
        self.api = ApiServer(self.objects, folder / "api", self.pods.get, listen("127.0.0.1"))
        self.credentials = folder / "credentials"
        self.credentials.mkdir()
        (self.credentials / "ca.crt").write_bytes(self.api.ca.read_bytes())
        self.give_token("demo-end")

    def give_token(self, account: str) -> None:
        (self.credentials / "token").write_text(self.api.token(account) + "\n")

    def find(self, kind: str, name: str) -> Object:
        found = self.api.find(kind, name)
        assert found is not None
        return found

    @property
    def replicas(self) -> tuple[int, int]:
        agents = self.find("Deployment", "demo-agent")["spec"]["replicas"]
        return agents, self.find("StatefulSet", "demo-coordinator")["spec"]["replicas"]

    def command(self) -> list[str]:
        """The command of the rendered container, for this server."""
        (container,) = self.find("Job", "demo-end")["spec"]["template"]["spec"]["containers"]
        words = [word.replace("$(POD_NAMESPACE)", "default") for word in container["command"]]
        place = ["--api-host", self.api.address[0], "--api-port", str(self.api.address[1])]
        where = ["--credentials", str(self.credentials), "--every", "0.1"]
        return [*words[1:3], *place, *where, *words[3:]]

    def start(self) -> subprocess.Popen[str]:
        return subprocess.Popen(
            [sys.executable, "-m", "elastic", *self.command()],
            env={**os.environ, "PYTHONPATH": str(REPOSITORY)},
            stdout=subprocess.PIPE, text=True,
        )  # fmt: skip

    def wait_for_requests(self, more: int) -> None:
        """Wait until `more` requests were answered from now on."""
        until, end = len(self.api.served) + more, time.monotonic() + LONG_S
        while len(self.api.served) < until:
            assert time.monotonic() < end, self.api.served
            time.sleep(0.02)


@pytest.fixture
def world(tmp_path: Path) -> Iterator[World]:
    one = World(tmp_path)
    try:
        yield one
    finally:
        one.api.close()


@pytest.mark.parametrize("code", [EXIT_OK, EXIT_UNRECOVERABLE, EXIT_JOB_FAILED])
def test_the_end_of_the_training_gives_all_machines_back(code: int, world: World) -> None:
    name = COORDINATORS[1]
    world.pods[name] = pod(name, RUNNING | {"lastState": ended(code, "the cause")})
    del world.pods[COORDINATORS[2]]  # as with the overlay `local`
    assert cli.main(world.command()) == code
    assert world.replicas == (0, 0)
    assert world.find("StatefulSet", "demo-etcd")["spec"]["replicas"] > 0


def test_nothing_changes_while_the_training_goes_on(world: World) -> None:
    """Crashes, and a coordinator that another one replaces, are no end."""
    for name, code in zip(COORDINATORS, (1, 2, 137), strict=True):
        world.pods[name] = pod(name, {"state": ended(code), "lastState": ended(143)})
    before, process = world.replicas, world.start()
    try:
        world.wait_for_requests(20)
        assert world.replicas == before and process.poll() is None
        name = COORDINATORS[0]
        world.pods[name] = pod(name, {"state": ended(EXIT_OK)})
        assert process.wait(LONG_S) == EXIT_OK and world.replicas == (0, 0)
    finally:
        process.kill()
        process.wait()


def test_an_end_that_nobody_knows_any_more_is_no_success(
    world: World, capsys: pytest.CaptureFixture[str]
) -> None:
    """The end Job was lost between its last change and its own end."""
    world.pods.clear()
    for kind, name in (("Deployment", "demo-agent"), ("StatefulSet", "demo-coordinator")):
        world.find(kind, name)["spec"]["replicas"] = 0
    assert cli.main(world.command()) == EXIT_JOB_FAILED
    assert "the machines have been given back" in capsys.readouterr().err


def test_pods_that_are_not_there_yet_are_no_end(world: World) -> None:
    world.pods.clear()
    before, process = world.replicas, world.start()
    try:
        world.wait_for_requests(20)
        assert world.replicas == before and process.poll() is None
    finally:
        process.kill()
        process.wait()


def test_an_api_server_that_fails_is_asked_again_and_named(world: World) -> None:
    world.api.fails_with = 503
    world.pods[COORDINATORS[0]] = pod(COORDINATORS[0], {"state": ended(EXIT_OK)})
    process = world.start()
    try:
        world.wait_for_requests(3)
        world.api.fails_with = 0
        output, _ = process.communicate(timeout=LONG_S)
    finally:
        process.kill()
    assert process.returncode == EXIT_OK and world.replicas == (0, 0)
    assert "status 503" in output and "the request is repeated" in output


def test_the_account_may_do_this_and_nothing_else(world: World) -> None:
    def may(verb: str, group: str | None, resource: str, name: str, sub: str | None) -> bool:
        return world.api.allows("demo-end", verb, group, resource, name, sub, "default")

    allowed = [
        *(("get", None, "pods", name, None) for name in COORDINATORS),
        *(
            (verb, "apps", kind, name, "scale")
            for verb in ("get", "patch")
            for kind, name in (("deployments", "demo-agent"), ("statefulsets", "demo-coordinator"))
        ),
    ]
    assert all(may(*one) for one in allowed)
    rules = world.find("Role", "demo-end")["rules"]
    assert all(rule["resourceNames"] and "*" not in str(rule) for rule in rules)
    number = sum(len(r["resources"]) * len(r["resourceNames"]) * len(r["verbs"]) for r in rules)
    assert number == len(allowed), "the Role has more rights than the end Job uses"


def test_other_accounts_may_not(world: World) -> None:
    world.give_token("demo-job")
    world.pods[COORDINATORS[0]] = pod(COORDINATORS[0], {"state": ended(EXIT_OK)})
    process = world.start()
    try:
        world.wait_for_requests(2)
    finally:
        process.kill()
        output, _ = process.communicate()
    assert {status for _, _, status in world.api.served} == {403} and world.replicas[0] > 0
    assert "demo-job may not get" in output


def test_a_cronjob_is_suspended(world: World) -> None:
    world.objects.append({"kind": "CronJob", "metadata": {"name": "demo-copy"}, "spec": {}})
    rule = {"apiGroups": ["batch"], "resources": ["cronjobs"], "verbs": ["patch"]}
    world.find("Role", "demo-end")["rules"].append(rule)
    world.pods[COORDINATORS[0]] = pod(COORDINATORS[0], {"state": ended(EXIT_OK)})
    assert cli.main([*world.command(), "cronjob/demo-copy", "cronjob/gone"]) == EXIT_OK
    assert world.find("CronJob", "demo-copy")["spec"] == {"suspend": True}


def test_a_container_that_was_started_again_shows_its_former_end() -> None:
    assert ending_of(pod("a", RUNNING)) is None
    assert ending_of({"metadata": {"name": "a"}, "status": {}}) is None
    assert ending_of(pod("a", {"state": ended(1), "lastState": ended(137)})) is None
    found = ending_of(pod("a", {"state": {"waiting": {}}, "lastState": ended(5, "why\n")}))
    assert found is not None and (found.pod, found.code, found.message) == ("a", 5, "why")


@pytest.mark.parametrize(
    ("words", "named"),
    [
        (["deployment/"], "KIND/NAME"),
        (["pod/demo"], "KIND/NAME"),
        (["--every", "0", "deployment/a"], "--every"),
        (["--api-port", "0", "deployment/a"], "--api-port"),
        (["--credentials", "nowhere", "deployment/a"], "--credentials"),
        ([], "KIND/NAME"),
    ],
)
def test_wrong_values_are_one_line(
    words: list[str], named: str, capsys: pytest.CaptureFixture[str]
) -> None:
    first = ["kubernetes", "end", "--coordinator", "a", "--namespace", "b", "--api-host", "c"]
    assert cli.main([*first, *words]) == 2
    out, err = capsys.readouterr()
    assert out == "" and err.count("\n") == 1 and named in err
