"""Checkpoints as replicas of any TP size, as hashes, and as safetensors files."""

from __future__ import annotations

import hashlib
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from torch import nn

from elastic.domain.errors import FieldError
from elastic.store import checkpoint_directory
from elastic.worker.model.layers import ListStack, describe_parameters
from elastic.worker.model.state_codec import reshard
from elastic.worker.replica.checkpoint import load_layer, read_layer
from elastic.worker.replica.export import checkpoint_runs, export_checkpoint, params_sha256
from elastic.worker.replica.replica import LayerReplica
from tests.agent.vault.checkpoints import N_LAYERS, floats, layer_run, whole
from tests.patience import LONG_S
from tests.worker.model.toy_model import (
    First,
    Last,
    Middle,
    replicas,
    state_of,
    toy_stack,
    train,
)


def split_replicas(*, empty: bool = False) -> list[LayerReplica]:
    """Toy layers with weights that are marked as split along their rows."""
    layers = replicas(empty=empty)
    for replica in layers:
        for name, parameter in replica.module.named_parameters():
            if name.startswith("inner."):
                parameter.partition_dim = 0  # type: ignore[attr-defined]
    return layers


def save(directory: Path, layers: list[LayerReplica], tp: int) -> Path:
    step = layers[0].version
    for replica in layers:
        run = state_of(replica)
        for shard in range(tp):
            part = reshard([run], shard, tp)
            view = memoryview(part.numpy().data)
            checkpoint_directory.write_part(
                directory, step, replica.index, shard, len(layers), tp, view
            )
    return checkpoint_directory.commit(directory, step)


@pytest.mark.parametrize("tp", [1, 2, 3])
def test_a_checkpoint_of_any_tp_size_loads_with_tp_1(tmp_path: Path, tp: int) -> None:
    layers = split_replicas()
    train(layers, 2)
    path = save(tmp_path, layers, tp)
    for replica, fresh in zip(layers, split_replicas(empty=True), strict=True):
        load_layer(path, fresh)
        assert fresh.version == 2 and torch.equal(state_of(fresh), state_of(replica))


def test_a_checkpoint_of_another_model_does_not_load(tmp_path: Path) -> None:
    """It has no description, because an older version wrote it."""
    layers = replicas()
    path = save(tmp_path, layers, 1)
    other = layers[1]
    other.index = 0
    with pytest.raises(FieldError, match=r"--resume.*another model.*layer 0"):
        load_layer(path, other)


def test_layers_are_described_by_types_sizes_and_names() -> None:
    def describe(*shape: int, name: str = "w", dtype: torch.dtype = torch.float32) -> str:
        return describe_parameters([(name, torch.empty(shape, dtype=dtype, device="meta"))])

    one = describe(4, 8)
    assert one.startswith("1 parameters of 32 float32 elements (") and one == describe(4, 8)
    others = [describe(8, 4), describe(4, 9), describe(4, 8, name="v")]
    others += [describe(4, 8, dtype=torch.bfloat16)]
    assert len({one, *others}) == 5
    assert len(toy_stack().contents()) == 3


def test_a_checkpoint_of_tp_1_is_cut_for_tp_2(tmp_path: Path) -> None:
    layers = split_replicas()
    train(layers, 1)
    one, two = save(tmp_path / "one", layers, 1), save(tmp_path / "two", layers, 2)
    for layer in range(3):
        for rank in range(2):
            cut = reshard(read_layer(one, layer), rank, 2)
            assert torch.equal(cut, read_layer(two, layer)[rank])


def test_training_continues_equally_from_a_checkpoint(tmp_path: Path) -> None:
    layers = split_replicas()
    train(layers, 2)
    path = save(tmp_path, layers, 2)
    again = split_replicas(empty=True)
    for replica in again:
        load_layer(path, replica)
    train(layers, 2)
    train(again, 2)
    assert all(torch.equal(state_of(a), state_of(b)) for a, b in zip(layers, again, strict=True))


def test_the_hash_follows_its_definition() -> None:
    """Layers are in order, parameters in name order, bytes little-endian, shards joined."""
    expected = hashlib.sha256()
    for layer in range(N_LAYERS):
        expected.update(floats(layer))  # a_norm
        expected.update(bytes(b for row in range(4) for b in (row, 0x40 + layer)))  # bias
        expected.update(
            floats(
                *(100 * layer + 10 * row + column + 6 for row in range(2) for column in range(4))
            )
        )
    for tp in (1, 2, 4):
        runs = ([memoryview(layer_run(n, 6, s, tp)) for s in range(tp)] for n in range(N_LAYERS))
        assert params_sha256(runs) == expected.hexdigest()


def test_export_merges_shards(tmp_path: Path) -> None:
    found = []
    for tp in (1, 2):
        path = whole(tmp_path / str(tp), 6, tp)
        out = tmp_path / f"{tp}.safetensors"
        result = export_checkpoint(path if tp == 1 else path.parent, out)
        assert result["step"] == 6 and result["tensors"] == 9
        assert result["params_sha256"] == params_sha256(checkpoint_runs(path))
        tensors = load_file(out)
        assert tensors["layers.2.weight"].tolist() == [[206, 207, 208, 209], [216, 217, 218, 219]]
        assert tensors["layers.1.bias"].dtype == torch.bfloat16 and len(tensors) == 9
        found.append(out.read_bytes())
    assert found[0] == found[1]


class Scaled(First):
    """A layer with a parameter that is one number."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.tensor(2.5))


def test_a_parameter_of_one_number_keeps_its_shape(tmp_path: Path) -> None:
    layers = replicas(ListStack([Scaled, Middle, Last], seed=1))
    path = save(tmp_path, layers, 1)
    done = export_checkpoint(path, tmp_path / "out.safetensors")
    found = load_file(tmp_path / "out.safetensors")["layers.0.scale"]
    assert found.shape == () and found.item() == 2.5
    assert done["params_sha256"] == params_sha256(checkpoint_runs(path))


def test_export_overwrites_a_file_only_if_forced(tmp_path: Path) -> None:
    path, out = whole(tmp_path / "c", 6), tmp_path / "out.safetensors"
    out.write_text("precious")
    with pytest.raises(FieldError, match="exists"):
        export_checkpoint(path, out)
    assert out.read_text() == "precious"
    with pytest.raises(FieldError, match="directory must exist"):
        export_checkpoint(path, tmp_path / "no" / "where")
    with pytest.raises(FieldError, match="checkpoint"):
        export_checkpoint(tmp_path / "nothing", out, force=True)
    with pytest.raises(FieldError):
        export_checkpoint(path, tmp_path, force=True)
    assert out.read_text() == "precious"
    export_checkpoint(path, out, force=True)
    assert len(load_file(out)) == 9
    assert sorted(p.name for p in tmp_path.iterdir()) == ["c", "out.safetensors"]


def test_export_starts_without_torch(tmp_path: Path) -> None:
    code = "import sys, elastic.worker.replica.export; sys.exit('torch' in sys.modules)"
    assert (
        subprocess.run([sys.executable, "-c", code], timeout=LONG_S, cwd=Path.cwd()).returncode == 0
    )
