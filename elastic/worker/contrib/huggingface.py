"""A transformers model as a list of layers. No other file imports transformers.

The model's own forward pass prepares the arguments of its blocks, calls them, and computes the
loss. Each layer runs that code with other layers replaced ("Hugging Face" in
docs/design/models.md), so no architecture needs code of its own:

- layer 0 runs the model up to the call of the first block;
- a block is called with the arguments that a copy of the model without parameters has recorded;
- the last layer runs the model with blocks that pass the hidden states on.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from elastic.domain.errors import FieldError, describe, needs_extra, with_place
from elastic.worker.contrib.safetensors_folder import Weights, weights_in
from elastic.worker.model.checks import Described, description
from elastic.worker.model.meta_modules import parameters_on_meta, without_memory
from elastic.worker.model.microbatch import Microbatch
from elastic.worker.model.whole_model import Values, WholeModel, values_of

with needs_extra("hf", "A Hugging Face model"):
    import transformers
    from transformers import (
        AutoConfig,
        AutoModelForCausalLM,
        Cache,
        PreTrainedConfig,
        PreTrainedModel,
    )

MODEL = (
    "a transformers model, its config, or a folder with config.json, as "
    "AutoConfig.from_pretrained('folder') or LlamaConfig(hidden_size=64, ...)"
)
LABELS = (
    "give the model what it computes its loss from: the field is usually called labels; or give "
    "from_huggingface loss=function(outputs, microbatch)"
)
SPLIT = "build its layers by hand (docs/guide/custom-model.md)"
Loss = Callable[[Any, Microbatch], Tensor]


def from_huggingface(
    model: PreTrainedModel | PreTrainedConfig | str | Path,
    *,
    seed: int = 0,
    loss: Loss | None = None,
    varying: bool = False,
) -> HuggingFaceStack:
    """Return the layers of a transformers model: one before its blocks, each block, one behind.

    Args:
        model: a config: parameters get the initial values of the model's own initialisation. A
            folder with a config.json and safetensors files: a node reads the tensors of its layers;
            without such files, as a config. A model: it is cut as it is, with its values; each
            worker then holds the whole model in host memory.
        seed: seed of initial values.
        loss: loss(outputs of the model, micro-batch) -> scalar; None: the loss that the model
            computes.
        varying: whether the shapes of the fields differ from micro-batch to micro-batch.

    The fields of a micro-batch are the keyword arguments of the model's forward. Raises FieldError
    for a model that cannot be cut, with the module where, and MissingExtra without transformers.
    """
    return HuggingFaceStack(_Skeleton.of(model), seed, loss, varying)


@dataclass(frozen=True, slots=True, eq=False)
class _Skeleton:
    """A model whose parameters have no memory, and the place of its blocks."""

    model: PreTrainedModel
    path: str
    """Name of the list of blocks, as model.layers."""
    values: Values | None
    """Values of its parameters; None: the model's own initialisation."""

    @classmethod
    def of(cls, given: object) -> _Skeleton:
        values: Values | None = None
        if isinstance(given, str | Path):
            values = weights_in(Path(given))
            given = _config_in(Path(given))
        if isinstance(given, PreTrainedModel):
            model, values = without_memory(given), values_of(given)
        elif isinstance(given, PreTrainedConfig):
            with parameters_on_meta():
                model = cast(Any, _model_class(given))._from_config(copy.deepcopy(given))
        else:
            raise FieldError("model", description(given), MODEL)
        if getattr(model.config, "output_router_logits", False):
            remedy = "set it to False: the routers' loss does not pass through pipelines yet"
            raise FieldError(f"{type(model.config).__name__}.output_router_logits", True, remedy)
        for part in model.modules():
            config = getattr(part, "config", None)
            if isinstance(config, PreTrainedConfig):
                config.use_cache = False  # a cache would carry values from block to block
        if isinstance(values, Weights):
            values.prefix = f"{model.base_model_prefix}."
        return cls(model.train(), _path_of_blocks(model), values)

    @property
    def n_blocks(self) -> int:
        return len(self.blocks)

    @property
    def blocks(self) -> nn.ModuleList:
        found = self.model.get_submodule(self.path)
        assert isinstance(found, nn.ModuleList)
        return found

    def around(self) -> tuple[list[str], list[str]]:
        """Return the names of the modules with parameters before and behind the blocks, in the
        order of their calls. Raises FieldError for a parameter that is in none of them."""
        before: list[str] = []
        behind: list[str] = []
        parent: nn.Module = self.model
        prefix = ""
        for word in self.path.split("."):
            for name, _ in parent.named_parameters(recurse=False):
                what = Described("a parameter beside the blocks")
                raise FieldError(f"{type(self.model).__name__}, {prefix}{name}", what, SPLIT)
            children = dict(parent.named_children())
            names = [n for n, child in children.items() if n == word or _has_parameters(child)]
            place = names.index(word)
            before += [f"{prefix}{name}" for name in names[:place]]
            behind = [f"{prefix}{name}" for name in names[place + 1 :]] + behind
            parent, prefix = children[word], f"{prefix}{word}."
        return before, behind


def _has_parameters(module: nn.Module) -> bool:
    return any(True for _ in module.parameters())


def _config_in(folder: Path) -> PreTrainedConfig:
    if not (folder / "config.json").is_file():
        raise FieldError("model", str(folder), f"it has no config.json: {MODEL}")
    return cast(PreTrainedConfig, AutoConfig.from_pretrained(folder, local_files_only=True))


def _model_class(config: PreTrainedConfig) -> type[PreTrainedModel]:
    """Return the class that the config names, or else the language model of its family."""
    for name in config.architectures or ():
        found = getattr(transformers, name, None)
        if isinstance(found, type) and issubclass(found, PreTrainedModel):
            return found
    mapping = AutoModelForCausalLM._model_mapping
    if type(config) not in mapping:
        remedy = "name the class in config.architectures, as ['LlamaForCausalLM']"
        raise FieldError("model", description(config), remedy)
    found = mapping[type(config)]
    return cast(type[PreTrainedModel], found[0] if isinstance(found, tuple) else found)


def _path_of_blocks(model: PreTrainedModel) -> str:
    """Return the name of the list of blocks. Raises FieldError unless there is one."""
    kinds = set(model._no_split_modules or ())
    found: dict[str, nn.ModuleList] = {}
    for path, part in model.named_modules():
        inside = any(path.startswith(f"{known}.") for known in found)
        if inside or not isinstance(part, nn.ModuleList) or not len(part):
            continue
        if kinds and {type(block).__name__ for block in part} <= kinds:
            found[path] = part
    if len(found) != 1:
        names = " and ".join(found)
        what = f"a model with several lists of blocks, {names}" if found else "no list of blocks"
        raise FieldError(type(model).__name__, Described(what), SPLIT)
    return next(iter(found))


class _Reached(Exception):
    """Ends the model's forward pass where enough is known."""

    def __init__(self, hidden: Tensor | None = None) -> None:
        super().__init__()
        self.hidden = hidden


class _Call:
    """What the replaced modules of one model use during one forward pass."""

    def __init__(self) -> None:
        self.hidden: Tensor | None = None
        self.arguments: list[Arguments] = []
        self.in_tuple: bool | None = None
        """Whether a block returns its hidden states in a tuple; None: not known yet."""
        self.checked = False
        """Whether the arguments of the blocks were checked."""
        self.passed_on = False
        """Whether the forward pass has reached the blocks."""


Arguments = tuple[tuple[Any, ...], dict[str, Any]]
"""Arguments of a block behind its hidden states."""


class _Replacement(nn.Module):
    """Stands for another module, and has its attributes, but not its parameters."""

    def __init__(self, instead_of: nn.Module, call: _Call) -> None:
        super().__init__()
        self.__dict__["original"] = instead_of  # not a submodule
        self.__dict__["call"] = call

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            return getattr(self.__dict__["original"], name)


def _hidden_of(args: tuple[Any, ...], named: dict[str, Any]) -> tuple[Tensor, Arguments]:
    """Split the arguments of a block into hidden states and the rest."""
    if args:
        return args[0], (args[1:], named)
    rest = dict(named)
    return rest.pop("hidden_states"), ((), rest)


class _Stop(_Replacement):
    """The first block of layer 0."""

    def forward(self, *args: Any, **named: Any) -> Tensor:
        raise _Reached(_hidden_of(args, named)[0])


class _Record(_Replacement):
    """A block that keeps its arguments."""

    def forward(self, *args: Any, **named: Any) -> Any:
        call: _Call = self.__dict__["call"]
        hidden, rest = _hidden_of(args, named)
        call.arguments.append(rest)
        if len(call.arguments) == self.__dict__["count"]:
            raise _Reached
        return hidden  # the next block's recorder ignores what it gets


class _PassOn(_Replacement):
    """A block of the last layer: returns the hidden states that the last block has returned."""

    def forward(self, *args: Any, **named: Any) -> Any:
        call: _Call = self.__dict__["call"]
        call.passed_on = True
        return (call.hidden,) if call.in_tuple else call.hidden


class _Before(_Replacement):
    """A module before the blocks: its result, NaN, has a fitting shape and must not matter."""

    def forward(self, *args: Any, **named: Any) -> Any:
        call: _Call = self.__dict__["call"]
        original = self.__dict__["original"]
        if call.passed_on:
            what = Described("a module before the blocks that is used behind them")
            raise FieldError(self.__dict__["path"], what, SPLIT)
        assert call.hidden is not None
        shape = call.hidden.shape
        given = [value for value in (*args, *named.values()) if isinstance(value, Tensor)]
        if not self.__dict__["first"] and given:
            wide = (original.embedding_dim,) if isinstance(original, nn.Embedding) else ()
            shape = torch.Size((*given[0].shape, *wide))
        return call.hidden.new_full(shape, torch.nan)


class _Behind(_Replacement):
    """A module behind the blocks, where none is reached."""

    def forward(self, *args: Any, **named: Any) -> Any:
        what = Described("a module behind the blocks that is also used before them")
        raise FieldError(self.__dict__["path"], what, SPLIT)


class _Layer(nn.Module):
    """The model with some modules replaced."""

    def __init__(self, model: nn.Module, call: _Call) -> None:
        super().__init__()
        self.model = model
        self.__dict__["call"] = call

    def run(self, fields: dict[str, Any], hidden: Tensor | None) -> Any:
        """Run the model's forward pass. Raises _Reached."""
        call: _Call = self.__dict__["call"]
        call.hidden, call.arguments, call.passed_on = hidden, [], False
        try:
            return self.model(**fields)
        finally:
            call.hidden = None


class _First(_Layer):
    def forward(self, hidden: None, microbatch: Microbatch) -> Tensor:
        try:
            self.run(dict(microbatch.fields), None)
        except _Reached as reached:
            assert reached.hidden is not None
            return reached.hidden
        raise FieldError(type(self.model).__name__, Described("a model without blocks"), SPLIT)


class _Block(nn.Module):
    """One block. `recorder` returns the recorder of a device."""

    def __init__(self, block: nn.Module, index: int, recorder: Callable[[torch.device], _Layer]):
        super().__init__()
        self.block, self._index = block, index
        self.__dict__["recorder"] = recorder

    def forward(self, hidden: Tensor, microbatch: Microbatch) -> Tensor:
        arguments = microbatch.once("huggingface", lambda: self._record(hidden, microbatch))
        args, named = arguments[self._index]
        out = self.block(hidden, *args, **named)
        return cast(Tensor, out[0] if isinstance(out, tuple) else out)

    def _record(self, hidden: Tensor, microbatch: Microbatch) -> list[Arguments]:
        """Return the arguments of all blocks. The hidden states and all that the modules before the
        blocks return are NaN here, so an argument that depends on them shows it. Raises FieldError
        for such an argument, because this stage cannot compute it."""
        recorder: _Layer = self.__dict__["recorder"](hidden.device)
        call: _Call = recorder.__dict__["call"]
        try:
            recorder.run(dict(microbatch.fields), torch.full_like(hidden, torch.nan))
        except _Reached:
            pass
        except (AttributeError, IndexError, KeyError, RuntimeError, TypeError) as error:
            cause = with_place(describe(error), error)
            what = Described(f"a model that fails when it is cut ({cause})")
            raise FieldError(type(recorder.model).__name__, what, SPLIT) from error
        found, call.arguments = call.arguments, []
        if not call.checked:
            call.checked = True
            for index, (args, named) in enumerate(found):
                named = {**{f"argument {i + 1}": one for i, one in enumerate(args)}, **named}
                for name, value in named.items():
                    if isinstance(value, Cache) or any(map(_depends, tree_leaves(value))):
                        what = Described("a value that depends on other layers")
                        raise FieldError(f"block {index}, {name}", what, SPLIT)
        return found


def _depends(value: object) -> bool:
    """Return whether `value` was computed from NaN."""
    return isinstance(value, Tensor) and value.is_floating_point() and bool(value.isnan().any())


class _Last(_Layer):
    def __init__(self, model: nn.Module, call: _Call, behind: str, loss: Loss | None) -> None:
        """`behind`: name of the first module behind the blocks."""
        super().__init__(model, call)
        self.__dict__.update(behind=behind, loss=loss)

    def forward(self, hidden: Tensor, microbatch: Microbatch) -> Tensor:
        call: _Call = self.__dict__["call"]
        if call.in_tuple is None:
            self._find_out(hidden, microbatch)
        outputs = self.run(dict(microbatch.fields), hidden)
        loss: Loss | None = self.__dict__["loss"]
        if loss is not None:
            return loss(outputs, microbatch)
        found = getattr(outputs, "loss", None)
        if found is None:
            names = ", ".join(microbatch.fields)
            raise FieldError("data", Described(f"fields without a loss ({names})"), LABELS)
        return cast(Tensor, found)

    def _find_out(self, hidden: Tensor, microbatch: Microbatch) -> None:
        """Find out whether the model expects the result of a block in a tuple: then the first
        module behind the blocks gets the hidden states, else a part of them."""
        call: _Call = self.__dict__["call"]
        behind = self.model.get_submodule(self.__dict__["behind"])

        def compare(module: nn.Module, args: tuple[Any, ...], named: dict[str, Any]) -> None:
            found = next((v for v in (*args, *named.values()) if isinstance(v, Tensor)), None)
            raise _Reached(found)

        handle = behind.register_forward_pre_hook(compare, with_kwargs=True)
        try:
            for call.in_tuple in (False, True):
                with torch.random.fork_rng(devices=[]), torch.no_grad():
                    try:
                        self.run(dict(microbatch.fields), hidden)
                    except _Reached as reached:
                        if reached.hidden is not None and reached.hidden.shape == hidden.shape:
                            return
                    except (AttributeError, IndexError, RuntimeError, TypeError):
                        continue  # it expects the other
        finally:
            handle.remove()
        what = Described("a module that does not get the result of the last block")
        raise FieldError(f"{type(self.model).__name__}, {self.__dict__['behind']}", what, SPLIT)


class HuggingFaceStack(WholeModel):
    """The layers of a transformers model, made by `from_huggingface`."""

    def __init__(self, skeleton: _Skeleton, seed: int, loss: Loss | None, varying: bool) -> None:
        self._skeleton, self._loss = skeleton, loss
        self._before, self._behind = skeleton.around()
        for names, side in ((self._before, "before"), (self._behind, "behind")):
            if not names:
                what = Described(f"a model without parameters {side} its blocks")
                raise FieldError(type(skeleton.model).__name__, what, SPLIT)
        self._recorders: dict[torch.device, _Layer] = {}
        super().__init__(skeleton.model, seed, values=skeleton.values, varying=varying)

    @property
    def n_layers(self) -> int:
        return self._skeleton.n_blocks + 2

    @property
    def config(self) -> PreTrainedConfig:
        """The model's config."""
        return self._skeleton.model.config

    def name_of(self, layer: int, name: str) -> str:
        kind, _, rest = name.partition(".")
        return f"{self._skeleton.path}.{layer - 1}.{rest}" if kind == "block" else rest

    def initialise(self, module: nn.Module) -> None:
        _initialise(module, self._skeleton.model)

    def empty_layer(self, index: int) -> nn.Module:
        skeleton, call = self._skeleton, _Call()
        if 0 < index < self.n_layers - 1:
            block = copy.deepcopy(skeleton.blocks[index - 1])
            return _Block(block, index - 1, self._recorder)
        model = copy.deepcopy(skeleton.model)
        if index == 0:
            self._replace_blocks(model, call, _Stop)
            self._replace(model, call, self._behind, _Behind)
            return _First(model, call)
        self._replace_blocks(model, call, _PassOn)
        self._replace(model, call, self._before, _Before)
        return _Last(model, call, self._behind[0], self._loss)

    def _recorder(self, device: torch.device) -> _Layer:
        """Return the model that records the arguments of its blocks on `device`."""
        if device not in self._recorders:
            model, call = copy.deepcopy(self._skeleton.model), _Call()
            self._replace_blocks(model, call, _Record)
            self._replace(model, call, self._before, _Before)
            self._replace(model, call, self._behind, _Behind)
            self._recorders[device] = _Layer(cast(nn.Module, model).to(device).eval(), call)
        return self._recorders[device]

    def _replace_blocks(self, model: nn.Module, call: _Call, kind: type[_Replacement]) -> None:
        blocks = model.get_submodule(self._skeleton.path)
        assert isinstance(blocks, nn.ModuleList)
        for index, original in enumerate(self._skeleton.blocks):
            made = kind(original, call)
            made.__dict__["count"] = len(blocks)
            blocks[index] = made

    def _replace(
        self, model: nn.Module, call: _Call, names: list[str], kind: type[_Replacement]
    ) -> None:
        for place, path in enumerate(names):
            parent, _, name = path.rpartition(".")
            made = kind(self._skeleton.model.get_submodule(path), call)
            made.__dict__.update(first=place == 0, path=path)
            setattr(model.get_submodule(parent), name, made)


def _initialise(module: nn.Module, owner: PreTrainedModel) -> None:
    """Give each part of `module`, children first, the initial values of the model it belongs to."""
    for child in module.children():
        _initialise(child, child if isinstance(child, PreTrainedModel) else owner)
    if not isinstance(module, _Replacement | _Layer | _Block):
        cast(Any, owner)._init_weights(module)
