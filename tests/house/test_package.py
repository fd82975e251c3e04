"""The package: version, make targets, size of functions, docstrings."""

from __future__ import annotations

import ast
import functools
import re
import tomllib
from pathlib import Path

import pytest

import elastic

ROOT = Path(__file__).parents[2]
SOURCES = sorted(
    path
    for folder in ("elastic", "simulator", "examples", "benchmarks", "tests")
    for path in (ROOT / folder).rglob("*.py")
    if "_pb2" not in path.name
)
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())


def names(paths: list[Path]) -> list[str]:
    return [str(path.relative_to(ROOT)) for path in paths]


def test_version_is_stated_once() -> None:
    assert PROJECT["project"]["version"] == elastic.__version__


def test_readme_and_licence_exist() -> None:
    assert (ROOT / PROJECT["project"]["readme"]).is_file()
    assert "MIT" in (ROOT / "LICENSE").read_text()


@pytest.mark.parametrize("name", ["setup", "demo", "test", "check", "bench", "chaos"])
def test_make_targets(name: str) -> None:
    makefile = (ROOT / "Makefile").read_text()
    rule = re.search(rf"^{name}:(.*)", makefile, re.MULTILINE)
    assert rule is not None
    assert name == "setup" or "setup" in rule.group(1).split()


@functools.cache
def syntax() -> tuple[list[str], list[str]]:
    """Return (large functions, modules without a docstring)."""
    large, silent = [], []
    for path in SOURCES:
        name, tree = str(path.relative_to(ROOT)), ast.parse(path.read_text())
        if tree.body and "tests" not in path.parts and not ast.get_docstring(tree):
            silent.append(name)
        for node in ast.walk(tree):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                assert node.end_lineno is not None
                if node.end_lineno - node.lineno >= 80:
                    large.append(f"{name}:{node.lineno} {node.name}")
    return large, silent


def test_functions_stay_small() -> None:
    assert not syntax()[0]


def test_every_module_has_a_docstring() -> None:
    assert not syntax()[1]


def test_no_todo_marks() -> None:
    marks = re.compile(r"#\s*(" + "|".join(("TO" + "DO", "FIX" + "ME", "XX" + "X")) + r")\b")
    assert not names([path for path in SOURCES if marks.search(path.read_text())])
