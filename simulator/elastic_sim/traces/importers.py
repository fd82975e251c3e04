"""Converts recorded traces of other projects, and our own events.jsonl, to our format.

`FORMATS` names the importers: Bamboo and Oobleck, Parcae, counts over time, AWS, SkyPilot. Errors
name the file, the place in the file, the value and the remedy.
"""

from __future__ import annotations

import csv
import io
import json
import math
import random
import reprlib
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from datetime import datetime
from typing import Any

from elastic.core.protocol.fault_spec import FaultKind, FaultSpec
from elastic.domain.codec import decode, json_fault
from elastic.domain.errors import FieldError
from elastic_sim.traces.statistics import statistics
from elastic_sim.traces.trace import (
    ADD,
    MAX_EVENTS,
    MAX_NODES,
    REMOVE,
    Event,
    PlacedEvent,
    Trace,
    TraceBuilder,
    refuse_milliseconds,
)

MAX_LIKELY_LOSSES = 20.0
"""Losses per node-hour that suggest a wrong unit of time. Recorded markets have up to 1.6."""
MIN_LOSSES = 5
"""Least number of losses for an estimate of their rate."""
MAX_LIKELY_END_S = 365 * 86400.0
"""Length that suggests a wrong unit of time: no recorded market is as long."""


def bamboo(text: str, name: str) -> Trace:
    """Parse a trace of Bamboo or Oobleck's artifact: rows of milliseconds, add or remove, node.

    The trace ends with its last event.
    """
    builder, end = TraceBuilder(), 0.0
    for where, at, fields in _csv(text, name, 3):
        end = at / 1000
        builder.add(Event(end, fields[1], fields[2]), where, ",".join(fields))
    return _trace(builder, end, name)


def counts(text: str, name: str, unit_s: float = 1.0) -> Trace:
    """Parse rows of time and number of instances from then on. `unit_s`: seconds per unit of time.

    The file does not name nodes, so the lost ones are drawn at random, always the same ones.
    """
    rows = [(where, at * unit_s, fields[1]) for where, at, fields in _csv(text, name, 2)]
    return _trace(_numbered(rows), rows[-1][1] if rows else 0.0, name)


def dated_counts(text: str, name: str) -> Trace:
    """Parse rows of date, time of day and number of instances from then on, as Bamboo's logs have.

    Their writer told each count three times, a minute apart, even if it had changed meanwhile. So a
    row replaces all earlier ones that are not before it. The lost nodes are drawn as by `counts`.
    """
    rows: list[tuple[str, float, str]] = []
    for number, line in enumerate(text.splitlines(), 1):
        where, fields = f"{name}, line {number}", [field.strip() for field in line.split(",")]
        if not line.strip():
            continue
        if len(fields) != 3:
            raise FieldError(where, line[:80], "write DATE, TIME, COUNT")
        at = _timestamp(f"{fields[0]}T{fields[1]}Z", where)
        while rows and rows[-1][1] >= at:
            rows.pop()
        rows.append((where, at, fields[2]))
    placed = [(where, at - rows[0][1], count) for where, at, count in rows]
    return _trace(_numbered(placed), placed[-1][1] if placed else 0.0, name)


def _numbered(rows: Iterable[tuple[str, float, Any]]) -> TraceBuilder:
    """Return the events of rows (place in the file, seconds, instances from then on)."""
    builder, present, number, draw = TraceBuilder(), list[str](), 0, random.Random(0)
    for where, at, count in rows:
        wanted = _number(count, where)
        if wanted != int(wanted) or wanted > MAX_NODES:
            raise FieldError(where, count, f"a whole number of instances, at most {MAX_NODES}")
        while len(present) < wanted:
            number += 1
            present.append(f"node{number}")
            builder.add(Event(at, ADD, present[-1]), where)
        while len(present) > wanted:
            lost = present.pop(draw.randrange(len(present)))
            builder.add(Event(at, REMOVE, lost), where)
        _not_too_many(builder.events, where)
    return builder


def parcae(text: str, name: str) -> Trace:
    """Parse a trace of Parcae: one JSON list per line.

    [milliseconds, "add", "remove" or "no-op", {"nodes": [...], "duration": milliseconds}]
    """
    builder, last, end = TraceBuilder(), 0.0, 0.0
    for number, line in enumerate(text.splitlines(), 1):
        where = f"{name}, line {number}"
        if not line.strip():
            continue
        row = _json(line, where)
        if not (isinstance(row, list) and len(row) == 3 and isinstance(row[2], dict)):
            remedy = 'write [MS, "add", {"nodes": [...], "duration": MS}]'
            raise FieldError(where, line[:80], remedy)
        time, kind, more = row
        at, lasting = _number(time, where), _number(more.get("duration"), f"{where}: duration")
        last = _not_before(last, at, where, time)
        if kind not in (ADD, REMOVE, "no-op"):
            raise FieldError(where, _shown(kind), "add, remove or no-op")
        nodes = more.get("nodes")
        if not isinstance(nodes, list) or not all(isinstance(node, str) for node in nodes):
            remedy = 'a list of names, as ["node1", "node2"]'
            raise FieldError(f"{where}: nodes", _shown(nodes), remedy)
        for node in nodes if kind != "no-op" else ():
            builder.add(Event(at / 1000, kind, node), where, f"{_shown(time)},{kind},{node}")
        end = max(end, (at + lasting) / 1000)
    return _trace(builder, end, name)


def spot_prices(
    text: str, name: str, bid: float, nodes: int = 1, product: str | None = None
) -> Trace:
    """Parse the output of `aws ec2 describe-spot-price-history`.

    Each zone has `nodes` nodes of a type while their price is at most `bid` dollars per hour.
    `product`: use only rows with this ProductDescription.
    """
    if not (math.isfinite(bid) and bid > 0):
        raise FieldError("--bid", bid, "dollars per hour, above 0")
    if not 1 <= nodes <= MAX_NODES:
        raise FieldError("--nodes", nodes, f"from 1 to {MAX_NODES}")
    prices = _prices(text, name, product)
    start, builder = prices[0][0], TraceBuilder()
    affordable: set[tuple[str, str]] = set()
    for at, zone, kind, price, where in prices:
        market = zone, kind
        if (price <= bid) != (market in affordable):
            change = ADD if price <= bid else REMOVE
            (affordable.add if change == ADD else affordable.discard)(market)
            for i in range(1, nodes + 1):
                event = Event(at - start, change, f"{zone}-{kind}-{i}", zone, kind)
                builder.add(event, where, f"{zone}, {kind}")
            _not_too_many(builder.events, where)
    return _trace(builder, prices[-1][0] - start, name, f", bid {bid:g}")


def _prices(text: str, name: str, product: str | None) -> list[tuple[float, str, str, float, str]]:
    """Return (seconds, zone, instance type, price, place in the file), times ascending."""
    prices, products = list[tuple[float, str, str, float, str]](), set[str]()
    for where, row in _listed(text, name, "SpotPriceHistory"):
        found = _text(row, "ProductDescription", where, "")
        products.add(found)
        if product is None or found == product:
            zone, kind = _text(row, "AvailabilityZone", where), _text(row, "InstanceType", where)
            price = _number(row.get("SpotPrice"), f"{where}.SpotPrice")
            at = _timestamp(row.get("Timestamp"), f"{where}.Timestamp")
            prices.append((at, zone, kind, price, where))
    named = ", ".join(repr(known[:40]) for known in sorted(products)[:8])[:200]
    if product is None and len(products) > 1:
        remedy = "each has its own prices: choose one with --product"
        raise FieldError(f"{name}: ProductDescription", named, remedy)
    if not prices:
        raise FieldError("--product", product, f"the file has {named}")
    return sorted(prices, key=lambda price: price[0])


def scaling_activities(text: str, name: str) -> Trace:
    """Parse the output of `aws autoscaling describe-scaling-activities`.

    A launch counts at its end, a termination at its start. Failed and unfinished activities are
    ignored.
    """
    found = list[PlacedEvent]()
    for where, row in _listed(text, name, "Activities"):
        words = _text(row, "Description", where).split()
        kind = {"Launching": ADD, "Terminating": REMOVE}.get(words[0] if words else "")
        if kind is None or row.get("StatusCode", "Successful") != "Successful":
            continue
        field = "EndTime" if kind == ADD else "StartTime"
        place = f"{where}.Details"
        details = _object(_json(_text(row, "Details", where, "{}"), place), place)
        zone = _text(details, "Availability Zone", place, "")
        event = Event(_timestamp(row.get(field), f"{where}.{field}"), kind, words[-1], zone)
        found.append(PlacedEvent(event, where, row["Description"]))
    if not found:
        raise FieldError(f"{name}: Activities", "", "it has no successful launch or termination")
    found.sort(key=lambda placed: placed.event.seconds)
    start, present = found[0].event.seconds, set[str]()
    before, later = list[PlacedEvent](), list[PlacedEvent]()
    for one in found:
        event = replace(one.event, seconds=one.event.seconds - start)
        if event.kind == REMOVE and event.node not in present:  # launched before the record begins
            before.append(one._replace(event=replace(event, seconds=0.0, kind=ADD)))
        (present.add if event.kind == ADD else present.discard)(event.node)
        later.append(one._replace(event=event))
    return _trace(_build(before[::-1] + later), later[-1].event.seconds, name)


def skypilot(text: str, name: str) -> Trace:
    """Parse a spot trace of SkyPilot: number of instances at fixed intervals.

    {"metadata": {"gap_seconds": S}, "data": [0, 1, ...]}
    """
    found = _json(text, name)
    metadata = found.get("metadata") if isinstance(found, dict) else None
    if not isinstance(metadata, dict) or not isinstance(found.get("data"), list):
        remedy = 'metadata.gap_seconds and a list "data" are needed'
        raise FieldError(name, _shown(found), remedy)
    gap, data = _number(metadata.get("gap_seconds"), f"{name}: metadata.gap_seconds"), found["data"]
    rows = ((f"{name}: data[{i}]", i * gap, count) for i, count in enumerate(data))
    return _trace(_numbered(rows), len(data) * gap, name)


@dataclass(slots=True)
class _PresentNode:
    """A node of a run, from its join until it is lost."""

    since: float
    where: str
    """Place in the file of the event with which the node joined."""
    noticed: float = math.nan
    """Time of the node's notice; nan: none."""
    until: float = math.inf
    """Time at which the node will leave, according to its notice; inf: no notice."""
    drained: bool = False
    """Whether the node's data was moved out. The node may still serve copies until it leaves."""


class _RunNodes:
    """Follows the nodes of a run and collects their trace events."""

    def __init__(
        self, start: float, kills: dict[str, list[float]], devices: tuple[str, ...]
    ) -> None:
        self._start, self._kills, self._devices = start, kills, devices
        self.placed = list[PlacedEvent]()
        self._present, self._joined = dict[str, _PresentNode](), 0

    def process(self, where: str, at: float, row: dict[str, Any]) -> None:
        """Process one event of the run. Raises FieldError."""
        node, kind = _text(row, "node", where), row["kind"]
        present = self._present.get(node)
        if kind == "joined":
            if present is None or present.drained:
                self._add(node, at, where, _text(row, "domain", where, ""))
        elif present is None or present.drained:
            return
        elif kind == "drain":
            present.noticed = at if math.isnan(present.noticed) else present.noticed
            deadline_s = _number(row.get("deadline_s"), f"{where}: deadline_s")
            present.until = min(present.until, at + deadline_s)
        elif kind == "notice" and row.get("notice") == "none":
            present.noticed, present.until = math.nan, math.inf
        elif kind == "drained" and present.until < math.inf:
            present.drained = True
        elif kind in ("lost", "drained"):
            self._remove(node, at, where)

    def finish(self, last: float) -> None:
        """Remove nodes that left or were killed without an event of their loss."""
        for node, present in list(self._present.items()):
            if present.drained:
                self._remove(node, present.until, present.where)
            elif any(kill >= present.since for kill in self._kills.get(node, ())):
                self._remove(node, last, present.where)
        self.placed.sort(key=lambda one: one.event.seconds)

    def _add(self, node: str, at: float, where: str, domain: str) -> None:
        if node in self._present:
            self._remove(node, min(at, self._present[node].until), where)
        device = self._devices[0] if len(self._devices) == 1 else ""
        if self._joined < len(self._devices):
            device = self._devices[self._joined]
        event = Event(at - self._start, ADD, node, domain, device)
        self.placed.append(PlacedEvent(event, where, f"{node}, {domain}"))
        self._present[node] = _PresentNode(at, where)
        self._joined += 1

    def _remove(self, node: str, at: float, where: str) -> None:
        present = self._present.pop(node)
        if at < present.since:
            remedy = f"{node} joined later, at {present.since} ({present.where})"
            raise FieldError(f"{where}: at", at, remedy)
        kills = (kill for kill in self._kills.get(node, ()) if present.since <= kill <= at)
        at = max(kills, default=at)
        notice_s = at - present.noticed if at > present.noticed else 0.0
        event = Event(at - self._start, REMOVE, node, notice_s=notice_s)
        self.placed.append(PlacedEvent(event, where, node))


def elastic_events(text: str, name: str, config: str = "{}") -> Trace:
    """Parse our own events.jsonl, from the first event on.

    A node is present from `joined` until `lost`. A node with a notice (`drain`, unless withdrawn)
    leaves when the notice ends. `config` is the run's config.json, which gives the nodes' types and
    the injected faults: a node that a fault killed is lost at the fault, not at its detection.
    """
    rows = _rows(text, name)
    start = rows[0][1] if rows else 0.0
    given = _object(_json(config, "config.json"), "config.json")
    devices = decode(tuple[str, ...], given.get("devices") or [], "config.json: devices")
    nodes = _RunNodes(start, _kills(rows, given), devices)
    for where, at, row in rows:
        if row.get("kind") not in ("joined", "lost", "drain", "drained", "notice"):
            continue
        if at < start:
            remedy = f"times must ascend; the first row is at {start}"
            raise FieldError(f"{where}: at", row["at"], remedy)
        nodes.process(where, at, row)
    last = max((at for _, at, _ in rows), default=start)
    nodes.finish(last)
    end = max([last - start, *(one.event.seconds for one in nodes.placed)])
    return _trace(_build(nodes.placed), end, name)


def _rows(text: str, name: str) -> list[tuple[str, float, dict[str, Any]]]:
    """Return (place in the file, time, event) of each event with a time."""
    found = []
    for number, line in enumerate(text.splitlines(), 1):
        where = f"{name}, line {number}"
        if line.strip():
            row = _object(_json(line, where), where, "write one object per line")
            if "at" in row:
                found.append((where, _number(row["at"], f"{where}: at"), row))
    return found


def _kills(
    rows: list[tuple[str, float, dict[str, Any]]], config: dict[str, Any]
) -> dict[str, list[float]]:
    """Return the times at which injected faults killed each node."""
    faults = decode(tuple[FaultSpec, ...], config.get("faults") or [], "config.json: faults")
    found = dict[str, list[float]]()
    for where, at, row in rows:
        if faults and row.get("kind") == "fault":
            number = row.get("number")
            if not isinstance(number, int) or not 0 <= number < len(faults):
                remedy = f"the run has {len(faults)} faults"
                raise FieldError(f"{where}: number", _shown(number), remedy)
            if faults[number].kind is FaultKind.KILL:
                found.setdefault(faults[number].node, []).append(at)
    return found


FORMATS: dict[str, Callable[..., Trace]] = {
    "bamboo": bamboo,
    "counts": counts,
    "dated-counts": dated_counts,
    "parcae": parcae,
    "spot-prices": spot_prices,
    "scaling-activities": scaling_activities,
    "skypilot": skypilot,
    "events": elastic_events,
}
UNITS = {
    "bamboo": "milliseconds",
    "counts": "seconds",
    "dated-counts": "dates",
    "parcae": "milliseconds",
    "spot-prices": "dates",
    "scaling-activities": "dates",
    "skypilot": "seconds",
    "events": "seconds",
}
"""Unit of the times in each format."""


def plausibility_warning(trace: Trace, unit: str) -> str:
    """Return why the times of a trace are probably not in `unit`; "": they are plausible."""
    if not trace.events:
        return "no node ever joins; is the bid too low, or is it the wrong file?"
    found = statistics(trace)
    if found.losses >= MIN_LOSSES and found.losses_per_node_hour > MAX_LIKELY_LOSSES:
        rate = f"{found.losses_per_node_hour:.3g} losses per node and hour"
        return f"{rate}, more than any market has: are times really {unit}?"
    if trace.end_s > MAX_LIKELY_END_S:
        days = trace.end_s / 86400
        return f"{days:.4g} days, longer than any record: are times really {unit}?"
    return ""


def _build(placed: Iterable[PlacedEvent]) -> TraceBuilder:
    builder = TraceBuilder()
    for one in placed:
        builder.add(one.event, one.where, one.text)
    return builder


def _trace(builder: TraceBuilder, end_s: float, name: str, more: str = "") -> Trace:
    """Return the whole trace. `more`: options of the import, for the trace's origin."""
    if not builder.events and not end_s:
        raise FieldError(name, "", "it holds no events: name another file")
    found = builder.build(end_s, f"imported from {name}{more}", name)
    refuse_milliseconds(name, [event.seconds for event in found.events], end_s)
    return found


def _not_before(last: float, at: float, where: str, text: Any) -> float:
    """Return `at`. Raises FieldError if `at` is before `last`, the time of the row before."""
    if at < last:
        remedy = f"times must ascend; the row before is at {last:.15g}"
        raise FieldError(where, _shown(text), remedy)
    return at


def _not_too_many(events: list[Event], where: str) -> None:
    if len(events) > MAX_EVENTS:
        raise FieldError(where, len(events), f"at most {MAX_EVENTS} events; import a part of it")


def _csv(text: str, name: str, fields: int) -> Iterator[tuple[str, float, list[str]]]:
    """Yield (place, first field as an ascending time, all fields) of each row."""
    reader, last = csv.reader(io.StringIO(text)), 0.0
    try:
        for row in reader:
            if not row:
                continue
            where = f"{name}, line {reader.line_num}"
            if len(row) != fields:
                raise FieldError(where, ",".join(row)[:80], f"{fields} fields are needed")
            last = _not_before(last, _number(row[0], where), where, ",".join(row))
            yield where, last, [field.strip() for field in row]
    except csv.Error as error:
        raise FieldError(f"{name}, line {reader.line_num}", "", f"not CSV: {error}") from error


def _listed(text: str, name: str, key: str) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield (place, object) of each element of the non-empty list under `key`."""
    found = _json(text, name)
    rows = found.get(key) if isinstance(found, dict) else None
    if not isinstance(rows, list) or not rows:
        raise FieldError(name, type(found).__name__, f'an object with a list "{key}" is needed')
    for index, row in enumerate(rows):
        yield f"{name}: {key}[{index}]", _object(row, f"{name}: {key}[{index}]")


def _json(text: str, where: str) -> Any:
    try:
        return json.loads(text)
    except (ValueError, RecursionError) as error:
        raise FieldError(where, text[:80], f"not JSON: {json_fault(error)}") from error


def _object(found: Any, where: str, remedy: str = "an object is needed") -> dict[str, Any]:
    if not isinstance(found, dict):
        raise FieldError(where, _shown(found), remedy)
    return found


def _text(row: dict[str, Any], key: str, where: str, default: str | None = None) -> str:
    value = row.get(key, default)
    if not isinstance(value, str):
        raise FieldError(f"{where}: {key}", _shown(value), "text is needed")
    return value


def _number(value: Any, where: str) -> float:
    """Return a finite number from 0 up, from text or JSON. Raises FieldError."""
    try:
        number = math.nan if isinstance(value, bool) else float(value)
    except (TypeError, ValueError, OverflowError):
        number = math.nan
    if not math.isfinite(number) or number < 0:
        raise FieldError(where, _shown(value), "a number from 0 up is needed")
    return number


def _timestamp(value: Any, where: str) -> float:
    """Return the seconds since 1970 of a time in ISO 8601. Raises FieldError."""
    try:
        return datetime.fromisoformat(value.replace("Z", "+00:00")).timestamp()
    except (ValueError, AttributeError, TypeError, OverflowError):
        raise FieldError(where, _shown(value), "a time as 2026-01-31T12:00:00Z is needed") from None


def _shown(value: Any) -> str:
    return (value if isinstance(value, str) else reprlib.repr(value))[:80]
