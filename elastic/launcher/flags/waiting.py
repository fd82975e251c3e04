"""Flags about waiting and leaving: silence, heartbeats, notices."""

from __future__ import annotations

import argparse
from collections.abc import Mapping

from elastic.core.protocol.notice_source import NoticeSource, SourceKind, parse_sources
from elastic.core.protocol.timeouts import SILENCE_S, budget
from elastic.domain.errors import FieldError
from elastic.launcher.flags.values import seconds

METADATA_VARIABLES = {
    SourceKind.AWS: "AWS_EC2_METADATA_SERVICE_ENDPOINT",
    SourceKind.GCP: "GCE_METADATA_HOST",
    SourceKind.AZURE: "ELASTIC_AZURE_METADATA_SERVICE",
}
"""Where the clouds' own tools look for another address of the metadata service; Azure's have no such variable."""


def silence(args: argparse.Namespace) -> float:
    given = {
        flag: text
        for flag, text in (("--silence", args.silence), ("--lease", args.lease))
        if text is not None
    }
    found = {seconds(flag, text) for flag, text in given.items()}
    if len(found) > 1:
        raise FieldError(
            "--lease", args.lease, f"it is the same as --silence, which is {args.silence}: leave it out"
        )
    return found.pop() if found else SILENCE_S


def heartbeat(args: argparse.Namespace, nodes: int) -> float:
    """`nodes`: how many there may be."""
    given: str | None = args.heartbeat
    if given is not None:
        return seconds("--heartbeat", given)
    return budget(silence(args), nodes=nodes).heartbeat_s


def notices(args: argparse.Namespace, standalone: bool) -> tuple[NoticeSource, ...]:
    given: str | None = args.notice
    return parse_sources(("none" if standalone else "auto") if given is None else given)


def metadata_services(environ: Mapping[str, str]) -> tuple[tuple[str, str], ...]:
    named = ((cloud.value, environ.get(variable, "")) for cloud, variable in METADATA_VARIABLES.items())
    return tuple((cloud, where) for cloud, where in named if where)
