"""Wrong arguments of `Trainer`: one line says what was given, and what is wanted."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from elastic.domain.errors import FieldError, UsageError
from elastic.domain.types import JobSpec
from elastic.worker.datasets.map_style import from_dataset
from elastic.worker.evaluation import Evaluation
from elastic.worker.model.layers import ListStack
from elastic.worker.trainer import Trainer
from tests.worker.model.toy_model import microbatch, sgd, toy_stack

MODULE = nn.Sequential(nn.Linear(6, 6), nn.Linear(6, 1))
ADAM = torch.optim.Adam(MODULE.parameters())
WHOLE = "a whole number"
STACK = r"a LayerStack, as from_sequential\(model, .* or ListStack\(\[lambda: Layer"
OPTIMIZER = r"an OptimizerSpec, as OptimizerSpec\(factory=torch.optim.Adam, lr=lambda step: 0.003\)"


@pytest.mark.parametrize(
    ("name", "value", "given", "wanted"),
    [
        ("stack", MODULE, "an object of type Sequential", STACK),
        ("stack", nn.ModuleList([MODULE]), "an object of type ModuleList", STACK),
        ("stack", [lambda: MODULE], "an object of type list", STACK),
        ("stack", ListStack, "the class ListStack", STACK),
        ("stack", toy_stack, "the function toy_stack", STACK),
        ("stack", None, "None", STACK),
        ("optimizer", ADAM, "an object of type Adam", OPTIMIZER),
        ("optimizer", torch.optim.Adam, "the class Adam", OPTIMIZER),
        ("optimizer", "adam", "'adam'", OPTIMIZER),
        ("data", [microbatch(0, 0)], "an object of type list", r"a function data\(step, index\)"),
        ("steps", 0, "0", f"{WHOLE} from 1 up"),
        ("steps", 4.0, "4.0", f"{WHOLE} from 1 up"),
        ("steps", "4", "'4'", f"{WHOLE} from 1 up"),
        ("steps", None, "None", f"{WHOLE} from 1 up"),
        ("steps", True, "True", f"{WHOLE} from 1 up"),
        ("steps", 10**30, "1000000.*", f"{WHOLE} from 1 up below 2\\*\\*64"),
        ("microbatches", 2.5, "2.5", f"{WHOLE} from 1 to 1000000"),
        ("microbatches", 10**9, "1000000000", f"{WHOLE} from 1 to 1000000"),
        ("seed", "a", "'a'", WHOLE),
        ("seed", None, "None", WHOLE),
        ("seed", 2**64, "18446744073709551616", f"{WHOLE} below 2\\*\\*64"),
        ("weight", 3.0, "3.0", "a function of a micro-batch's fields"),
        ("weight", lambda: 1.0, "<lambda>.*", "a function of a micro-batch's fields"),
        ("tp", 0, "0", f"{WHOLE} from 1 up"),
        ("tp", "1", "'1'", f"{WHOLE} from 1 up"),
        ("tokens_per_microbatch", -5, "-5", f"{WHOLE} from 0 up"),
        ("tokens_per_microbatch", 1.5, "1.5", f"{WHOLE} from 0 up"),
        ("tokens_per_sequence", -1, "-1", f"{WHOLE} from 0 up"),
        ("tokens_per_sequence", 2.5, "2.5", f"{WHOLE} from 0 up"),
        ("tokens_per_sequence", 9, "9", "at most tokens_per_microbatch, which is 0"),
        ("checkpoint_every", -1, "-1", f"{WHOLE} from 0 up"),
        ("checkpoint_every", None, "None", f"{WHOLE} from 0 up"),
        ("evaluation", 10, "10", r"Evaluation\(data=..., every=100, microbatches=8\)"),
        ("evaluation", microbatch, "the function microbatch", r"Evaluation\(data="),
    ],
)
def test_a_wrong_argument_is_named(name: str, value: Any, given: str, wanted: str) -> None:
    arguments = {"steps": 4, "microbatches": 2, "data": microbatch, name: value}
    with pytest.raises(FieldError, match=rf"^{name}: {given} is not usable: {wanted}") as caught:
        Trainer(**{"stack": toy_stack(), "optimizer": sgd(), **arguments})
    assert "\n" not in str(caught.value)


def test_with_weights_the_expected_one_must_be_given() -> None:
    arguments: dict[str, Any] = {"steps": 4, "microbatches": 2, "weight": lambda fields: 1.0}
    wanted = "^tokens_per_microbatch: 0 is not usable: with weight, the expected weight"
    with pytest.raises(FieldError, match=wanted):
        Trainer(stack=toy_stack(), optimizer=sgd(), data=microbatch, **arguments)
    made = Trainer(
        stack=toy_stack(), optimizer=sgd(), data=microbatch, tokens_per_microbatch=6, **arguments
    )
    assert made._job.typical_weight == 6.0


def test_a_weight_may_be_less_than_the_tokens_of_a_sequence() -> None:
    """It may count a few of the tokens alone."""
    arguments: dict[str, Any] = {
        "steps": 4,
        "microbatches": 2,
        "tokens_per_microbatch": 6,
        "tokens_per_sequence": 9,
    }
    given = {"stack": toy_stack(), "optimizer": sgd(), "data": microbatch, **arguments}
    wanted = "^tokens_per_sequence: 9 is not usable: at most tokens_per_microbatch, which is 6"
    with pytest.raises(FieldError, match=wanted):
        Trainer(**given)
    assert Trainer(**given, weight=lambda fields: 1.0)._job.tokens_per_sequence == 9


def test_numbers_of_other_libraries_are_whole_numbers_too() -> None:
    made = Trainer(
        stack=toy_stack(),
        optimizer=sgd(),
        data=microbatch,
        steps=torch.tensor(4),  # type: ignore[arg-type]
        microbatches=2,
        seed=2**64 - 1,
    )
    assert type(made._job.spec.n_steps) is int and made._job.spec.n_steps == 4


@pytest.mark.parametrize(
    ("name", "value", "given", "wanted"),
    [
        ("data", [microbatch(0, 0)], "an object of type list", r"a function data\(step, index\)"),
        ("data", lambda index: index, "<lambda>.*", r"a function data\(step, index\)"),
        ("every", 0, "0", f"{WHOLE} from 1 up"),
        ("every", "10", "'10'", f"{WHOLE} from 1 up"),
        ("microbatches", 0, "0", f"{WHOLE} from 1 to 1000000"),
        ("microbatches", 10**9, "1000000000", f"{WHOLE} from 1 to 1000000"),
    ],
)
def test_a_wrong_argument_of_an_evaluation_is_named(
    name: str, value: Any, given: str, wanted: str
) -> None:
    arguments = {"data": microbatch, "every": 2, "microbatches": 3, name: value}
    pattern = rf"^evaluation.{name}: {given} is not usable: {wanted}"
    with pytest.raises(FieldError, match=pattern):
        Evaluation(**arguments)


def test_data_made_for_another_number_of_micro_batches_is_refused() -> None:
    source = from_dataset([torch.ones(6)] * 64, rows=2, microbatches=4)
    with pytest.raises(FieldError, match=r"evaluation.microbatches: 3 .* 4, as the data was made"):
        Evaluation(data=source, every=2, microbatches=3)


def test_nodes_compare_when_they_evaluate() -> None:
    """A node whose script evaluates at other steps would wait in other exchanges."""

    def spec_of(**arguments: Any) -> JobSpec:
        common: dict[str, Any] = {"data": microbatch, "steps": 4, "microbatches": 2}
        return Trainer(stack=toy_stack(), optimizer=sgd(), **common, **arguments)._job.spec

    plain = spec_of()
    twice = spec_of(evaluation=Evaluation(data=microbatch, every=2, microbatches=3))
    assert [twice.evaluates(version) for version in range(5)] == [False, False, True, False, True]
    assert not any(plain.evaluates(version) for version in range(5))
    assert twice.joined(plain) is None and twice.joined(twice) == twice


def test_torchrun_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each of its processes would train the whole model alone."""
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "none")
    with pytest.raises(UsageError, match="torchrun has started this script: use `elastic run`"):
        Trainer(stack=toy_stack(), optimizer=sgd(), data=microbatch, steps=4, microbatches=2)
