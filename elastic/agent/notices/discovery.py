"""Turns `--notice` options into sources. `auto` asks at the start which cloud this is."""

from __future__ import annotations

import logging
import queue
import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from http.client import HTTPException
from pathlib import Path

from elastic.agent.notices import aws, azure, gcp
from elastic.agent.notices.file import NoticeFile
from elastic.agent.notices.hook import NoticeHook
from elastic.agent.notices.metadata import MetadataService
from elastic.agent.notices.source import Source
from elastic.core.protocol.notice_source import CLOUDS, NODE_PLACEHOLDER, NoticeSource, SourceKind

log = logging.getLogger("elastic.agent.notices")
PROBE_S = 1.0
"""Timeout of the first request to a metadata service, which answers at once if it exists."""
BASES = {SourceKind.AWS: aws.BASE, SourceKind.GCP: gcp.BASE, SourceKind.AZURE: azure.BASE}


@dataclass(frozen=True, slots=True, kw_only=True)
class SourceContext:
    """Values of the node that sources need."""

    node: str
    silence_s: float
    """Time after which a silent node counts as lost."""
    hook_dir: Path
    """Directory for the hook's address and token."""
    services: Mapping[str, str]
    """Base URLs of metadata services that are not at the cloud's usual address, per cloud."""
    token: str = ""
    """Token of the hook; "": make a new one."""

    def service(self, cloud: SourceKind, timeout_s: float = 0.0) -> MetadataService:
        base = self.services.get(cloud.value, BASES[cloud]).replace(NODE_PLACEHOLDER, self.node)
        return MetadataService(base, timeout_s) if timeout_s else MetadataService(base)


def sources_of(wanted: NoticeSource, context: SourceContext) -> tuple[Source, ...]:
    """The sources for one option; none for `auto`. Raises FieldError."""
    match wanted.kind:
        case SourceKind.FILE:
            return (NoticeFile(wanted.where.replace(NODE_PLACEHOLDER, context.node)),)
        case SourceKind.HTTP:
            card = context.hook_dir / f"{context.node}.json"
            return (NoticeHook(wanted.where, context.node, card, context.token),)
        case SourceKind.AUTO:
            return ()
        case cloud:
            return _cloud_sources(cloud, context)


def detect(context: SourceContext, then: Callable[[tuple[Source, ...]], object]) -> None:
    """Probe all metadata services at once; pass the sources of the one that answers to `then`, from
    another thread."""
    threading.Thread(
        target=lambda: then(_detect(context)), name="notices-auto", daemon=True
    ).start()


def _detect(context: SourceContext) -> tuple[Source, ...]:
    answers: queue.Queue[SourceKind | None] = queue.Queue()

    def probe(cloud: SourceKind) -> None:
        answers.put(cloud if _answers(cloud, context) else None)

    for cloud in CLOUDS:
        threading.Thread(target=probe, args=(cloud,), name=f"probe-{cloud}", daemon=True).start()
    for _ in CLOUDS:
        try:
            found = answers.get(timeout=2 * PROBE_S)
        except queue.Empty:
            break
        if found is not None:
            log.info("notices: the cloud is %s", found)
            return _cloud_sources(found, context)
    log.info("notices: no metadata service answers")
    return ()


def _answers(cloud: SourceKind, context: SourceContext) -> bool:
    """All sources of a cloud share a service, so the first one is probed."""
    source = _cloud_sources(cloud, context, PROBE_S)[0]
    try:
        return source.answers()
    except (OSError, HTTPException, ValueError):
        return False


def _cloud_sources(
    cloud: SourceKind, context: SourceContext, timeout_s: float = 0.0
) -> tuple[aws.Aws | gcp.Gcp | azure.Azure, ...]:
    service = context.service(cloud, timeout_s)
    match cloud:
        case SourceKind.AWS:
            return (aws.Aws(service),)
        case SourceKind.GCP:
            return (gcp.Gcp(service, "preempted"), gcp.Gcp(service, "maintenance-event"))
        case _:
            return (azure.Azure(service, context.silence_s),)
