"""Commands that tests call show no progress, however slow the machine is."""

from __future__ import annotations

import pytest
from elastic_sim.cli import progress

from tests.patience import LONG_S


@pytest.fixture(autouse=True)
def no_progress(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(progress, "EVERY_S", 10 * LONG_S)
    monkeypatch.setattr(progress, "FIRST_S", 10 * LONG_S)
