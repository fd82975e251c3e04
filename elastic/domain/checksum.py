"""Checksum of a copy: it covers the bytes and the description that a recovery relies on.

A recovery chooses copies by kind, layer, TP rank, step, portion and ledger. So these fields are
part of the checksum, together with the losses, the size and the hash of the bytes. Owner, epoch and
sequence are not: copies of equal content by different holders have equal checksums, which lets one
replace the other.

The prefix names the format. A copy with another prefix is refused.
"""

from __future__ import annotations

import hashlib

from elastic.domain.types import Copy

FORMAT = "2:"
"""Format 1, without a prefix, was the hash of the bytes alone."""


def copy_checksum(copy: Copy, digest: str) -> str:
    """Return the checksum of `copy`, whose bytes have the xxh3-64 `digest` (hexadecimal)."""
    fields = (
        copy.kind,
        copy.layer,
        copy.shard,
        copy.step,
        tuple(copy.portion),
        copy.nbytes,
        sorted(copy.microbatches),
        sorted((index, float(loss).hex()) for index, loss in copy.losses),
        digest,
    )
    return FORMAT + hashlib.blake2b(repr(fields).encode(), digest_size=8).hexdigest()


def checksum_problem(copy: Copy, digest: str) -> str:
    """Return why the description of `copy` and bytes of this `digest` do not match; "": they do."""
    if not copy.checksum.startswith(FORMAT):
        return f"checksum {copy.checksum!r} is of another format than {FORMAT}"
    found = copy_checksum(copy, digest)
    return "" if found == copy.checksum else f"checksum {found}, not {copy.checksum}"
