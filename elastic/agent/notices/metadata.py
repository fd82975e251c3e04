"""Plain HTTP client of metadata services: no proxy, no redirects, bounded size."""

from __future__ import annotations

import http.client
import json
from collections.abc import Mapping
from contextlib import closing
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any
from urllib.parse import urlsplit

from elastic.domain.errors import FieldError

USUAL_ADDRESS = "http://169.254.169.254"
"""Address of the metadata service in each cloud."""
MAX_BYTES = 1 << 16
REQUEST_S = 2.0
"""Timeout of a request; metadata services are on the same host."""


@dataclass(frozen=True, slots=True)
class Answer:
    """The answer to a request for `path`. Names of headers are in lower case."""

    path: str
    status: int
    headers: Mapping[str, str]
    text: str

    def expect(self, *statuses: int) -> Answer:
        """Return this answer. Raises ValueError if its status is not in `statuses`."""
        if self.status not in statuses:
            raise self.unexpected()
        return self

    def json_object(self) -> dict[str, Any]:
        """Return the JSON object of an answer with status 200. Raises ValueError for any other."""
        value = json.loads(self.expect(200).text)
        if not isinstance(value, dict):
            raise self.unexpected()
        return value

    def unexpected(self) -> ValueError:
        """Return the error for an answer that the protocol does not define."""
        return ValueError(f"{self.path}: status {self.status}, {self.text[:80]!r}")


class MetadataService:
    """Client of the service at `base`, http://host[:port][/prefix]. Raises FieldError."""

    def __init__(self, base: str, timeout_s: float = REQUEST_S) -> None:
        parts = urlsplit(base if "://" in base else f"http://{base}")
        try:
            self._host, self._port = parts.hostname or "", parts.port or 80
        except ValueError as error:
            raise FieldError("metadata service", base, f"http://HOST[:PORT]: {error}") from error
        if parts.scheme != "http" or not self._host:
            raise FieldError("metadata service", base, "http://HOST[:PORT]")
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
        """Send one request; return the answer. `timeout_s`: 0 means that of the client. Raises
        OSError if no answer comes, HTTPException or ValueError if it is malformed."""
        timeout_s = timeout_s or self._timeout_s
        with closing(http.client.HTTPConnection(self._host, self._port, timeout_s)) as connection:
            connection.request(method, self._prefix + path, body.encode() or None, dict(headers))
            answer = connection.getresponse()
            content = answer.read(MAX_BYTES + 1)
            if len(content) > MAX_BYTES:
                raise ValueError(f"{path}: more than {MAX_BYTES} bytes")
            found = {name.lower(): value for name, value in answer.getheaders()}
            return Answer(path, answer.status, found, content.decode())


def seconds_until(when: datetime) -> float:
    """Return the seconds from now to `when`, which is in UTC if it names no time zone."""
    when = when if when.tzinfo else when.replace(tzinfo=UTC)
    return (when - datetime.now(UTC)).total_seconds()
