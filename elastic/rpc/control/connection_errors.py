"""Explains why no coordinator is reached, where gRPC only says how its connection failed."""

from __future__ import annotations

FOREIGN = "another program answers there, and no coordinator: end it, or use another address"
NEEDS_TLS = (
    "the other side ends the connection at once: it needs certificates (--certs), it refuses these "
    "(another authority, or expired), or another program answers there"
)
NEEDS_NONE = "the other side does not use TLS: leave out --certs, or another program answers there"
_CAUSES = (
    ("Failed parsing HTTP/2", FOREIGN),
    ("SETTINGS frame", FOREIGN),
    ("WRONG_VERSION_NUMBER", NEEDS_NONE),
    ("Socket closed", NEEDS_TLS),
    ("reset by peer", NEEDS_TLS),
)
"""Parts of gRPC's texts, and their likely cause."""


def explained(text: str) -> str:
    """Return gRPC's text about a connection that cannot be made, after its likely cause."""
    cause = next((cause for part, cause in _CAUSES if part in text), "")
    return f"{cause} ({text})" if cause else text
