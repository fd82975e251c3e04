"""README and docs/ are correct: examples run, links and paths exist, generated pages are
current."""

from __future__ import annotations

import importlib.util
import json
import os
import re
import shlex
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest

from elastic.coordinator.records.run_summary import summarize
from elastic.core.job.goodput import recovery_entry
from elastic.core.job.state import ChangeCompleted, EpochChange
from elastic.core.protocol.fault_spec import FaultKind, parse_fault
from tests.house.time_constants import CONSTANTS, KINDS, found

ROOT = Path(__file__).resolve().parents[2]
DOCS = ROOT / "docs"
PAGES = (ROOT / "README.md", *sorted(DOCS.rglob("*.md")))


def _script(name: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location(name, DOCS / "generate" / f"{name}.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def _python(page: Path) -> str:
    blocks = re.findall(r"^```python\n(.*?)^```", page.read_text(), re.S | re.M)
    assert len(blocks) == 1
    return str(blocks[0])


@pytest.mark.parametrize(
    "page",
    [
        # test_extras runs it, too
        pytest.param(ROOT / "README.md", id="README.md", marks=pytest.mark.chaos),
        pytest.param(DOCS / "guide" / "custom-model.md", id="custom-model.md"),
        pytest.param(DOCS / "guide" / "data.md", id="data.md", marks=pytest.mark.chaos),
        # test_huggingface.py and test_megatron_models.py of the scenarios train such models
        pytest.param(
            DOCS / "guide" / "huggingface.md", id="huggingface.md", marks=pytest.mark.chaos
        ),
        pytest.param(DOCS / "guide" / "megatron.md", id="megatron.md", marks=pytest.mark.chaos),
    ],
)
def test_the_example_trains(page: Path, tmp_path: Path) -> None:
    script, run_dir = tmp_path / "mine.py", tmp_path / "run"
    script.write_text(_python(page))
    command = [sys.executable, "-m", "elastic", "run", "--standalone", "--nnodes", "2"]
    done = subprocess.run(
        [*command, "--run-dir", str(run_dir), str(script)],
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=240,
        check=False,
    )
    assert done.returncode == 0, done.stdout
    loss = json.loads((run_dir / "summary.json").read_text())["loss"]
    assert loss[-1] < loss[0]


def test_readme_is_short() -> None:
    assert len((ROOT / "README.md").read_text().splitlines()) <= 120


@pytest.mark.parametrize("name", ["states", "cli", "timeouts"])
def test_generated_page_is_current(name: str) -> None:
    generator = _script(f"make_{name}")
    assert generator.OUT.read_text() == generator.text(), (
        f"run: python docs/generate/make_{name}.py"
    )


def test_every_constant_in_seconds_is_of_a_known_kind() -> None:
    assert found() == set(CONSTANTS), "enter it in tests/house/time_constants.py"
    assert set(CONSTANTS.values()) == set(KINDS)


@pytest.mark.parametrize("page", PAGES, ids=lambda p: p.name)
def test_links_and_paths_exist(page: Path) -> None:
    text = page.read_text()
    for target in re.findall(r"\]\(([^)\s]+)\)", text):
        if not target.startswith("https://"):
            path, _, anchor = target.partition("#")
            file = page.parent / path if path else page
            assert file.exists(), target
            assert not anchor or anchor in _anchors(file), target
    for path in re.findall(r"`((?:elastic|examples|benchmarks|tests|docs)/[\w./-]+)`", text):
        assert (ROOT / path).exists(), path
    for module in re.findall(r"python -m ((?:elastic|examples|benchmarks)\.[\w.]+)", text):
        assert importlib.util.find_spec(module) is not None, module


def _anchors(page: Path) -> set[str]:
    titles = re.findall(r"^#+ (.*)$", page.read_text(), re.M)
    return {re.sub(r"[^\w -]", "", title.lower()).replace(" ", "-") for title in titles}


@pytest.mark.parametrize("page", PAGES, ids=lambda p: p.name)
def test_no_absolute_paths(page: Path) -> None:
    assert not re.findall(
        r"(?<![\w.])/(?:work|home|root|tmp|Users|opt|mnt)/[\w./-]*", page.read_text()
    )


def test_every_decision_is_numbered_once() -> None:
    names = [page.name for page in sorted((DOCS / "decisions").glob("*.md"))]
    assert [name[:4] for name in names] == [f"{n:03}-" for n in range(1, len(names) + 1)]


def test_faults_in_the_docs_can_be_given() -> None:
    told = set()
    for page in PAGES:
        for text in re.findall(r'--fault ("[^"]+")', page.read_text()):
            words = shlex.split(text)[0]
            if words != "SPEC":
                told.add(parse_fault(words).kind)
    assert told == set(FaultKind)


def test_summary_page_names_every_field_and_kind() -> None:
    named = set(re.findall(r"`([\w-]+)`", (DOCS / "guide" / "summary.md").read_text()))
    change = EpochChange(1, (), False, (), 1, 0.0, None, 0, 0)
    fields = {*summarize([]), *recovery_entry(ChangeCompleted(change, 1, 0.0, 0.0, 0.0), None)}
    assert fields - named == set()
    folders = (ROOT / "elastic" / "core", ROOT / "elastic" / "coordinator")
    source = "".join(path.read_text() for folder in folders for path in folder.rglob("*.py"))
    kinds = set(re.findall(r'\b(?:LogEntry|event)\(\s*"([\w-]+)"', source))
    assert len(kinds) > 10 and kinds - named == set()
