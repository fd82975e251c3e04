"""How a bulk connection begins: TLS where certificates are set, and both sides show that they know the join token.

    client -> vault   {"kind": "Hello", "body": {"node", "nonce"}}
    vault -> client   {"nonce", "proof"}                            over both nonces
    client -> vault   {"kind": "Proof", "body": {"proof"}}          over the vault's nonce and the node
    vault -> client   {"error"}                                     "": welcome

Nothing but these is read of who has not shown it yet, and no more than a few hundred bytes.
"""

from __future__ import annotations

import socket
import ssl
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from elastic.domain.errors import FieldError, VaultError
from elastic.rpc.frames import MAX_HEADER_BYTES, MAX_PAYLOAD_BYTES, Stream
from elastic.rpc.proofs import Gate, answer, new_nonce, proved
from elastic.rpc.refusals import Reason
from elastic.rpc.security import Contexts, Security

MOST_BYTES = 1024
"""Of a header of the greeting."""
GREETING_S = 10.0
"""How long TLS and the greeting may take together."""


@dataclass(frozen=True)
class Turned:
    """The greeting of a connection that is refused."""

    reason: Reason
    text: str


def greet(stream: Stream, token: str, node: str) -> None:
    """The client's side. Raises VaultError when either side is refused."""
    mine = new_nonce()
    stream.send({"kind": "Hello", "body": {"node": node, "nonce": mine}})
    challenge = _received(stream)
    nonce, proof = str(challenge.get("nonce", "")), str(challenge.get("proof", ""))
    if not proved(token, proof, "server", mine, nonce):
        raise VaultError(f"the vault does not know the join token ({challenge.get('error', '')})")
    stream.send({"kind": "Proof", "body": {"proof": answer(token, nonce, "vault", node)}})
    error = _received(stream).get("error", "")
    if error:
        raise VaultError(f"the vault refuses this node: {error}")


def receive(stream: Stream, gate: Gate) -> str | Turned:
    """The vault's side: the node that is welcome, or why it is not. Raises what a broken connection raises."""
    stream.most_header, stream.most_payload = MOST_BYTES, 0
    hello = _body(stream, "Hello")
    if hello is None:
        stream.send({"error": "the join token is asked for first"})
        return Turned(Reason.TOKEN, "no greeting")
    node, theirs = str(hello.get("node", "")), str(hello.get("nonce", ""))
    nonce = gate.nonce()
    stream.send({"nonce": nonce, "proof": gate.show(theirs, nonce)})
    proof = _body(stream, "Proof") or {}
    problem = gate.check(nonce, str(proof.get("proof", "")), "vault", node)
    stream.send({"error": "the join token is missing or wrong" if problem else ""})
    if problem is not None:
        return Turned(problem, f"as {node}")
    stream.most_header, stream.most_payload = MAX_HEADER_BYTES, MAX_PAYLOAD_BYTES
    return node


def wrap_client(secure: Security, host: str) -> Callable[[socket.socket], ssl.SSLSocket]:
    """TLS towards `host`; the certificate that comes must carry its name, or the one that the job goes by."""
    contexts = secure.contexts
    assert contexts is not None
    context = contexts.client()
    name = secure.name or host
    return lambda sock: context.wrap_socket(sock, server_hostname=name, do_handshake_on_connect=False)


def wrap_server(contexts: Contexts) -> Callable[[socket.socket], ssl.SSLSocket]:
    """TLS of whoever connects, with a certificate of its own."""
    return lambda sock: contexts.server().wrap_socket(sock, server_side=True, do_handshake_on_connect=False)


def _received(stream: Stream) -> dict[str, Any]:
    header, nbytes = stream.receive()
    if not isinstance(header, dict) or nbytes:
        raise FieldError("greeting", str(header)[:80], "an object is needed")
    return header


def _body(stream: Stream, kind: str) -> dict[str, Any] | None:
    header = _received(stream)
    body = header.get("body")
    return body if header.get("kind") == kind and isinstance(body, dict) else None
