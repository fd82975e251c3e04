"""Sources of a node's notices: `--notice auto|none|aws|gcp|azure|file:PATH|http:[HOST:]PORT`.

Several sources are separated by commas.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from enum import StrEnum

from elastic.domain.errors import FieldError

FLAG = "--notice"
NODE_PLACEHOLDER = "${node}"
"""Placeholder of the node's name in file paths and in addresses of metadata services."""
LOOPBACK = "127.0.0.1"


class SourceKind(StrEnum):
    """Kind of a notice source."""

    AUTO = "auto"
    """The cloud whose metadata service answers, if there is one."""
    AWS = "aws"
    GCP = "gcp"
    AZURE = "azure"
    FILE = "file"
    HTTP = "http"


CLOUDS = (SourceKind.AWS, SourceKind.GCP, SourceKind.AZURE)


@dataclass(frozen=True, slots=True)
class NoticeSource:
    """One source of notices."""

    kind: SourceKind
    where: str = ""
    """Path of a file, or host:port to listen on."""

    def __str__(self) -> str:
        return f"{self.kind}:{self.where}" if self.where else self.kind.value


def parse_sources(text: str) -> tuple[NoticeSource, ...]:
    """Parse a comma-separated list. Raises FieldError that names the wrong part."""
    words = re.split(r",(?=(?:auto|none|aws|gcp|azure|file:|http:|$))", text)
    found = tuple(_parse(word.strip()) for word in words if word.strip() != "none")
    if len(words) > 1 and len(found) < len(words):
        raise FieldError(FLAG, text, "none excludes all other sources")
    if len(set(found)) < len(found):
        raise FieldError(FLAG, text, "give each source once")
    return found


def _parse(word: str) -> NoticeSource:
    kind, colon, where = word.partition(":")
    if kind not in {one.value for one in SourceKind}:
        raise FieldError(FLAG, word, "auto, none, aws, gcp, azure, file:PATH or http:[HOST:]PORT")
    if kind == SourceKind.FILE:
        if not where or "\0" in where:
            raise FieldError(
                FLAG,
                word,
                "file:PATH, as in file:/var/run/notice; ${node} in it is the node's name",
            )
        return NoticeSource(SourceKind.FILE, where)
    if kind == SourceKind.HTTP:
        return NoticeSource(SourceKind.HTTP, _address(word, where))
    if colon:
        raise FieldError(FLAG, word, f"{kind} takes no argument")
    return NoticeSource(SourceKind(kind))


def _address(word: str, where: str) -> str:
    match = re.fullmatch(r"(?:(\[[0-9A-Fa-f:.]+\]|[A-Za-z0-9._-]+):)?([0-9]{1,5})", where)
    if match is None or int(match[2]) > 65535:
        raise FieldError(FLAG, word, "http:[HOST:]PORT, as in http:8600; port 0 is any free port")
    return f"{match[1] or LOOPBACK}:{match[2]}"
