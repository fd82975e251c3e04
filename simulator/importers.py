"""Recorded traces of others in our format: Bamboo, Oobleck, Parcae, counts over time, AWS and SkyPilot."""

from __future__ import annotations

import csv
import io
import json
import math
from collections.abc import Callable, Iterator
from datetime import datetime
from typing import Any

from elastic.errors import FieldError
from simulator.trace import ADD, REMOVE, Event, Trace, check


def bamboo(text: str, name: str) -> Trace:
    """milliseconds, add or remove, node: the traces of Bamboo and of Oobleck's artifact. Ends with its last event."""
    events = []
    for line, fields in _csv(text, name, 3):
        at = _number(fields[0], f"{name}, line {line}") / 1000
        events.append(Event(at, fields[1], fields[2]))
    return _trace(events, max((e.seconds for e in events), default=0.0), f"imported from {name}", name)


def counts(text: str, name: str, unit_s: float = 1.0) -> Trace:
    """seconds (or hours), instances: as pairs of rows, before and after a change. Nodes are numbered; who came last
    goes first, since the file does not say who went."""
    events, present, number, last = list[Event](), list[str](), 0, 0.0
    for line, fields in _csv(text, name, 2):
        at = _number(fields[0], f"{name}, line {line}") * unit_s
        wanted = _number(fields[1], f"{name}, line {line}")
        if wanted != int(wanted):
            raise FieldError(f"{name}, line {line}", fields[1], "a whole number of instances")
        while len(present) < wanted:
            number += 1
            present.append(f"node{number}")
            events.append(Event(at, ADD, present[-1]))
        while len(present) > wanted:
            events.append(Event(at, REMOVE, present.pop()))
        last = max(last, at)
    return _trace(events, last, f"imported from {name}", name)


def parcae(text: str, name: str) -> Trace:
    """A JSON list a line: milliseconds, add, remove or no-op, {"nodes": [...], "duration": milliseconds}."""
    events, end = list[Event](), 0.0
    for number, line in enumerate(text.splitlines(), 1):
        where = f"{name}, line {number}"
        if not line.strip():
            continue
        row = _json(line, where)
        try:
            at, kind, more = row
            nodes, lasting = more["nodes"], float(more["duration"])
            at = float(at) / 1000
        except (TypeError, ValueError, KeyError):
            raise FieldError(
                where, line[:80], 'write [MS, "add", {"nodes": [...], "duration": MS}]'
            ) from None
        if kind not in (ADD, REMOVE, "no-op") or not all(isinstance(node, str) for node in nodes):
            raise FieldError(where, str(kind)[:80], "add, remove or no-op, and names of nodes")
        events += [Event(at, kind, node) for node in nodes if kind != "no-op"]
        end = max(end, at + lasting / 1000)
    return _trace(events, end, f"imported from {name}", name)


def spot_prices(text: str, name: str, bid: float, nodes: int = 1) -> Trace:
    """`aws ec2 describe-spot-price-history`: a zone's nodes are there while its price is at most `bid`."""
    prices = []
    for index, row in enumerate(_listed(text, name, "SpotPriceHistory")):
        where = f"{name}: SpotPriceHistory[{index}]"
        try:
            prices.append(
                (
                    _when(row["Timestamp"], where),
                    row["AvailabilityZone"],
                    row["InstanceType"],
                    float(row["SpotPrice"]),
                )
            )
        except (TypeError, ValueError, KeyError):
            remedy = "Timestamp, AvailabilityZone, InstanceType and SpotPrice are needed"
            raise FieldError(where, str(row)[:80], remedy) from None
    prices.sort(key=lambda price: price[0])
    start, events = prices[0][0], list[Event]()
    there: set[tuple[str, str]] = set()
    for at, zone, kind, price in prices:
        market = zone, kind
        if (price <= bid) != (market in there):
            what = ADD if price <= bid else REMOVE
            (there.add if what == ADD else there.discard)(market)
            events += [Event(at - start, what, f"{zone}-{kind}-{i}", zone, kind) for i in range(1, nodes + 1)]
    return _trace(events, prices[-1][0] - start, f"imported from {name}, bid {bid:g}", name)


def scaling_activities(text: str, name: str) -> Trace:
    """`aws autoscaling describe-scaling-activities`: launches and terminations, by their end and start."""
    told = []
    for index, row in enumerate(_listed(text, name, "Activities")):
        where = f"{name}: Activities[{index}]"
        try:
            words, status = row["Description"].split(), row.get("StatusCode", "Successful")
            kind = {"Launching": ADD, "Terminating": REMOVE}.get(words[0])
            node = words[-1]
            time = row["EndTime"] if kind == ADD else row["StartTime"]
            zone = _json(row.get("Details", "{}"), where).get("Availability Zone", "")
        except (TypeError, ValueError, KeyError, IndexError, AttributeError):
            raise FieldError(where, str(row)[:80], "Description, StartTime and EndTime are needed") from None
        if kind is not None and status == "Successful":
            told.append(Event(_when(time, where), kind, node, zone))
    told.sort(key=lambda event: event.seconds)
    start = told[0].seconds if told else 0.0
    there: set[str] = set()
    events = list[Event]()
    for event in told:
        at = event.seconds - start
        if event.kind == REMOVE and event.node not in there:  # launched before the record begins
            events.insert(0, Event(0.0, ADD, event.node, event.zone))
        (there.add if event.kind == ADD else there.discard)(event.node)
        events.append(Event(at, event.kind, event.node, event.zone))
    return _trace(events, max((e.seconds for e in events), default=0.0), f"imported from {name}", name)


def skypilot(text: str, name: str) -> Trace:
    """SkyPilot's spot traces: {"metadata": {"gap_seconds": S}, "data": [0, 1, ...]}, how many instances there are at
    fixed intervals."""
    found = _json(text, name)
    try:
        gap, data = float(found["metadata"]["gap_seconds"]), [int(n) for n in found["data"]]
    except (TypeError, ValueError, KeyError):
        raise FieldError(name, str(found)[:80], 'metadata.gap_seconds and a list "data" are needed') from None
    rows = "\n".join(f"{i * gap},{n}" for i, n in enumerate(data))
    trace = counts(rows, name)
    return check(trace.events, len(data) * gap, trace.origin)


def elastic_events(text: str, name: str) -> Trace:
    """Our own events.jsonl: `joined`, `lost` and `drained` nodes, from the first event on."""
    events, there, start, end = list[Event](), set[str](), math.nan, 0.0
    for number, line in enumerate(text.splitlines(), 1):
        where = f"{name}, line {number}"
        row = _json(line, where) if line.strip() else {}
        if not isinstance(row, dict):
            raise FieldError(where, line[:80], "an object a line is needed")
        if "at" not in row:
            continue
        at = _number(str(row["at"]), where)
        start = at if math.isnan(start) else start
        end = max(end, at - start)
        node = row.get("node", "")
        if row.get("kind") == "joined" and node not in there:
            there.add(node)
            events.append(Event(at - start, ADD, node, str(row.get("domain", ""))))
        elif row.get("kind") in ("lost", "drained") and node in there:
            there.discard(node)
            events.append(Event(at - start, REMOVE, node))
    return _trace(events, end, f"imported from {name}", name)


FORMATS: dict[str, Callable[..., Trace]] = {
    "bamboo": bamboo,
    "counts": counts,
    "parcae": parcae,
    "spot-prices": spot_prices,
    "scaling-activities": scaling_activities,
    "skypilot": skypilot,
    "events": elastic_events,
}


def _trace(events: list[Event], end_s: float, origin: str, name: str) -> Trace:
    return check(events, end_s, origin, f"{name}, event")


def _csv(text: str, name: str, fields: int) -> Iterator[tuple[int, list[str]]]:
    reader = csv.reader(io.StringIO(text))
    try:
        for row in reader:
            if not row:
                continue
            if len(row) != fields:
                where = f"{name}, line {reader.line_num}"
                raise FieldError(where, ",".join(row)[:80], f"{fields} fields are needed")
            yield reader.line_num, [field.strip() for field in row]
    except csv.Error as error:
        raise FieldError(f"{name}, line {reader.line_num}", "", f"not CSV: {error}") from error


def _listed(text: str, name: str, key: str) -> list[Any]:
    """The list under `key`, not empty."""
    found = _json(text, name)
    rows = found.get(key) if isinstance(found, dict) else None
    if not isinstance(rows, list) or not rows:
        raise FieldError(name, type(found).__name__, f'an object with a list "{key}" is needed')
    return rows


def _json(text: str, where: str) -> Any:
    try:
        return json.loads(text)
    except (ValueError, RecursionError) as error:
        raise FieldError(where, text[:80], f"not JSON: {error}") from error


def _number(text: str, where: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not math.isfinite(value) or value < 0:
        raise FieldError(where, text[:80], "a number from 0 up is needed")
    return value


def _when(text: str, where: str) -> float:
    """ISO 8601 as seconds since 1970."""
    try:
        return datetime.fromisoformat(text.replace("Z", "+00:00")).timestamp()
    except (ValueError, AttributeError, TypeError):
        raise FieldError(where, str(text)[:80], "a time as 2026-01-31T12:00:00Z is needed") from None
