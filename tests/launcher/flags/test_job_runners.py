"""`elastic run` with the `PET_*` variables of Jobs, StatefulSets and JobSets for torchrun."""

from __future__ import annotations

import itertools
import socket
from pathlib import Path
from typing import Any

import pytest

from elastic.domain.errors import FieldError
from elastic.launcher.flags import addresses
from elastic.launcher.flags.request import Request
from tests.launcher.helpers import read


def under(place: Path, **environ: str) -> Request:
    (place / "script.py").write_text("")
    environ.setdefault("PET_INSECURE", "1")
    return read(str(place / "script.py"), **environ)


@pytest.fixture(autouse=True)
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.mark.parametrize("rank", range(3))
def test_static(here: Path, rank: int) -> None:
    """An indexed Job whose pods get their index as rank and pod 0's name as master."""
    found = under(here, PET_NNODES="3", PET_NPROC_PER_NODE="2", PET_NODE_RANK=str(rank),
                  PET_MASTER_ADDR="train-0.train", PET_MASTER_PORT="23456")  # fmt: skip
    config = found.config
    assert found.hosts is (rank == 0) and found.nodes == (f"node{rank}",)
    assert (config.min_nodes, config.max_nodes, config.nproc_per_node) == (3, 3, 2)
    assert config.coordinator == "train-0.train:23456" and config.master_addr == "train-0.train"
    assert not config.standalone


def test_elastic_rendezvous(here: Path) -> None:
    """As an operator sets them for pods that come and go."""
    found = under(here, PET_NNODES="2:4", PET_RDZV_BACKEND="c10d",
                  PET_RDZV_ENDPOINT="train-0.train:29400", PET_RDZV_ID="train",
                  PET_MAX_RESTARTS="3")  # fmt: skip
    assert found.hosts is None, "the owner of the address starts the coordinator"
    assert (found.config.min_nodes, found.config.max_nodes, found.config.max_restarts) == (2, 4, 3)
    assert found.config.run_id == "train" and found.config.coordinator == "train-0.train:29400"
    (name,) = found.nodes
    again = under(here, PET_RDZV_BACKEND="c10d", PET_RDZV_ENDPOINT="train-0.train")
    assert name != again.nodes[0], "a pod that comes again is another node"


@pytest.mark.parametrize(("word", "hosts"), [("true", True), ("0", False)])
def test_is_host(here: Path, word: str, hosts: bool) -> None:
    found = under(
        here, PET_RDZV_BACKEND="c10d", PET_RDZV_ENDPOINT="train", PET_RDZV_CONF=f"is_host={word}"
    )
    assert found.hosts is hosts


def test_flags_come_before_variables(here: Path) -> None:
    environ = {
        "PET_NNODES": "4",
        "PET_RDZV_BACKEND": "c10d",
        "PET_RDZV_ENDPOINT": "a:1",
        "PET_INSECURE": "1",
    }
    (here / "script.py").write_text("")
    words = ["--nnodes", "2:3", str(here / "script.py")]
    config = read(*words, **environ).config
    assert (config.min_nodes, config.max_nodes, config.coordinator) == (2, 3, "a:1")


def test_pods_wait_for_each_others_names(monkeypatch: pytest.MonkeyPatch) -> None:
    real, calls = socket.getaddrinfo, itertools.count()

    def later(host: str, *args: Any, **more: Any) -> Any:
        if next(calls) < 2:
            raise socket.gaierror(socket.EAI_NONAME, "Name or service not known")
        return real("127.0.0.1", *args, **more)

    monkeypatch.setattr(addresses, "RESOLVE_INTERVAL_S", 0.001)
    monkeypatch.setattr(socket, "getaddrinfo", later)
    monkeypatch.setenv(addresses.IN_A_POD, "10.0.0.1")
    assert addresses.local_address("train-0.train:29400") == "127.0.0.1"
    assert next(calls) > 2


def test_elsewhere_an_unknown_name_is_a_mistake(monkeypatch: pytest.MonkeyPatch) -> None:
    def never(*_: Any, **__: Any) -> Any:
        raise socket.gaierror(socket.EAI_NONAME, "Name or service not known")

    monkeypatch.setattr(socket, "getaddrinfo", never)
    monkeypatch.delenv(addresses.IN_A_POD, raising=False)
    with pytest.raises(FieldError, match="the host is unknown"):
        addresses.local_address("train-0.train:29400")
