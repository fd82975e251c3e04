"""Protocol version: which versions of the runtime understand each other.

`PROTOCOL` grows by one with each release that changes a message or the saved state. Versions N and
N-1 understand each other, under these rules for changes:

- A new field has a default. A receiver that does not know the field ignores it.
- Only a field with a default may be removed, or get another meaning under another name.
- A new kind of message is sent only to receivers that announce the kind as a capability, so the
  receiver must be able to do without it.
- A new value of an enumeration is written one version after it can be read.
- What nodes compare must not differ because one of them does not know a field (`JobSpec.joined`).

`tests/rpc/frozen` has samples of both versions.

Both sides announce their `ProtocolVersion` when a session opens: agent and coordinator, worker and
agent. The saved state holds the number of the coordinator that wrote it. A side that does not fit
is refused before it joins.
"""

from __future__ import annotations

from dataclasses import dataclass

from elastic.domain.version import VERSION

PROTOCOL = 2
"""Version of messages and saved state. Version 1 announced no version."""
UNANNOUNCED = 0
"""Number of a side that announces no version."""
FIRST = 1
"""Version of a saved state without a number."""


@dataclass(frozen=True, slots=True)
class ProtocolVersion:
    """Announcement of one side of a session."""

    number: int = UNANNOUNCED
    release: str = ""
    """Version of the package, for people."""
    capabilities: tuple[str, ...] = ()
    """Kinds of messages that this side can read; (): unknown, so all kinds are sent."""

    def reads(self, kind: str) -> bool:
        """Return whether this side can read messages of this kind."""
        return not self.capabilities or kind in self.capabilities

    @property
    def text(self) -> str:
        """Description for people."""
        if self.number == UNANNOUNCED:
            return "a version of elastic that announces no protocol"
        return f"elastic {self.release or 'unknown'} with protocol {self.number}"


def this_version(capabilities: tuple[str, ...] = ()) -> ProtocolVersion:
    """Return the announcement of this process."""
    return ProtocolVersion(PROTOCOL, VERSION, capabilities)


def incompatibility(
    mine: ProtocolVersion, theirs: ProtocolVersion, my_name: str, their_name: str
) -> str:
    """Return why two sides do not understand each other, with both versions and the remedy; "":
    they do."""
    if theirs.number != UNANNOUNCED and abs(mine.number - theirs.number) <= 1:
        return ""
    understood = f"{max(FIRST, mine.number - 1)} to {mine.number + 1}"
    return (
        f"{their_name} has {theirs.text}, {my_name} has {mine.text} and understands protocols "
        f"{understood}: install the same version of elastic on all machines of the job"
    )
