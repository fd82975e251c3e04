from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

import elastic.rpc.control  # noqa: F401  (before any test imports gRPC: it sets the lowest version of TLS)
from elastic.agent.vault.server import VaultServer
from elastic.agent.vault.vault import Vault
from tests.patience import LONG_S
from tests.security.parts import Authority, secure


@pytest.fixture(scope="session")
def authority(tmp_path_factory: pytest.TempPathFactory) -> Authority:
    return Authority(tmp_path_factory.mktemp("certs"))


@pytest.fixture
def vault(tmp_path: Path) -> Vault:
    return Vault("a", tmp_path / "vault")


@pytest.fixture(params=["tls", "plain"])
def server(
    request: pytest.FixtureRequest, vault: Vault, authority: Authority
) -> Iterator[VaultServer]:
    certs = authority.good if request.param == "tls" else None
    made = VaultServer(vault, timeout_s=LONG_S, secure=secure(certs)).start()
    yield made
    made.close()


@pytest.fixture
def tls(vault: Vault, authority: Authority) -> Iterator[VaultServer]:
    made = VaultServer(vault, timeout_s=LONG_S, secure=secure(authority.good)).start()
    yield made
    made.close()
