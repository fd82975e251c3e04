"""No file imports itself, directly or through others, on any level and under TYPE_CHECKING."""

from __future__ import annotations

import sys
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import grimp
import pytest

PACKAGES = ("elastic", "elastic_sim", "benchmarks")


def check_cycles(*packages: str) -> int:
    """Raise CycleError if files of the packages import each other; return the number of files."""
    graph = grimp.build_graph(*packages, exclude_type_checking_imports=False, cache_dir=None)
    imports = {file: graph.find_modules_directly_imported_by(file) for file in graph.modules}
    TopologicalSorter(imports).prepare()
    return len(imports)


def test_no_file_imports_itself() -> None:
    try:
        assert check_cycles(*PACKAGES) > 300
    except CycleError as error:
        pytest.fail("import cycle: " + " <- ".join(error.args[1]))


@pytest.mark.parametrize(
    "back",
    [
        "from {0} import a",
        "def late() -> None:\n    from {0} import a",
        "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    from {0}.a import x",
    ],
    ids=["module", "function", "type-checking"],
)
def test_cycles_are_found(
    back: str,
    request: pytest.FixtureRequest,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    name = f"cyclic_{request.node.callspec.id.replace('-', '_')}"
    monkeypatch.setattr(sys, "path", [str(tmp_path), *sys.path])
    folder = tmp_path / name
    folder.mkdir()
    (folder / "__init__.py").touch()
    (folder / "a.py").write_text(f"from {name} import b\nx = 1\n")
    assert check_cycles(name) == 2
    (folder / "b.py").write_text(back.format(name) + "\n")
    with pytest.raises(CycleError) as caught:
        check_cycles(name)
    assert {f"{name}.a", f"{name}.b"} == set(caught.value.args[1])
