"""Azure: Scheduled Events. Only events that name this machine count.

An event begins at its NotBefore time, or as soon as it is acknowledged. The agent acknowledges an
event when its node is drained, if the event concerns no other machine. A freeze that is shorter
than the tolerated silence of a node is ignored.
"""

from __future__ import annotations

import json
from email.utils import parsedate_to_datetime
from typing import Any

from elastic.agent.notices.metadata import MetadataService, seconds_until
from elastic.agent.notices.source import Source, make_notice
from elastic.core.node.notice_tracker import ProviderNotice

EVENTS = "/metadata/scheduledevents?api-version=2020-07-01"
NAME = "/metadata/instance/compute/name?api-version=2021-02-01&format=text"
VERSIONS = "/metadata/versions"
HEADERS = {"Metadata": "true"}
READ_EVERY_S = 1.0
"""Interval between two reads, as Azure recommends."""
FIRST_REQUEST_S = 130.0
"""Timeout of the first request of a machine, which may take two minutes."""
LEAVE_EVENTS = ("Preempt", "Terminate", "Reboot", "Redeploy")


class Azure(Source):
    """Reads the scheduled events of a virtual machine."""

    name, every_s = "azure", READ_EVERY_S

    def __init__(self, service: MetadataService, silence_s: float) -> None:
        """`silence_s`: time after which a silent node counts as lost."""
        self._service, self._silence_s = service, silence_s
        self._machine, self._first_s = "", FIRST_REQUEST_S
        self._own_events: set[str] = set()

    def answers(self) -> bool:
        """Return whether the service is that of Azure. Raises as `read` does."""
        return "apiVersions" in self._service.ask("GET", VERSIONS, HEADERS).json_object()

    def read(self) -> tuple[ProviderNotice, ...]:
        if not self._machine:
            answer = self._service.ask("GET", NAME, HEADERS).expect(200)
            self._machine = answer.text.strip().lower()
            if not self._machine:
                raise answer.unexpected()
        answer = self._service.ask("GET", EVENTS, HEADERS, timeout_s=self._first_s)
        events = answer.json_object().get("Events", [])
        self._first_s = 0.0
        if not isinstance(events, list):
            raise answer.unexpected()
        mine = [event for event in events if isinstance(event, dict) and self._concerns(event)]
        self._own_events = {
            event["EventId"]
            for event in mine
            if len(event["Resources"]) == 1 and event["EventStatus"] == "Scheduled"
        }
        return tuple(_notice(event) for event in mine)

    def acknowledge(self, heard: ProviderNotice) -> None:
        """Let the event begin, if it concerns no other machine."""
        event = heard.identity.removeprefix("azure:")
        if event in self._own_events:
            body = json.dumps({"StartRequests": [{"EventId": event}]})
            headers = {**HEADERS, "Content-Type": "application/json"}
            self._service.ask("POST", EVENTS, headers, body=body).expect(200, 202)

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


def _notice(event: dict[str, Any]) -> ProviderNotice:
    """Return the notice of an event. Raises ValueError unless NotBefore is empty or has the form
    `Mon, 19 Sep 2016 18:29:47 GMT`."""
    kind, at = event["EventType"], event.get("NotBefore") or ""
    left_s = seconds_until(parsedate_to_datetime(str(at))) if at else 0.0
    detail = f"{kind} not before {at}" if at else f"{kind} has begun"
    return make_notice("azure", event["EventId"], left_s, detail)
