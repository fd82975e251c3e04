"""Published tables beside the values that we compute from the published rules and constants.

`TABLES` maps the name of a table to a function that returns its rows. The tables in `RECORDED` need
recorded traces, which are not part of this repository.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Collection, Mapping, Sequence
from pathlib import Path
from typing import Any, Self

from elastic.command_line import reason_of
from elastic.domain.errors import FieldError
from elastic_sim.reproduce import oobleck_artifact
from elastic_sim.reproduce import parcae_measurements as parcae_models
from elastic_sim.reproduce.parcae_artifact import ideal, proactive, reactive
from elastic_sim.traces.importers import bamboo
from elastic_sim.traces.importers import parcae as parcae_trace
from elastic_sim.traces.trace import Trace

Row = dict[str, Any]
"""Keys: model, system, trace, value, published (None: not published)."""


class PublishedValue(float):
    """A published value with the digits that were printed: 287.10 has two decimals."""

    text: str
    decimals: int

    def __new__(cls, text: str) -> Self:
        made = super().__new__(cls, text)
        made.text, made.decimals = text, len(text.partition(".")[2])
        return made


def published_values(text: str) -> tuple[PublishedValue, ...]:
    """Return the values of a text with blanks between them."""
    return tuple(PublishedValue(word) for word in text.split())


OOBLECK_TRACES = {
    "6h": "6h.csv",
    "3h": "3h.csv",
    "1h": "1h.csv",
    "30m": "30m.csv",
    "10m": "10m.csv",
    "scaled-p3": "scale_p3-trace.csv",
    "scaled-g4dn": "scale_gcp-trace.csv",
}
OOBLECK_PUBLISHED = {
    ("6h", "bert-large"): published_values("77.04 260.11 287.10"),
    ("6h", "gpt2"): published_values("17.47 86.51 85.59"),
    ("6h", "gpt3-6.7b"): published_values("0.00 4.14 4.33"),
    ("1h", "bert-large"): published_values("75.60 246.03 286.28"),
    ("1h", "gpt2"): published_values("17.13 85.17 85.42"),
    ("1h", "gpt3-6.7b"): published_values("0.00 2.69 4.22"),
    ("10m", "bert-large"): published_values("69.84 173.52 282.11"),
    ("10m", "gpt2"): published_values("16.01 76.39 84.81"),
    ("10m", "gpt3-6.7b"): published_values("0.00 0.26 3.55"),
    ("scaled-p3", "bert-large"): published_values("63.6 187.7 221.4"),
    ("scaled-p3", "gpt2"): published_values("14.3 64.6 66.8"),
    ("scaled-p3", "gpt3-6.7b"): published_values("0.00 0.00 2.68"),
}
"""Samples/s of Bamboo, Varuna and Oobleck, printed by the authors' program (0: out of memory)."""
_SINGLE_VALUES = {
    **{("gpt3-6.7b", "oracle", name): "4.69" for name in ("6h", "3h", "1h", "30m", "10m")},
    ("gpt3-6.7b", "oracle", "scaled-p3"): "4.80",
    ("gpt3-6.7b", "oobleck", "scaled-p3: of the oracle, %"): "56",
    ("bert-large", "oobleck", "10m: effective, %"): "95.5",
    ("bert-large", "oobleck", "10m: restart, %"): "0.3",
    ("bert-large", "oobleck", "10m: lost work, %"): "4.2",
    ("gpt3-6.7b", "oobleck", "10m: effective, %"): "75.9",
    ("gpt3-6.7b", "oobleck", "10m: restart, %"): "1.0",
    ("gpt3-6.7b", "oobleck", "10m: lost work, %"): "23.1",
    ("gpt3-6.7b", "oobleck", "10m: shortest step, s"): "186",
    ("gpt3-6.7b", "oobleck", "10m: longest step, s"): "312",
    ("llama3-300-l40s", "torchft", "a failure a minute: steps committed, %"): "82.3",
    ("llama3-300-l40s", "torchft", "times 29.6 of 30 groups, %"): "81.2",
    ("16384 GPUs", "rsc-1", "MTTF, hours"): "1.8",
    ("131072 GPUs", "rsc-1", "MTTF, hours"): "0.23",
}
"""Published values by (model, system, trace).

The oracle is the best system at each number of nodes, if changes cost nothing (samples/s,
integrated from the artifact's tables). The authors' program printed Oobleck's use of time, with a
failure every ten minutes (BERT-large also in the README of tools/simulator).
"""
PUBLISHED = {key: PublishedValue(text) for key, text in _SINGLE_VALUES.items()}


def data_directory(given: Path | None) -> Path:
    """Return the directory of traces: `given`, ELASTIC_DATA, or a default. Raises FieldError."""
    defaults = (os.environ.get("ELASTIC_DATA"), "../shared/data")
    places = [given] if given else [Path(place) for place in defaults if place]
    for place in places:
        if (place / "traces").is_dir():
            return place
    remedy = "a directory with traces/ and reference/ is needed: --data DIR, or ELASTIC_DATA"
    raise FieldError("--data", str(places[0]), remedy)


def oobleck(data: Path) -> list[Row]:
    """Return the rows of Oobleck's artifact: three systems and the oracle, and the use of time."""
    tables = oobleck_artifact.throughputs(_read(data / "reference/oobleck_throughput.json"))
    traces = {
        name: bamboo(_read(data / "traces/oobleck" / file), file)
        for name, file in OOBLECK_TRACES.items()
    }
    rows = []
    for name, trace in traces.items():
        for model in oobleck_artifact.MODELS:
            published = OOBLECK_PUBLISHED.get((name, model.name), (None, None, None))
            for system, value in zip(("bamboo", "varuna", "oobleck"), published, strict=True):
                found = oobleck_artifact.simulate(
                    system, model, trace, tables, recorded=name.startswith("scaled")
                )
                rows.append(_row(model.name, system, name, found, value))
    made = {
        (row["model"], row["trace"]): row["value"] for row in rows if row["system"] == "oobleck"
    }
    for name, trace in traces.items():
        for model in oobleck_artifact.MODELS:
            best = oobleck_artifact.oracle(model, trace, tables)
            share = 100 * made[model.name, name] / best if best else 0.0
            rows.append(_row(model.name, "oracle", name, best))
            rows.append(_row(model.name, "oobleck", f"{name}: of the oracle, %", share))
    return rows + _times(traces["10m"], tables)


def _times(trace: Trace, tables: Mapping[str, oobleck_artifact.ThroughputTable]) -> list[Row]:
    """Return Oobleck's use of time with a failure per ten minutes, as counted and by the clock."""
    rows = []
    for model in oobleck_artifact.MODELS:
        if table := tables.get(f"oobleck/{model.key}"):
            times = oobleck_artifact.ArtifactOobleckTimes(model, table, trace)
            by_the_clock, (shortest, longest) = times.by_the_clock(), times.step_seconds()
            values = {
                **{f"{part}, %": share for part, share in times.counted().items()},
                **{f"{part}, % by the clock": share for part, share in by_the_clock.items()},
                "shortest step, s": shortest,
                "longest step, s": longest,
            }
            rows += [_row(model.name, "oobleck", f"10m: {n}", v) for n, v in values.items()]
    return rows


PARCAE_TRACES = {
    "hadp": "trace_hh_55_65.txt",
    "hasp": "trace_hl_15_25.txt",
    "ladp": "trace_lh_80_90.txt",
    "lasp": "trace_ll_10_11.txt",
}
PARCAE_PUBLISHED = {
    ("gpt-1.5b", "hadp"): published_values("39.87 29.87 37.41"),
    ("gpt-1.5b", "hasp"): published_values("41.53 34.49 39.53"),
    ("gpt-1.5b", "ladp"): published_values("30.12 20.35 27.87"),
    ("gpt-1.5b", "lasp"): published_values("28.83 27.45 28.30"),
    ("gpt-6.7b", "hadp"): published_values("10.232 4.221 9.121"),
    ("gpt-6.7b", "hasp"): published_values("10.740 7.097 10.069"),
    ("gpt-6.7b", "lasp"): published_values("7.865 6.715 7.667"),
    ("bert", "hadp"): published_values("501.91 445.47 484.35"),
    ("bert", "hasp"): published_values("531.06 493.11 519.97"),
    ("bert", "ladp"): published_values("357.86 303.80 344.17"),
    ("bert", "lasp"): published_values("337.06 329.54 333.97"),
}
"""Samples/s of ideal, reactive and Parcae with a perfect forecast, from the authors' program.

Total samples divided by the seconds of the hour. For gpt-6.7b and bert, the program uses 400 and
100 draws of the lost nodes, on the same events. The program prints no value for gpt-6.7b on ladp,
because it fails with fewer nodes than the model's twelve stages.
"""


def parcae(data: Path, traces: Collection[str] = tuple(PARCAE_TRACES)) -> list[Row]:
    """Return rows for four hours of p3: ideal, reactive, and Parcae with a perfect forecast."""
    rows = []
    for name in traces:
        file = PARCAE_TRACES[name]
        trace = parcae_trace(_read(data / "traces/parcae" / file), file)
        for model in parcae_models.MODELS:
            published = PARCAE_PUBLISHED.get((model.name, name), (None, None, None))
            ways = {"ideal": ideal, "reactive": reactive, "parcae": proactive}
            for (system, way), value in zip(ways.items(), published, strict=True):
                rows.append(_row(model.name, system, name, way(model, trace), value))
    return rows


def torchft(data: Path) -> list[Row]:
    """Return percents of committed steps and of work: 300 GPUs in 30 groups, a failure per minute.

    Each failure discards the running step. torchft's test on 300 L40S GPUs had 1,100 failures in
    6,249 steps, of which 5,145 were committed. Source: pytorch.org/blog/
    fault-tolerant-llama-training-with-2000-synthetic-failures-every-15-seconds, 2025.
    """
    step_s = 1100 * 60 / 6249
    committed = 100 * (1 - step_s / 60)
    values = {
        "a failure a minute: steps committed, %": committed,
        "times 29.6 of 30 groups, %": committed * 29.6 / 30,
    }
    return [_row("llama3-300-l40s", "torchft", name, value) for name, value in values.items()]


def meta(data: Path) -> list[Row]:
    """Return mean hours to failure and expected percent of effective training time, by job size.

    MTTF = 1 / (N r) and E[ETTR] = 1 - N r (u0 + dt / 2) for N nodes with r failures per node-day, a
    restart of u0 = 5 min and a checkpoint every dt = 60 min (Kokolis et al., HPCA 2025).
    """
    rows = []
    for cluster, rate in (("rsc-1", 6.50), ("rsc-2", 2.34)):
        for gpus in (1024, 16_384, 131_072):
            size, nodes = f"{gpus} GPUs", gpus / 8
            rows.append(_row(size, cluster, "MTTF, hours", 24 * 1000 / (nodes * rate)))
            lost = nodes * (rate / 1000) * (5 / 1440 + 60 / 1440 / 2)
            ettr = max(0.0, 1 - lost)
            rows.append(_row(size, cluster, "E[ETTR], hourly checkpoints, %", 100 * ettr))
    return rows


def gemini(data: Path) -> list[Row]:
    """Return the cost of a failure with a copy in peers' memory per step of 65 s, fetched in 2.5 s.

    The formula is the authors' (Wang et al., SOSP 2023): t_ckpt + 1 / (2 f) + t_rtvl, here with a
    hidden checkpoint. They published no value.
    """
    wasted_s = 1 / (2 * (1 / 65)) + 2.5
    return [_row("gpt-100b", "gemini", "wasted time of a failure, s", wasted_s)]


TABLES: dict[str, Callable[[Path], list[Row]]] = {
    "oobleck": oobleck,
    "parcae": parcae,
    "torchft": torchft,
    "meta": meta,
    "gemini": gemini,
}


RECORDED = ("oobleck", "parcae")
"""Tables that need recorded traces."""


def describe(rows: Sequence[Row]) -> str:
    """Return the rows as a table for the terminal."""
    lines = [
        f"{'model':<16} {'system':<10} {'trace':<40} {'value':>10} {'published':>10} {'off by':>10}"
    ]
    for row in rows:
        value, published = row["value"], row["published"]
        shown = "" if published is None else f"{published.text:>10} {_off(value, published):>10}"
        name = f"{row['model']:<16} {row['system']:<10} {row['trace']:<40}"
        lines.append(f"{name} {value:>10.4f} {shown}".rstrip())
    return "\n".join(lines)


def rounds_to(value: float, published: PublishedValue) -> bool:
    """Return whether `value` rounds to the published digits."""
    return f"{value:.{published.decimals}f}" == published.text


def _off(value: float, published: PublishedValue) -> str:
    if rounds_to(value, published):
        return "as printed"
    return f"{100 * (value / published - 1):+.2f} %" if published else "-"


def _row(
    model: str, system: str, trace: str, value: float, published: PublishedValue | None = None
) -> Row:
    """Return a row with the given published value, or else the one in `PUBLISHED`."""
    if published is None:
        published = PUBLISHED.get((model, system, trace))
    return {
        "model": model,
        "system": system,
        "trace": trace,
        "value": value,
        "published": published,
    }


def _read(path: Path) -> str:
    try:
        return path.read_text()
    except (OSError, UnicodeDecodeError) as error:
        why = reason_of(error) if isinstance(error, OSError) else "it is not text in UTF-8"
        raise FieldError("--data", str(path), f"{why}, and this file is needed") from error
