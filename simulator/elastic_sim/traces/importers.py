"""Recorded traces of others in our format: Bamboo, Oobleck, Parcae, counts over time, AWS and SkyPilot."""

from __future__ import annotations

import csv
import io
import json
import math
import reprlib
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from datetime import datetime
from typing import Any, NamedTuple

from elastic.core.protocol.fault_spec import FaultKind, FaultSpec
from elastic.domain.codec import decode
from elastic.domain.errors import FieldError
from elastic_sim.traces.statistics import statistics
from elastic_sim.traces.trace import (
    ADD,
    MOST_EVENTS,
    MOST_NODES,
    REMOVE,
    Event,
    Growing,
    Trace,
    refuse_milliseconds,
)

LIKELY_LOSSES = 20.0
"""Per node and hour. Recorded markets have up to 1.6; with more than this a node stays less than three minutes, which
is what comes of hours taken for seconds (times 3600)."""
FEW_LOSSES = 5
"""So few say nothing of a rate."""
LIKELY_END_S = 365 * 86400.0
"""Nobody recorded a market for longer; seconds taken for hours soon make years."""


def bamboo(text: str, name: str) -> Trace:
    """milliseconds, add or remove, node: the traces of Bamboo and of Oobleck's artifact. Ends with its last event."""
    growing, end = Growing(), 0.0
    for where, at, fields in _csv(text, name, 3):
        end = at / 1000
        growing.add(Event(end, fields[1], fields[2]), where, ",".join(fields))
    return _trace(growing, end, f"imported from {name}", name)


def counts(text: str, name: str, unit_s: float = 1.0) -> Trace:
    """seconds (or hours), instances: as pairs of rows, before and after a change. Nodes are numbered; who came last
    goes first, since the file does not say who went."""
    rows = [(where, at * unit_s, fields[1]) for where, at, fields in _csv(text, name, 2)]
    return _trace(_numbered(rows), rows[-1][1] if rows else 0.0, f"imported from {name}", name)


def _numbered(rows: Iterable[tuple[str, float, Any]]) -> Growing:
    """`rows`: where it stands, when, how many instances from then on."""
    growing, present, number = Growing(), list[str](), 0
    for where, at, told in rows:
        wanted = _number(told, where)
        if wanted != int(wanted) or wanted > MOST_NODES:
            raise FieldError(where, told, f"a whole number of instances, at most {MOST_NODES}")
        while len(present) < wanted:
            number += 1
            present.append(f"node{number}")
            growing.add(Event(at, ADD, present[-1]), where)
        while len(present) > wanted:
            growing.add(Event(at, REMOVE, present.pop()), where)
        _not_too_many(growing.events, where)
    return growing


def parcae(text: str, name: str) -> Trace:
    """A JSON list a line: milliseconds, add, remove or no-op, {"nodes": [...], "duration": milliseconds}."""
    growing, last, end = Growing(), 0.0, 0.0
    for number, line in enumerate(text.splitlines(), 1):
        where = f"{name}, line {number}"
        if not line.strip():
            continue
        row = _json(line, where)
        if not (isinstance(row, list) and len(row) == 3 and isinstance(row[2], dict)):
            raise FieldError(where, line[:80], 'write [MS, "add", {"nodes": [...], "duration": MS}]')
        told, kind, more = row
        at, lasting = _number(told, where), _number(more.get("duration"), f"{where}: duration")
        last = _not_before(last, at, where, told)
        if kind not in (ADD, REMOVE, "no-op"):
            raise FieldError(where, _shown(kind), "add, remove or no-op")
        nodes = more.get("nodes")
        if not isinstance(nodes, list) or not all(isinstance(node, str) for node in nodes):
            raise FieldError(f"{where}: nodes", _shown(nodes), 'a list of names, as ["node1", "node2"]')
        for node in nodes if kind != "no-op" else ():
            growing.add(Event(at / 1000, kind, node), where, f"{_shown(told)},{kind},{node}")
        end = max(end, (at + lasting) / 1000)
    return _trace(growing, end, f"imported from {name}", name)


def spot_prices(text: str, name: str, bid: float, nodes: int = 1, product: str | None = None) -> Trace:
    """`aws ec2 describe-spot-price-history`: a zone's nodes are there while its price is at most `bid`. `product`: of
    rows with this ProductDescription alone."""
    if not (math.isfinite(bid) and bid > 0):
        raise FieldError("--bid", bid, "dollars an hour, above 0")
    if not 1 <= nodes <= MOST_NODES:
        raise FieldError("--nodes", nodes, f"from 1 to {MOST_NODES}")
    prices = _prices(text, name, product)
    start, growing = prices[0][0], Growing()
    there: set[tuple[str, str]] = set()
    for at, zone, kind, price, where in prices:
        market = zone, kind
        if (price <= bid) != (market in there):
            what = ADD if price <= bid else REMOVE
            (there.add if what == ADD else there.discard)(market)
            for i in range(1, nodes + 1):
                event = Event(at - start, what, f"{zone}-{kind}-{i}", zone, kind)
                growing.add(event, where, f"{zone}, {kind}")
            _not_too_many(growing.events, where)
    return _trace(growing, prices[-1][0] - start, f"imported from {name}, bid {bid:g}", name)


def _prices(text: str, name: str, product: str | None) -> list[tuple[float, str, str, float, str]]:
    """When, zone, instance type, price, where it stands; times ascending."""
    prices, products = list[tuple[float, str, str, float, str]](), set[str]()
    for where, row in _listed(text, name, "SpotPriceHistory"):
        found = _word(row, "ProductDescription", where, "")
        products.add(found)
        if product is None or found == product:
            zone, kind = _word(row, "AvailabilityZone", where), _word(row, "InstanceType", where)
            price = _number(row.get("SpotPrice"), f"{where}.SpotPrice")
            prices.append((_when(row.get("Timestamp"), f"{where}.Timestamp"), zone, kind, price, where))
    told = ", ".join(repr(known[:40]) for known in sorted(products)[:8])
    if product is None and len(products) > 1:
        remedy = "they have prices of their own: choose one with --product"
        raise FieldError(f"{name}: ProductDescription", told[:200], remedy)
    if not prices:
        raise FieldError("--product", product, f"the file has {told[:200]}")
    return sorted(prices, key=lambda price: price[0])


def scaling_activities(text: str, name: str) -> Trace:
    """`aws autoscaling describe-scaling-activities`: launches and terminations, by their end and start. Those that
    failed, or are not done yet, do not count."""
    told = list[_Placed]()
    for where, row in _listed(text, name, "Activities"):
        words = _word(row, "Description", where).split()
        kind = {"Launching": ADD, "Terminating": REMOVE}.get(words[0] if words else "")
        if kind is None or row.get("StatusCode", "Successful") != "Successful":
            continue
        told_by = "EndTime" if kind == ADD else "StartTime"
        details = _object(_json(_word(row, "Details", where, "{}"), f"{where}.Details"), f"{where}.Details")
        zone = _word(details, "Availability Zone", f"{where}.Details", "")
        event = Event(_when(row.get(told_by), f"{where}.{told_by}"), kind, words[-1], zone)
        told.append(_Placed(event, where, row["Description"]))
    if not told:
        raise FieldError(f"{name}: Activities", "", "no launch or termination that was successful is in it")
    told.sort(key=lambda placed: placed.event.seconds)
    start, there = told[0].event.seconds, set[str]()
    before, placed = list[_Placed](), list[_Placed]()
    for event, where, description in told:
        if event.kind == REMOVE and event.node not in there:  # launched before the record begins
            before.append(_Placed(replace(event, seconds=0.0, kind=ADD), where, description))
        (there.add if event.kind == ADD else there.discard)(event.node)
        placed.append(_Placed(replace(event, seconds=event.seconds - start), where, description))
    return _trace(_grown(before[::-1] + placed), placed[-1].event.seconds, f"imported from {name}", name)


def skypilot(text: str, name: str) -> Trace:
    """SkyPilot's spot traces: {"metadata": {"gap_seconds": S}, "data": [0, 1, ...]}, how many instances there are at
    fixed intervals."""
    found = _json(text, name)
    metadata = found.get("metadata") if isinstance(found, dict) else None
    if not isinstance(metadata, dict) or not isinstance(found.get("data"), list):
        raise FieldError(name, _shown(found), 'metadata.gap_seconds and a list "data" are needed')
    gap, data = _number(metadata.get("gap_seconds"), f"{name}: metadata.gap_seconds"), found["data"]
    rows = ((f"{name}: data[{i}]", i * gap, told) for i, told in enumerate(data))
    return _trace(_numbered(rows), len(data) * gap, f"imported from {name}", name)


@dataclass(slots=True)
class _There:
    """A node of a run, as its events tell it."""

    since: float
    where: str
    """Where it is told that it came."""
    told: float = math.nan
    """When it was told that it goes; nan: it was not."""
    until: float = math.inf
    """When it goes, as it was told."""
    gone: bool = False
    """It moved its state off and left: it may be there until then, for others."""


def elastic_events(text: str, name: str, config: str = "{}") -> Trace:
    """Our own events.jsonl, from the first event on: nodes that `joined`, were `lost`, or were told to go (`drain`,
    unless that was taken back) and go when that notice runs out.

    `config`: the run's config.json. With it nodes have their types, and those that an injected fault killed go when
    that was carried out, not when they were found lost.
    """
    rows = _rows(text, name)
    start = rows[0][1] if rows else 0.0
    given = _object(_json(config, "config.json"), "config.json")
    kills = _kills(rows, given)
    devices = decode(tuple[str, ...], given.get("devices") or [], "config.json: devices")
    placed, there, joined = list[_Placed](), dict[str, _There](), 0

    def gone(node: str, at: float, where: str) -> None:
        one = there.pop(node)
        if at < one.since:
            raise FieldError(f"{where}: at", at, f"{node} joined later, at {one.since} ({one.where})")
        at = max((kill for kill in kills.get(node, ()) if one.since <= kill <= at), default=at)
        notice = at - one.told if at > one.told else 0.0
        placed.append(_Placed(Event(at - start, REMOVE, node, notice_s=notice), where, node))

    for where, at, row in rows:
        kind = row.get("kind")
        if kind not in ("joined", "lost", "drain", "drained", "notice"):
            continue
        if at < start:
            raise FieldError(f"{where}: at", row["at"], f"times must ascend; the first row is at {start}")
        node = _word(row, "node", where)
        one = there.get(node)
        if kind == "joined":
            if one is not None and one.gone:
                gone(node, min(at, one.until), where)
            elif one is not None:
                continue
            device = devices[joined] if joined < len(devices) else devices[0] if len(devices) == 1 else ""
            domain = _word(row, "domain", where, "")
            placed.append(_Placed(Event(at - start, ADD, node, domain, device), where, f"{node}, {domain}"))
            there[node], joined = _There(at, where), joined + 1
        elif one is None or one.gone:
            continue
        elif kind == "drain":
            one.told = at if math.isnan(one.told) else one.told
            one.until = min(one.until, at + _number(row.get("deadline_s"), f"{where}: deadline_s"))
        elif kind == "notice" and row.get("notice") == "none":
            one.told, one.until = math.nan, math.inf
        elif kind == "drained" and one.until < math.inf:
            one.gone = True
        elif kind in ("lost", "drained"):
            gone(node, at, where)
    last = max((at for _, at, _ in rows), default=start)
    for node, one in list(there.items()):
        if one.gone or any(kill >= one.since for kill in kills.get(node, ())):
            gone(node, one.until if one.gone else last, one.where)
    placed.sort(key=lambda one: one.event.seconds)
    end = max([last - start, *(one.event.seconds for one in placed)])
    return _trace(_grown(placed), end, f"imported from {name}", name)


def _rows(text: str, name: str) -> list[tuple[str, float, dict[str, Any]]]:
    """Where it stands, when, the event."""
    found = []
    for number, line in enumerate(text.splitlines(), 1):
        where = f"{name}, line {number}"
        row = _object(_json(line, where), where, "an object a line is needed") if line.strip() else {}
        if "at" in row:
            found.append((where, _number(row["at"], f"{where}: at"), row))
    return found


def _kills(rows: list[tuple[str, float, dict[str, Any]]], config: dict[str, Any]) -> dict[str, list[float]]:
    """When injected faults killed a node."""
    faults = decode(tuple[FaultSpec, ...], config.get("faults") or [], "config.json: faults")
    found = dict[str, list[float]]()
    for where, at, row in rows:
        if faults and row.get("kind") == "fault":
            number = row.get("number")
            if not isinstance(number, int) or not 0 <= number < len(faults):
                raise FieldError(f"{where}: number", _shown(number), f"the run has {len(faults)} faults")
            if faults[number].kind is FaultKind.KILL:
                found.setdefault(faults[number].node, []).append(at)
    return found


FORMATS: dict[str, Callable[..., Trace]] = {
    "bamboo": bamboo,
    "counts": counts,
    "parcae": parcae,
    "spot-prices": spot_prices,
    "scaling-activities": scaling_activities,
    "skypilot": skypilot,
    "events": elastic_events,
}
UNITS = {
    "bamboo": "milliseconds",
    "counts": "seconds",
    "parcae": "milliseconds",
    "spot-prices": "dates",
    "scaling-activities": "dates",
    "skypilot": "seconds",
    "events": "seconds",
}
"""What times of these formats are."""


def doubt(trace: Trace, unit: str) -> str:
    """What about an imported trace is so unlike any market that times may not be in `unit`; "": nothing."""
    if not trace.events:
        return "no node ever comes; is the bid too low, or the file another?"
    found = statistics(trace)
    if found.losses >= FEW_LOSSES and found.losses_per_node_hour > LIKELY_LOSSES:
        rate = f"{found.losses_per_node_hour:.3g} losses per node and hour"
        return f"{rate}, more than any market has: are times {unit} indeed?"
    if trace.end_s > LIKELY_END_S:
        return f"{trace.end_s / 86400:.4g} days, longer than any record: are times {unit} indeed?"
    return ""


class _Placed(NamedTuple):
    """An event with where it stands, and what stands there."""

    event: Event
    where: str
    told: str


def _grown(placed: Iterable[_Placed]) -> Growing:
    growing = Growing()
    for event, where, told in placed:
        growing.add(event, where, told)
    return growing


def _trace(growing: Growing, end_s: float, origin: str, name: str) -> Trace:
    found = growing.ended(end_s, origin, name)
    refuse_milliseconds(name, [event.seconds for event in found.events], end_s)
    return found


def _not_before(last: float, at: float, where: str, told: Any) -> float:
    """`at`, if it is not before the last row's time."""
    if at < last:
        raise FieldError(where, _shown(told), f"times must ascend; the row before is at {last:.15g}")
    return at


def _not_too_many(events: list[Event], where: str) -> None:
    if len(events) > MOST_EVENTS:
        raise FieldError(where, len(events), f"at most {MOST_EVENTS} events; import a part of it")


def _csv(text: str, name: str, fields: int) -> Iterator[tuple[str, float, list[str]]]:
    """Where each row stands, its time as the file has it (its first field; ascending), and its fields."""
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
    """The objects of the list under `key`, which is not empty, each with where it stands."""
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
        raise FieldError(where, text[:80], f"not JSON: {error}") from error


def _object(found: Any, where: str, remedy: str = "an object is needed") -> dict[str, Any]:
    if not isinstance(found, dict):
        raise FieldError(where, _shown(found), remedy)
    return found


def _word(row: dict[str, Any], key: str, where: str, default: str | None = None) -> str:
    value = row.get(key, default)
    if not isinstance(value, str):
        raise FieldError(f"{where}: {key}", _shown(value), "text is needed")
    return value


def _number(value: Any, where: str) -> float:
    """Of text or of JSON."""
    try:
        number = math.nan if isinstance(value, bool) else float(value)
    except (TypeError, ValueError, OverflowError):
        number = math.nan
    if not math.isfinite(number) or number < 0:
        raise FieldError(where, _shown(value), "a number from 0 up is needed")
    return number


def _when(value: Any, where: str) -> float:
    """ISO 8601 as seconds since 1970."""
    try:
        return datetime.fromisoformat(value.replace("Z", "+00:00")).timestamp()
    except (ValueError, AttributeError, TypeError, OverflowError):
        raise FieldError(where, _shown(value), "a time as 2026-01-31T12:00:00Z is needed") from None


def _shown(value: Any) -> str:
    return (value if isinstance(value, str) else reprlib.repr(value))[:80]
