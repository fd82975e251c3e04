"""Rehearsal: a real Prometheus with the shipped rules fires every alert, and none for a job that is
well.

One page has a job for each alert, with the series of `test_rules`, and one that is well. Windows
and waits of the rules are sixty times shorter. Each scrape is a minute of the series, so a busy
machine makes the rehearsal slower, not wrong. The series begin again at their end; counters go on.
"""

from __future__ import annotations

import re
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, HTTPServer
from itertools import count
from pathlib import Path
from typing import Any

import pytest

from tests.observability.test_rules import ILL, WELL, Series, changed
from tests.observability.tools import RULES, need, started, until
from tests.patience import LONG_S

UNITS_S = {"s": 1, "m": 60, "h": 3600}
SPEED = 60
FIRED = 'count by (alertname, job) (max_over_time(ALERTS{alertstate="firing"}[1h]))'


def hastened(rules: str) -> str:
    """The rules with windows, resolutions and waits that are SPEED times shorter."""

    def shorter(match: re.Match[str]) -> str:
        return f"{int(match[1]) * UNITS_S[match[2]] * 1000 // SPEED}ms"

    window = r"\[\d+[smh](?::\d+[smh])?\]"
    text = re.sub(window, lambda m: re.sub(r"(\d+)([smh])", shorter, m[0]), rules)
    return re.sub(r"(?<=for: )(\d+)([smh])", shorter, text)


def samples(notation: str) -> list[float | None]:
    """The values of a series in promtool's notation; None: a missing one."""
    found: list[float | None] = []
    for word in notation.split():
        start, step, times = re.fullmatch(r"(_|-?[\d.]+)([+-][\d.]+)?(?:x(\d+))?", word).groups()  # type: ignore[union-attr]
        number = int(times or 0)
        if start == "_":
            found += [None] * number
        else:
            found += [float(start) + i * float(step or 0) for i in range(number + 1)]
    return found


def test_the_notation() -> None:
    assert samples("_x2 20+60x2 5x1 7") == [None, None, 20, 80, 140, 5, 5, 7]
    assert samples("100-60x1") == [100, 40]
    assert hastened("x[15m:15s] for: 30s") == "x[15000ms:250ms] for: 500ms"


class Page:
    """All series at one minute after the other."""

    def __init__(self, jobs: dict[str, Series]) -> None:
        self._series = {
            name.replace('job="j"', f'job="{job}"'): samples(values)
            for job, series in jobs.items()
            for name, values in series.items()
        }
        self._minutes = count()

    def next(self) -> str:
        minute = next(self._minutes)
        lines = []
        for name, values in self._series.items():
            rounds, place = divmod(minute, len(values))
            value, metric = values[place], name.partition("{")[0]
            if value is None:
                continue
            if metric.endswith(("_total", "_bucket")):
                value += rounds * max(one for one in values if one is not None)
            lines.append(f"{name} {value}")
        return "\n".join([*lines, ""])


@contextmanager
def served(page: Page) -> Iterator[str]:
    """Serve the page; yield the address."""

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            body = page.next().encode()
            self.send_response(200)
            self.send_header("Content-Type", "text/plain; version=0.0.4")
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *_: Any) -> None:
            pass

    server = HTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    yield f"127.0.0.1:{server.server_port}"
    server.shutdown()
    server.server_close()
    thread.join(LONG_S)


@pytest.mark.slow
def test_every_alert_fires_in_a_rehearsal(tmp_path: Path) -> None:
    need("prometheus")
    rules = tmp_path / "rules.yml"
    rules.write_text(hastened(RULES.read_text()))
    jobs = {"well": WELL, **{name: changed(series) for name, series in ILL.items()}}
    wanted = {(f"Elastic{name}", name) for name in ILL}
    with served(Page(jobs)) as address:
        scrape = {
            "job_name": "rehearsal",
            "honor_labels": True,
            "static_configs": [{"targets": [address]}],
        }
        config = {
            "global": {
                "scrape_interval": "1s",
                "scrape_timeout": "1s",
                "evaluation_interval": "500ms",
            },
            "rule_files": [str(rules)],
            "scrape_configs": [scrape],
        }
        fired = set[tuple[str, str]]()
        with started(tmp_path / "prometheus", config) as server:

            def all_fired() -> bool:
                result = (server.ask("query", query=FIRED) or {"result": ()})["result"]
                found = (one["metric"] for one in result)
                fired.update((metric["alertname"], metric["job"]) for metric in found)
                return wanted <= fired

            try:
                until(all_fired, "every alert fires", 2 * LONG_S)
            finally:
                print("not fired:", sorted(wanted - fired))
    assert not [alert for alert, job in fired if job == "well"], "nothing fires in a healthy job"
