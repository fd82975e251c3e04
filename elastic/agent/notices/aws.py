"""AWS: spot interruption notices and rebalance recommendations, from the instance metadata service, version 2.

Both paths answer 404 until there is something. A session token is needed, and made anew when it is refused.
"""

from __future__ import annotations

import json
import logging
import time
from datetime import UTC, datetime
from http.client import HTTPException
from typing import Any

from elastic.agent.notices.metadata import Metadata, unexpected
from elastic.core.node.notice_tracker import ProviderNotice
from elastic.core.protocol.messages import NoticeKind

log = logging.getLogger("elastic.agent.notices")
BASE = "http://169.254.169.254"
TOKEN = "/latest/api/token"
ACTION = "/latest/meta-data/spot/instance-action"
REBALANCE = "/latest/meta-data/events/recommendations/rebalance"
TTL_S = 21600
READ_EVERY_S = 2.0
"""AWS recommends 5 s; two minutes are given, so either will do."""
NOTICE_S = 120.0
"""What AWS gives, where the notice tells no time that can be read."""
HINT_S = 600.0
"""How long an instance at elevated risk is taken to stay; AWS does not say."""


class Aws:
    """A spot instance's notices."""

    name, every_s = "aws", READ_EVERY_S

    def __init__(self, service: Metadata) -> None:
        self._service, self._token, self._fresh_until, self._trouble = service, "", 0.0, ""

    def answers(self) -> bool:
        """Whether this is AWS. Raises as `read` does."""
        return bool(self._renewed())

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
                    "aws", f"aws:rebalance@{at}", NoticeKind.HINT, deadline, "rebalance recommendation"
                )
            )
        return tuple(found)

    def _advice(self, goes: bool) -> dict[str, Any] | None:
        """What is recommended. An instance that `goes` for certain needs no advice: trouble with it is only logged."""
        try:
            advice = self._get(REBALANCE)
        except (OSError, HTTPException, ValueError) as error:
            if not goes:
                raise
            advice, trouble = None, str(error)
            if trouble != self._trouble:
                log.warning("the interruption counts, recommendations of aws cannot be read: %s", trouble)
            self._trouble = trouble
        else:
            self._trouble = ""
        return advice

    def acknowledge(self, heard: ProviderNotice) -> None:
        """AWS takes no answer."""

    def close(self) -> None:
        """Nothing is kept open."""

    def _get(self, path: str) -> dict[str, Any] | None:
        """What stands at `path`; None: nothing."""
        token = self._token if time.monotonic() < self._fresh_until else self._renewed()
        answer = self._service.ask("GET", path, {"X-aws-ec2-metadata-token": token})
        if answer.status == 401:
            answer = self._service.ask("GET", path, {"X-aws-ec2-metadata-token": self._renewed()})
        if answer.status == 404:
            return None
        if answer.status != 200:
            raise unexpected(path, answer)
        value = json.loads(answer.text)
        if not isinstance(value, dict):
            raise unexpected(path, answer)
        return value

    def _renewed(self) -> str:
        headers = {"X-aws-ec2-metadata-token-ttl-seconds": str(TTL_S), "Content-Length": "0"}
        answer = self._service.ask("PUT", TOKEN, headers)
        if answer.status != 200 or not answer.text.isascii() or not answer.text.strip().isprintable():
            raise unexpected(TOKEN, answer)
        self._token, self._fresh_until = answer.text.strip(), time.monotonic() + TTL_S / 2
        return self._token


def _interruption(action: dict[str, Any]) -> ProviderNotice:
    what, at = action.get("action"), action.get("time")
    if what not in ("terminate", "stop", "hibernate"):
        raise ValueError(f"{ACTION}: action {what!r}")
    left_s = 0.0 if what == "hibernate" else seconds_until(at)
    deadline = time.monotonic() + left_s
    return ProviderNotice("aws", f"aws:{what}@{at}", NoticeKind.LEAVE, deadline, f"spot {what} at {at}")


def seconds_until(at: object) -> float:
    """Seconds from now to an ISO 8601 time in UTC; what AWS promises if it cannot be read."""
    try:
        when = datetime.fromisoformat(str(at))
    except ValueError:
        return NOTICE_S
    when = when if when.tzinfo else when.replace(tzinfo=UTC)
    return (when - datetime.now(UTC)).total_seconds()
