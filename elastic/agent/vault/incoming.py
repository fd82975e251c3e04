"""A copy on its way into a vault: received into a slot of the vault's own, verified, and only then part of it."""

from __future__ import annotations

from typing import TYPE_CHECKING

from elastic.domain.errors import VaultError
from elastic.domain.types import Copy
from elastic.store.slots import Slot, checksum

if TYPE_CHECKING:
    from elastic.agent.vault.vault import Vault


class Incoming:
    """A copy on its way in: fill `buffer`, then `commit` or `abort`."""

    def __init__(self, vault: Vault, copy: Copy, slot: Slot, trusted: bool) -> None:
        self._vault, self._copy, self._trusted = vault, copy, trusted
        self._slot: Slot | None = slot
        self.buffer = slot.view(copy.nbytes)

    def verify(self, digest: str | None = None) -> None:
        """Raise VaultError unless the bytes match; `digest` is their checksum if it is known already."""
        found = checksum(self.buffer) if digest is None else digest
        if found != self._copy.checksum:
            raise VaultError(f"{self._copy.key} arrived corrupt: checksum {found}, not {self._copy.checksum}")

    def commit(self, digest: str | None = None) -> None:
        """Verify the bytes and add the copy to the vault; VaultError or StaleError keep nothing."""
        if self._slot is None:
            raise VaultError(f"{self._copy.key} was aborted")
        try:
            self.verify(digest)
            self._slot.finish(self._copy.sequence, self._copy.nbytes, self._copy.epoch)
            self._vault._add(self._copy, self._slot, self._trusted)
            self._slot = None
        finally:
            self.abort()

    def abort(self) -> None:
        """Give the room back unless the copy was committed."""
        slot, self._slot = self._slot, None
        if slot is not None:
            self._vault._give(slot)
