"""Backup schemes by name: GRADIENTS+STATE, for example stream:4+snapshot.

docs/design/backup.md describes the schemes and their costs.
"""

from __future__ import annotations

from dataclasses import dataclass

from elastic.domain.errors import FieldError
from elastic.domain.types import WHOLE, Plan, Portion

STREAM, REDUCE, LOG, RECOMPUTE, NONE = "stream", "reduce", "log", "recompute", "none"
SNAPSHOT, REPLICA, REPLAY = "snapshot", "replica", "replay"
GRADIENT_SCHEMES = (STREAM, REDUCE, LOG, RECOMPUTE, NONE)
STATE_SCHEMES = (SNAPSHOT, REPLICA, REPLAY, NONE)
SHARDED = "/sharded"
MOST_EVERY = 1 << 20
REPLAY_EVERY, MOST_REPLAY = 8, 64
"""Updates between two whole states at the peer: default of `replay`, and maximum."""
REMEDY = (
    "auto, or GRADIENTS+STATE: stream, stream:K (every K micro-batches), reduce, reduce:K, log or "
    "recompute, + snapshot, replica, replay or replay:N (whole states every N updates), "
    "with /sharded after it (not replica) where pipelines share the optimizer state"
)


@dataclass(frozen=True, slots=True)
class Gradients:
    """Scheme that protects the gradients of finished micro-batches."""

    name: str
    every: int = 0
    """Micro-batches between two copies; 0: no copies."""
    rounds: int = 0
    """Micro-batches between two sums over the holders; 0: one sum at the step's end."""

    @property
    def share(self) -> float:
        """Fraction of gradient bytes sent per micro-batch.

        In a sum over k holders, each sends 2 (k - 1) / k of its gradient; k = 2 is assumed.
        """
        often = self.every or self.rounds
        return 1 / often if often else 0.0


def gradients_of(text: str, field: str = "gradients") -> Gradients:
    """Return the scheme named stream, stream:K, reduce, reduce:K, log, recompute or none.

    Raises FieldError, which names `field`.
    """
    name, colon, number = text.partition(":")
    if name not in GRADIENT_SCHEMES:
        known = ", ".join(GRADIENT_SCHEMES)
        raise FieldError(field, text, f"one of {known}; stream:K copies every K micro-batches")
    if name not in (STREAM, REDUCE):
        if colon:
            raise FieldError(field, text, f"{name} takes no number; stream:K and reduce:K do")
        return Gradients(name)
    if colon and not _is_number(number, 1, MOST_EVERY):
        raise FieldError(field, text, f"{name}:K with K from 1 up, as {name}:4")
    often = int(number or 1)
    return Gradients(name, every=often) if name == STREAM else Gradients(name, rounds=often)


def _is_number(text: str, least: int, most: int) -> bool:
    return text.isascii() and text.isdigit() and least <= int(text) <= most


def streamed(gradients: str) -> str:
    """Return `gradients` with `stream` instead of `reduce`, for plans with single holders."""
    return gradients.replace(REDUCE, STREAM, 1)


@dataclass(frozen=True, slots=True)
class State:
    """Scheme that protects parameters and optimizer state."""

    name: str
    every: int = 0
    """Updates between two whole copies of a layer at the peer; 0: no copies."""
    sharded: bool = False
    """Whether each of k holders of a layer has only 1 / k of its optimizer state.

    Each holder updates its part of the parameters and receives the other parts.
    """

    @property
    def away(self) -> bool:
        """Whether the peer keeps the state of all layers of a node."""
        return self.every > 0

    @property
    def updates(self) -> bool:
        """Whether the peer receives the input of each update, because whole copies are rarer."""
        return self.every > 1


def state_of(text: str, field: str = "state") -> State:
    """Return the scheme named snapshot, replica, replay, replay:N or none; /sharded may follow.

    Raises FieldError, which names `field`.
    """
    scheme, slash, _ = text.partition("/")
    if slash and text != scheme + SHARDED:
        remedy = f"write {scheme}{SHARDED} where pipelines share the optimizer state"
        raise FieldError(field, text, remedy)
    name, colon, number = scheme.partition(":")
    if name not in STATE_SCHEMES:
        known = ", ".join(STATE_SCHEMES)
        raise FieldError(
            field, text, f"one of {known}; replay:N sends whole states every N updates"
        )
    if slash and name in (REPLICA, NONE):
        why = "no other node has this one's part of the optimizer state"
        raise FieldError(field, text, f"{why}: take snapshot{SHARDED} or replay{SHARDED}")
    if name != REPLAY:
        if colon:
            raise FieldError(field, text, f"{name} takes no number; replay:N does")
        return State(name, int(name == SNAPSHOT), sharded=bool(slash))
    if colon and not _is_number(number, 2, MOST_REPLAY):
        often = "for whole states after every update take snapshot"
        raise FieldError(field, text, f"{name}:N with N from 2 to {MOST_REPLAY}; {often}")
    return State(name, int(number or REPLAY_EVERY), sharded=bool(slash))


def portion_of(plan: Plan, node: str, layer: int) -> Portion:
    """Return the portion of the optimizer state of `layer` that its holder `node` has."""
    if not state_of(plan.state).sharded:
        return WHOLE
    nodes = [unit.node for unit in plan.holders(layer)]
    return nodes.index(node), len(nodes)


def schemes_of(backup: str, field: str = "backup") -> tuple[Gradients, str]:
    """Return (gradient scheme, name of the state scheme). FieldError names `field`."""
    gradients, plus, state = backup.partition("+")
    if not plus or state.partition("/")[0].partition(":")[0] not in STATE_SCHEMES:
        raise FieldError(field, backup, REMEDY)
    state_of(state, field)
    return gradients_of(gradients, field), state


def refuse_useless(backup: str, pipelines: str, field: str = "--backup") -> None:
    """Raise FieldError, with the reason, if the schemes `backup` protect nothing.

    `pipelines` is the value of --pipelines.
    """
    gradients, state = schemes_of(backup, field)
    lost = f"{gradients.name} without the state it belongs to recovers nothing"
    alone = pipelines == "1"
    for useless, remedy in (
        (
            state == NONE and gradients.name != NONE,
            f"{lost}: take snapshot, replay or replica, or none for no backup at all",
        ),
        (
            alone and gradients.name == REDUCE,
            "with --pipelines 1 there is nobody to sum with: take stream",
        ),
        (
            alone and state_of(state).sharded,
            f"with --pipelines 1 nobody shares a layer: leave {SHARDED} out",
        ),
        (
            alone and state == REPLICA,
            "with --pipelines 1 nobody else holds a layer: take snapshot or replay",
        ),
    ):
        if useless:
            raise FieldError(field, backup, remedy)
