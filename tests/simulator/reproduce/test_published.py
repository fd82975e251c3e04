"""Published values. Tests skip without the recorded traces, which are not in this repository."""

from __future__ import annotations

from pathlib import Path

import pytest
from elastic_sim.reproduce import tables as reproduce

DATA = Path(__file__).parents[4] / "shared/data"


@pytest.mark.skipif(not DATA.is_dir(), reason="the recorded traces are not at hand")
@pytest.mark.parametrize(
    "trace",
    [
        pytest.param(name, marks=[] if name == "hasp" else [pytest.mark.chaos])
        for name in reproduce.PARCAE_TRACES
    ],
)
def test_parcae_s_optimizer(trace: str) -> None:
    """The tolerance covers the random draws of lost nodes."""
    rows = reproduce.parcae(DATA, [trace])
    values = {(row["model"], row["trace"], row["system"]): row["value"] for row in rows}
    of_trace = {m: v for (m, name), v in reproduce.PARCAE_PUBLISHED.items() if name == trace}
    for model, published in of_trace.items():
        for system, value in zip(("ideal", "reactive", "parcae"), published, strict=True):
            found = 100 * values[model, trace, system] / values[model, trace, "ideal"]
            assert found == pytest.approx(100 * value / published[0], abs=0.5), (
                model,
                trace,
                system,
            )
            assert values[model, trace, system] == pytest.approx(value, rel=0.003)


@pytest.fixture(scope="module")
def oobleck() -> list[reproduce.Row]:
    if not DATA.is_dir():
        pytest.skip("the recorded traces are not at hand")
    return reproduce.oobleck(DATA)


def test_oobleck_s_artifact(oobleck: list[reproduce.Row]) -> None:
    rows = [
        row
        for row in oobleck
        if row["trace"] in reproduce.OOBLECK_TRACES and row["system"] != "oracle"
    ]
    assert len(rows) == 5 * 7 * 3
    known = [row for row in rows if row["published"] is not None]
    assert len(known) == len(reproduce.OOBLECK_PUBLISHED) * 3


def test_all_published_oobleck_values_within_a_percent(oobleck: list[reproduce.Row]) -> None:
    """A value passes, too, if it rounds to the published digits."""
    known = [row for row in oobleck if row["published"] is not None]
    assert len(known) == len(reproduce.OOBLECK_PUBLISHED) * 3 + 6 + 1 + 2 * 3 + 2
    for row in known:
        near = row["value"] == pytest.approx(row["published"], rel=0.01)
        assert near or reproduce.rounds_to(row["value"], row["published"]), row


def test_oobleck_time_and_oracle(oobleck: list[reproduce.Row]) -> None:
    """gpt3-6.7b, to more digits than published, from the authors' program and its tables."""
    found = {
        (row["system"], row["trace"]): row["value"]
        for row in oobleck
        if row["model"] == "gpt3-6.7b"
    }
    shares = {"effective": 75.86726, "restart": 1.04125, "lost work": 23.09148}
    for part, value in shares.items():
        assert found["oobleck", f"10m: {part}, %"] == pytest.approx(value, abs=1e-4)
    assert found["oracle", "10m"] == pytest.approx(4.6859, abs=1e-4)
    assert found["oracle", "scaled-p3"] == pytest.approx(4.8048, abs=1e-4)
    by_the_clock = [found["oobleck", f"10m: {part}, % by the clock"] for part in shares]
    assert sum(by_the_clock) == pytest.approx(100)
    assert by_the_clock[0] > found["oobleck", "10m: effective, %"]


def test_values_that_round_to_the_published_digits_are_marked() -> None:
    def table_row(value: float, published: str) -> str:
        row = {"model": "m", "system": "s", "trace": "t", "value": value}
        return reproduce.describe(
            [{**row, "published": reproduce.PublishedValue(published)}]
        ).splitlines()[1]

    assert table_row(0.2551, "0.26").split()[3:] == ["0.2551", "0.26", "as", "printed"]
    assert table_row(287.104, "287.10").split()[3:] == ["287.1040", "287.10", "as", "printed"]
    assert table_row(287.13, "287.10").split()[3:] == ["287.1300", "287.10", "+0.01", "%"]
    assert table_row(0.0, "0.00").endswith("as printed") and table_row(0.1, "0.00").endswith(" -")


def test_meta_hours_round_to_the_published_digits() -> None:
    known = [row for row in reproduce.meta(Path()) if row["published"] is not None]
    assert len(known) == 2
    assert all(reproduce.rounds_to(row["value"], row["published"]) for row in known)
