"""Check of SCRIPT: a file, module or executable that exists. Nothing is imported or started."""

from __future__ import annotations

import os
import pkgutil
import shutil
import sys
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import SimpleNamespace

from elastic.config import WorkerCommand
from elastic.domain.errors import FieldError, UsageError


def check_command(flags: SimpleNamespace) -> WorkerCommand:
    """Return the workers' command. Raises FieldError; UsageError if there is no script."""
    if not flags.script:
        raise UsageError("SCRIPT is missing: give a script, or -m and a module")
    command = WorkerCommand(
        script=flags.script,
        args=tuple(flags.script_args),
        module=flags.module,
        python=not flags.no_python,
        run_path=flags.run_path,
    )
    script = Path(command.script)
    problem = ""
    if command.module:
        _check_module(command.script)
    elif command.run_path and not script.is_absolute():
        raise FieldError("--run-path", command.script, "give the absolute path of a script")
    elif not command.python and not command.run_path:
        if shutil.which(command.script) is None:
            problem = "with --no-python give an executable on the PATH, or its path"
    elif not script.exists():
        problem = "there is no such file; -m runs a module"
    elif script.is_dir() and not (script / "__main__.py").exists():
        problem = "it is a directory without __main__.py; give a script file"
    elif not os.access(script, os.R_OK):
        problem = "it cannot be read; check its permissions"
    if problem:
        raise FieldError("SCRIPT", command.script, problem)
    return command


def _check_module(name: str) -> None:
    """Check that a module can be run, without importing its packages, which may be slow."""
    parts = name.split(".")
    folders: list[str] | None = [os.getcwd(), *(folder for folder in sys.path if folder)]
    for i in range(len(parts)):
        full = ".".join(parts[: i + 1])
        if folders is None:
            raise FieldError("-m", name, f"{'.'.join(parts[:i])} is not a package")
        spec = _find(full, folders)
        if spec is None:
            raise FieldError("-m", name, f"no module named {full}; check the name and PYTHONPATH")
        locations = spec.submodule_search_locations
        folders = None if locations is None else list(locations)
    if folders is not None and _find(f"{name}.__main__", folders) is None:
        raise FieldError("-m", name, "it is a package without __main__; name a module in it")


def _find(full: str, folders: list[str]) -> ModuleSpec | None:
    """Return the spec of module `full` in its parent's folders; None: no folder has the module."""
    namespace: ModuleSpec | None = None
    for folder in folders:
        finder = pkgutil.get_importer(folder)
        spec = finder.find_spec(full) if finder is not None else None
        if spec is not None and spec.loader is not None:
            return spec
        namespace = namespace or spec
    if namespace is not None or "." in full:
        return namespace
    found = (finder.find_spec(full, None, None) for finder in sys.meta_path)  # editable, built-in
    return next((spec for spec in found if spec is not None), None)
