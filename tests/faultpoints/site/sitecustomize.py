"""Records or injects fault points in the processes of a real job.

Python imports this module at the start of every process whose PYTHONPATH has this folder. The
variable FAULT_POINTS has the settings as JSON: folders, record, target, fault, claim.
"""

from __future__ import annotations

import importlib
import importlib.abc
import importlib.util
import json
import os
import sys
from collections.abc import Callable, Mapping, Sequence
from types import ModuleType
from typing import Any

STOPPED_S = 2


def role_of(words: Sequence[str], environment: Mapping[str, str]) -> str:
    """Return the role of this process; "": it has no points."""
    for module in ("agent", "coordinator"):
        if f"elastic.{module}.service" in words:
            node = words[words.index("--node") + 1] if "--node" in words else ""
            return f"{module}-{node}".rstrip("-")
    if environment.get("ELASTIC_NODE") and "LOCAL_RANK" in environment:
        return f"worker-{environment['ELASTIC_NODE']}"
    return ""


class AfterStore(importlib.abc.MetaPathFinder):
    """Wraps the store's writes when its module has been imported."""

    def __init__(self, wrap: Callable[[ModuleType], None]) -> None:
        self._wrap = wrap

    def find_spec(self, name: str, path: object, target: object = None) -> Any:
        if name != "elastic.store.sqlite":
            return None
        sys.meta_path.remove(self)
        spec: Any = importlib.util.find_spec(name)
        execute = spec.loader.exec_module

        def load(module: ModuleType) -> None:
            execute(module)
            self._wrap(module)

        spec.loader.exec_module = load
        return spec


def begin(settings: dict[str, Any], role: str) -> None:
    """Wrap the calls of this process."""
    sys.path.insert(0, os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
    injection = importlib.import_module("injection")
    del sys.path[0]

    def claim(point: object) -> bool:
        try:
            os.close(os.open(settings["claim"], os.O_CREAT | os.O_EXCL | os.O_WRONLY))
        except FileExistsError:
            return False
        return True

    def stopping() -> None:
        command = f"sleep {STOPPED_S}; kill -CONT {os.getpid()}"
        os.posix_spawn("/bin/sh", ["sh", "-c", command], os.environ, setsid=True)

    def wrap(store: Any) -> None:
        injection.install_store(injector, store.SqliteStore, store.StoreUnavailable)

    target = settings.get("target")
    injector = injection.Injector(
        role,
        record=settings.get("record", ""),
        target=injection.parse_point(target) if target else None,
        fault=settings.get("fault", ""),
        claim=claim,
        stopping=stopping,
    )
    injection.install(injector, tuple(settings["folders"]))
    sys.meta_path.insert(0, AfterStore(wrap))


if "FAULT_POINTS" in os.environ:
    mine = role_of(sys.orig_argv, os.environ)
    if mine:
        begin(json.loads(os.environ["FAULT_POINTS"]), mine)
