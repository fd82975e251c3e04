"""Weights come from torch.distributed.checkpoint, and go back there, bit for bit."""

from __future__ import annotations

import os
import pickle
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.checkpoint.metadata import _MEM_FORMAT_ENCODING
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import save as save_distributed
from torch.multiprocessing.spawn import spawn

from elastic.domain.errors import FieldError
from elastic.launcher.cli import main
from elastic.worker.contrib.distributed_checkpoint import DistributedCheckpoint, Part, write
from elastic.worker.contrib.huggingface.stack import from_huggingface
from elastic.worker.contrib.sequential import from_sequential
from tests.worker.contrib.cut_models import replicas, run
from tests.worker.contrib.test_huggingface import config, masked, parameters
from tests.worker.contrib.test_huggingface_export import folder_of, save, trained
from tests.worker.contrib.test_sequential import loss, microbatch, parts

transformers = pytest.importorskip("transformers")


def saved(values: dict[str, Any], folder: Path) -> Path:
    save_distributed(values, checkpoint_id=folder, no_dist=True)
    return folder


def model_of(family: str, **changes: Any) -> Any:
    torch.manual_seed(4)
    return transformers.AutoModelForCausalLM.from_config(config(family, **changes))


@pytest.mark.parametrize("family", ["llama", "gemma", "gpt2"])
@pytest.mark.parametrize("inside", ["", "model"])
def test_a_model_of_transformers_begins_with_them(family: str, inside: str, tmp_path: Path) -> None:
    model = model_of(family)
    values = model.state_dict()
    others = {"step": 3, "optimizer": {"exp_avg": {"weight": torch.ones(2)}}}
    folder = saved({inside: values, **others} if inside else values, tmp_path / "c")
    stack = from_huggingface(config(family), weights=folder)
    layers = replicas(stack)
    for name, value in parameters(stack, layers).items():
        assert torch.equal(value, values[name]), name
    with torch.no_grad():
        wanted = model.train()(**masked(0).fields).loss.item()
    assert run(layers, [1, 3], masked(0)) == pytest.approx(wanted, abs=1e-5)


@pytest.mark.parametrize("family", ["llama", "gpt2"])
def test_a_checkpoint_becomes_one_that_transformers_loads(
    family: str, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    given = config(family)
    checkpoint, out = save(trained(given), tmp_path / "c"), tmp_path / "out"
    source = folder_of(given, tmp_path / "model")
    words = ["convert", str(checkpoint), str(out), "--to", "dcp", "--model", str(source)]
    assert main([*words, "--shard-size", "20000"]) == 0
    assert "params_sha256" in capfd.readouterr().out
    assert len(list(out.glob("*.distcp"))) > 1
    model = model_of(family)
    values = model.state_dict()
    load(values, checkpoint_id=out, no_dist=True)
    model.load_state_dict(values)
    layers = trained(given)
    stack = from_huggingface(given)
    for layer in layers:
        for name, parameter in layer.module.named_parameters():
            assert torch.equal(values[stack.name_of(layer.index, name)], parameter), name
    with torch.no_grad():
        wanted = model.train()(**masked(2).fields).loss.item()
    again = replicas(from_huggingface(given, weights=out))
    assert run(again, [1], masked(2)) == pytest.approx(wanted, abs=1e-5)
    assert main(words) == 2 and "it exists" in capfd.readouterr().err


def test_any_checkpoint_becomes_one_with_the_names_of_layers(tmp_path: Path) -> None:
    layers, out = trained(config("llama")), tmp_path / "out"
    checkpoint = save(layers, tmp_path / "c")
    assert main(["convert", str(checkpoint), str(out), "--to", "dcp"]) == 0
    found = DistributedCheckpoint(out)
    named = {
        f"layers.{layer.index}.{name}": parameter
        for layer in layers
        for name, parameter in layer.module.named_parameters()
    }
    assert found.tensors.keys() == named.keys()
    assert all(torch.equal(found.read(name), value) for name, value in named.items())


@pytest.mark.parametrize("to", ["huggingface", "megatron"])
def test_a_format_that_does_not_fit_is_refused(
    to: str, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    checkpoint, out = save(trained(config("llama")), tmp_path / "c"), tmp_path / "out"
    assert main(["convert", str(checkpoint), str(out), "--to", to]) == 2
    assert ("--model" if to == "huggingface" else "from_megatron") in capfd.readouterr().err
    assert not out.exists() and not list(tmp_path.glob(".*"))


def test_a_size_of_files_that_would_be_ignored_is_refused(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    words = ["convert", str(tmp_path), str(tmp_path / "out"), "--shard-size", "1MiB", "--to"]
    for kind in ("dcp", "megatron"):
        assert main([*words, kind]) == 2
        assert "--shard-size: leave it out" in capfd.readouterr().err


@pytest.mark.parametrize("on_meta", [False, True])
def test_a_sequence_begins_with_them(on_meta: bool, tmp_path: Path) -> None:
    torch.manual_seed(2)
    trained_model = nn.Sequential(*parts())
    folder = saved(trained_model.state_dict(), tmp_path / "c")
    with torch.device("meta" if on_meta else "cpu"):
        made = nn.Sequential(*parts())
    layers = replicas(from_sequential(made, loss=loss, weights=folder))
    wanted = loss(trained_model(microbatch().fields["x"]), microbatch()).item()
    assert run(layers, [1], microbatch()) == pytest.approx(wanted, abs=1e-6)


def _save_sharded(rank: int, folder: str, store: str) -> None:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Replicate, Shard, distribute_tensor

    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=2)
    mesh = init_device_mesh("cpu", (2,))
    values = {
        "rows": distribute_tensor(torch.arange(35.0).reshape(7, 5), mesh, [Shard(0)]),
        "columns": distribute_tensor(torch.arange(12.0).reshape(3, 4), mesh, [Shard(1)]),
        "both": distribute_tensor(torch.arange(6, dtype=torch.bfloat16), mesh, [Replicate()]),
        "one": torch.tensor(7.0),
    }
    save_distributed(values, checkpoint_id=folder)
    dist.destroy_process_group()


def test_tensors_that_several_processes_have_written(tmp_path: Path) -> None:
    folder = tmp_path / "c"
    words = (str(folder), str(tmp_path / "store"))
    spawn(_save_sharded, words, nprocs=2)  # type: ignore[no-untyped-call]
    found = DistributedCheckpoint(folder)
    assert len(list(folder.glob("*.distcp"))) == 2
    assert torch.equal(found.read("rows"), torch.arange(35.0).reshape(7, 5))
    assert torch.equal(found.read("columns"), torch.arange(12.0).reshape(3, 4))
    assert torch.equal(found.read("both"), torch.arange(6, dtype=torch.bfloat16))
    assert found.read("one").item() == 7.0 and found.read("one").shape == ()
    for row in range(7):
        assert torch.equal(found.read("rows", (row,)), torch.arange(5.0) + 5 * row)


def test_parts_of_a_tensor_in_several_files(tmp_path: Path) -> None:
    whole = torch.randn(2, 3, 4)
    files = [
        [Part("a", whole[i : i + 1, :, c : c + 2], (i, 0, c), (2, 3, 4)) for c in (0, 2)]
        for i in range(2)
    ]
    write(tmp_path / "c", files)
    found = DistributedCheckpoint(tmp_path / "c")
    assert torch.equal(found.read("a"), whole) and torch.equal(found.read("a", (1, 2)), whole[1, 2])
    mine = {"a": torch.empty(2, 3, 4)}
    load(mine, checkpoint_id=tmp_path / "c", no_dist=True)
    assert torch.equal(mine["a"], whole)
    write(tmp_path / "d", files[:1])
    with pytest.raises(FieldError, match="12 of 24 numbers of a are absent"):
        DistributedCheckpoint(tmp_path / "d").read("a")
    write(tmp_path / "e", [[Part("none", torch.empty(0, 3))]])
    assert DistributedCheckpoint(tmp_path / "e").read("none").shape == (0, 3)


class Evil:
    """Runs a command if it is unpickled."""

    def __init__(self, made: Path) -> None:
        self.made = made

    def __reduce__(self) -> Any:
        return os.mkdir, (str(self.made),)


def _truncated(folder: Path, values: dict[str, Tensor]) -> None:
    path = next(folder.glob("*.distcp"))
    path.write_bytes(path.read_bytes()[:-100])


def _absent(folder: Path, values: dict[str, Tensor]) -> None:
    next(folder.glob("*.distcp")).unlink()


def _moved(folder: Path, values: dict[str, Tensor]) -> None:
    """A checkpoint whose data is said to be in another folder."""
    path = folder / ".metadata"
    metadata = pickle.loads(path.read_bytes())  # noqa: S301 - this test has written it
    for place in metadata.storage_data.values():
        place.relative_path = f"../{place.relative_path}"
    path.write_bytes(pickle.dumps(metadata))


def _overlapping(folder: Path, values: dict[str, Tensor]) -> None:
    """A checkpoint that lists each part of a tensor twice."""
    path = folder / ".metadata"
    metadata = pickle.loads(path.read_bytes())  # noqa: S301 - this test has written it
    for tensor in metadata.state_dict_metadata.values():
        tensor.chunks = [*tensor.chunks, *tensor.chunks]
    path.write_bytes(pickle.dumps(metadata))


def _other(change: Callable[[dict[str, Tensor]], Any]) -> Callable[[Path, dict[str, Tensor]], None]:
    def replace(folder: Path, values: dict[str, Tensor]) -> None:
        for path in folder.iterdir():
            path.unlink()
        saved(change(dict(values)), folder)

    return replace


WRONG: dict[str, tuple[Callable[[Path, dict[str, Tensor]], Any], str]] = {
    "truncated": (_truncated, "distcp cannot be read"),
    "no data": (_absent, "is in no file of this folder"),
    "outside": (_moved, "is in no file of this folder"),
    "overlapping": (_overlapping, "two parts of .* overlap"),
    "of a larger model": (
        _other(lambda values: {**values, "9.weight": torch.ones(3)}),
        r"the model lacks 1 of its tensors, as 9\.weight",
    ),
    "of numbers of another kind": (
        _other(lambda values: {n: v.to(torch.int8) for n, v in values.items()}),
        "a tensor of torch.int8",
    ),
    "of half a model, and its average": (
        _other(lambda values: {"model": {"1.bias": values["1.bias"]}, "ema": values}),
        r"it has no tensor model\.1\.weight",
    ),
    "damaged": (lambda f, _: (f / ".metadata").write_bytes(b"x"), ".metadata cannot be read"),
    "no checkpoint": (
        lambda f, _: (f / ".metadata").write_bytes(pickle.dumps({"a": 1})),
        "it describes no checkpoint",
    ),
    "of another model": (
        _other(lambda values: {n: v for n, v in values.items() if not n.startswith("3.norm1")}),
        r"it has no tensor 3\.norm1",
    ),
    "of another size": (
        _other(lambda values: {**values, "6.weight": torch.ones(3, 3)}),
        r"a tensor of shape \(3, 3\)|6.weight of shape",
    ),
    "of two models": (
        _other(lambda values: {"model": values, "ema": values}),
        r"ema\.1\.weight and model\.1\.weight|ema\.1.bias and model\.1\.bias",
    ),
    "an empty folder": (
        lambda f, _: shutil.rmtree(f),
        "a folder with model.safetensors",
    ),
}


@pytest.mark.parametrize("how", WRONG)
def test_what_does_not_fit_is_named(how: str, tmp_path: Path) -> None:
    values = nn.Sequential(*parts()).state_dict()
    folder = saved(values, tmp_path / "c")
    change, text = WRONG[how]
    change(folder, values)
    with pytest.raises(FieldError, match=text):
        replicas(from_sequential(nn.Sequential(*parts()), loss=loss, weights=folder))


def test_another_value_as_folder_is_refused() -> None:
    with pytest.raises(FieldError, match="a folder with model"):
        from_sequential(nn.Sequential(*parts()), loss=loss, weights={"a": 1})  # type: ignore[arg-type]


def test_a_checkpoint_that_python_3_11_2_has_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """There, a member of an Enum is pickled as a call of getattr."""
    by_name = lambda self, _: (getattr, (type(self), self.name))  # noqa: E731
    monkeypatch.setattr(_MEM_FORMAT_ENCODING, "__reduce_ex__", by_name)
    folder = saved({"a": torch.arange(4.0)}, tmp_path / "c")
    assert b"getattr" in (folder / ".metadata").read_bytes()
    assert DistributedCheckpoint(folder).tensors["a"].size == (4,)


def test_a_checkpoint_runs_no_code(tmp_path: Path) -> None:
    made = tmp_path / "made"
    folder = tmp_path / "c"
    folder.mkdir()
    (folder / ".metadata").write_bytes(pickle.dumps(Evil(made)))
    with pytest.raises(FieldError, match=r"it asks for posix\.mkdir, which no checkpoint needs"):
        from_sequential(nn.Sequential(*parts()), loss=loss, weights=folder)
    assert not made.exists()


def test_a_checkpoint_changes_no_class(tmp_path: Path) -> None:
    """A pickle may set attributes of the classes that it gets."""
    folder = saved({"a": torch.ones(3)}, tmp_path / "c")
    path = folder / ".metadata"
    changed = b"cpathlib\nPosixPath\nN}X\x0e\x00\x00\x00is_relative_tocpathlib\nPosixPath\ns\x86b0"
    path.write_bytes(b"\x80\x02" + changed + path.read_bytes()[2:])
    before = Path.is_relative_to
    with pytest.raises(FieldError):
        DistributedCheckpoint(folder)
    assert type(path).is_relative_to is before


def test_buffers_of_a_sequence_are_taken(tmp_path: Path) -> None:
    class Shift(nn.Module):
        def __init__(self, by: float) -> None:
            super().__init__()
            self.register_buffer("by", torch.tensor(by))

        def forward(self, x: Tensor) -> Tensor:
            return x + self.get_buffer("by")

    def made(by: float) -> nn.Sequential:
        return nn.Sequential(nn.Flatten(), nn.Linear(12, 5), Shift(by))

    folder = saved(made(3.0).state_dict(), tmp_path / "c")
    (layer,) = replicas(from_sequential(made(0.0), loss=loss, weights=folder))
    assert layer.module.get_buffer("parts.2.by").item() == 3.0


def test_an_optimizer_beside_a_model_is_left_out(tmp_path: Path) -> None:
    values = nn.Sequential(*parts()).state_dict()
    folder = saved({"model": values, "optim": {"exp_avg": values}}, tmp_path / "c")
    layers = replicas(from_sequential(nn.Sequential(*parts()), loss=loss, weights=folder))
    name = "parts.1.weight"
    assert torch.equal(layers[0].module.get_parameter(name), values["1.weight"])
