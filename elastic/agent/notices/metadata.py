"""Plain HTTP client of metadata services: no proxy, no redirects, bounded size."""

from __future__ import annotations

import http.client
from collections.abc import Mapping
from dataclasses import dataclass
from urllib.parse import urlsplit

from elastic.domain.errors import FieldError

MAX_BYTES = 1 << 16
REQUEST_S = 2.0
"""Timeout of a request; metadata services are on the same host."""


@dataclass(frozen=True, slots=True)
class Answer:
    """Status, headers (names in lower case) and text."""

    status: int
    headers: Mapping[str, str]
    text: str


class MetadataService:
    """The service at `base`, http://host[:port][/prefix]. Raises FieldError for another URL."""

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
        self,
        method: str,
        path: str,
        headers: Mapping[str, str],
        *,
        body: str = "",
        timeout_s: float = 0.0,
    ) -> Answer:
        """Send one request. Raises OSError without an answer, HTTPException or ValueError for a
        malformed one."""
        connection = http.client.HTTPConnection(
            self._host, self._port, timeout=timeout_s or self._timeout_s
        )
        try:
            connection.request(
                method, self._prefix + path, body=body.encode() or None, headers=dict(headers)
            )
            answer = connection.getresponse()
            content = answer.read(MAX_BYTES + 1)
            if len(content) > MAX_BYTES:
                raise ValueError(f"{path}: more than {MAX_BYTES} bytes")
            found = {name.lower(): value for name, value in answer.getheaders()}
            return Answer(answer.status, found, content.decode())
        finally:
            connection.close()


def unexpected(path: str, answer: Answer) -> ValueError:
    """The error for an answer that the protocol does not define."""
    return ValueError(f"{path}: status {answer.status}, {answer.text[:80]!r}")
