"""A transformers model as a list of layers.

The model's own forward pass prepares the arguments of its blocks, calls them, and computes the
loss. Each layer runs that code with other layers replaced ("Hugging Face" in
docs/design/models.md), so no architecture needs code of its own:

- layer 0 runs the model up to the call of the first block;
- a block is called with the arguments that a copy of the model without parameters has recorded;
- the last layer runs the model with blocks that pass the hidden states on.
"""

from __future__ import annotations

import copy
import sys
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import torch
from torch import Tensor, nn

from elastic.domain.errors import FieldError, describe, needs_extra
from elastic.worker.contrib.huggingface.adapter_names import PlainValues, is_adapter, plain_name
from elastic.worker.contrib.huggingface.weights import Weights, weights_in
from elastic.worker.contrib.weights import take_weights
from elastic.worker.contrib.whole_model import (
    StoredValues,
    Values,
    WholeModel,
    multiplied,
    values_of,
)
from elastic.worker.model.checks import Described, description, whole_number
from elastic.worker.model.meta_modules import parameters_on_meta, without_memory
from elastic.worker.model.rng import derive_parameter_seed

with needs_extra("hf", "A Hugging Face model"):
    import transformers
    from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedConfig, PreTrainedModel

    from elastic.worker.contrib.huggingface.cut import (
        SPLIT,
        Before,
        Behind,
        Block,
        Call,
        CutModel,
        First,
        Last,
        Loss,
        Note,
        PassOn,
        Record,
        Recorder,
        Replacement,
        Stop,
    )
    from elastic.worker.contrib.huggingface.router_logits import (
        RouterOutputs,
        StandIn,
        add_stand_ins,
        find_routers,
        forget_hooks,
    )

if TYPE_CHECKING:
    from peft import LoraConfig

    from elastic.worker.contrib.huggingface.adapters import Adapters

MODEL = (
    "a transformers model, its config, or a folder with config.json, as "
    "AutoConfig.from_pretrained('folder') or LlamaConfig(hidden_size=64, ...)"
)
DROPPED_LAYERS = ("layerdrop", "encoder_layerdrop", "decoder_layerdrop")
"""Fields of configs: probabilities of leaving out blocks."""


def from_huggingface(
    model: PreTrainedModel | PreTrainedConfig | str | Path,
    *,
    weights: str | Path | None = None,
    seed: int = 0,
    loss: Loss | None = None,
    varying: bool = False,
    lora: LoraConfig | str | Path | None = None,
) -> HuggingFaceStack:
    """Return the layers of a transformers model: one before its blocks, each block, one behind.

    Args:
        model: a config: parameters get the initial values of the model's own initialisation. A
            folder with a config.json and safetensors files: a node reads the tensors of its layers;
            without such files, as a config. A model: it is cut as it is, with its values; each
            worker then holds the whole model in host memory.
        weights: folder with the initial values instead: safetensors files, or a checkpoint of
            torch.distributed.checkpoint. A node reads the tensors of its layers.
        seed: seed of initial values.
        loss: loss(outputs of the model, micro-batch) -> scalar; None: the loss that the model
            computes.
        varying: whether the shapes of the fields differ from micro-batch to micro-batch.
        lora: adapters to add to the blocks: a peft.LoraConfig, or a folder with an
            adapter_config.json, and with an adapter_model.safetensors if their training goes on.
            They alone are trained; all other parameters are frozen.

    The fields of a micro-batch are the keyword arguments of the model's forward. Raises FieldError
    for a model that cannot be cut, with the module where, or for other adapters than LoRA's, and
    MissingExtra without transformers, or peft for `lora`.
    """
    adapters = None
    if lora is not None:
        from elastic.worker.contrib.huggingface.adapters import Adapters  # needs the extra lora

        adapters = Adapters(lora)
    skeleton = _Skeleton.of(model, whole_number("seed", seed), adapters)
    stack = HuggingFaceStack(skeleton, seed, loss, varying)
    if weights is not None:
        take_weights(stack, weights)
    return stack


@dataclass(frozen=True, slots=True, eq=False)
class _Skeleton:
    """A model whose parameters have no memory, and the place of its blocks."""

    model: PreTrainedModel
    path: str
    """Name of the list of blocks, as model.layers."""
    values: Values | None
    """Values of its parameters; None: the model's own initialisation."""
    registered: dict[str, Tensor]
    """Small values with which parameters were made, by name; an initialisation may leave them."""
    adapters: Adapters | None = None
    """Adapters that were added to the model; it may have some of its own beside."""
    routers: list[RouterOutputs] | None = None
    """Routers of each block whose logits the loss uses; None: it uses none."""

    @classmethod
    def of(cls, given: object, seed: int, adapters: Adapters | None) -> _Skeleton:
        """`seed`: seed of the values that modules draw when they are made."""
        values: Values | None = None
        registered: dict[str, Tensor] = {}
        if isinstance(given, str | Path):
            values = weights_in(Path(given))
            given = config_in(Path(given))
        peft = sys.modules.get("peft")
        if peft is not None and isinstance(given, peft.PeftModel):
            given = given.get_base_model()
        if isinstance(given, PreTrainedModel):
            model, values = without_memory(given), values_of(given)
        elif isinstance(given, PreTrainedConfig):
            with torch.random.fork_rng(devices=[]), parameters_on_meta() as known:
                torch.manual_seed(derive_parameter_seed(seed, 0, "made"))
                model = cast(Any, _model_class(given))._from_config(copy.deepcopy(given))
            registered = known.of(model)
        else:
            raise FieldError("model", description(given), MODEL)
        refuse_quantized(model.config)
        for name, part in model.named_modules():
            _check_part(name or type(model).__name__, part)
            config = getattr(part, "config", None)
            if isinstance(config, PreTrainedConfig):
                config.use_cache = False  # a cache would carry values from block to block
        path = _path_of_blocks(model)
        if adapters is not None:
            adapters.add(model, path)
        routers = find_routers(model, path)
        return cls(model.train(), path, values, registered, adapters, routers)

    @property
    def n_blocks(self) -> int:
        return len(self.blocks)

    @property
    def blocks(self) -> nn.ModuleList:
        found = self.model.get_submodule(self.path)
        assert isinstance(found, nn.ModuleList)
        return found

    def around(self) -> tuple[list[str], list[str]]:
        """Return the names of the modules with parameters before and behind the blocks.

        A forward pass of two tokens shows which run before the blocks. If the model needs other
        fields, the order in which it registers its modules decides; that order may be wrong, as in
        OPT, which registers its last norm before its blocks. Raises FieldError for a parameter that
        is in none of the modules.
        """
        first: list[str] = []
        last: list[str] = []
        parent: nn.Module = self.model
        prefix = ""
        for word in self.path.split("."):
            for name, _ in parent.named_parameters(recurse=False):
                what = Described("a parameter beside the blocks")
                raise FieldError(f"{type(self.model).__name__}, {prefix}{name}", what, SPLIT)
            children = dict(parent.named_children())
            names = [n for n, child in children.items() if n == word or _has_parameters(child)]
            place = names.index(word)
            first += [f"{prefix}{name}" for name in names[:place]]
            last = [f"{prefix}{name}" for name in names[place + 1 :]] + last
            parent, prefix = children[word], f"{prefix}{word}."
        model: nn.Module = copy.deepcopy(self.model)
        call = Call(self.n_blocks)
        self.replace(model, call, Stop, (Note, first + last))
        cut = CutModel(model, call).eval()
        before = cut.called_before_blocks()
        if not before:
            return first, last
        return before, [name for name in first + last if name not in before]

    def replace(
        self,
        model: nn.Module,
        call: Call,
        block: type[Replacement],
        *others: tuple[type[Replacement], list[str]],
    ) -> None:
        """Replace the blocks of a copy of the model, and other modules by name."""
        blocks = [f"{self.path}.{index}" for index in range(call.n_blocks)]
        for kind, names in ((block, blocks), *others):
            for index, name in enumerate(names):
                parent, _, last = name.rpartition(".")
                made = kind(model.get_submodule(name), call, name, index)
                setattr(model.get_submodule(parent), last, made)


def _has_parameters(module: nn.Module) -> bool:
    return any(True for _ in module.parameters())


def config_in(folder: Path) -> PreTrainedConfig:
    """Return the config in a folder. Raises FieldError without a config.json of a model."""
    if not (folder / "config.json").is_file():
        raise FieldError("model", str(folder), f"it has no config.json: {MODEL}")
    try:
        return cast(PreTrainedConfig, AutoConfig.from_pretrained(folder, local_files_only=True))
    except Exception as error:  # a config checks its values in many ways
        remedy = f"its config.json is not that of a model: {describe(error)}"
        raise FieldError("model", str(folder), remedy) from error


def refuse_quantized(config: Any) -> None:
    """Raise FieldError for a model whose numbers are stored with scales beside them."""
    if getattr(config, "quantization_config", None):
        remedy = "its weights are quantized: give the folder of the model before that"
        what = Described("a quantization")
        raise FieldError(f"{type(config).__name__}.quantization_config", what, remedy)


def _check_part(name: str, part: nn.Module) -> None:
    """Raise FieldError if a module of the model does what does not pass through pipelines."""
    config = getattr(part, "config", None)
    for field in DROPPED_LAYERS if isinstance(config, PreTrainedConfig) else ():
        share = vars(config).get(field)
        if share:
            remedy = "set it to 0: every block runs in every micro-batch"
            raise FieldError(f"{type(config).__name__}.{field}", share, remedy)
    kind = getattr(part, "rope_type", None)
    if "dynamic" in (kind.values() if isinstance(kind, dict) else [kind]):
        remedy = "its frequencies depend on earlier micro-batches: use yarn, llama3 or longrope"
        raise FieldError(f"{name}.rope_type", "dynamic", remedy)
    checkpointing = getattr(part, "_gradient_checkpointing_func", None)
    if getattr(checkpointing, "keywords", {}).get("use_reentrant"):
        remedy = "enable it with gradient_checkpointing_kwargs={'use_reentrant': False}"
        raise FieldError("gradient_checkpointing_enable", "use_reentrant=True", remedy)


def _model_class(config: PreTrainedConfig) -> type[PreTrainedModel]:
    """Return the class that the config names, or else the language model of its family. Raises
    FieldError for a class that transformers does not have."""
    named = list(config.architectures or ())
    for name in named:
        found = getattr(transformers, name, None)
        if isinstance(found, type) and issubclass(found, PreTrainedModel):
            return found
    if named:
        remedy = "a class of transformers; make a model of other code yourself, and give the model"
        raise FieldError("config.architectures", ", ".join(named), remedy)
    mapping = AutoModelForCausalLM._model_mapping
    if type(config) not in mapping:
        remedy = "name the class in config.architectures, as ['LlamaForCausalLM']"
        raise FieldError("model", description(config), remedy)
    found = mapping[type(config)]
    return cast(type[PreTrainedModel], found[0] if isinstance(found, tuple) else found)


def _path_of_blocks(model: PreTrainedModel) -> str:
    """Return the name of the list of blocks: the one whose modules the model does not want to be
    split, or else the only list of modules. Raises FieldError unless there is one."""
    kinds = set(model._no_split_modules or ())
    found: dict[str, nn.ModuleList] = {}
    for path, part in model.named_modules():
        inside = any(path.startswith(f"{known}.") for known in found)
        if inside or not isinstance(part, nn.ModuleList) or not _has_parameters(part):
            continue
        if not kinds or {type(block).__name__ for block in part} <= kinds:
            found[path] = part
    if len(found) != 1:
        names = " and ".join(found)
        what = f"a model with several lists of blocks, {names}" if found else "no list of blocks"
        raise FieldError(type(model).__name__, Described(what), SPLIT)
    return next(iter(found))


class HuggingFaceStack(WholeModel):
    """The layers of a transformers model, made by `from_huggingface`."""

    def __init__(self, skeleton: _Skeleton, seed: int, loss: Loss | None, varying: bool) -> None:
        self._skeleton, self._loss = skeleton, loss
        self._before, self._behind = skeleton.around()
        for names, side in ((self._before, "before"), (self._behind, "behind")):
            if not names:
                what = Described(f"a model without parameters {side} its blocks")
                raise FieldError(type(skeleton.model).__name__, what, SPLIT)
        self._recorders: dict[torch.device, Recorder] = {}
        self._adapters, values = skeleton.adapters, skeleton.values
        in_memory = None if isinstance(values, Weights) else values
        if in_memory is not None and self._adapters is not None:
            in_memory = PlainValues(in_memory)
        super().__init__(skeleton.model, seed, values=in_memory, varying=varying)
        if isinstance(values, Weights):
            self.take_values(values)

    @property
    def n_layers(self) -> int:
        return self._skeleton.n_blocks + 2

    @property
    def config(self) -> PreTrainedConfig:
        """The model's config."""
        return self._skeleton.model.config

    @property
    def model_name(self) -> str:
        """The name of the model's class, as LlamaForCausalLM."""
        return type(self._skeleton.model).__name__

    def training_flops(self, tokens: int) -> float:
        """Return six operations per token for each weight that it is multiplied with, four if the
        weight is frozen. Of experts, the chosen ones count; 0 if their form is not the usual one.
        The products of queries and keys, which depend on the length of the sequences, are left
        out."""
        chosen = getattr(self.config.get_text_config(), "num_experts_per_tok", None)
        total = 0.0
        for module in self._empty:
            experts = {
                id(weight)
                for name, part in module.named_modules()
                if name.rpartition(".")[2] == "experts"
                for weight in part.parameters()
            }
            for weight in multiplied(module):
                share = 1.0
                if id(weight) in experts:  # a matrix of each expert
                    if weight.ndim != 3 or not isinstance(chosen, int):
                        return 0.0
                    share = min(1.0, chosen / len(weight))
                total += (6.0 if weight.requires_grad else 4.0) * share * weight.numel()
        return tokens * total

    def take_values(self, values: StoredValues) -> None:
        if isinstance(values, Weights):  # files of the model without its head lack its prefix
            values.prefix = f"{self._skeleton.model.base_model_prefix}."
        super().take_values(values if self._adapters is None else PlainValues(values))

    def parameter_names(self) -> list[str]:
        names = super().parameter_names()
        return names if self._adapters is None else [plain_name(name) for name in names]

    def is_added(self, name: str) -> bool:
        return self._adapters is not None and is_adapter(name)

    def name_of(self, layer: int, name: str) -> str:
        kind, _, rest = name.partition(".")
        return f"{self._skeleton.path}.{layer - 1}.{rest}" if kind == "block" else rest

    def initialise(self, module: nn.Module) -> None:
        _initialise(module, self._skeleton.model)

    def left_out(self, name: str) -> Tensor | None:
        return self._skeleton.registered.get(name)

    def empty_layer(self, index: int) -> nn.Module:
        skeleton, call = self._skeleton, Call(self._skeleton.n_blocks)
        if 0 < index < self.n_layers - 1:
            block = copy.deepcopy(skeleton.blocks[index - 1])
            places = {} if skeleton.routers is None else skeleton.routers[index - 1]
            return Block(block, index - 1, self._recorder, places)
        model = copy.deepcopy(skeleton.model)
        if index == 0:
            skeleton.replace(model, call, Stop, (Behind, self._behind))
            return First(model, call, routed=skeleton.routers is not None)
        skeleton.replace(model, call, PassOn, (Before, self._before))
        if skeleton.routers is not None:
            self._add_stand_ins(model, skeleton.routers)
        return Last(model, call, self._behind, self._loss)

    def _add_stand_ins(self, model: nn.Module, routers: list[RouterOutputs]) -> None:
        """Give a copy of the model, in which `PassOn` replaces the blocks, their routers."""
        forget_hooks(model)
        replaced = cast(nn.ModuleList, model.get_submodule(self._skeleton.path))
        for one, block, places in zip(replaced, self._skeleton.blocks, routers, strict=True):
            add_stand_ins(one, block, places)

    def _initial(self, index: int) -> nn.Module:
        module = super()._initial(index)
        if self._adapters is not None:
            seed = derive_parameter_seed(self.seed, index, "lora")
            self._adapters.initialise(module, partial(self.name_of, index), seed)
        return module

    def _recorder(self, device: torch.device) -> Recorder:
        """Return the model that records the arguments of its blocks on `device`."""
        if device not in self._recorders:
            model, call = copy.deepcopy(self._skeleton.model), Call(self._skeleton.n_blocks)
            beside = (Before, self._before), (Behind, self._behind)
            self._skeleton.replace(model, call, Record, *beside)
            self._recorders[device] = Recorder(cast(nn.Module, model).to(device).eval(), call)
        return self._recorders[device]


def _initialise(module: nn.Module, owner: PreTrainedModel) -> None:
    """Give each part of `module`, children first, the initial values of the model it belongs to."""
    for child in module.children():
        _initialise(child, child if isinstance(child, PreTrainedModel) else owner)
    if not isinstance(module, Replacement | CutModel | Block | StandIn):
        cast(Any, owner)._init_weights(module)
