"""The commands of docs/guide/examples.md, as they stand there, and the same on one node."""

from __future__ import annotations

import json
import os
import re
import shlex
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.scenarios.harness import DEADLINE_S, LEASE_S, ROOT

PAGE, OWN = (ROOT / "docs" / "guide" / f"{name}.md" for name in ("examples", "custom-model"))
SECTIONS = dict(re.findall(r"^## (.+?)\n(.*?)(?=^## |\Z)", PAGE.read_text(), re.M | re.S))
SMALL = "A vision model"


def commands(section: str) -> list[list[str]]:
    """Return the words of each command of a section."""
    lines = re.findall(r"^    (.+)$", SECTIONS[section].replace("\\\n", ""), re.M)
    return [shlex.split(line) for line in lines]


def called(words: list[str], folder: Path, *more: str) -> subprocess.CompletedProcess[str]:
    """Run a command in a folder; `more` are flags of `elastic run`."""
    python = [sys.executable, "-m", "elastic"] if words[0] == "elastic" else [sys.executable]
    done = subprocess.run(
        [*python, *words[1:2], *more, *words[2:]],
        cwd=folder,
        env={**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=DEADLINE_S,
        check=False,
    )
    assert done.returncode == 0, done.stdout
    return done


def trained(words: list[str], folder: Path, name: str) -> dict[str, Any]:
    called(words, folder, "--run-dir", name, "--lease", LEASE_S)
    return dict(json.loads((folder / name / "summary.json").read_text()))


def evaluated(summary: dict[str, Any]) -> list[tuple[Any, ...]]:
    return [(e["step"], e["loss"], e["figures"]) for e in summary["evaluations"]]


def on_one_node(words: list[str]) -> list[str]:
    """Return the command without the fault and the checkpoints, on one node."""
    text = re.sub(r"--(fault|checkpoint-dir) ('[^']*'|\S+)", "", shlex.join(words))
    return shlex.split(re.sub(r"--nnodes \d+", "--nnodes 1", text))


@pytest.mark.parametrize(
    "section",
    [pytest.param(name, marks=[] if name == SMALL else [pytest.mark.chaos]) for name in SECTIONS],
)
def test_an_example_loses_a_node_and_changes_no_bit(section: str, tmp_path: Path) -> None:
    found = re.search(r"```python\n(.*?)```", OWN.read_text(), re.S)
    assert found
    (tmp_path / "mine.py").write_text(found[1])
    lost = None
    for words in commands(section):
        if words[:2] != ["elastic", "run"]:
            called(words, tmp_path)
            continue
        lost = trained(words, tmp_path, "lost")
        plain = trained(on_one_node(words), tmp_path, "plain")
        assert lost["params_sha256"] == plain["params_sha256"]
        assert lost["loss"] == plain["loss"] and evaluated(lost) == evaluated(plain)
        assert len(lost["recoveries"]) == 1 and not plain["recoveries"]
        assert lost["loss"][-1] < lost["loss"][0]
    assert lost is not None, section
    if (tmp_path / "adapter").exists():
        from peft import PeftModel
        from transformers import AutoModelForCausalLM

        base = AutoModelForCausalLM.from_pretrained(tmp_path / "small")
        adapted = dict(PeftModel.from_pretrained(base, tmp_path / "adapter").named_parameters())
        assert all(value.any() for name, value in adapted.items() if "lora" in name)
    if (tmp_path / "tuned-model").exists():
        from transformers import AutoModelForCausalLM

        assert AutoModelForCausalLM.from_pretrained(tmp_path / "tuned-model").num_parameters()
