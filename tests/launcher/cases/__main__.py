"""Runs all cases one after the other, and writes docs/operate/messages.md.

python -m tests.launcher.cases
python -m tests.launcher.cases --only memory --output

A case that was silent for too long is run again, and the last run counts. With --only the page is
not written.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from pathlib import Path

from tests.launcher.cases.case import Case
from tests.launcher.cases.catalogue import CASES, COVERED
from tests.launcher.cases.execution import execute, page_words, problems
from tests.launcher.cases.page import LIMIT_S, OUT, Outcome, silence_s, text

ATTEMPTS = 3
WATCH_S = 9.0
"""Time for which a wait is watched: its line comes about three times."""


def _outcome(case: Case) -> Outcome:
    """Run a case, again if it was silent for long: on a busy machine, processes start slowly."""
    for _ in range(ATTEMPTS):
        with tempfile.TemporaryDirectory(prefix="elastic-case-") as name:
            outcome = Path(name), execute(case, Path(name), WATCH_S)
        if silence_s(outcome) <= LIMIT_S:
            break
    return outcome


def main() -> int:
    """Run the cases; return 1 if one prints or ends otherwise than it should."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--only", default="", help="run the cases whose title has this text")
    parser.add_argument("--output", action="store_true", help="print what the commands print")
    flags = parser.parse_args()
    outcomes: dict[str, Outcome] = {}
    wrong = 0
    for case in CASES:
        if flags.only.lower() not in case.title.lower():
            continue
        try:
            folder, results = outcomes[case.name] = _outcome(case)
        except AssertionError as error:
            print(f"WRONG  {case.title}: {error}", flush=True)
            wrong += 1
            continue
        for command, result in results:
            found = problems(command, result, folder)
            wrong += bool(found)
            print(f"{result.silence_s:5.1f} s silent: {case.item} {case.title}", flush=True)
            lines = [f"WRONG: {line}" for line in found]
            if flags.output or found:
                lines += page_words(result.output, folder).splitlines()
            for line in lines:
                print(f"        {line}", flush=True)
    if not flags.only and not wrong:
        OUT.write_text(text(outcomes, (*CASES, *COVERED)))
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
