"""Every run that succeeds must have written all checkpoints that were due, whole."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path

from elastic.domain.state_layout import read_header
from elastic.store.checkpoints import SavedCheckpoint, latest, open_checkpoints
from elastic.worker.replica.export import checkpoint_runs, params_sha256

EXAMPLES, SMALL_JOB = ("examples.train_gpt", "tests.scenarios.train"), "small_job.py"
EVERY, STEPS = "--checkpoint-every", "--steps"
USUAL = {"tests.kubernetes.train": (20, 0), SMALL_JOB: (3, 6)}
"""Script -> (steps between two checkpoints, number of steps) that it has without flags; 0: the
script needs the flag."""


def with_checkpoints(script: Sequence[str]) -> list[str]:
    """Add checkpoints to the words of an example script, about three in the whole run."""
    if not set(EXAMPLES) & set(script) or EVERY in script or STEPS not in script:
        return list(script)
    return [*script, EVERY, str(max(2, _last(script, STEPS, 0) // 3))]


def due(script: Sequence[str], first: int = 0) -> list[int]:
    """Return the steps after `first` at whose end this script must have written a checkpoint."""
    name = next((Path(word).name for word in script if Path(word).name in (*EXAMPLES, *USUAL)), "")
    every, steps = USUAL.get(name, (0, 0))
    every, steps = _last(script, EVERY, every), _last(script, STEPS, steps)
    if not name or not every:
        return []
    return [step for step in range(first + 1, steps + 1) if step % every == 0 or step == steps]


def location_of(run_dir: Path, flags: Sequence[str]) -> str:
    """Return the path or URL of the checkpoints of `elastic run FLAGS`."""
    if "--checkpoint-dir" in flags:
        return flags[list(flags).index("--checkpoint-dir") + 1]
    return str(run_dir / "checkpoints")


def kept(steps: Sequence[int], flags: Sequence[str]) -> Sequence[int]:
    """Return those of the steps whose checkpoints `elastic run FLAGS` keeps."""
    return steps[-_last(flags, "--checkpoint-keep", 0) :]


def resumed_step(flags: Sequence[str]) -> int:
    """Return the step of the checkpoint that `--resume` names; 0: none."""
    if "--resume" not in flags:
        return 0
    path = latest(flags[list(flags).index("--resume") + 1])
    assert path is not None
    return SavedCheckpoint(path).manifest.step


def assert_written(
    location: str | Path, steps: Sequence[int], final_sha256: str, explanation: object = ""
) -> None:
    """Assert that `location` has the checkpoints of `steps`, whole, and that the last of them has
    the final parameters. All files are read, and their checksums are compared."""
    there = {manifest.step for _, manifest in open_checkpoints(location).complete()[0]}
    missing = set(steps) - there
    assert not missing, f"checkpoints {missing} of {list(steps)} are missing; {explanation}"
    found = {step: verified_sha256(f"{location}/step-{step:08d}", step) for step in steps}
    if found:
        assert found[max(found)] == final_sha256, "the last checkpoint has other parameters"


def verified_sha256(path: str | Path, step: int) -> str:
    """Return the hash of the parameters of a checkpoint. All files are read, and their checksums
    are compared. Raises AssertionError, OSError or ElasticError if it is not whole."""
    return params_sha256(_verified_runs(path, step))


def _verified_runs(path: str | Path, step: int) -> Iterator[list[memoryview]]:
    """Yield the states of each layer. Reading them compares the checksums of the files."""
    assert SavedCheckpoint(path).manifest.step == step
    for runs in checkpoint_runs(path):
        assert {read_header(run).version for run in runs} == {step}, path
        yield runs


def _last(words: Sequence[str], flag: str, default: int) -> int:
    """Return the number after the last occurrence of `flag`."""
    places = [place for place, word in enumerate(words) if word == flag]
    return int(words[places[-1] + 1]) if places else default
