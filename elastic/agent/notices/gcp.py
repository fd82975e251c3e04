"""GCP: preemption and host maintenance, from two values of the metadata server.

A request can wait until the value changes. `instance/preempted` becomes TRUE about 30 s before the
machine is stopped. `instance/maintenance-event` becomes TERMINATE_ON_HOST_MAINTENANCE at least a
minute ahead; MIGRATE_ON_HOST_MAINTENANCE moves the running machine, so that the node stays.
"""

from __future__ import annotations

import time

from elastic.agent.notices.metadata import MetadataService, unexpected
from elastic.agent.notices.source import Source
from elastic.core.node.notice_tracker import ProviderNotice
from elastic.core.protocol.messages import NoticeKind

BASE = "http://169.254.169.254"
ROOT = "/computeMetadata/v1/"
FLAVOR = {"Metadata-Flavor": "Google"}
WAIT_S = 60
"""Time that the server is asked to wait for a change."""
PAUSE_S = 0.2
"""Pause between two requests, in case that the server does not wait."""
PREEMPTED_S = 30.0
MAINTENANCE_S = 60.0
"""Time from the change of each value until the machine stops."""


class Gcp(Source):
    """One of the two values. GCP accepts no acknowledgement."""

    every_s = PAUSE_S

    def __init__(self, service: MetadataService, value: str) -> None:
        """`value`: preempted or maintenance-event."""
        self.name = f"gcp-{value}"
        self._service, self._value, self._etag = service, value, ""

    def answers(self) -> bool:
        """True if this is GCP. Raises as `read` does."""
        answer = self._service.ask("GET", "/", FLAVOR)
        return answer.headers.get("metadata-flavor") == "Google"

    def read(self) -> tuple[ProviderNotice, ...]:
        path = f"{ROOT}instance/{self._value}"
        if self._etag:
            path += f"?wait_for_change=true&timeout_sec={WAIT_S}&last_etag={self._etag}"
        answer = self._service.ask("GET", path, FLAVOR, timeout_s=WAIT_S + 5.0)
        if answer.status != 200 or answer.headers.get("metadata-flavor") != "Google":
            self._etag = ""
            raise unexpected(path, answer)
        etag = answer.headers.get("etag", "")
        self._etag = etag if etag.isalnum() else ""
        return self._notice(answer.text.strip())

    def _notice(self, value: str) -> tuple[ProviderNotice, ...]:
        now = time.monotonic()
        match self._value, value:
            case "preempted", "TRUE":
                return (
                    ProviderNotice(
                        "gcp", "gcp:preempted", NoticeKind.LEAVE, now + PREEMPTED_S, "preempted"
                    ),
                )
            case "maintenance-event", "TERMINATE_ON_HOST_MAINTENANCE":
                deadline, identity = now + MAINTENANCE_S, f"gcp:maintenance@{self._etag}"
                return (
                    ProviderNotice("gcp", identity, NoticeKind.LEAVE, deadline, "host maintenance"),
                )
            case ("preempted", "FALSE") | (
                "maintenance-event",
                "NONE" | "MIGRATE_ON_HOST_MAINTENANCE",
            ):
                return ()
        raise ValueError(f"{self._value}: {value[:80]!r}")
