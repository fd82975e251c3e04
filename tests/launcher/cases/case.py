"""A case: commands that a user gives in a situation, and the text that must be printed."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from elastic.domain.errors import EXIT_OK

ITEMS = {
    1: "Waiting",
    2: "Accepted or refused",
    3: "Wrong paths and objects",
    4: "A script that fails",
    5: "Progress and status",
    6: "A wrong profile",
    7: "Help",
}
"""Titles of the page's tables."""


@dataclass(frozen=True, kw_only=True)
class Command:
    """A command line, and what it must print.

    In the line, `{free}` and `{idle}` are free ports, and another program listens at `{held}`.
    """

    line: str
    """`elastic ...`, `elastic-sim ...` or `python ...`."""
    code: int = EXIT_OK
    """Exit code, unless the command waits."""
    shows: tuple[str, ...] = ()
    """Texts that must be in the output, in which `page_words` has replaced what varies."""
    hides: tuple[str, ...] = ()
    """Texts that must not be in it."""
    wait: str = ""
    """Text of a line about a wait that does not end by itself. The line must be printed twice; then
    the command is interrupted. "": the command ends by itself."""


@dataclass(frozen=True, kw_only=True)
class Case:
    """A situation of the list of issue 22. All commands run in one new folder."""

    item: int
    """Key of ITEMS."""
    title: str
    """At most about 12 words."""
    command: Command
    files: Mapping[str, str] = field(default_factory=dict)
    """Contents of files in the folder, by name."""
    before: Command | None = None
    """Runs before `command`, to its end. The page does not show its output."""
    then: Command | None = None
    """Runs after `command`, or during its wait."""
    is_long: bool = False
    """It trains, takes more than about ten seconds, or resembles another case: only `make chaos`
    runs it."""

    @property
    def name(self) -> str:
        """Name of the test."""
        return self.title.replace("`", "").replace(" ", "-")


@dataclass(frozen=True, kw_only=True)
class Covered:
    """A situation that takes too long for the page. Another test shows it."""

    item: int
    title: str
    command: str
    test: str
    """FILE::TEST, from the root of the repository."""
    prints: str
    """The decisive line."""
