"""The words of the command line that give a scenario again."""

from __future__ import annotations

import shlex
from collections.abc import Sequence
from typing import Any

from elastic_sim.steps.scenario import Scenario


def replay_command(scenario: Scenario, policies: Sequence[str], seeds: int) -> str:
    """The same replay again."""
    words = ["elastic-sim", "replay"]
    if scenario.market is None:
        words.append(scenario.trace)
    words += ["--model", scenario.model, "--policy", ",".join(policies), "--seeds", f"{seeds}"]
    words += scenario_words(scenario)
    if scenario.market is not None:
        words += ["--mtbf", f"{scenario.market.mtbf_s:g}s"]
    return shlex.join(words)


def scenario_words(scenario: Scenario) -> list[str]:
    """Words for what differs from the defaults, and for all that the failure rate needs."""
    usual = Scenario()
    told: list[tuple[str, Any, bool]] = [
        ("--microbatches", scenario.microbatches, scenario.microbatches != usual.microbatches),
        ("--nodes-of", ",".join(scenario.nodes_of), scenario.nodes_of != usual.nodes_of),
        ("--from", f"{scenario.first_s:g}s", bool(scenario.first_s)),
        ("--to", f"{scenario.last_s:g}s", bool(scenario.last_s)),
        ("--notice", f"{scenario.notice_s:g}s", scenario.notice_s >= 0),
    ]
    if scenario.market is not None:
        m = scenario.market
        told += [
            ("--nodes", m.nodes, True),
            ("--repair", f"{m.repair_s:g}s", True),
            ("--duration", f"{scenario.duration_s:g}s", True),
            ("--bulk", ",".join(f"{n}:{weight:g}" for n, weight in m.bulk), m.bulk != ((1, 1.0),)),
        ]
    told += [("--physics", text, True) for text in scenario.physics]
    return [word for name, value, needed in told if needed for word in (name, str(value))]
