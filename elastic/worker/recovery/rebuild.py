"""A state that no vault has any more, from a parity and the other states that are in it."""

from __future__ import annotations

from collections.abc import Sequence

from elastic.domain.errors import VaultError
from elastic.domain.types import Copy
from elastic.store.slots import checksum
from elastic.worker.recovery.fetch import Fetched


class WrongParity(VaultError):
    """The parity is not that of what it says."""


def rebuilt(state: Copy, sources: Sequence[Copy], fetched: Sequence[Fetched]) -> Fetched:
    """Return `state`, the beginning of the XOR of `fetched`: what was read of `sources`, of which the first, a parity,
    is at least as long as the others. Raises WrongParity unless that has the state's checksum."""
    out = fetched[0].data.clone()
    for other in fetched[1:]:
        out[: len(other.data)] ^= other.data
    out = out[: state.nbytes]
    found = checksum(memoryview(out.numpy().data))
    if found != state.checksum:
        what = f"layer {state.layer}, version {state.step}"
        raise WrongParity(f"{what} from {sources[0].key}: checksum {found}, not {state.checksum}")
    return Fetched(out, f"peer:{sources[0].node}")
