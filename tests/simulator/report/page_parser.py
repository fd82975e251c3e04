"""Parses pages and their charts."""

from __future__ import annotations

import json
import re
from html.parser import HTMLParser
from typing import Any


def body(page: str) -> str:
    """Return the page without its head, which holds the source of the charting library."""
    return page.partition("</head>")[2]


def figures(page: str) -> dict[str, dict[str, Any]]:
    """Return {id: {"data", "layout"}} of every chart, as the browser gets them."""
    text, found = body(page), {}
    for match in re.finditer(r'Plotly\.newPlot\(\s*"([^"]+)",\s*', text):
        data, end = json.JSONDecoder().raw_decode(text, match.end())
        start = end + len(re.match(r",\s*", text[end:]).group())  # type: ignore[union-attr]
        layout, _ = json.JSONDecoder().raw_decode(text, start)
        assert match[1] not in found
        found[match[1]] = {"data": data, "layout": layout}
    return found


class Tags(HTMLParser):
    """Checks that tags close in order; collects addresses."""

    def __init__(self) -> None:
        super().__init__()
        self.open: list[str] = []
        self.ids: list[str] = []
        self.addresses: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.ids += [value or "" for name, value in attrs if name == "id"]
        self.addresses += [
            value or "" for name, value in attrs if name in ("href", "src", "xlink:href")
        ]
        if tag not in ("meta", "link"):
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.addresses += [
            value or "" for name, value in attrs if name in ("href", "src", "xlink:href")
        ]

    def handle_endtag(self, tag: str) -> None:
        assert self.open and self.open[-1] == tag, f"</{tag}> in {self.open[-5:]}"
        self.open.pop()


def parsed(text: str) -> Tags:
    tags = Tags()
    tags.feed(text)
    tags.close()
    assert not tags.open
    return tags
