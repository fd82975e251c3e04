"""GCP: preemption and host maintenance, from the metadata server; both answer when the value changes.

`instance/preempted` turns TRUE about 30 s before the machine is stopped, and stays so. `instance/maintenance-event`
turns TERMINATE_ON_HOST_MAINTENANCE a minute or more ahead; MIGRATE_ON_HOST_MAINTENANCE moves the machine while it runs,
so that nobody has to leave.
"""

from __future__ import annotations

import time

from elastic.agent.notices.metadata import Metadata, unexpected
from elastic.core.node.notice_tracker import ProviderNotice
from elastic.core.protocol.messages import NoticeKind

BASE = "http://169.254.169.254"
ROOT = "/computeMetadata/v1/"
FLAVOR = {"Metadata-Flavor": "Google"}
HANG_S = 60
"""How long the server is asked to wait for a change."""
PAUSE_S = 0.2
"""Between two questions, should the server not wait at all."""
PREEMPTED_S = 30.0
MAINTENANCE_S = 60.0
"""How long before the machine goes its value changes."""


class Gcp:
    """One of the two values."""

    every_s = PAUSE_S

    def __init__(self, service: Metadata, what: str) -> None:
        """`what`: preempted or maintenance-event."""
        self.name = f"gcp-{what}"
        self._service, self._what, self._etag = service, what, ""

    def answers(self) -> bool:
        """Whether this is GCP. Raises as `read` does."""
        answer = self._service.ask("GET", "/", FLAVOR)
        return answer.headers.get("metadata-flavor") == "Google"

    def read(self) -> tuple[ProviderNotice, ...]:
        path = f"{ROOT}instance/{self._what}"
        if self._etag:
            path += f"?wait_for_change=true&timeout_sec={HANG_S}&last_etag={self._etag}"
        answer = self._service.ask("GET", path, FLAVOR, timeout_s=HANG_S + 5.0)
        if answer.status != 200 or answer.headers.get("metadata-flavor") != "Google":
            self._etag = ""
            raise unexpected(path, answer)
        etag = answer.headers.get("etag", "")
        self._etag = etag if etag.isalnum() else ""
        return self._notice(answer.text.strip())

    def acknowledge(self, heard: ProviderNotice) -> None:
        """GCP takes no answer."""

    def close(self) -> None:
        """Nothing is kept open."""

    def _notice(self, value: str) -> tuple[ProviderNotice, ...]:
        now = time.monotonic()
        match self._what, value:
            case "preempted", "TRUE":
                return (
                    ProviderNotice("gcp", "gcp:preempted", NoticeKind.LEAVE, now + PREEMPTED_S, "preempted"),
                )
            case "maintenance-event", "TERMINATE_ON_HOST_MAINTENANCE":
                deadline, identity = now + MAINTENANCE_S, f"gcp:maintenance@{self._etag}"
                return (ProviderNotice("gcp", identity, NoticeKind.LEAVE, deadline, "host maintenance"),)
            case ("preempted", "FALSE") | ("maintenance-event", "NONE" | "MIGRATE_ON_HOST_MAINTENANCE"):
                return ()
        raise ValueError(f"{self._what}: {value[:80]!r}")
