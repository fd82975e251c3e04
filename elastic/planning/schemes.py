"""Backup schemes by name: GRADIENTS+STATE, as stream:4+snapshot. What they do and cost: docs/backup.md."""

from __future__ import annotations

from dataclasses import dataclass

from elastic.errors import FieldError

STREAM, REDUCE, RECOMPUTE, NONE = "stream", "reduce", "recompute", "none"
SNAPSHOT, REPLICA, REPLAY = "snapshot", "replica", "replay"
GRADIENT_SCHEMES = (STREAM, REDUCE, RECOMPUTE, NONE)
STATE_SCHEMES = (SNAPSHOT, REPLICA, REPLAY, NONE)
MOST_EVERY = 1 << 20
REPLAY_EVERY, MOST_REPLAY = 8, 64
"""Updates between two whole states at the peer: of `replay`, and at most."""
REMEDY = (
    "auto, or GRADIENTS+STATE: stream, stream:K (every K micro-batches), reduce, reduce:K or recompute, "
    "+ snapshot, replica, replay or replay:N (whole states every N updates)"
)


@dataclass(frozen=True, slots=True)
class Gradients:
    """How finished micro-batches' gradients are kept."""

    name: str
    every: int = 0
    """Micro-batches between two copies; 0: no copies."""
    rounds: int = 0
    """Micro-batches between two sums over the holders; 0: one sum at the step's end."""

    @property
    def share(self) -> float:
        """Of a gradient's bytes, what is sent a micro-batch. Of a sum over k holders each sends 2 (k - 1) / k: here as
        if they were two."""
        often = self.every or self.rounds
        return 1 / often if often else 0.0


def gradients_of(text: str, field: str = "gradients") -> Gradients:
    """Read stream, stream:K, reduce, reduce:K, recompute or none. Raises FieldError naming `field`."""
    name, colon, number = text.partition(":")
    if name not in GRADIENT_SCHEMES:
        raise FieldError(
            field, text, f"one of {', '.join(GRADIENT_SCHEMES)}; stream:K copies every K micro-batches"
        )
    if name not in (STREAM, REDUCE):
        if colon:
            raise FieldError(field, text, f"{name} takes no number; stream:K and reduce:K do")
        return Gradients(name)
    if colon and (not number.isascii() or not number.isdigit() or not 1 <= int(number) <= MOST_EVERY):
        raise FieldError(field, text, f"{name}:K with K from 1 up, as {name}:4")
    often = int(number) if colon else 1
    return Gradients(name, every=often) if name == STREAM else Gradients(name, rounds=often)


def streamed(gradients: str) -> str:
    """What takes the place of `reduce` where some layer has one holder only."""
    return gradients.replace(REDUCE, STREAM, 1)


@dataclass(frozen=True, slots=True)
class State:
    """How parameters and optimizer state are kept."""

    name: str
    every: int = 0
    """Updates between two whole copies of a layer at the peer; 0: none goes there."""

    @property
    def away(self) -> bool:
        """The peer can make the state of every layer."""
        return self.every > 0

    @property
    def updates(self) -> bool:
        """Between whole copies the peer gets what each update takes."""
        return self.every > 1


def state_of(text: str, field: str = "state") -> State:
    """Read snapshot, replica, replay, replay:N or none. Raises FieldError naming `field`."""
    name, colon, number = text.partition(":")
    if name not in STATE_SCHEMES:
        raise FieldError(
            field, text, f"one of {', '.join(STATE_SCHEMES)}; replay:N sends whole states every N updates"
        )
    if name != REPLAY:
        if colon:
            raise FieldError(field, text, f"{name} takes no number; replay:N does")
        return State(name, int(name == SNAPSHOT))
    if not colon:
        return State(name, REPLAY_EVERY)
    if not number.isascii() or not number.isdigit() or not 2 <= int(number) <= MOST_REPLAY:
        remedy = f"replay:N with N from 2 to {MOST_REPLAY}; for whole states after every update take snapshot"
        raise FieldError(field, text, remedy)
    return State(name, int(number))


def schemes_of(backup: str, field: str = "backup") -> tuple[Gradients, str]:
    """Read GRADIENTS+STATE. Raises FieldError naming `field`."""
    gradients, plus, state = backup.partition("+")
    if not plus or state.partition(":")[0] not in STATE_SCHEMES:
        raise FieldError(field, backup, REMEDY)
    state_of(state, field)
    return gradients_of(gradients, field), state


def refuse_useless(backup: str, pipelines: str, field: str = "--backup") -> None:
    """Raise FieldError for pairs that protect nothing, with the reason. `pipelines`: as the user fixed them."""
    gradients, state = schemes_of(backup, field)
    if state == NONE and gradients.name != NONE:
        why = f"{gradients.name} without the state it belongs to recovers nothing"
        raise FieldError(
            field, backup, f"{why}: take snapshot, replay or replica, or none for no backup at all"
        )
    if gradients.name == REDUCE and pipelines == "1":
        raise FieldError(field, backup, "with --pipelines 1 there is nobody to sum with: take stream")
    if state == REPLICA and pipelines == "1":
        raise FieldError(
            field, backup, "with --pipelines 1 nobody else holds a layer: take snapshot or replay"
        )
