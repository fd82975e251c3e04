"""Published values, where the recorded traces are at hand (not part of this repository: simulator/data.py)."""

from __future__ import annotations

from pathlib import Path

import pytest

from simulator.importers import bamboo
from simulator.reproduce.artifact import MODELS, simulate, throughputs

DATA = Path(__file__).parents[3] / "shared/data"
VALUES = {
    ("6h", "bert-large"): (77.04, 260.11, 287.10),
    ("6h", "gpt2"): (17.47, 86.51, 85.59),
    ("6h", "gpt3-6.7b"): (0, 4.14, 4.33),
    ("1h", "bert-large"): (75.60, 246.03, 286.28),
    ("1h", "gpt2"): (17.13, 85.17, 85.42),
    ("1h", "gpt3-6.7b"): (0, 2.69, 4.22),
    ("10m", "bert-large"): (69.84, 173.52, 282.11),
    ("10m", "gpt2"): (16.01, 76.39, 84.81),
    ("10m", "gpt3-6.7b"): (0, 0.26, 3.55),
    ("scale_p3-trace", "bert-large"): (63.6, 187.7, 221.4),
    ("scale_p3-trace", "gpt2"): (14.3, 64.6, 66.8),
    ("scale_p3-trace", "gpt3-6.7b"): (0, 0.00, 2.68),
}


@pytest.mark.skipif(not DATA.is_dir(), reason="the recorded traces are not at hand")
@pytest.mark.parametrize(("trace", "model"), VALUES)
def test_oobleck_s_artifact(trace: str, model: str) -> None:
    tables = throughputs((DATA / "reference/oobleck_throughput.json").read_text())
    events = bamboo((DATA / f"traces/oobleck/{trace}.csv").read_text(), trace)
    (known,) = (m for m in MODELS if m.name == model)
    for system, published in zip(("bamboo", "varuna", "oobleck"), VALUES[trace, model], strict=True):
        found = simulate(system, known, events, tables, recorded=trace.startswith("scale"))
        assert found == pytest.approx(published, rel=0.01, abs=0.006), system
