"""The judge of the other tests, on examples with a known answer."""

from __future__ import annotations

from elastic.domain.types import GRADIENT, STATE, UPDATE, Copy
from tests.core.recovery.copies import M, gradient, state, update
from tests.core.recovery.job_model import make_spec
from tests.core.recovery.oracle import of_present_history, reachable_versions

SPEC = make_spec(2, M, 20)


def versions(*copies: Copy, recorded: tuple[int, ...] = ()) -> set[int]:
    return reachable_versions(copies, SPEC, recorded)


def test_all_layers_need_a_copy_of_one_version() -> None:
    assert versions(state(0, 3), state(0, 4), state(1, 4), state(1, 5)) == {4}
    assert versions(state(0, 3), state(1, 4)) == set()
    assert versions(state(0, 3)) == set()


def test_a_chain_of_updates_has_one_owner_and_no_gap() -> None:
    both = (state(0, 2), state(0, 5), state(1, 2), update(1, 2), update(1, 3))
    assert versions(*both, update(1, 4)) == {2, 5}
    assert versions(*both, update(1, 4, owner="b")) == {2}
    assert versions(*both, update(1, 4, epoch=9)) == {2}
    assert versions(*both) == {2}


def test_gradients_repeat_a_step_if_its_record_and_each_micro_batch_once_are_there() -> None:
    base = (state(0, 2), state(0, 3), state(1, 2), gradient(1, 2, {0, 1}), gradient(1, 2, {1, 2}))
    assert versions(*base, gradient(1, 2, {2, 3}), recorded=(2,)) == {2, 3}
    assert versions(*base, gradient(1, 2, {2, 3})) == {2}
    assert versions(*base, gradient(1, 2, {3}), recorded=(2,)) == {2}


def test_a_tied_layer_needs_the_gradients_of_both() -> None:
    spec, whole = make_spec(2, M, 20, tied=True), set(range(M))
    copies = (state(0, 2), state(1, 3), state(1, 2), gradient(0, 2, whole))
    assert reachable_versions(copies, spec, (2,)) == {2}
    assert reachable_versions((*copies, gradient(1, 2, whole)), spec, (2,)) == {2, 3}


def test_a_later_epoch_undoes_what_it_computes_again() -> None:
    """Epoch 5 began at step 3; the copies are of epoch 4."""
    began = {4: 0, 5: 3}
    kept = [state(0, 3), gradient(0, 3, {0}), update(0, 2)]
    assert [c.kind for c in kept if of_present_history(c, began)] == [STATE, GRADIENT, UPDATE]
    undone = [state(0, 4), gradient(0, 4, {0}), update(0, 3)]
    assert not any(of_present_history(copy, began) for copy in undone)
    assert of_present_history(state(0, 4, epoch=5), began)
