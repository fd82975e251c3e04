"""Plain HTTP to a metadata service: never through a proxy, never redirected, never more than a page."""

from __future__ import annotations

import http.client
from collections.abc import Mapping
from dataclasses import dataclass
from urllib.parse import urlsplit

from elastic.domain.errors import FieldError

MOST_BYTES = 1 << 16
REQUEST_S = 2.0
"""A metadata service is on the same host; one that takes longer does not work."""


@dataclass(frozen=True, slots=True)
class Answer:
    """Status, headers (names in lower case) and text."""

    status: int
    headers: Mapping[str, str]
    text: str


class Metadata:
    """One service at `base`, http://host[:port][/prefix]."""

    def __init__(self, base: str, timeout_s: float = REQUEST_S) -> None:
        parts = urlsplit(base if "://" in base else f"http://{base}")
        try:
            port = parts.port or 80
        except ValueError as error:
            raise FieldError("metadata service", base, f"http://HOST[:PORT]: {error}") from error
        if parts.scheme != "http" or not parts.hostname:
            raise FieldError("metadata service", base, "http://HOST[:PORT]")
        self.base, self._host, self._port = base, parts.hostname, port
        self._prefix, self._timeout_s = parts.path.rstrip("/"), timeout_s

    def ask(
        self, method: str, path: str, headers: Mapping[str, str], *, body: str = "", timeout_s: float = 0.0
    ) -> Answer:
        """One request. Raises OSError when nobody answers, HTTPException or ValueError when the answer is none."""
        line = http.client.HTTPConnection(self._host, self._port, timeout=timeout_s or self._timeout_s)
        try:
            line.request(method, self._prefix + path, body=body.encode() or None, headers=dict(headers))
            answer = line.getresponse()
            content = answer.read(MOST_BYTES + 1)
            if len(content) > MOST_BYTES:
                raise ValueError(f"{path}: more than {MOST_BYTES} bytes")
            found = {name.lower(): value for name, value in answer.getheaders()}
            return Answer(answer.status, found, content.decode())
        finally:
            line.close()


def unexpected(path: str, answer: Answer) -> ValueError:
    """What is raised for an answer that the protocol does not know."""
    return ValueError(f"{path}: status {answer.status}, {answer.text[:80]!r}")
