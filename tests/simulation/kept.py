"""Scenarios that have failed once. They stay as tests, with all their choices, because a change of
the simulation can give another scenario to a seed."""

from __future__ import annotations

import json
from pathlib import Path

from elastic.domain import codec
from tests.simulation.world import Scenario

FILE = Path(__file__).with_name("kept.jsonl")


def keep(scenario: Scenario, why: str) -> None:
    """Add a scenario."""
    entry = {"why": why, "scenario": codec.encode(scenario)}
    with FILE.open("a") as file:
        file.write(json.dumps(entry) + "\n")


def kept() -> list[tuple[str, Scenario]]:
    """Return (what was wrong, scenario) of each."""
    lines = FILE.read_text().splitlines() if FILE.exists() else []
    entries = [json.loads(line) for line in lines]
    return [(one["why"], codec.decode(Scenario, one["scenario"])) for one in entries]
