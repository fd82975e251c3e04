"""Modules that stand for other modules of a transformers model while a layer runs its code.

They watch that the model calls its blocks one after the other, each with the hidden states that the
one before has returned. A model that does anything else is refused, because a layer would silently
leave something out.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import MappingProxyType, MethodType
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves
from transformers import Cache

from elastic.domain.errors import FieldError, describe, with_place
from elastic.worker.contrib.huggingface.router_logits import (
    HIDDEN,
    Logits,
    RouterOutputs,
    emit_logits,
    recorded,
)
from elastic.worker.model.checks import Described
from elastic.worker.model.microbatch import Microbatch
from elastic.worker.model.values import Value
from elastic.worker.transport.device_fault import is_local_fault

LABELS = (
    "give the model what it computes its loss from: the field is usually called labels; or give "
    "from_huggingface loss=function(outputs, microbatch)"
)
SPLIT = "build its layers by hand (docs/guide/custom-model.md)"
FORMS = (0, 1, 2, 3)
"""How a block returns its hidden states: alone (0), or first in a tuple of so many values."""
Loss = Callable[[Any, Microbatch], Tensor]
NO_LOGITS: Logits = MappingProxyType({})
Arguments = tuple[tuple[Any, ...], dict[str, Any]]
"""Arguments of a block behind its hidden states."""


class Reached(Exception):
    """Ends the model's forward pass where enough is known."""

    def __init__(self, hidden: Tensor | None = None) -> None:
        super().__init__()
        self.hidden = hidden


class Call:
    """One forward pass of a model with replaced modules."""

    def __init__(self, n_blocks: int) -> None:
        self.n_blocks = n_blocks
        self.form: int | None = None
        """One of FORMS; None: not known yet."""
        self.known_fields: set[tuple[str, ...]] = set()
        """Names of the fields with which the arguments of the blocks were checked."""
        self.noted: list[str] = []
        """Names of the modules that were called before the blocks, in that order."""
        self.begin(None)

    def begin(self, hidden: Tensor | None, logits: Logits = NO_LOGITS) -> None:
        self.hidden = hidden
        """What the last block returns."""
        self.logits = logits
        """What the routers of all blocks have returned."""
        self.arguments: list[Arguments] = []
        self.called = 0
        """Number of blocks that were called."""
        self.expected: tuple[Tensor, int] | None = None
        """What the next block gets, with the number of changes it has seen."""

    def enter(self, index: int, given: Tensor) -> None:
        """Called as block `index` gets `given`. Raises FieldError unless the block before has just
        returned it."""
        if index != self.called:
            what = Described(f"a block that is called when block {self.called} should be")
            raise FieldError(f"block {index}", what, SPLIT)
        if self.expected is not None:
            expected, version = self.expected
            same = given.data_ptr() == expected.data_ptr() and given.shape == expected.shape
            if not same or given._version != version:
                what = Described(f"hidden states other than the result of block {index - 1}")
                raise FieldError(f"block {index}", what, SPLIT)
        self.called += 1

    def refuse_partly_called(self) -> None:
        """Raise FieldError if some blocks, but not all of them, were called."""
        if 0 < self.called < self.n_blocks:
            what = Described(f"a model that calls {self.called} of its {self.n_blocks} blocks")
            raise FieldError("blocks", what, SPLIT)

    def result(self) -> Tensor | tuple[Tensor, ...]:
        """Return the result of a block: NaN, or the hidden states at the last block."""
        assert self.hidden is not None
        out, nan = self.hidden, self.hidden.new_full((), torch.nan)
        if self.called < self.n_blocks:
            out = nan.expand(out.shape)
        self.expected = out, out._version
        return (out, *[nan] * (self.form - 1)) if self.form else out


class Replacement(nn.Module):
    """Stands for another module, and has its attributes, but not its parameters."""

    def __init__(self, instead_of: nn.Module, call: Call, path: str, index: int) -> None:
        """`index`: of the block, or of the module among those on its side of the blocks."""
        super().__init__()
        self.__dict__.update(original=instead_of, call=call, path=path, index=index)

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            found = getattr(self.__dict__["original"], name)
        if isinstance(found, MethodType):
            what = Described(f"a module whose {name}() the model calls, which may change it")
            raise FieldError(self.__dict__["path"], what, SPLIT)
        return found

    def entered(self, args: tuple[Any, ...], named: dict[str, Any]) -> tuple[Tensor, Arguments]:
        """Split the arguments of a block into hidden states and the rest."""
        if args:
            hidden, rest = args[0], (args[1:], named)
        else:
            others = dict(named)
            hidden, rest = others.pop("hidden_states"), ((), others)
        self.__dict__["call"].enter(self.__dict__["index"], hidden)
        return hidden, rest


class Stop(Replacement):
    """A block of layer 0."""

    def forward(self, *args: Any, **named: Any) -> Tensor:
        raise Reached(self.entered(args, named)[0])


class Record(Replacement):
    """A block that keeps its arguments."""

    def forward(self, *args: Any, **named: Any) -> Any:
        call: Call = self.__dict__["call"]
        call.arguments.append(self.entered(args, named)[1])
        if call.called == call.n_blocks:
            raise Reached
        return call.result()


class PassOn(Replacement):
    """Stands for a block in the last layer. The last of them returns the hidden states that this
    layer receives."""

    def forward(self, *args: Any, **named: Any) -> Any:
        call: Call = self.__dict__["call"]
        self.entered(args, named)
        emit_logits(self, self.__dict__["index"], call.logits)
        return call.result()


class Before(Replacement):
    """A module before the blocks: its result, NaN, has a fitting shape and must not matter."""

    def forward(self, *args: Any, **named: Any) -> Any:
        call: Call = self.__dict__["call"]
        original = self.__dict__["original"]
        if call.called:
            what = Described("a module before the blocks that is used behind them")
            raise FieldError(self.__dict__["path"], what, SPLIT)
        assert call.hidden is not None
        shape = call.hidden.shape
        given = [value for value in (*args, *named.values()) if isinstance(value, Tensor)]
        if given and isinstance(original, nn.Embedding):
            shape = torch.Size((*given[0].shape, original.embedding_dim))
        elif given and isinstance(original, nn.Linear):
            shape = torch.Size((*given[0].shape[:-1], original.out_features))
        elif given and self.__dict__["index"]:
            shape = given[0].shape
        return call.hidden.new_full(shape, torch.nan)


class Note(Before):
    """A module beside the blocks, whose call before them is noted."""

    def forward(self, *args: Any, **named: Any) -> Any:
        self.__dict__["call"].noted.append(self.__dict__["path"])
        return super().forward(*args, **named)


class Behind(Replacement):
    """A module behind the blocks, where none is reached."""

    def forward(self, *args: Any, **named: Any) -> Any:
        call: Call = self.__dict__["call"]
        call.refuse_partly_called()
        what = Described("a module behind the blocks that is also used before them")
        raise FieldError(self.__dict__["path"], what, SPLIT)


class CutModel(nn.Module):
    """The model with some modules replaced."""

    def __init__(self, model: nn.Module, call: Call) -> None:
        super().__init__()
        self.model = model
        self.__dict__["call"] = call

    def run(self, fields: dict[str, Any], hidden: Tensor | None, logits: Logits = NO_LOGITS) -> Any:
        """Run the model's forward pass. Raises Reached, and FieldError for another order of the
        blocks than one after the other."""
        call: Call = self.__dict__["call"]
        call.begin(hidden, logits)
        try:
            return self.model(**fields)
        finally:
            call.hidden = call.expected = None
            call.logits = NO_LOGITS

    def find_form(self, run: Callable[[], bool]) -> None:
        """Find out how a block returns its hidden states. `run()` runs the model with one form, and
        returns whether it could be right. Raises FieldError if none is."""
        call: Call = self.__dict__["call"]
        failures: list[tuple[int, Exception]] = []
        for form in FORMS:
            call.form = form
            try:
                if run():
                    return
                what = Described("a module behind the blocks that does not get their result")
                failure: Exception = FieldError(type(self.model).__name__, what, SPLIT)
            except (FieldError, *_FAILURES) as error:
                if not isinstance(error, FieldError) and not _is_by_the_cut(error):
                    raise
                failure = error
            failures.append((call.called, failure))
        call.form = None
        with self.named_failures():
            raise max(failures, key=lambda one: one[0])[1]

    def called_before_blocks(self) -> list[str]:
        """Return the names of the `Note` modules that run before the blocks, in the order of their
        calls, found with two tokens; empty for a model that needs other fields."""
        call: Call = self.__dict__["call"]
        with torch.random.fork_rng(devices=[]), torch.no_grad():
            try:
                self.run({"input_ids": torch.ones(1, 2, dtype=torch.int64)}, torch.zeros(1, 2, 1))
            except Reached:
                return list(dict.fromkeys(call.noted))
            except _FAILURES as error:
                if not _is_by_the_cut(error):
                    raise
        return []

    @contextmanager
    def named_failures(self) -> Iterator[None]:
        """Turn a failure of the model's code into a FieldError; a fault of the node stays one."""
        try:
            yield
        except _FAILURES as error:
            if not _is_by_the_cut(error):
                raise
            cause = with_place(describe(error), error)
            what = Described(f"a model that fails when it is cut ({cause})")
            raise FieldError(type(self.model).__name__, what, SPLIT) from error


_FAILURES = (AttributeError, IndexError, KeyError, RuntimeError, TypeError, ValueError)


def _is_by_the_cut(error: Exception) -> bool:
    """Return whether the replaced modules may have caused `error`, not the node or its memory."""
    return not (is_local_fault(error) or isinstance(error, torch.OutOfMemoryError | FieldError))


class First(CutModel):
    """Layer 0. `routed`: whether the value for the next layers collects logits of routers."""

    def __init__(self, model: nn.Module, call: Call, *, routed: bool) -> None:
        super().__init__(model, call)
        self.__dict__["routed"] = routed

    def forward(self, hidden: None, microbatch: Microbatch) -> Value:
        try:
            self.run(dict(microbatch.fields), None)
        except Reached as reached:
            assert reached.hidden is not None
            return {HIDDEN: reached.hidden} if self.__dict__["routed"] else reached.hidden
        raise FieldError(type(self.model).__name__, Described("a model without blocks"), SPLIT)


class Block(nn.Module):
    """One block. `recorder` returns the recorder of a device. `routers`: those of the block."""

    def __init__(
        self,
        block: nn.Module,
        index: int,
        recorder: Callable[[torch.device], Recorder],
        routers: RouterOutputs,
    ) -> None:
        super().__init__()
        self.block, self._index, self._routers = block, index, routers
        self.__dict__["recorder"] = recorder

    def forward(self, value: Value, microbatch: Microbatch) -> Value:
        if not isinstance(value, dict):
            return self._transformed(cast(Tensor, value), microbatch)
        with recorded(self.block, self._index, self._routers) as logits:
            hidden = self._transformed(value[HIDDEN], microbatch)
        return {**value, HIDDEN: hidden, **logits}

    def _transformed(self, hidden: Tensor, microbatch: Microbatch) -> Tensor:
        recorder: Recorder = self.__dict__["recorder"](hidden.device)
        key = "huggingface", hidden.dtype
        arguments = microbatch.once(key, lambda: recorder.arguments(hidden, microbatch))
        args, named = arguments[self._index]
        out = self.block(hidden, *args, **named)
        return cast(Tensor, out[0] if isinstance(out, tuple) else out)


class Recorder(CutModel):
    """The model without parameters, which records the arguments of its blocks."""

    def arguments(self, hidden: Tensor, microbatch: Microbatch) -> list[Arguments]:
        """Return the arguments of all blocks. The hidden states and all that the modules before the
        blocks return are NaN here, so an argument that depends on them shows it. Raises FieldError
        for such an argument, because this stage cannot compute it."""
        call: Call = self.__dict__["call"]
        fields, nan = dict(microbatch.fields), torch.full_like(hidden, torch.nan)

        def reaches_all() -> bool:
            try:
                self.run(fields, nan)
            except Reached:
                return True
            return False

        if call.form is None:
            self.find_form(reaches_all)
        with self.named_failures():
            reaches_all()
        found, call.arguments = call.arguments, []
        names = tuple(fields)
        call.refuse_partly_called()
        if names not in call.known_fields:
            call.known_fields.add(names)
            for index, one in enumerate(found):
                _check_arguments(index, one)
        return found


def _check_arguments(index: int, arguments: Arguments) -> None:
    """Raise FieldError for an argument that depends on hidden states."""
    args, named = arguments
    for name, value in {
        **{f"argument {i + 1} behind the hidden states": v for i, v in enumerate(args)},
        **named,
    }.items():
        if isinstance(value, Cache) or any(map(_is_nan, tree_leaves(value))):
            what = Described("a value that depends on other layers")
            raise FieldError(f"block {index}, {name}", what, SPLIT)


def _is_nan(value: object) -> bool:
    return isinstance(value, Tensor) and value.is_floating_point() and bool(value.isnan().any())


class Last(CutModel):
    """The last layer."""

    def __init__(self, model: nn.Module, call: Call, behind: list[str], loss: Loss | None) -> None:
        """`behind`: names of the modules behind the blocks."""
        super().__init__(model, call)
        self.__dict__.update(behind=behind, loss=loss)

    def forward(self, value: Value, microbatch: Microbatch) -> Tensor:
        call: Call = self.__dict__["call"]
        logits = value if isinstance(value, dict) else NO_LOGITS
        hidden = cast(Tensor, logits.get(HIDDEN, value))
        if call.form is None:
            self._find_form(hidden, logits, microbatch)
        outputs = self.run(dict(microbatch.fields), hidden, logits)
        call.refuse_partly_called()
        loss: Loss | None = self.__dict__["loss"]
        if loss is not None:
            return loss(outputs, microbatch)
        found = getattr(outputs, "loss", None)
        if found is None:
            names = ", ".join(microbatch.fields)
            raise FieldError("data", Described(f"fields without a loss ({names})"), LABELS)
        return cast(Tensor, found)

    def _find_form(self, hidden: Tensor, logits: Logits, microbatch: Microbatch) -> None:
        """Find out how a block returns its hidden states. A form is right if each block receives
        them from the one before, and the first module behind the blocks receives them with as many
        dimensions."""
        call: Call = self.__dict__["call"]
        behind = [self.model.get_submodule(name) for name in self.__dict__["behind"]]
        fields, devices = dict(microbatch.fields), [hidden.device] if hidden.is_cuda else []

        def stop(module: nn.Module, args: tuple[Any, ...], named: dict[str, Any]) -> None:
            found = next((v for v in (*args, *named.values()) if isinstance(v, Tensor)), None)
            raise Reached(found)

        def is_right() -> bool:
            with torch.random.fork_rng(devices=devices), torch.no_grad():
                try:
                    self.run(fields, hidden, logits)
                except Reached as reached:
                    call.refuse_partly_called()
                    return reached.hidden is not None and (
                        call.n_blocks > 1 or reached.hidden.shape == hidden.shape
                    )
            return False

        handles = [part.register_forward_pre_hook(stop, with_kwargs=True) for part in behind]
        try:
            self.find_form(is_right)
        finally:
            for handle in handles:
                handle.remove()
