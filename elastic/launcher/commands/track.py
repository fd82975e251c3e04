"""`elastic track`: tell TensorBoard, Weights & Biases, MLflow or a callback what a run does."""

from __future__ import annotations

import contextlib
import logging
import os
import signal
import sys
import threading
from pathlib import Path
from types import FrameType

import click

from elastic import lifeline
from elastic.command_line import Command, ParsedType
from elastic.config import FILE, load_config
from elastic.domain.errors import EXIT_OK, FieldError
from elastic.launcher.commands.queries import LATEST
from elastic.launcher.tracking.follower import Tracker
from elastic.launcher.tracking.targets import Target, make_callback, parse_target

TARGET = ParsedType("TARGET", parse_target)


@click.command(cls=Command)
@click.option(
    "--run-dir",
    type=click.Path(path_type=Path),
    envvar="PET_RUN_DIR",
    help=f"a run, under way or over (default {LATEST})",
)
@click.option(
    "--to",
    "target",
    type=TARGET,
    required=True,
    help="tensorboard:FOLDER, wandb:PROJECT, mlflow:EXPERIMENT or callback:MODULE:NAME",
)
@click.option("--once", is_flag=True, help="end after what the run has done so far")
@click.option("--check", is_flag=True, hidden=True)
@click.option("--parent-pipe", type=int, default=-1, hidden=True)
def track(run_dir: Path | None, target: Target, once: bool, check: bool, parent_pipe: int) -> int:
    """Tell TensorBoard, Weights & Biases, MLflow or a callback what a run does.

    Each finished step is told once, whatever nodes were lost. The run may be over. If the command
    is started again, it goes on where it ended.
    """
    if parent_pipe >= 0:
        lifeline.watch(parent_pipe)
    stop, numbers = threading.Event(), list[int]()

    def interrupt(number: int, _frame: FrameType | None) -> None:
        if numbers:  # a second one ends a callback that hangs
            signal.signal(number, signal.SIG_DFL)
            os.kill(os.getpid(), number)
        numbers.append(number)
        stop.set()

    for number in () if check else (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, interrupt)
    callback = make_callback(target, "--to")
    if check:
        return EXIT_OK
    place = (run_dir or LATEST).resolve()  # "latest" may name another run later
    if not (place / FILE).is_file():
        remedy = f"it has no {FILE}: give the run directory of `elastic run`"
        raise FieldError("--run-dir", str(run_dir or LATEST), remedy)
    config = load_config(str(place))
    logging.basicConfig(stream=sys.stderr, format="%(levelname)s %(name)s: %(message)s")

    def say(text: str) -> None:
        with contextlib.suppress(OSError, ValueError):  # nobody reads it any more
            print(f"elastic track: {text}", flush=True)

    tracker = Tracker(
        config, place, target, callback, say, once=once, quiet=parent_pipe >= 0, stop=stop
    )
    code = tracker.run()
    return 128 + numbers[0] if numbers and not tracker.ended else code
