"""`elastic convert`: write a checkpoint's parameters in the format of another library."""

from __future__ import annotations

from pathlib import Path

import click
from click.core import ParameterSource

from elastic.command_line import Command
from elastic.domain.errors import FieldError, UsageError
from elastic.launcher.commands.queries import JSON, show
from elastic.launcher.flags.validators import FOLDER, SAVED, SIZE

HUGGINGFACE, PEFT, DCP, MEGATRON = "huggingface", "peft", "dcp", "megatron"


@click.command(cls=Command)
@click.argument("checkpoint", type=SAVED)
@click.argument("out", type=FOLDER)
@click.option(
    "--to",
    "kind",
    type=click.Choice((HUGGINGFACE, PEFT, DCP, MEGATRON)),
    default=HUGGINGFACE,
    help="format of OUT: a Hugging Face model, LoRA adapters of peft, "
    "torch.distributed.checkpoint, or megatron's torch_dist",
)
@click.option(
    "--model",
    type=click.Path(exists=True, file_okay=False, path_type=Path),
    metavar="FOLDER",
    help="folder with the config.json of the Hugging Face model; without it, --to dcp names the "
    "parameters layers.N.NAME",
)
@click.option(
    "--lora",
    type=click.Path(exists=True, file_okay=False, path_type=Path),
    metavar="FOLDER",
    help="folder with the adapter_config.json of the adapters, for --to peft",
)
@click.option(
    "--shard-size", type=SIZE, default="5GiB", help="size of a file of a Hugging Face model"
)
@JSON
def convert(
    checkpoint: str,
    out: Path,
    kind: str,
    model: Path | None,
    lora: Path | None,
    shard_size: int,
    json: bool,
) -> int:
    """Write the parameters of CHECKPOINT for another library, to the new folder OUT.

    CHECKPOINT is a directory or URL that ends with step-..., or one that contains some.
    `weights=` of from_huggingface and from_megatron reads OUT, too. A model of megatron_config
    becomes a Hugging Face model as one of from_huggingface does.
    """
    if out.exists():
        raise FieldError("OUT", str(out), "it exists; give another")
    if (kind == PEFT) != (lora is not None):
        remedy = "give the folder with the adapter_config.json" if lora is None else "leave it out"
        raise UsageError(f"--lora: {remedy}: it is for --to peft")
    if kind in (HUGGINGFACE, PEFT) and model is None:
        raise UsageError(
            "--model: give the folder with the config.json of the model, or another --to"
        )
    source = click.get_current_context().get_parameter_source("shard_size")
    if (model is None or lora is not None) and source is ParameterSource.COMMANDLINE:
        raise UsageError("--shard-size: leave it out: it is for Hugging Face models, with --model")
    if kind == MEGATRON:
        if model is not None:
            raise FieldError("--model", str(model), "leave it out: it is for Hugging Face models")
        from elastic.worker.contrib.megatron.checkpoint import to_megatron

        found = to_megatron(checkpoint, out)
    elif kind == PEFT:
        from elastic.worker.contrib.huggingface.adapter_export import to_peft

        assert model is not None and lora is not None
        found = to_peft(checkpoint, model, lora, out)
    elif kind == DCP:
        from elastic.worker.contrib.distributed_export import to_distributed_checkpoint

        found = to_distributed_checkpoint(checkpoint, out, model, shard_bytes=shard_size)
    else:
        from elastic.worker.contrib.huggingface.export import to_huggingface

        assert model is not None
        found = to_huggingface(checkpoint, model, out, shard_bytes=shard_size)
    return show({"out": str(out), **found}, json)
