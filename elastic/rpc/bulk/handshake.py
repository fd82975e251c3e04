"""Opens a bulk connection: TLS if certificates are set, then both sides prove the join token.

    client -> vault   {"kind": "Hello", "body": {"node", "nonce"}}
    vault -> client   {"nonce", "proof"}                    proof over both nonces
    client -> vault   {"kind": "Proof", "body": {"proof"}}  proof over the vault's nonce and node
    vault -> client   {"error"}                             "": accepted

Until then the vault reads nothing but these messages, of at most MAX_BYTES each.
"""

from __future__ import annotations

import socket
import ssl
from collections.abc import Callable
from typing import Any

from elastic.domain.errors import FieldError, VaultError
from elastic.rpc.frames import MAX_HEADER_BYTES, MAX_PAYLOAD_BYTES, FrameStream
from elastic.rpc.security.rejections import Reason
from elastic.rpc.security.tls import Certificates, SecuritySettings
from elastic.rpc.security.token_proof import TokenGate, answer, new_nonce, proved

MAX_BYTES = 1024
"""Longest header of the handshake."""
HANDSHAKE_S = 10.0
"""Time limit of TLS and the proofs together."""


def authenticate(stream: FrameStream, token: str, node: str) -> None:
    """Run the client's side of the handshake. Raises VaultError if one side rejects the other."""
    mine = new_nonce()
    stream.send({"kind": "Hello", "body": {"node": node, "nonce": mine}})
    challenge = _received(stream)
    nonce, proof = str(challenge.get("nonce", "")), str(challenge.get("proof", ""))
    if not proved(token, proof, "server", mine, nonce):
        why = challenge.get("error") or "is it this job's, and not that of a viewer or operator?"
        raise VaultError(f"the vault does not know the join token: {why}")
    stream.send({"kind": "Proof", "body": {"proof": answer(token, nonce, "vault", node)}})
    error = _received(stream).get("error", "")
    if error:
        raise VaultError(f"the vault rejects this node: {error}")


def verify_client(stream: FrameStream, gate: TokenGate) -> tuple[str, Reason | None]:
    """Run the vault's side of the handshake. Raises the errors of `FrameStream`.

    Return the node that the client claims to be, and why it is rejected (None: it is accepted).
    """
    stream.most_header, stream.most_payload = MAX_BYTES, 0
    hello = _body(stream, "Hello")
    if hello is None:
        stream.send({"error": "a proof of the join token is needed first"})
        return "", Reason.TOKEN
    node, challenge = str(hello.get("node", "")), gate.challenge(str(hello.get("nonce", "")))
    stream.send(challenge)
    proof = _body(stream, "Proof") or {}
    problem = gate.check(challenge["nonce"], str(proof.get("proof", "")), "vault", node)
    stream.send({"error": "the join token is missing or wrong" if problem else ""})
    if problem is None:
        stream.most_header, stream.most_payload = MAX_HEADER_BYTES, MAX_PAYLOAD_BYTES
    return node, problem


def wrap_client(secure: SecuritySettings, host: str) -> Callable[[socket.socket], ssl.SSLSocket]:
    """Return a function that sets up TLS on a socket to `host`. The server's certificate must carry
    this name or the one in the settings."""
    certificates = secure.certificates
    assert certificates is not None
    context = certificates.client()
    name = secure.name or host
    return lambda sock: context.wrap_socket(
        sock, server_hostname=name, do_handshake_on_connect=False
    )


def wrap_server(certificates: Certificates) -> Callable[[socket.socket], ssl.SSLSocket]:
    """Return a function that sets up TLS on a socket to a client, which must have a certificate."""
    return lambda sock: certificates.server().wrap_socket(
        sock, server_side=True, do_handshake_on_connect=False
    )


def _received(stream: FrameStream) -> dict[str, Any]:
    header, nbytes = stream.receive()
    if not isinstance(header, dict) or nbytes:
        raise FieldError("handshake", str(header)[:80], "an object is needed")
    return header


def _body(stream: FrameStream, kind: str) -> dict[str, Any] | None:
    header = _received(stream)
    body = header.get("body")
    return body if header.get("kind") == kind and isinstance(body, dict) else None
