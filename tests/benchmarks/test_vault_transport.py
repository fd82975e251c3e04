"""The benchmark of the vaults' transport, a small part of it."""

from __future__ import annotations

import math

from benchmarks.backup.vault_transport import QUICK, rows


def test_a_small_part_of_everything() -> None:
    """The speed is not tested."""
    found = rows(QUICK)
    assert len(found) == 3 * (len(QUICK.sizes) + 2)
    assert all(math.isfinite(row.value) and row.value > 0 for row in found)
