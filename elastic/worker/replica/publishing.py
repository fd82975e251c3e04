"""What the publisher (`elastic.worker.backup.publisher`) needs of others."""

from __future__ import annotations

from typing import Protocol

from torch import Tensor

from elastic.core.protocol.messages import Published


class Message(Protocol):
    """What is published of `elastic.worker.backup.activation_log.Logged`."""

    @property
    def kind(self) -> str: ...

    @property
    def layer(self) -> int: ...

    @property
    def step(self) -> int: ...

    @property
    def microbatch(self) -> int: ...

    @property
    def nbytes(self) -> int: ...

    def write(self, out: Tensor) -> None: ...


class Waiting(Protocol):
    """Something under way (`elastic.worker.backup.copier.Copying`)."""

    def wait(self) -> None: ...


class Readable(Protocol):
    """What copies are made of."""

    copying: Waiting | None
    """A copy that is being written; whoever changes what it reads waits for it first."""


class Summed(Readable, Protocol):
    """A gradient sum to be published: a layer's own (`LayerReplica`) or another (`Part`)."""

    index: int
    ledger: set[int]
    losses: dict[int, float]

    @property
    def gradient_nbytes(self) -> int: ...

    def write_gradient(self, out: Tensor) -> None: ...


class Sender(Protocol):
    """A channel to the agent."""

    def send(self, message: Published) -> None: ...
