"""Every case prints what it must, without a traceback through this repository's packages."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.launcher.cases.case import ITEMS, Case, Covered
from tests.launcher.cases.catalogue import CASES, COVERED
from tests.launcher.cases.execution import ROOT, execute, own_frames, page_words, problems
from tests.launcher.cases.page import OUT, head_of

PARAMETERS = [
    pytest.param(case, id=case.name, marks=[pytest.mark.chaos] if case.is_long else [])
    for case in CASES
]


@pytest.mark.parametrize("case", PARAMETERS)
def test_a_case(case: Case, tmp_path: Path) -> None:
    for command, result in execute(case, tmp_path):
        assert problems(command, result, tmp_path) == [], result.output


def test_every_item_has_cases_with_names_of_their_own() -> None:
    assert {case.item for case in CASES} == set(ITEMS)
    assert len({case.name for case in CASES}) == len(CASES)


@pytest.mark.parametrize("case", COVERED, ids=lambda case: case.title)
def test_the_test_of_another_case_exists(case: Covered) -> None:
    file, _, name = case.test.partition("::")
    assert f"def {name}(" in (ROOT / file).read_text()


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_the_page_has_every_case(case: Case) -> None:
    assert head_of(case) in OUT.read_text(), "run: python -m tests.launcher.cases"


def test_frames_of_this_repository_are_found() -> None:
    ours = f'  File "{ROOT}/elastic/config.py", line 1, in <module>'
    theirs = '  File "train.py", line 5, in load'
    assert own_frames(f"Traceback (most recent call last):\n{theirs}\n{ours}\n") == [ours]


def test_what_varies_has_fixed_words(tmp_path: Path) -> None:
    text = f"{tmp_path}/run: waiting for 12 s at 127.0.0.1:4711, loss 3.25, 1,024 tokens/s, 1.5 GiB"
    words = "FOLDER/run: waiting for N s at 127.0.0.1:PORT, loss N, N tokens/s, N GiB"
    assert page_words(text, tmp_path) == words
