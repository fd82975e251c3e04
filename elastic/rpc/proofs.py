"""Who knows the join token, shown without sending it.

The side that is asked gives a nonce; the side that asks answers with an HMAC over it, over who it is and over what it
asks. A nonce is good once, for a short time, and in the process that gave it: what was captured cannot be used again.
Nonces carry their own proof of origin, so that whoever asks for many of them fills no memory. Both sides prove
themselves: an answer of somebody who does not know the token is not believed either.
"""

from __future__ import annotations

import hashlib
import hmac
import secrets
import threading
import time
from collections.abc import Callable

from elastic.rpc.refusals import Reason

NONCE_BYTES = 16
GOOD_S = 30.0
"""How long a nonce may be answered."""


def new_nonce() -> str:
    return secrets.token_hex(NONCE_BYTES)


def prove(token: str, *words: str) -> str:
    """HMAC-SHA256 of `words` under the token, hexadecimal. The words cannot run into each other."""
    raw = [word.encode("utf-8", "surrogatepass") for word in words]
    text = b"".join(len(word).to_bytes(8, "little") + word for word in raw)
    return hmac.new(token.encode(), text, hashlib.sha256).hexdigest()


def proved(token: str, proof: str, *words: str) -> bool:
    """Whether `proof` is right; takes the same time whatever is wrong with it."""
    return hmac.compare_digest(prove(token, *words).encode(), proof.encode("utf-8", "replace"))


def digest(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()


class Gate:
    """The asked side: gives nonces and checks answers. Thread-safe."""

    def __init__(self, token: str, clock: Callable[[], float] = time.monotonic) -> None:
        self._token, self._clock = token, clock
        self._secret = secrets.token_hex(32)
        self._lock = threading.Lock()
        self._used: dict[str, float] = {}

    @property
    def open(self) -> bool:
        """No token is asked for."""
        return not self._token

    def nonce(self) -> str:
        """A new one."""
        body = f"{self._clock():.3f}.{new_nonce()}"
        return f"{body}.{prove(self._secret, body)}"

    def show(self, *words: str) -> str:
        """This side's own proof."""
        return prove(self._token, "server", *words)

    def check(self, nonce: str, proof: str, *words: str) -> Reason | None:
        """Why the answer to `nonce` is refused, or None; each nonce is good for one right answer."""
        if self.open:
            return None
        body, _, origin = nonce.rpartition(".")
        mine = proved(self._secret, origin, body)
        if not proved(self._token, proof, "client", nonce, *words):
            return Reason.TOKEN
        now = self._clock()
        if not mine or now - float(body.partition(".")[0]) > GOOD_S:
            return Reason.REPLAYED
        with self._lock:
            self._used = {old: at for old, at in self._used.items() if now - at <= GOOD_S}
            if nonce in self._used:
                return Reason.REPLAYED
            self._used[nonce] = now
        return None


def answer(token: str, nonce: str, *words: str) -> str:
    """The asking side's proof for `nonce`."""
    return prove(token, "client", nonce, *words)
