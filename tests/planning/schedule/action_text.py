"""Action lists for tests: from and to text, and 1F1B by stage."""

from __future__ import annotations

import re
from collections.abc import Iterable

from elastic.planning.schedule.schedule import ONE_F_ONE_B, Action, Kind, lists


def parse_actions(text: str) -> tuple[Action, ...]:
    """Parse the text form of actions, for example "F0 SF0 2RB1"."""
    found = []
    for word in text.split():
        match = re.fullmatch(r"(\d*)([A-Z]+)(\d+)", word)
        assert match is not None, word
        found.append(Action(Kind(match[2]), int(match[3]), int(match[1] or -1)))
    return tuple(found)


def format_actions(actions: Iterable[Action]) -> str:
    return " ".join(map(str, actions))


def one_f_one_b(stage: int, n_stages: int, microbatches: tuple[int, ...]) -> tuple[Action, ...]:
    """Return the 1F1B list of `stage`."""
    return lists(ONE_F_ONE_B, n_stages, n_stages, microbatches)[stage]
