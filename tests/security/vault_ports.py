"""Connections to a vault's port, as members make them and as others might."""

from __future__ import annotations

import socket
import ssl
from pathlib import Path

import pytest

from elastic.agent.vault.server import VaultServer
from elastic.domain.errors import ChannelClosed
from elastic.rpc.bulk.transfer import VaultClient
from elastic.rpc.frames import FrameStream
from elastic.rpc.security.tls import CA, CERT, KEY
from elastic.rpc.security.token_proof import answer, new_nonce
from tests.agent.vault.copies import content, make
from tests.patience import LONG_S
from tests.security.parts import TOKEN, Authority, secure

PORT = "vault"
DATA = content(1, 200_000)
COPY = make(DATA)


def certs_of(server: VaultServer, authority: Authority) -> Path | None:
    return authority.good if server._certificates is not None else None


def client(server: VaultServer, certs: Path | None, token: str = TOKEN) -> VaultClient:
    return VaultClient(server.address, node="b", timeout_s=LONG_S, secure=secure(certs, token))


def serves(server: VaultServer, certs: Path | None, kept: int = 0) -> None:
    """A member is served, and the vault holds what it held."""
    mine = client(server, certs)
    assert len(mine.inventory()) == kept
    mine.close()


def dial(server: VaultServer, certs: Path | None) -> FrameStream:
    """A connection that sends arbitrary bytes, with a valid certificate where TLS is on."""
    host, _, port = server.address.rpartition(":")
    sock: socket.socket = socket.create_connection((host, int(port)), timeout=LONG_S)
    if certs is not None:
        context = ssl.create_default_context(cafile=str(certs / CA))
        context.load_cert_chain(certs / CERT, certs / KEY)
        sock = context.wrap_socket(sock, server_hostname="localhost")
    return FrameStream(sock, LONG_S)


def enter(stream: FrameStream, node: str = "b") -> None:
    """Say who we are, rightly."""
    stream.send({"kind": "Hello", "body": {"node": node, "nonce": new_nonce()}})
    nonce = stream.receive()[0]["nonce"]
    stream.send({"kind": "Proof", "body": {"proof": answer(TOKEN, nonce, "vault", node)}})
    assert stream.receive()[0] == {"error": ""}


def ended(stream: FrameStream) -> None:
    """The other side hangs up."""
    with pytest.raises(ChannelClosed):
        while True:
            stream.receive()
    stream.close()


def where(server: VaultServer) -> tuple[str, int]:
    host, _, port = server.address.rpartition(":")
    return host, int(port)
