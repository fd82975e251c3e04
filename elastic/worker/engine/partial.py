"""Partial replay: runs micro-batches through only those layers that lack their gradients.

The first of the repeating stages reads its input from a message that its neighbour logged; the last
one reads its output's gradient in the same way. These messages are fetched from vaults while the
epoch is installed. All else is as in a full step (`elastic.worker.engine.stage_runner`).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

import torch

from elastic.domain.types import Assignment, Copy, PartialRun
from elastic.planning.plan.rank_map import RankMember, Roster
from elastic.planning.schedule.partial_schedule import excerpt, groups
from elastic.planning.schedule.schedule import Action, Kind
from elastic.worker.backup.activation_log import read_message
from elastic.worker.engine.stage import stages_of_rank
from elastic.worker.engine.stage_runner import Hooks, StageRunner
from elastic.worker.model.values import Message
from elastic.worker.replica.replica import LayerReplica


def needed_messages(assignment: Assignment, member: RankMember) -> Iterator[Copy]:
    """Yield the copies of logged messages that `member` needs for its partial replays."""
    for run in assignment.partial:
        if run.pipeline != member.pipeline:
            continue
        if run.inputs and run.first in member.layers:
            yield run.inputs[member.shard]
        if run.gradients and run.last - 1 in member.layers:
            yield run.gradients[member.shard]


class PartialRunner:
    """Runs the partial replays of one worker, before an epoch's first step.

    Args:
        messages: bytes of the copies that `needed_messages` names, by key.

    Raises VaultError if a message is malformed.
    """

    def __init__(
        self,
        assignment: Assignment,
        roster: Roster,
        rank: int,
        replicas: Sequence[LayerReplica],
        messages: dict[str, torch.Tensor],
    ) -> None:
        self.step = assignment.step
        self._groups = groups(assignment.partial, roster.members[rank].pipeline)
        self._member, self._places = roster.members[rank], roster.places(rank)
        self._pipeline = assignment.plan.pipelines[self._member.pipeline]
        self._roster, self._rank, self._replicas = roster, rank, replicas
        self._messages = {key: read_message(data) for key, data in messages.items()}

    def run(self, runner: StageRunner, skip: Mapping[int, frozenset[int]], hooks: Hooks) -> None:
        """Run all partial replays on `runner`. `StageRunner.run` defines arguments and errors."""
        for (first, last), runs in self._groups:
            indices = tuple(run.microbatch for run in runs)
            actions = excerpt(self._pipeline, first, last, indices)[self._member.stage]
            if actions:
                stages = stages_of_rank(self._roster, self._rank, self._replicas, first, last)
                given = self._logged_messages(runs)
                runner.run(self.step, actions, skip, hooks, given, stages)

    def _logged_messages(self, runs: Sequence[PartialRun]) -> dict[Action, Message]:
        """Return the logged messages of `runs`, by the action that would receive them."""
        messages = {}
        for run in runs:
            for copies, layer, kind in (
                (run.inputs, run.first, Kind.RECV_F),
                (run.gradients, run.last - 1, Kind.RECV_B),
            ):
                place = next((p for p in self._places if layer in p.stage.layers), None)
                if copies and place is not None:
                    number = place.number if len(self._places) > 1 else -1
                    message = self._messages.pop(copies[self._member.shard].key)
                    messages[Action(kind, run.microbatch, number)] = message
        return messages
