"""Backup schemes by name: GRADIENTS+STATE, as stream:4+snapshot. What they do and cost: docs/backup.md."""

from __future__ import annotations

from dataclasses import dataclass

from elastic.errors import FieldError

STREAM, LOG, RECOMPUTE, NONE = "stream", "log", "recompute", "none"
SNAPSHOT, REPLICA = "snapshot", "replica"
GRADIENT_SCHEMES = (STREAM, LOG, RECOMPUTE, NONE)
STATE_SCHEMES = (SNAPSHOT, REPLICA, NONE)
MOST_EVERY = 1 << 20
REMEDY = "auto, or GRADIENTS+STATE: stream, stream:K (every K micro-batches), log or recompute, + snapshot or replica"


@dataclass(frozen=True, slots=True)
class Gradients:
    """How finished micro-batches' gradients are kept."""

    name: str
    every: int = 0
    """Micro-batches between two copies; 0: no copies."""

    @property
    def share(self) -> float:
        """Of a gradient's bytes, what is sent a micro-batch."""
        return 1 / self.every if self.every else 0.0


def gradients_of(text: str, field: str = "gradients") -> Gradients:
    """Read stream, stream:K, log, recompute or none. Raises FieldError naming `field`."""
    name, colon, number = text.partition(":")
    if name not in GRADIENT_SCHEMES:
        raise FieldError(
            field, text, f"one of {', '.join(GRADIENT_SCHEMES)}; stream:K copies every K micro-batches"
        )
    if name != STREAM:
        if colon:
            raise FieldError(field, text, f"{name} takes no number; stream:K does")
        return Gradients(name)
    if not colon:
        return Gradients(name, 1)
    if not number.isascii() or not number.isdigit() or not 1 <= int(number) <= MOST_EVERY:
        raise FieldError(field, text, "stream:K with K from 1 up, as stream:4")
    return Gradients(name, int(number))


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


def state_of(text: str, field: str = "state") -> State:
    """Read snapshot, replica or none. Raises FieldError naming `field`."""
    if text not in STATE_SCHEMES:
        raise FieldError(field, text, f"one of {', '.join(STATE_SCHEMES)}")
    return State(text, int(text == SNAPSHOT))


def schemes_of(backup: str, field: str = "backup") -> tuple[Gradients, str]:
    """Read GRADIENTS+STATE. Raises FieldError naming `field`."""
    gradients, plus, state = backup.partition("+")
    if not plus or state not in STATE_SCHEMES:
        raise FieldError(field, backup, REMEDY)
    return gradients_of(gradients, field), state


def refuse_useless(backup: str, pipelines: str, field: str = "--backup") -> None:
    """Raise FieldError for pairs that protect nothing, with the reason. `pipelines`: as the user fixed them."""
    gradients, state = schemes_of(backup, field)
    if state == NONE and gradients.name != NONE:
        why = f"{gradients.name} without the state it belongs to recovers nothing"
        raise FieldError(field, backup, f"{why}: take snapshot or replica, or none for no backup at all")
    if state == REPLICA and pipelines == "1":
        raise FieldError(field, backup, "with --pipelines 1 nobody else holds a layer: take snapshot")
