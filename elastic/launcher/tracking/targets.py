"""Where a tracker writes, as the text of a flag: tensorboard:FOLDER, wandb:PROJECT, ..."""

from __future__ import annotations

import importlib
import os
import re
import sys
from dataclasses import dataclass

from elastic.domain.errors import ElasticError, FieldError, describe
from elastic.launcher.tracking.callback import Callback

KINDS = ("tensorboard", "wandb", "mlflow", "callback")
REMEDY = (
    "give tensorboard:FOLDER, wandb:PROJECT, wandb:ENTITY/PROJECT, mlflow:EXPERIMENT or "
    "callback:MODULE:NAME"
)
_CALLBACK = re.compile(r"[A-Za-z_][\w.]*:[A-Za-z_]\w*")
_PROJECT = re.compile(r"([^/\s]+/)?[^/\s]+")


@dataclass(frozen=True, slots=True)
class Target:
    """A kind of tracker and its place."""

    kind: str
    place: str
    """Folder, project, experiment, or MODULE:NAME."""

    def __str__(self) -> str:
        return f"{self.kind}:{self.place}"


def parse_target(flag: str, text: str) -> Target:
    """Return the target in `text`. Raises FieldError, which names `flag`."""
    kind, _, place = text.partition(":")
    if kind not in KINDS or not place.strip():
        raise FieldError(flag, text, REMEDY)
    if kind == "callback" and not _CALLBACK.fullmatch(place):
        raise FieldError(flag, text, "give callback:MODULE:NAME, as callback:mine.hooks:OnStep")
    if kind == "wandb" and not _PROJECT.fullmatch(place):
        raise FieldError(flag, text, "give wandb:PROJECT or wandb:ENTITY/PROJECT, without spaces")
    return Target(kind, place)


def make_callback(target: Target, flag: str) -> Callback:
    """Return the callback of `target`. Raises MissingExtra if its library is not installed, and
    FieldError, which names `flag`, if a user's callback cannot be made."""
    try:
        made = _make(target)
    except ElasticError:
        raise
    except (Exception, SystemExit) as error:  # of the user's code, or of a library
        remedy = f"it cannot be made ({describe(error)}); give another"
        raise FieldError(flag, str(target), remedy) from error
    if not isinstance(made, Callback):
        remedy = f"it makes a {type(made).__name__}: derive the class from elastic.Callback"
        raise FieldError(flag, str(target), remedy)
    return made


def _make(target: Target) -> object:
    if target.kind == "tensorboard":
        from elastic.launcher.tracking.tensorboard import TensorBoard

        return TensorBoard(target.place)
    if target.kind == "wandb":
        from elastic.launcher.tracking.wandb import WeightsAndBiases

        return WeightsAndBiases(target.place)
    if target.kind == "mlflow":
        from elastic.launcher.tracking.mlflow import MLflow

        return MLflow(target.place)
    module, _, name = target.place.partition(":")
    sys.path[:0] = [] if os.getcwd() in sys.path else [os.getcwd()]
    return getattr(importlib.import_module(module), name)()
