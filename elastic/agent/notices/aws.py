"""AWS: spot interruption notices and rebalance recommendations (instance metadata service v2).

Both paths answer 404 while there is no notice. Requests need a session token, which is renewed when
the service refuses it.
"""

from __future__ import annotations

import json
import logging
import time
from datetime import UTC, datetime
from http.client import HTTPException
from typing import Any

from elastic.agent.notices.metadata import MetadataService, unexpected
from elastic.agent.notices.source import Source
from elastic.core.node.notice_tracker import ProviderNotice
from elastic.core.protocol.messages import NoticeKind

log = logging.getLogger("elastic.agent.notices")
BASE = "http://169.254.169.254"
TOKEN = "/latest/api/token"
ACTION = "/latest/meta-data/spot/instance-action"
REBALANCE = "/latest/meta-data/events/recommendations/rebalance"
TOKEN_TTL_S = 21600
READ_EVERY_S = 2.0
"""AWS recommends 5 s and gives two minutes of notice."""
NOTICE_S = 120.0
"""Deadline of a notice without a readable time."""
HINT_S = 600.0
"""Assumed lifetime of an instance at elevated risk; AWS gives none."""


class Aws(Source):
    """Notices of a spot instance. AWS accepts no acknowledgement."""

    name, every_s = "aws", READ_EVERY_S

    def __init__(self, service: MetadataService) -> None:
        self._service, self._token, self._fresh_until, self._last_error = service, "", 0.0, ""

    def answers(self) -> bool:
        """True if this is AWS. Raises as `read` does."""
        return bool(self._renew_token())

    def read(self) -> tuple[ProviderNotice, ...]:
        found = []
        action = self._get(ACTION)
        if action is not None:
            found.append(_interruption(action))
        advice = self._advice(bool(found))
        if advice is not None:
            at = str(advice.get("noticeTime", ""))
            deadline = time.monotonic() + HINT_S
            found.append(
                ProviderNotice(
                    "aws",
                    f"aws:rebalance@{at}",
                    NoticeKind.HINT,
                    deadline,
                    "rebalance recommendation",
                )
            )
        return tuple(found)

    def _advice(self, certain: bool) -> dict[str, Any] | None:
        """The rebalance recommendation, if any. After an interruption notice (`certain`) it is not
        needed, so that errors are only logged."""
        try:
            advice = self._get(REBALANCE)
        except (OSError, HTTPException, ValueError) as error:
            if not certain:
                raise
            advice, problem = None, str(error)
            if problem != self._last_error:
                log.warning(
                    "the interruption notice holds; recommendations of AWS cannot be read: %s",
                    problem,
                )
            self._last_error = problem
        else:
            self._last_error = ""
        return advice

    def _get(self, path: str) -> dict[str, Any] | None:
        """The JSON object at `path`, or None."""
        token = self._token if time.monotonic() < self._fresh_until else self._renew_token()
        answer = self._service.ask("GET", path, {"X-aws-ec2-metadata-token": token})
        if answer.status == 401:
            answer = self._service.ask(
                "GET", path, {"X-aws-ec2-metadata-token": self._renew_token()}
            )
        if answer.status == 404:
            return None
        if answer.status != 200:
            raise unexpected(path, answer)
        value = json.loads(answer.text)
        if not isinstance(value, dict):
            raise unexpected(path, answer)
        return value

    def _renew_token(self) -> str:
        headers = {"X-aws-ec2-metadata-token-ttl-seconds": str(TOKEN_TTL_S), "Content-Length": "0"}
        answer = self._service.ask("PUT", TOKEN, headers)
        if (
            answer.status != 200
            or not answer.text.isascii()
            or not answer.text.strip().isprintable()
        ):
            raise unexpected(TOKEN, answer)
        self._token, self._fresh_until = answer.text.strip(), time.monotonic() + TOKEN_TTL_S / 2
        return self._token


def _interruption(action: dict[str, Any]) -> ProviderNotice:
    what, at = action.get("action"), action.get("time")
    if what not in ("terminate", "stop", "hibernate"):
        raise ValueError(f"{ACTION}: action {what!r}")
    left_s = 0.0 if what == "hibernate" else _seconds_until(at)
    deadline = time.monotonic() + left_s
    return ProviderNotice(
        "aws", f"aws:{what}@{at}", NoticeKind.LEAVE, deadline, f"spot {what} at {at}"
    )


def _seconds_until(at: object) -> float:
    """Seconds from now to an ISO 8601 time in UTC; NOTICE_S if it cannot be parsed."""
    try:
        when = datetime.fromisoformat(str(at))
    except ValueError:
        return NOTICE_S
    when = when if when.tzinfo else when.replace(tzinfo=UTC)
    return (when - datetime.now(UTC)).total_seconds()
