"""Turns `--notice` options into sources. `auto` probes the metadata services of all clouds."""

from __future__ import annotations

import logging
import os
import queue
import threading
from collections.abc import Callable
from http.client import HTTPException
from pathlib import Path

from elastic.agent.notices.aws import ACTION, REBALANCE, Aws
from elastic.agent.notices.azure import Azure
from elastic.agent.notices.file import NoticeFile
from elastic.agent.notices.gcp import Gcp
from elastic.agent.notices.hook import NoticeHook
from elastic.agent.notices.metadata import REQUEST_S, USUAL_ADDRESS, MetadataService
from elastic.agent.notices.source import Source
from elastic.config import JobConfig
from elastic.core.protocol.notice_source import CLOUDS, NODE_PLACEHOLDER, NoticeSource, SourceKind

log = logging.getLogger("elastic.agent.notices")
PROBE_S = 1.0
"""Timeout of a probe of a metadata service, which answers at once if it exists."""
TOKEN_VARIABLE = "ELASTIC_NOTICE_TOKEN"
"""Environment variable with the token of the hook. Without it, the hook makes a new one."""


def sources_of(wanted: NoticeSource, config: JobConfig, node: str) -> tuple[Source, ...]:
    """Return the sources for one `--notice` option; () for `auto`. Raises FieldError."""
    match wanted.kind:
        case SourceKind.FILE:
            return (NoticeFile(wanted.where.replace(NODE_PLACEHOLDER, node)),)
        case SourceKind.HTTP:
            card = Path(config.run_dir) / "hooks" / f"{node}.json"
            return (NoticeHook(wanted.where, node, card, os.environ.get(TOKEN_VARIABLE, "")),)
        case SourceKind.AUTO:
            return ()
        case cloud:
            return _cloud_sources(cloud, config, node)


def detect(config: JobConfig, node: str, then: Callable[[tuple[Source, ...]], object]) -> None:
    """Probe all metadata services at once, on other threads. `then` gets the sources of the first
    cloud that answers, or ()."""
    threading.Thread(
        target=lambda: then(_detect(config, node)), name="notices-auto", daemon=True
    ).start()


def _detect(config: JobConfig, node: str) -> tuple[Source, ...]:
    answers: queue.Queue[SourceKind | None] = queue.Queue()

    def probe(cloud: SourceKind) -> None:
        source = _cloud_sources(cloud, config, node, PROBE_S)[0]  # all use one service
        try:
            answers.put(cloud if source.answers() else None)
        except (OSError, HTTPException, ValueError):
            answers.put(None)

    for cloud in CLOUDS:
        threading.Thread(target=probe, args=(cloud,), name=f"probe-{cloud}", daemon=True).start()
    for _ in CLOUDS:
        try:
            found = answers.get(timeout=2 * PROBE_S)
        except queue.Empty:
            break
        if found is not None:
            log.info("notices: the cloud is %s", found)
            return _cloud_sources(found, config, node)
    log.info("notices: no metadata service answers")
    return ()


def _cloud_sources(
    cloud: SourceKind, config: JobConfig, node: str, timeout_s: float = REQUEST_S
) -> tuple[Aws | Gcp | Azure, ...]:
    address = dict(config.metadata_services).get(cloud, USUAL_ADDRESS)
    service = MetadataService(address.replace(NODE_PLACEHOLDER, node), timeout_s)
    match cloud:
        case SourceKind.AWS:
            return (Aws(service, ACTION), Aws(service, REBALANCE))
        case SourceKind.GCP:
            return (Gcp(service, "preempted"), Gcp(service, "maintenance-event"))
        case SourceKind.AZURE:
            return (Azure(service, config.lease_s),)
        case _:
            raise AssertionError(f"no sources for {cloud}")
