"""Azure: Scheduled Events. They may concern several machines; only those that name this one count.

An event begins at its NotBefore, or as soon as it is acknowledged. It is acknowledged once this node is drained, if it
concerns no other machine: then nobody waits for nothing. A freeze shorter than the silence that is tolerated is no
reason to leave.
"""

from __future__ import annotations

import json
import time
from datetime import UTC, datetime
from email.utils import parsedate_to_datetime
from typing import Any

from elastic.agent.notices.metadata import Metadata, unexpected
from elastic.core.node.notice_tracker import ProviderNotice
from elastic.core.protocol.messages import NoticeKind

BASE = "http://169.254.169.254"
EVENTS = "/metadata/scheduledevents?api-version=2020-07-01"
NAME = "/metadata/instance/compute/name?api-version=2021-02-01&format=text"
VERSIONS = "/metadata/versions"
HEADERS = {"Metadata": "true"}
READ_EVERY_S = 1.0
"""As Azure recommends."""
FIRST_S = 130.0
"""The first question of a machine may take up to two minutes."""
LEAVES = ("Preempt", "Terminate", "Reboot", "Redeploy")


class Azure:
    """A virtual machine's scheduled events."""

    name, every_s = "azure", READ_EVERY_S

    def __init__(self, service: Metadata, silence_s: float) -> None:
        """`silence_s`: how long a silent node is tolerated."""
        self._service, self._silence_s = service, silence_s
        self._machine, self._asked = "", False
        self._alone: set[str] = set()

    def answers(self) -> bool:
        """Whether this is Azure. Raises as `read` does."""
        answer = self._service.ask("GET", VERSIONS, HEADERS)
        return answer.status == 200 and "apiVersions" in _object(VERSIONS, answer.text)

    def read(self) -> tuple[ProviderNotice, ...]:
        if not self._machine:
            answer = self._service.ask("GET", NAME, HEADERS)
            if answer.status != 200 or not answer.text.strip():
                raise unexpected(NAME, answer)
            self._machine = answer.text.strip().lower()
        answer = self._service.ask("GET", EVENTS, HEADERS, timeout_s=0.0 if self._asked else FIRST_S)
        if answer.status != 200:
            raise unexpected(EVENTS, answer)
        self._asked = True
        events = _object(EVENTS, answer.text).get("Events", [])
        if not isinstance(events, list):
            raise unexpected(EVENTS, answer)
        mine = [event for event in events if isinstance(event, dict) and self._concerns(event)]
        self._alone = {str(e["EventId"]) for e in mine if len(e["Resources"]) == 1 and _waits(e)}
        return tuple(_heard(event) for event in mine)

    def acknowledge(self, heard: ProviderNotice) -> None:
        """Let the event begin, if this machine alone waits for it."""
        event = heard.identity.removeprefix("azure:")
        if event in self._alone:
            body = json.dumps({"StartRequests": [{"EventId": event}]})
            answer = self._service.ask(
                "POST", EVENTS, {**HEADERS, "Content-Type": "application/json"}, body=body
            )
            if answer.status not in (200, 202):
                raise unexpected(EVENTS, answer)

    def close(self) -> None:
        """Nothing is kept open."""

    def _concerns(self, event: dict[str, Any]) -> bool:
        resources, kind = event.get("Resources"), event.get("EventType")
        if not isinstance(resources, list) or not isinstance(event.get("EventId"), str):
            raise ValueError(f"{EVENTS}: {str(event)[:80]}")
        if self._machine not in {str(name).lower() for name in resources}:
            return False
        if event.get("EventStatus") not in ("Scheduled", "Started"):
            return False
        duration = event.get("DurationInSeconds", -1)
        short = isinstance(duration, (int, float)) and 0 <= duration < self._silence_s
        return kind in LEAVES or (kind == "Freeze" and not short)


def _waits(event: dict[str, Any]) -> bool:
    return event.get("EventStatus") == "Scheduled"


def _heard(event: dict[str, Any]) -> ProviderNotice:
    kind, at = event["EventType"], event.get("NotBefore") or ""
    deadline = time.monotonic() + (_seconds_until(str(at)) if at else 0.0)
    detail = f"{kind} not before {at}" if at else f"{kind} has begun"
    return ProviderNotice("azure", f"azure:{event['EventId']}", NoticeKind.LEAVE, deadline, detail)


def _seconds_until(at: str) -> float:
    """Seconds from now to a time as `Mon, 19 Sep 2016 18:29:47 GMT`. Raises ValueError."""
    when = parsedate_to_datetime(at)
    when = when if when.tzinfo else when.replace(tzinfo=UTC)
    return (when - datetime.now(UTC)).total_seconds()


def _object(path: str, text: str) -> dict[str, Any]:
    value = json.loads(text)
    if not isinstance(value, dict):
        raise ValueError(f"{path}: {text[:80]!r}")
    return value
