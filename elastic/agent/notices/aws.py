"""AWS: spot interruption notices and rebalance recommendations (instance metadata service v2).

Each of the two has its own path, which answers 404 while there is no notice. Requests need a
session token, which is renewed when the service refuses it. AWS accepts no acknowledgement.
"""

from __future__ import annotations

import time
from datetime import datetime
from typing import Any

from elastic.agent.notices.metadata import Answer, MetadataService, seconds_until
from elastic.agent.notices.source import Source, make_notice
from elastic.core.node.notice_tracker import ProviderNotice
from elastic.core.protocol.messages import NoticeKind

TOKEN = "/latest/api/token"
ACTION = "/latest/meta-data/spot/instance-action"
REBALANCE = "/latest/meta-data/events/recommendations/rebalance"
TOKEN_TTL_S = 21600
READ_EVERY_S = 2.0
"""Interval between two reads. AWS recommends 5 s and gives two minutes of notice."""
NOTICE_S = 120.0
"""Deadline of a notice without a readable time."""
HINT_S = 600.0
"""Assumed lifetime of an instance at elevated risk; AWS states none."""


class Aws(Source):
    """Reads the notices of a spot instance from one of the two paths."""

    every_s = READ_EVERY_S

    def __init__(self, service: MetadataService, path: str) -> None:
        """`path`: ACTION or REBALANCE."""
        self.name = f"aws-{path.rpartition('/')[2]}"
        self._service, self._path = service, path
        self._token, self._fresh_until = "", 0.0

    def answers(self) -> bool:
        """Return whether the service is that of AWS. Raises as `read` does."""
        return bool(self._renew_token())

    def read(self) -> tuple[ProviderNotice, ...]:
        fresh = time.monotonic() < self._fresh_until
        answer = self._get(self._token if fresh else self._renew_token())
        if answer.status == 401:
            answer = self._get(self._renew_token())
        if answer.status == 404:
            return ()
        value = answer.json_object()
        return (_advice(value) if self._path == REBALANCE else _interruption(value),)

    def _get(self, token: str) -> Answer:
        return self._service.ask("GET", self._path, {"X-aws-ec2-metadata-token": token})

    def _renew_token(self) -> str:
        headers = {"X-aws-ec2-metadata-token-ttl-seconds": str(TOKEN_TTL_S), "Content-Length": "0"}
        answer = self._service.ask("PUT", TOKEN, headers).expect(200)
        token = answer.text.strip()
        if not (token.isascii() and token.isprintable()):
            raise answer.unexpected()
        self._token, self._fresh_until = token, time.monotonic() + TOKEN_TTL_S / 2
        return token


def _interruption(action: dict[str, Any]) -> ProviderNotice:
    what, at = action.get("action"), action.get("time")
    if what not in ("terminate", "stop", "hibernate"):
        raise ValueError(f"{ACTION}: action {what!r}")
    try:
        left_s = 0.0 if what == "hibernate" else seconds_until(datetime.fromisoformat(str(at)))
    except ValueError:
        left_s = NOTICE_S
    return make_notice("aws", f"{what}@{at}", left_s, f"spot {what} at {at}")


def _advice(advice: dict[str, Any]) -> ProviderNotice:
    what = f"rebalance@{advice.get('noticeTime', '')}"
    return make_notice("aws", what, HINT_S, "rebalance recommendation", NoticeKind.HINT)
