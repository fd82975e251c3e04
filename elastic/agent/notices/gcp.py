"""GCP: preemption and host maintenance, from two values of the metadata server.

A request can wait until the value changes. `instance/preempted` becomes TRUE about 30 s before the
machine is stopped. `instance/maintenance-event` becomes TERMINATE_ON_HOST_MAINTENANCE at least a
minute ahead; MIGRATE_ON_HOST_MAINTENANCE moves the running machine, so that the node stays.
"""

from __future__ import annotations

from elastic.agent.notices.metadata import MetadataService
from elastic.agent.notices.source import Source, make_notice
from elastic.core.node.notice_tracker import ProviderNotice

ROOT = "/computeMetadata/v1/"
FLAVOR = {"Metadata-Flavor": "Google"}
WAIT_S = 60
"""Time that the server is asked to wait for a change."""
PAUSE_S = 0.2
"""Pause between two requests, in case that the server does not wait."""
PREEMPTED_S = 30.0
MAINTENANCE_S = 60.0
"""Time from the change of each value until the machine stops: preempted, maintenance-event."""
LEAVE = {
    "TRUE": (PREEMPTED_S, "preempted"),
    "TERMINATE_ON_HOST_MAINTENANCE": (MAINTENANCE_S, "host maintenance"),
}
STAY = ("FALSE", "NONE", "MIGRATE_ON_HOST_MAINTENANCE")


class Gcp(Source):
    """Reads one of the two values. GCP accepts no acknowledgement."""

    every_s = PAUSE_S

    def __init__(self, service: MetadataService, value: str) -> None:
        """`value`: preempted or maintenance-event."""
        self.name = f"gcp-{value}"
        self._service, self._value, self._etag = service, value, ""

    def answers(self) -> bool:
        """Return whether the service is that of GCP. Raises as `read` does."""
        answer = self._service.ask("GET", "/", FLAVOR)
        return answer.headers.get("metadata-flavor") == "Google"

    def read(self) -> tuple[ProviderNotice, ...]:
        etag, self._etag = self._etag, ""
        path = f"{ROOT}instance/{self._value}"
        if etag:
            path += f"?wait_for_change=true&timeout_sec={WAIT_S}&last_etag={etag}"
        answer = self._service.ask("GET", path, FLAVOR, timeout_s=WAIT_S + 5.0).expect(200)
        value, etag = answer.text.strip(), answer.headers.get("etag", "")
        if answer.headers.get("metadata-flavor") != "Google" or value not in (*LEAVE, *STAY):
            raise answer.unexpected()
        self._etag = etag if etag.isalnum() else ""
        if value in STAY:
            return ()
        left_s, detail = LEAVE[value]
        return (make_notice("gcp", f"{self._value}@{self._etag}", left_s, detail),)
