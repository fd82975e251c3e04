"""LoRA adapters of the package peft in a Hugging Face model. Only this file knows peft."""

from __future__ import annotations

import copy
import re
from collections.abc import Callable
from dataclasses import fields
from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor, nn

from elastic.domain.errors import FieldError, describe, needs_extra
from elastic.worker.contrib.huggingface.adapter_names import ADAPTER, is_adapter, stored_name
from elastic.worker.contrib.huggingface.weights import Weights, read_file
from elastic.worker.model.checks import Described, description
from elastic.worker.model.meta_modules import parameters_on_meta

with needs_extra("lora", "LoRA"):
    import peft
    from peft import LoraConfig
    from peft.tuners.lora import LoraLayer

CONFIG, WEIGHTS = "adapter_config.json", "adapter_model.safetensors"
OLD_WEIGHTS = "adapter_model.bin"
LORA = "a peft.LoraConfig, or a folder with an adapter_config.json"
UNSUPPORTED = {
    "bias": ("none", "leave it out: the parameters of the model stay as they are"),
    "modules_to_save": (None, "leave it out: the parameters of the model stay as they are"),
    "trainable_token_indices": (None, "leave it out: the parameters of the model stay as they are"),
    "target_parameters": (None, "name modules in target_modules"),
    "layer_replication": (None, "leave it out"),
    "use_dora": (False, "leave it out: its initial values depend on the model's"),
}
"""Fields of LoraConfig, their only value, and the remedy."""


class Adapters:
    """LoRA adapters with their initial values.

    Raises FieldError for what is no LoRA config, or for one whose initial values need more than the
    seed; MissingExtra without peft.
    """

    def __init__(self, given: object) -> None:
        self.weights: Weights | None = None
        if isinstance(given, str | Path):
            folder = Path(given)
            given = _config_in(folder)
            if (folder / WEIGHTS).is_file():
                self.weights = read_file(folder / WEIGHTS)
            elif (folder / OLD_WEIGHTS).exists():
                remedy = f"it has {OLD_WEIGHTS}: save the adapters as {WEIGHTS}, or remove it"
                raise FieldError("lora", str(folder), remedy)
        if not isinstance(given, LoraConfig):
            raise FieldError("lora", description(given), LORA)
        for name, (only, remedy) in UNSUPPORTED.items():
            value = getattr(given, name, only)
            if value != only and value:
                raise FieldError(f"LoraConfig.{name}", value, remedy)
        for field in fields(given):
            variant = field.metadata.get("is_lora_variant")
            if variant and getattr(given, field.name) not in (None, False):
                remedy = "leave it out: only plain LoRA is possible"
                raise FieldError(f"LoraConfig.{field.name}", getattr(given, field.name), remedy)
        initial = given.init_lora_weights
        if not (isinstance(initial, bool) or initial == "gaussian"):
            remedy = "use True or 'gaussian': others change the model, or need data"
            raise FieldError("LoraConfig.init_lora_weights", initial, remedy)
        self.config = copy.deepcopy(given)

    def add(self, model: nn.Module, blocks: str) -> None:
        """Add adapters without memory to `model`, and freeze all else.

        `blocks`: name of the list of the model's blocks. Raises FieldError if a target is not in
        it, if the model has adapters already, or if peft refuses the model.
        """
        if any(isinstance(part, LoraLayer) for part in model.modules()):
            what = Described("a model that has adapters already")
            raise FieldError("model", what, "leave lora out, or give the model without adapters")
        config = copy.deepcopy(self.config)
        config.inference_mode = False
        try:
            with parameters_on_meta():
                peft.inject_adapter_in_model(config, model, ADAPTER)
        except (ValueError, TypeError, NotImplementedError, re.error) as error:
            raise FieldError("lora", description(self.config), describe(error)) from error
        for name, part in model.named_modules():
            if isinstance(part, LoraLayer) and not name.startswith(f"{blocks}."):
                what = Described(f"{name}, which is outside {blocks}")
                raise FieldError("LoraConfig.target_modules", what, "name modules of the blocks")

    def initialise(self, module: nn.Module, name_of: Callable[[str], str], seed: int) -> None:
        """Give the adapters in a layer the values of their files, or else initial values.

        `name_of`: the model's name of a parameter of the layer. Raises FieldError for files of
        other adapters.
        """
        with torch.random.fork_rng(devices=[]), torch.no_grad():
            torch.manual_seed(seed)
            for part in module.modules():
                if isinstance(part, LoraLayer):
                    _reset(part, self.config.init_lora_weights)
            if self.weights is None:
                return
            for name, parameter in module.named_parameters():
                if is_adapter(name):
                    _copy(parameter, self.weights, stored_name(name_of(name)))

    def save(self, folder: Path, model: str) -> None:
        """Write the adapter_config.json to `folder`. `model`: name or folder of the model."""
        config = copy.deepcopy(self.config)
        config.base_model_name_or_path, config.inference_mode = model, True
        config.save_pretrained(str(folder))


def _reset(layer: LoraLayer, how: Any) -> None:
    """Give an adapter its initial values. With `how` False both of its matrices are random."""
    if how is not False:
        cast(Any, layer).reset_lora_parameters(ADAPTER, how)
        return
    for part in (layer.lora_A[ADAPTER], layer.lora_B[ADAPTER]):
        cast(nn.Linear, part).reset_parameters()


def _copy(parameter: Tensor, weights: Weights, name: str) -> None:
    """Copy the stored value `name` to a parameter. Raises FieldError for other adapters."""
    if name not in weights:
        raise FieldError("lora", WEIGHTS, f"it has no {name}: it is of other adapters")
    value = weights(name)
    if value.shape != parameter.shape:
        remedy = f"its config makes adapters of shape {tuple(parameter.shape)}"
        raise FieldError("lora", description(value), remedy)
    parameter.copy_(value)


def _config_in(folder: Path) -> LoraConfig:
    if not (folder / CONFIG).is_file():
        raise FieldError("lora", str(folder), f"it has no {CONFIG}: LoraConfig.save_pretrained")
    try:
        return cast(LoraConfig, peft.PeftConfig.from_pretrained(str(folder)))
    except Exception as error:  # a config checks its values in many ways
        remedy = f"its {CONFIG} is not that of adapters: {describe(error)}"
        raise FieldError("lora", str(folder), remedy) from error
