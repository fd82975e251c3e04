"""The ranks of a tensor-parallel group leave an epoch together, wherever each of them is."""

from __future__ import annotations

import threading
from collections.abc import Callable
from itertools import product
from types import SimpleNamespace
from typing import Any

import pytest

from elastic.core.protocol import messages as m
from elastic.core.protocol.timeouts import DEFAULT_TIMEOUTS
from elastic.domain.errors import VaultError
from elastic.domain.types import Assignment, Unit
from elastic.planning.plan.plan import parse_plan
from elastic.worker import epoch_session
from elastic.worker.control.meeting_point import MeetingPoint
from elastic.worker.engine.stage_runner import GroupAgreement
from elastic.worker.epoch_session import EpochSession
from elastic.worker.model.layers import TensorParallel
from elastic.worker.transport.cancellation import AbandonSignal, LinkFailed
from tests.patience import LONG_S
from tests.worker.engine.thread_group import ThreadGroup

PLAN = """plan epoch=1 layers=2 microbatches=1 tp=2 backup=stream+snapshot
pipeline 0 microbatches=0: a[0:2]
"""


class Agent:
    """The client of an agent that can announce a newer epoch, or the end of the job."""

    position = SimpleNamespace(update=lambda *_: None)

    def __init__(self) -> None:
        self.abandon, self.sent = AbandonSignal(), list[Any]()
        self.meeting = MeetingPoint("a")
        self.placed = threading.Event()
        """Set when the rank waits for an order, for the other rank, or in its installation."""
        self._ordered = threading.Event()
        self._newest: int | None = None

    def begin_epoch(self, epoch: int) -> AbandonSignal:
        return self.abandon

    def await_halt(self, epoch: int) -> int | None:
        self.placed.set()
        assert self._ordered.wait(LONG_S)
        return self._newest

    def send(self, message: Any) -> None:
        self.sent.append(message)

    def order(self, epoch: int | None) -> None:
        """Announce `epoch`; None: the job is over."""
        self._newest = epoch
        self.abandon.set("an order")
        self._ordered.set()


class Steps:
    """A runner of steps whose first step behaves as `body` does."""

    def __init__(self, session: EpochSession, body: Callable[[GroupAgreement], None]) -> None:
        self.step, self.record, self._body = 0, None, body
        self._agreement = session._agreement
        self.runner = SimpleNamespace(step=0, started=(), sent=(), agreement=self._agreement)

    def run(self, *_: Any) -> None:
        self._body(self._agreement)
        raise AssertionError("the first step does not end")


def is_installing(session: EpochSession, agent: Agent) -> Steps:
    """The rank waits for others in its installation."""
    agent.placed.set()
    assert session._abandon.wait(LONG_S)
    session._abandon.check()
    raise AssertionError("it was not ordered to leave")


def fails_to_install(session: EpochSession, agent: Agent) -> Steps:
    """The rank is ready later than the others, and a link of its own fails."""
    raise LinkFailed((0,), "broken")


def begins_the_step(session: EpochSession, agent: Agent) -> Steps:
    """The rank is installed, and waits for the others before its first action, or before each."""

    def body(agreement: GroupAgreement) -> None:
        agent.placed.set()
        with agreement:
            while True:
                agreement.check()

    return Steps(session, body)


def fails_in_the_update(session: EpochSession, agent: Agent) -> Steps:
    """The rank finds no room for a copy between two exchanges with the others."""

    def body(agreement: GroupAgreement) -> None:
        raise VaultError("no room")

    return Steps(session, body)


PLACES = [is_installing, fails_to_install, begins_the_step, fails_in_the_update]


@pytest.mark.parametrize("newest", [2, None], ids=["halt", "stop"])
@pytest.mark.parametrize(
    "places", list(product(PLACES, PLACES)), ids=lambda two: "-".join(one.__name__ for one in two)
)
def test_all_ranks_of_a_group_leave(
    places: tuple[Callable[..., Steps], ...], newest: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No rank remains in an exchange in which another one takes no part."""
    group, agents = ThreadGroup(2), [Agent(), Agent()]
    monkeypatch.setattr(epoch_session, "tp_sync", lambda tp: group.sync_of(tp.rank))

    def install(session: EpochSession) -> Steps:
        rank = session._context.tp.rank
        return places[rank](session, agents[rank])

    monkeypatch.setattr(EpochSession, "_install", install)
    order = m.Install(1, Assignment(parse_plan(PLAN), 0))
    threads = []
    for rank, agent in enumerate(agents):
        context: Any = SimpleNamespace(
            agent=agent,
            unit=Unit("a"),
            tp=TensorParallel(rank, 2),
            settings=SimpleNamespace(timeouts=DEFAULT_TIMEOUTS),
            job=SimpleNamespace(spec=SimpleNamespace(n_steps=3)),
            replicas={},
            evaluated=None,
            protection=None,
            left_links=None,
        )
        session = EpochSession(context, order)
        threads.append(threading.Thread(target=session.run, daemon=True))
        threads[-1].start()
    for agent in agents:
        assert agent.placed.wait(LONG_S)
    for agent in agents:
        agent.order(newest)
    for thread in threads:
        thread.join(LONG_S)
    assert not any(thread.is_alive() for thread in threads)
    assert group.calls[0] == group.calls[1] > 0
    for agent in agents:
        halted = [one.epoch for one in agent.sent if isinstance(one, m.Halted)]
        assert halted == ([] if newest is None else [newest])
