"""All cases, in the order of the page."""

from __future__ import annotations

from tests.launcher.cases.case import Case, Covered
from tests.launcher.cases.items import (
    accepted,
    failing,
    help,
    objects,
    profile,
    progress,
    waiting,
)

CASES: tuple[Case, ...] = (
    *waiting.CASES,
    *accepted.CASES,
    *objects.CASES,
    *failing.CASES,
    *progress.CASES,
    *profile.CASES,
    *help.CASES,
)
COVERED: tuple[Covered, ...] = progress.COVERED
