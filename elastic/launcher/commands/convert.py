"""`elastic convert`: write a checkpoint's parameters in the format of another library."""

from __future__ import annotations

from pathlib import Path

import click

from elastic.command_line import Command
from elastic.domain.errors import FieldError
from elastic.launcher.commands.queries import JSON, show
from elastic.launcher.flags.validators import FOLDER, SIZE


@click.command(cls=Command)
@click.argument("checkpoint", type=click.Path(exists=True, file_okay=False, path_type=Path))
@click.argument("out", type=FOLDER)
@click.option(
    "--model",
    required=True,
    type=click.Path(exists=True, file_okay=False, path_type=Path),
    metavar="FOLDER",
    help="folder with the config.json of the Hugging Face model",
)
@click.option("--shard-size", type=SIZE, default="5GiB", help="size of a safetensors file")
@JSON
def convert(checkpoint: Path, out: Path, model: Path, shard_size: int, json: bool) -> int:
    """Write the parameters of CHECKPOINT as the Hugging Face model OUT.

    CHECKPOINT is a directory step-..., or one that contains some. OUT is a new folder, which
    from_pretrained loads, and from_huggingface too.
    """
    if out.exists():
        raise FieldError("OUT", str(out), "it exists; give another")
    from elastic.worker.contrib.huggingface.export import to_huggingface

    found = to_huggingface(checkpoint, model, out, shard_bytes=shard_size)
    return show({"out": str(out), **found}, json)
