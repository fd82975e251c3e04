"""Proves knowledge of the join token without sending it.

The server gives a nonce. The client answers with an HMAC over the nonce, its own name and its
request. A nonce is valid once, for a short time, and only in the process that gave it, so a
captured answer is useless. Each nonce carries a proof of its origin, so a client that asks for many
fills no memory. Both sides prove themselves: a client rejects a server that does not know the
token.
"""

from __future__ import annotations

import hashlib
import hmac
import secrets
import threading
import time
from collections.abc import Callable

from elastic.rpc.security.rejections import Reason
from elastic.rpc.security.roles import Role, token_of

NONCE_BYTES = 16
GOOD_S = 30.0
"""Time for which a nonce is valid."""


def new_nonce() -> str:
    return secrets.token_hex(NONCE_BYTES)


def prove(token: str, *words: str) -> str:
    """Return the HMAC-SHA256 of `words` under the token, as hex; each word follows its length."""
    raw = [word.encode("utf-8", "surrogatepass") for word in words]
    text = b"".join(len(word).to_bytes(8, "little") + word for word in raw)
    return hmac.new(token.encode(), text, hashlib.sha256).hexdigest()


def proved(token: str, proof: str, *words: str) -> bool:
    """Return whether `proof` is right, after the same time for every wrong proof."""
    return hmac.compare_digest(prove(token, *words).encode(), proof.encode("utf-8", "replace"))


def digest(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()


class TokenGate:
    """The server's side of the proof: gives nonces and checks answers. Thread-safe."""

    def __init__(self, token: str, clock: Callable[[], float] = time.monotonic) -> None:
        self._token, self._clock = token, clock
        self._secret = secrets.token_hex(32)
        self._lock = threading.Lock()
        self._used: dict[str, float] = {}

    def known(self, role: Role = Role.MEMBER) -> str:
        """Return the token of a role in this job."""
        return token_of(role, self._token)

    @property
    def open(self) -> bool:
        """Whether no token is required."""
        return not self._token

    def nonce(self) -> str:
        """Return a nonce that carries its time and a proof that this process made it."""
        body = f"{self._clock():.3f}.{new_nonce()}"
        return f"{body}.{prove(self._secret, body)}"

    def challenge(self, theirs: str, role: Role = Role.MEMBER) -> dict[str, str]:
        """Return a new nonce, and the server's proof over it and the client's nonce, with the token
        of the client's role."""
        nonce = self.nonce()
        return {"nonce": nonce, "proof": prove(self.known(role), "server", theirs, nonce)}

    def check(self, nonce: str, proof: str, *words: str, role: Role = Role.MEMBER) -> Reason | None:
        """Return why the answer to `nonce` is rejected, or None. A right answer uses up a nonce."""
        if self.open:
            return None
        if not proved(self.known(role), proof, "client", nonce, *words):
            return Reason.TOKEN
        now, (body, _, origin) = self._clock(), nonce.rpartition(".")
        if not proved(self._secret, origin, body) or now - float(body.partition(".")[0]) > GOOD_S:
            return Reason.REPLAYED
        with self._lock:
            self._used = {old: at for old, at in self._used.items() if now - at <= GOOD_S}
            if nonce in self._used:
                return Reason.REPLAYED
            self._used[nonce] = now
        return None


def answer(token: str, nonce: str, *words: str) -> str:
    """Return the client's proof for `nonce`."""
    return prove(token, "client", nonce, *words)
