"""Azure: Scheduled Events. Only events that name this machine count.

An event begins at its NotBefore time, or as soon as it is acknowledged. It is acknowledged when
this node is drained, if no other machine is concerned. A freeze shorter than the tolerated silence
of a node is ignored.
"""

from __future__ import annotations

import json
import time
from datetime import UTC, datetime
from email.utils import parsedate_to_datetime
from typing import Any

from elastic.agent.notices.metadata import MetadataService, unexpected
from elastic.agent.notices.source import Source
from elastic.core.node.notice_tracker import ProviderNotice
from elastic.core.protocol.messages import NoticeKind

BASE = "http://169.254.169.254"
EVENTS = "/metadata/scheduledevents?api-version=2020-07-01"
NAME = "/metadata/instance/compute/name?api-version=2021-02-01&format=text"
VERSIONS = "/metadata/versions"
HEADERS = {"Metadata": "true"}
READ_EVERY_S = 1.0
"""Azure's recommendation."""
FIRST_REQUEST_S = 130.0
"""Timeout of the first request of a machine, which may take two minutes."""
LEAVE_EVENTS = ("Preempt", "Terminate", "Reboot", "Redeploy")


class Azure(Source):
    """Scheduled events of a virtual machine."""

    name, every_s = "azure", READ_EVERY_S

    def __init__(self, service: MetadataService, silence_s: float) -> None:
        """`silence_s`: time after which a silent node counts as lost."""
        self._service, self._silence_s = service, silence_s
        self._machine, self._asked = "", False
        self._own_events: set[str] = set()

    def answers(self) -> bool:
        """True if this is Azure. Raises as `read` does."""
        answer = self._service.ask("GET", VERSIONS, HEADERS)
        return answer.status == 200 and "apiVersions" in _json_object(VERSIONS, answer.text)

    def read(self) -> tuple[ProviderNotice, ...]:
        if not self._machine:
            answer = self._service.ask("GET", NAME, HEADERS)
            if answer.status != 200 or not answer.text.strip():
                raise unexpected(NAME, answer)
            self._machine = answer.text.strip().lower()
        answer = self._service.ask(
            "GET", EVENTS, HEADERS, timeout_s=0.0 if self._asked else FIRST_REQUEST_S
        )
        if answer.status != 200:
            raise unexpected(EVENTS, answer)
        self._asked = True
        events = _json_object(EVENTS, answer.text).get("Events", [])
        if not isinstance(events, list):
            raise unexpected(EVENTS, answer)
        mine = [event for event in events if isinstance(event, dict) and self._concerns(event)]
        self._own_events = {
            str(e["EventId"]) for e in mine if len(e["Resources"]) == 1 and _is_scheduled(e)
        }
        return tuple(_notice(event) for event in mine)

    def acknowledge(self, heard: ProviderNotice) -> None:
        """Let the event begin, if it concerns no other machine."""
        event = heard.identity.removeprefix("azure:")
        if event in self._own_events:
            body = json.dumps({"StartRequests": [{"EventId": event}]})
            answer = self._service.ask(
                "POST", EVENTS, {**HEADERS, "Content-Type": "application/json"}, body=body
            )
            if answer.status not in (200, 202):
                raise unexpected(EVENTS, answer)

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
        return kind in LEAVE_EVENTS or (kind == "Freeze" and not short)


def _is_scheduled(event: dict[str, Any]) -> bool:
    return event.get("EventStatus") == "Scheduled"


def _notice(event: dict[str, Any]) -> ProviderNotice:
    kind, at = event["EventType"], event.get("NotBefore") or ""
    deadline = time.monotonic() + (_seconds_until(str(at)) if at else 0.0)
    detail = f"{kind} not before {at}" if at else f"{kind} has begun"
    return ProviderNotice("azure", f"azure:{event['EventId']}", NoticeKind.LEAVE, deadline, detail)


def _seconds_until(at: str) -> float:
    """Seconds from now to a time such as `Mon, 19 Sep 2016 18:29:47 GMT`. Raises ValueError."""
    when = parsedate_to_datetime(at)
    when = when if when.tzinfo else when.replace(tzinfo=UTC)
    return (when - datetime.now(UTC)).total_seconds()


def _json_object(path: str, text: str) -> dict[str, Any]:
    value = json.loads(text)
    if not isinstance(value, dict):
        raise ValueError(f"{path}: {text[:80]!r}")
    return value
