"""What an agent tells of backups that the user should know."""

from __future__ import annotations

from collections.abc import Callable

from elastic.core.protocol.messages import BACKUP_SHORT, COPY_CORRUPT, BackupNote
from elastic.domain.types import Copy


class Notes:
    """Callbacks of a node's vault and replicator, from any thread; `put` takes what they have to say."""

    def __init__(self, node: str, put: Callable[[BackupNote], None]) -> None:
        self._node, self._put = node, put

    def corrupt(self, copy: Copy) -> None:
        """A copy in this node's vault is not what it was."""
        why = f"{copy.key} does not match its checksum, and is dropped"
        self._put(BackupNote(COPY_CORRUPT, copy.owner, self._node, why))

    def short(self, keeper: str, why: str) -> None:
        """`keeper` has no room for this node's copies."""
        self._put(BackupNote(BACKUP_SHORT, self._node, keeper, why))
