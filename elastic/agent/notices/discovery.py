"""From `--notice` to sources; `auto` asks once, at the start, which cloud's metadata service answers."""

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
from elastic.agent.notices.hook import Hook
from elastic.agent.notices.metadata import Metadata
from elastic.agent.notices.source import Source
from elastic.core.protocol.notice_source import CLOUDS, NODE_PLACEHOLDER, NoticeSource, SourceKind

log = logging.getLogger("elastic.agent.notices")
PROBE_S = 1.0
"""A metadata service answers at once, or there is none."""
BASES = {SourceKind.AWS: aws.BASE, SourceKind.GCP: gcp.BASE, SourceKind.AZURE: azure.BASE}


@dataclass(frozen=True, slots=True, kw_only=True)
class Surroundings:
    """What sources need to know of the node."""

    node: str
    silence_s: float
    cards: Path
    """Directory for the hook's address and token."""
    services: Mapping[str, str]
    """Metadata services that stand elsewhere than where the cloud has them, by cloud."""
    token: str = ""
    """Of the hook; "": a new one."""

    def service(self, cloud: SourceKind, timeout_s: float = 0.0) -> Metadata:
        base = self.services.get(cloud.value, BASES[cloud]).replace(NODE_PLACEHOLDER, self.node)
        return Metadata(base, timeout_s) if timeout_s else Metadata(base)


def sources_of(wanted: NoticeSource, around: Surroundings) -> tuple[Source, ...]:
    """What has to be read for one source; none for auto. Raises FieldError."""
    match wanted.kind:
        case SourceKind.FILE:
            return (NoticeFile(wanted.where.replace(NODE_PLACEHOLDER, around.node)),)
        case SourceKind.HTTP:
            return (Hook(wanted.where, around.node, around.cards / f"{around.node}.json", around.token),)
        case SourceKind.AUTO:
            return ()
        case cloud:
            return _cloud(cloud, around)


def detect(around: Surroundings, then: Callable[[tuple[Source, ...]], object]) -> None:
    """Ask all metadata services at once; `then` gets the sources of the one that answers, from a thread."""
    threading.Thread(target=lambda: then(_detected(around)), name="notices-auto", daemon=True).start()


def _detected(around: Surroundings) -> tuple[Source, ...]:
    answers: queue.Queue[SourceKind | None] = queue.Queue()

    def ask(cloud: SourceKind) -> None:
        answers.put(cloud if _answers(cloud, around) else None)

    for cloud in CLOUDS:
        threading.Thread(target=ask, args=(cloud,), name=f"probe-{cloud}", daemon=True).start()
    for _ in CLOUDS:
        try:
            found = answers.get(timeout=2 * PROBE_S)
        except queue.Empty:
            break
        if found is not None:
            log.info("notices: this is %s", found)
            return _cloud(found, around)
    log.info("notices: no metadata service answers")
    return ()


def _answers(cloud: SourceKind, around: Surroundings) -> bool:
    service = around.service(cloud, PROBE_S)
    try:
        match cloud:
            case SourceKind.AWS:
                return aws.Aws(service).answers()
            case SourceKind.GCP:
                return gcp.Gcp(service, "preempted").answers()
            case _:
                return azure.Azure(service, around.silence_s).answers()
    except (OSError, HTTPException, ValueError):
        return False


def _cloud(cloud: SourceKind, around: Surroundings) -> tuple[Source, ...]:
    service = around.service(cloud)
    match cloud:
        case SourceKind.AWS:
            return (aws.Aws(service),)
        case SourceKind.GCP:
            return (gcp.Gcp(service, "preempted"), gcp.Gcp(service, "maintenance-event"))
        case _:
            return (azure.Azure(service, around.silence_s),)
