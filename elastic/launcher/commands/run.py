"""`elastic run`."""

from __future__ import annotations

import os
from types import SimpleNamespace
from typing import Any

from elastic.domain.errors import FieldError
from elastic.launcher.flags.flags import RAY, RunCommand
from elastic.launcher.flags.request import Request, request


def _run(**flags: Any) -> int:
    wanted = request(SimpleNamespace(**flags), os.environ)
    if wanted.ray is not None:
        return _on_ray(wanted)
    from elastic.launcher.run.supervisor import launch

    return launch(wanted)


def _on_ray(wanted: Request) -> int:
    try:
        from elastic.launcher.ray.ray import launch
    except ModuleNotFoundError as error:
        if (error.name or "").partition(".")[0] != "ray":
            raise
        raise FieldError("--backend", "ray", "ray is missing: pip install 'elastic-runtime[ray]'") from None
    return launch(wanted)


run = RunCommand("run", _run, "Train a script or module on elastic nodes.", {"Ray's flags": RAY})
