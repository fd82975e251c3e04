"""Steps of one worker with real layers and backups."""

from __future__ import annotations

import threading
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

from elastic.core.protocol.fault_spec import Phase
from elastic.core.protocol.messages import Published
from elastic.domain.errors import VaultFull
from elastic.domain.types import Assignment
from elastic.planning.plan.plan import parse_plan
from elastic.planning.plan.rank_map import roster
from elastic.worker.backup.protection import Protection
from elastic.worker.backup.publisher import Publisher
from elastic.worker.control.agent_client import TrainingPosition
from elastic.worker.control.meeting_point import MeetingPoint
from elastic.worker.engine.partial import PartialRunner
from elastic.worker.engine.stage_runner import GroupAgreement
from elastic.worker.engine.step import StepRunner
from elastic.worker.transport.cancellation import AbandonSignal, EpochAbandoned
from tests.worker.engine.models import single_rank_links
from tests.worker.engine.thread_group import ThreadGroup
from tests.worker.model.toy_model import microbatch, replicas, sgd

PLAN = parse_plan(
    "plan epoch=1 layers=3 microbatches=2 tp=1 backup=recompute+replica\n"
    "pipeline 0 microbatches=0-1: node0[0:3]\n"
)


class Worker:
    """One rank of a tensor-parallel group. It trains alone, apart from the group's agreement."""

    def __init__(self, group: ThreadGroup, rank: int, directory: Path) -> None:
        self.publisher = Publisher(self._acknowledge, directory / str(rank), "node0", rank)
        self.full_in = -1
        """Step in whose reduction the memory of this worker becomes full."""
        self.layers, abandon, members = replicas(), AbandonSignal(), roster(PLAN)
        self.steps = StepRunner(
            plan=PLAN,
            roster=members,
            replicas=self.layers,
            links=single_rank_links(abandon),
            tied=(),
            optimizer=sgd(),
            data=microbatch,
            agreement=GroupAgreement(group.sync_of(rank), abandon),
            protection=Protection(
                self.publisher, PLAN, "node0", self.layers, abandon, lambda message: None, ()
            ),
            injector=cast(Any, SimpleNamespace(reach=self._reach, stretch=lambda seconds: None)),
            agent=cast(
                Any,
                SimpleNamespace(
                    position=TrainingPosition(),
                    boundary_requested=lambda: None,
                    meeting=MeetingPoint("node0"),
                ),
            ),
            on_microbatch=lambda: None,
            partial=PartialRunner(Assignment(PLAN, 0), members, 0, self.layers, {}),
        )

    def _acknowledge(self, published: Published) -> None:
        self.publisher.on_acked(published.bundle)

    def _reach(self, step: int, phase: Phase, microbatch: int | None = None) -> None:
        if step == self.full_in and phase is Phase.REDUCE:
            self.publisher._pool.limit = self.publisher._pool.allocated_bytes


def test_a_rank_without_room_for_its_new_state_tells_its_group(tmp_path: Path) -> None:
    """The other rank would wait for it in the group's next exchange, which nothing interrupts."""
    group, ends = ThreadGroup(2), dict[int, type[Exception]]()
    workers = [Worker(group, rank, tmp_path) for rank in range(2)]
    workers[0].full_in = 0

    def train(rank: int) -> None:
        try:
            for step in range(2):
                workers[rank].steps.run(step, [(0, 1)], {})
        except Exception as error:  # noqa: BLE001 - the test compares it
            ends[rank] = type(error)

    threads = [threading.Thread(target=train, args=(rank,)) for rank in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert ends == {0: VaultFull, 1: EpochAbandoned}
