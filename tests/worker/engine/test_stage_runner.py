"""Stage runners.

Gradients do not depend on the cuts, ledgers match the gradients, and a tensor-parallel group
leaves an epoch together.
"""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable

import pytest
import torch

from elastic.domain.errors import ElasticError, FieldError, VaultError
from elastic.domain.types import Accumulate
from elastic.planning.schedule.schedule import Action, Kind
from elastic.worker.engine.stage import LocalStage, stages_of_rank
from elastic.worker.engine.stage_runner import GroupAgreement
from elastic.worker.model.layers import ListStack
from elastic.worker.model.values import Message
from elastic.worker.transport.cancellation import AbandonSignal, EpochAbandoned, LinkFailed
from tests.planning.schedule.action_text import one_f_one_b, parse_actions
from tests.worker.engine.models import (
    First,
    PauseBefore,
    RecordingHooks,
    data,
    replicas,
    runner,
    single_rank_links,
    stack,
    train_on_one_worker,
)
from tests.worker.engine.plans import roster_of
from tests.worker.engine.rank_processes import Rank, Ranks, run_ranks
from tests.worker.engine.thread_group import ThreadGroup
from tests.worker.passes import forward

N_LAYERS, M = 4, 5
CUTS = [[0], [0, 1], [0, 3], [0, 1, 2], [0, 1, 2, 3]]


def run_stage(
    rank: Rank, cuts: list[int], accumulate: Accumulate
) -> list[tuple[torch.Tensor, dict[int, float]]]:
    roster = roster_of([cuts], N_LAYERS, [tuple(range(M))])
    layers = replicas(stack(N_LAYERS), roster.members[rank.rank].layers, accumulate)
    stage = runner(layers, rank.open(), M, stages_of_rank(roster, rank.rank, layers))
    hooks = RecordingHooks()
    actions = one_f_one_b(rank.rank, len(cuts), tuple(range(M)))
    for _ in range(2):
        for layer in layers:
            layer.clear()
        stage.run(0, actions, {}, hooks)
    assert hooks.finished == 2 * list(range(M))
    assert hooks.actions == 2 * list(actions)
    assert stage.started == set(range(M))
    assert stage.sent == (set() if rank.rank == len(cuts) - 1 else set(range(M)))
    assert all(layer.ledger == set(range(M)) for layer in layers)
    return [(layer.gradient, layer.losses) for layer in layers]


@pytest.mark.parametrize("accumulate", [Accumulate.FAST, Accumulate.EXACT])
@pytest.mark.parametrize("cuts", CUTS)
def test_gradients_do_not_depend_on_the_cuts(cuts: list[int], accumulate: Accumulate) -> None:
    whole = train_on_one_worker(stack(N_LAYERS), M, accumulate)
    found = [
        layer for stage in run_ranks(run_stage, len(cuts), cuts, accumulate) for layer in stage
    ]
    for layer, (gradient, losses) in zip(whole, found, strict=True):
        assert torch.equal(layer.gradient, gradient)
        assert layer.losses == losses


def test_one_worker_agrees_with_plain_autograd() -> None:
    """The reference is one backward pass of the mean loss over all micro-batches."""
    layers = train_on_one_worker(stack(N_LAYERS), M, Accumulate.FAST)
    total = torch.zeros(())
    for index in range(M):
        hidden = None
        for layer in layers:
            hidden = forward(layer, hidden, data(0, index))
        assert hidden is not None
        total = total + hidden
        assert layers[-1].losses[index] == hidden.item()
    torch.autograd.backward(total / M)
    for layer in layers:
        for name, parameter in layer.module.named_parameters():
            assert parameter.grad is not None
            flat = layer.gradient[layer.gradient_slice(name)]
            torch.testing.assert_close(flat, parameter.grad.flatten(), rtol=1e-5, atol=1e-7)


def test_gradients_are_added_only_where_they_are_missing() -> None:
    """A layer that has 0 and 2 already gets the other micro-batches and keeps its losses."""
    whole = train_on_one_worker(stack(N_LAYERS), M, Accumulate.EXACT)
    layers = replicas(stack(N_LAYERS), range(N_LAYERS), Accumulate.EXACT)
    done = frozenset({0, 2})
    stage = runner(layers, single_rank_links(), M)
    stage.run(
        0, one_f_one_b(0, 1, (0, 2)), dict.fromkeys(range(N_LAYERS - 1), done), RecordingHooks()
    )
    assert [sorted(layer.ledger) for layer in layers] == [[], [], [], [0, 2]]
    stage.run(0, one_f_one_b(0, 1, (1, 3, 4, 0, 2)), {N_LAYERS - 1: done}, RecordingHooks())
    for layer, expected in zip(layers, whole, strict=True):
        assert layer.ledger == set(range(M))
        assert torch.equal(layer.gradient, expected.gradient)
    assert layers[-1].losses == whole[-1].losses


def test_a_stage_of_a_frozen_first_layer_has_no_gradient() -> None:
    model = stack(N_LAYERS)
    frozen = ListStack([lambda: First().requires_grad_(False), *model.builders[1:]], model.seed)
    layer = replicas(frozen, (0,), Accumulate.EXACT)[0]
    stage = LocalStage([layer], following=1)
    output = stage.forward(data(0, 0), None)
    assert not output.spec.parts[0].gradient
    assert stage.backward(0, Message.of(())) is None
    stage.collect(0, {})
    assert layer.ledger == {0} and not layer.gradient.any()


def test_an_empty_list_does_nothing() -> None:
    stage = runner(replicas(stack(2), range(2), Accumulate.FAST), single_rank_links(), M)
    stage.run(0, (), {}, RecordingHooks())
    assert stage.started == set()


def test_actions_must_fit_the_stage() -> None:
    stage = runner(replicas(stack(2), range(2), Accumulate.FAST), single_rank_links(), M)
    with pytest.raises(AssertionError, match="no neighbour"):
        stage.run(0, parse_actions("RF0 F0 B0"), {}, RecordingHooks())


class AbandonAt(RecordingHooks):
    """Abandons the epoch before one action."""

    def __init__(self, abandon: AbandonSignal, at: str) -> None:
        super().__init__()
        self._abandon, self._at = abandon, at

    def before(self, action: Action) -> None:
        super().before(action)
        if str(action) == self._at:
            self._abandon.set(f"at {action}")


AT = [("F0", []), ("B0", []), ("F1", [0]), ("B4", [0, 1, 2, 3])]


@pytest.mark.parametrize(("at", "whole"), AT)
def test_ledgers_match_after_abandoning_between_actions(at: str, whole: list[int]) -> None:
    abandon = AbandonSignal()
    layers = replicas(stack(N_LAYERS), range(N_LAYERS), Accumulate.EXACT)
    hooks = AbandonAt(abandon, at)
    stage = runner(layers, single_rank_links(abandon), M)
    with pytest.raises(EpochAbandoned, match=f"at {at}"):
        stage.run(0, one_f_one_b(0, 1, tuple(range(M))), {}, hooks)
    assert [sorted(layer.ledger) for layer in layers] == [whole] * N_LAYERS
    assert hooks.finished == whole
    assert sorted(layers[-1].losses) == whole


def lose_a_stage(rank: Rank, at: str) -> tuple[set[int], set[int], set[int]]:
    """Run one of three stages. The last one is killed before action `at`."""
    roster = roster_of([[0, 1, 2]], N_LAYERS, [tuple(range(M))])
    layers = replicas(stack(N_LAYERS), roster.members[rank.rank].layers, Accumulate.EXACT)
    stage = runner(layers, rank.open(), M, stages_of_rank(roster, rank.rank, layers))
    hooks = PauseBefore(rank, at) if rank.rank == 2 else RecordingHooks()
    with pytest.raises(LinkFailed) as caught:
        stage.run(0, one_f_one_b(rank.rank, 3, tuple(range(M))), {}, hooks)
    assert caught.value.ranks == (2,)
    assert set(hooks.finished) == layers[0].ledger
    return layers[0].ledger, stage.started, stage.sent


@pytest.mark.parametrize(("at", "done"), [("F0", 0), ("B1", 1), ("SB3", 3)])
def test_ledgers_match_after_losing_a_stage(at: str, done: int) -> None:
    with Ranks(lose_a_stage, 3, at) as ranks:
        ranks.reports(2)
        ranks.signal(2, signal.SIGKILL)
        for ledger, started, sent in ranks.reports(0, 1):
            assert ledger <= set(range(done))
            assert ledger <= sent <= started


def run_group(
    bodies: list[Callable[[GroupAgreement], None]], abandons: list[AbandonSignal]
) -> tuple[list[type[BaseException] | None], list[int]]:
    """Run one body per rank of a group. Returns the errors and the numbers of `sync` calls."""
    group = ThreadGroup(len(bodies))
    raised: list[type[BaseException] | None] = [None] * len(bodies)

    def run(rank: int) -> None:
        agreement = GroupAgreement(group.sync_of(rank), abandons[rank])
        try:
            with agreement, agreement:
                bodies[rank](agreement)
        except (EpochAbandoned, ElasticError) as error:
            raised[rank] = type(error)

    threads = [threading.Thread(target=run, args=(rank,)) for rank in range(len(bodies))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return raised, group.calls


def check_thrice(agreement: GroupAgreement) -> None:
    for _ in range(3):
        agreement.check()


def test_a_group_continues_while_no_rank_must_leave() -> None:
    found, calls = run_group([check_thrice, check_thrice], [AbandonSignal(), AbandonSignal()])
    assert (found, calls) == ([None, None], [3, 3])


def test_a_group_leaves_at_the_same_check() -> None:
    abandons = [AbandonSignal(), AbandonSignal()]

    def leave_after_one(agreement: GroupAgreement) -> None:
        agreement.check()
        abandons[0].set("a newer epoch")
        check_thrice(agreement)

    found, calls = run_group([leave_after_one, check_thrice], abandons)
    assert (found, calls) == ([EpochAbandoned, EpochAbandoned], [2, 2])


@pytest.mark.parametrize("error", [EpochAbandoned("a newer epoch"), VaultError("no room")])
def test_a_rank_that_fails_between_checks_notifies_the_others_once(error: Exception) -> None:
    def fail_after_one(agreement: GroupAgreement) -> None:
        agreement.check()
        raise error

    found, calls = run_group([fail_after_one, check_thrice], [AbandonSignal(), AbandonSignal()])
    assert (found, calls) == ([type(error), EpochAbandoned], [2, 2])
    found, calls = run_group([fail_after_one, fail_after_one], [AbandonSignal(), AbandonSignal()])
    assert (found, calls) == ([type(error)] * 2, [2, 2])


def test_a_rank_reports_a_failed_link_before_it_tells_its_group() -> None:
    """The other rank may wait in a collective that does not fail, until an epoch is announced for
    this very report."""

    def no_exchange(flag: bool) -> bool:
        raise AssertionError("the other rank takes part in no exchange")

    with pytest.raises(LinkFailed), GroupAgreement(no_exchange, AbandonSignal()):
        raise LinkFailed((4,), "broken")


def leave(agreement: GroupAgreement) -> None:
    agreement.leave()
    agreement.leave()


def leave_after_one(agreement: GroupAgreement) -> None:
    agreement.check()
    agreement.leave()


def fail_and_leave(agreement: GroupAgreement) -> None:
    try:
        with agreement:
            raise LinkFailed((4,), "broken")
    finally:
        agreement.leave()


@pytest.mark.parametrize(
    ("other", "error"),
    [(check_thrice, EpochAbandoned), (leave, None), (fail_and_leave, LinkFailed)],
)
def test_a_rank_that_has_left_takes_part_in_the_last_exchange_once(
    other: Callable[[GroupAgreement], None], error: type[BaseException] | None
) -> None:
    """For example, its installation failed, and the other rank has finished its own."""
    found, counts = run_group([leave, other], [AbandonSignal(), AbandonSignal()])
    assert (found, counts) == ([None, error], [1, 1])


def test_a_rank_may_leave_after_common_exchanges() -> None:
    bodies: list[Callable[[GroupAgreement], None]] = [leave_after_one, check_thrice]
    found, calls = run_group(bodies, [AbandonSignal(), AbandonSignal()])
    assert (found, calls) == ([None, EpochAbandoned], [2, 2])


def test_a_rank_leaves_although_the_others_have_died() -> None:
    """Its agent will end it, too."""

    def broken(flag: bool) -> bool:
        raise RuntimeError("connection closed by peer")

    GroupAgreement(broken, AbandonSignal()).leave()


def test_errors_of_the_user_are_not_shared() -> None:
    def broken(agreement: GroupAgreement) -> None:
        agreement.check()
        raise FieldError("x", 1, "fix it")

    found, calls = run_group([broken], [AbandonSignal()])
    assert (found, calls) == ([FieldError], [1])


def test_kinds_that_compute_and_that_receive() -> None:
    assert [k for k in Kind if k.computes] == [Kind.F, Kind.B, Kind.INPUT, Kind.WEIGHT]
    assert [k for k in Kind if k.receives] == [Kind.RECV_F, Kind.RECV_B]
