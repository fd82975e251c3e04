"""Messages that a list of actions receives from other stages, posted ahead of their use."""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial

from elastic.planning.schedule.schedule import Action, Kind
from elastic.worker.engine.stage import LocalStage
from elastic.worker.model.values import Message
from elastic.worker.transport.links import Links, Receive

RECEIVES_AHEAD = 2
"""Number of receives that are posted in advance, per neighbour."""


class _PostedReceives:
    """Receives from one neighbour, in order. The next `RECEIVES_AHEAD` of them are posted."""

    def __init__(self, actions: Iterable[Action], post: Callable[[Action], Receive]) -> None:
        self._left, self._post = deque(actions), post
        self._posted: deque[Receive] = deque()
        self._top_up()

    def _top_up(self) -> None:
        while self._left and len(self._posted) < RECEIVES_AHEAD:
            self._posted.append(self._post(self._left.popleft()))

    def take(self) -> Message:
        """Wait for the next message and return it."""
        message = self._posted.popleft().message()
        self._top_up()
        return message


class ExpectedMessages:
    """The messages that `actions` receive. Take them in the order of the actions.

    Args:
        stages: the stages of this worker, by number.
        first_tag: number that is added to the tags of all messages (`message_tag`).
    """

    def __init__(
        self,
        actions: Sequence[Action],
        stages: Mapping[int, LocalStage],
        links: Links,
        first_tag: int = 0,
    ) -> None:
        self._stages = stages
        incoming: dict[int, list[Action]] = defaultdict(list)
        for action in actions:
            if action.kind.receives:
                incoming[self._sender(action)].append(action)

        def post(rank: int, action: Action) -> Receive:
            return links.recv(rank, first_tag + message_tag(action))

        self._posted = {
            rank: _PostedReceives(expected, partial(post, rank))
            for rank, expected in incoming.items()
        }

    def take(self, action: Action) -> Message:
        """Wait for the message that `action` receives. Raises EpochAbandoned or LinkFailed."""
        return self._posted[self._sender(action)].take()

    def _sender(self, action: Action) -> int:
        stage = self._stages[action.stage]
        rank = stage.previous if action.kind is Kind.RECV_F else stage.following
        assert rank is not None, f"{action}: this stage has no neighbour on that side"
        return rank


def message_tag(action: Action) -> int:
    """Return the tag of a message's flow (`Links`).

    The tag encodes the direction, and the boundary if the worker has several stages.
    """
    forward = action.kind in (Kind.SEND_F, Kind.RECV_F)
    if action.stage < 0:
        return 0 if forward else 1
    upper = action.stage + (action.kind in (Kind.SEND_F, Kind.RECV_B))
    return 2 * upper + (0 if forward else 1)
