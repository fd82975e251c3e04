"""`elastic kubernetes claim`: the volume claim of a job's checkpoints.

It is not part of the rendered job, so that `kubectl delete -f` of the job leaves the checkpoints.
"""

from __future__ import annotations

import click

from elastic.command_line import Command, ParsedType
from elastic.domain.errors import FieldError
from elastic.launcher.kubernetes.kustomize import build
from elastic.launcher.kubernetes.render import LABEL, manifests, renamed, show
from elastic.planning.plan.units import size_of

GIB = 1 << 30
ACCESS = ("ReadWriteMany", "ReadWriteOnce")


def _size(flag: str, text: str) -> int:
    found = size_of(flag, text)
    if found < GIB:
        raise FieldError(flag, text, "give at least 1GiB")
    return found


# fmt: off
@click.command(cls=Command, options_metavar="[flags]")
@click.option("--name", type=LABEL, required=True, help="name of the job")
@click.option("--namespace", type=LABEL, help="namespace of the claim (default: kubectl's)")
@click.option("--size", type=ParsedType("SIZE", _size), default="100GiB", help="size of the volume")
@click.option("--access", type=click.Choice(ACCESS), default=ACCESS[0],
              help="ReadWriteOnce only if all pods run on one machine")
@click.option("--storage-class", type=LABEL,
              help="class of the volume (default: that of the cluster)")
def claim(
    name: str, namespace: str | None, size: int, access: str, storage_class: str | None
) -> int:
    """Print the volume claim of a job's checkpoints, for kubectl apply -f -.

    It is no part of the rendered job: deleting the job leaves the checkpoints.
    """
    # fmt: on
    (item,) = renamed(build(manifests() / "claim"), name)
    if namespace:
        item["metadata"]["namespace"] = namespace
    item["spec"]["accessModes"] = [access]
    whole = size % GIB == 0
    item["spec"]["resources"]["requests"]["storage"] = f"{size // GIB}Gi" if whole else str(size)
    if storage_class:
        item["spec"]["storageClassName"] = storage_class
    return show([item])
