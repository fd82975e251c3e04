"""Flags about waiting and leaving: silence, heartbeats, notices."""

from __future__ import annotations

from collections.abc import Mapping
from types import SimpleNamespace

from elastic.core.protocol.notice_source import NoticeSource, SourceKind, parse_sources
from elastic.core.protocol.timeouts import SILENCE_S, budget
from elastic.domain.errors import FieldError

METADATA_VARIABLES = {
    SourceKind.AWS: "AWS_EC2_METADATA_SERVICE_ENDPOINT",
    SourceKind.GCP: "GCE_METADATA_HOST",
    SourceKind.AZURE: "ELASTIC_AZURE_METADATA_SERVICE",
}
"""Where the clouds' own tools look for another address of the metadata service; Azure's have no such variable."""


def silence(flags: SimpleNamespace) -> float:
    """Seconds."""
    given = {value for value in (flags.silence, flags.lease) if value is not None}
    if len(given) > 1:
        raise FieldError(
            "--lease", flags.lease, f"it is the same as --silence, which is {flags.silence}: leave it out"
        )
    return float(given.pop()) if given else SILENCE_S


def heartbeat(flags: SimpleNamespace, nodes: int) -> float:
    """Seconds. `nodes`: how many there may be."""
    if flags.heartbeat is not None:
        return float(flags.heartbeat)
    return budget(silence(flags), nodes=nodes).heartbeat_s


def notices(flags: SimpleNamespace, standalone: bool) -> tuple[NoticeSource, ...]:
    given: tuple[NoticeSource, ...] | None = flags.notice
    return parse_sources("none" if standalone else "auto") if given is None else given


def metadata_services(environ: Mapping[str, str]) -> tuple[tuple[str, str], ...]:
    named = ((cloud.value, environ.get(variable, "")) for cloud, variable in METADATA_VARIABLES.items())
    return tuple((cloud, where) for cloud, where in named if where)
