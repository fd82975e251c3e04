"""Reference runs that several tests compare with. Each is made once per session, by the first
of the suite's processes that needs it."""

from __future__ import annotations

import fcntl
import hashlib
from collections.abc import Sequence
from pathlib import Path

from tests.scenarios.catalogue import BASE
from tests.scenarios.harness import Run, elastic_run

SCRIPT = ("-m", "tests.scenarios.train", "--steps", "6")
"""The usual job; later flags override earlier ones."""
GPT = ("-m", "examples.train_gpt", *BASE)
"""The same with the small GPT of the examples."""
ONLY_GPT = ("--dropout", "--dtype", "--tie-embeddings", "--tp")


def script(*flags: str) -> list[str]:
    """The usual job with these flags, or the GPT if one of them is a flag of the GPT alone."""
    return [*(GPT if set(flags) & set(ONLY_GPT) else SCRIPT), *flags]


def made_once(directory: Path, flags: Sequence[str], job: Sequence[str]) -> Run:
    """Return the run of `elastic run FLAGS JOB`, which must end well. All tests of a session
    share it; `directory` is below the session's temporary folder."""
    session = next((p for p in directory.parents if p.parent.name.startswith("pytest-of-")), None)
    key = hashlib.sha256(repr((*flags, *job)).encode()).hexdigest()[:16]
    folder = (session or directory) / f"reference-{key}"
    folder.mkdir(exist_ok=True)
    with (folder / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        output = folder / "output"
        if not output.exists():
            run = elastic_run(folder / "run", flags, job)
            assert run.code == 0, run.output
            output.write_text(run.output)
    return Run(0, output.read_text(), folder / "run")


def exact(*flags: str) -> list[str]:
    """Flags of `elastic run` for a run whose parameters are compared bit for bit."""
    return ["--accumulate", "exact", *flags]


def reference(directory: Path, *script_flags: str) -> Run:
    """The failure-free run on one node."""
    return made_once(directory, exact("--nnodes", "1"), script(*script_flags))


def faults(*texts: str) -> list[str]:
    """Command-line flags that inject these faults."""
    return [word for text in texts for word in ("--fault", text)]


def median(values: Sequence[float]) -> float:
    ordered = sorted(values)
    return ordered[len(ordered) // 2]
