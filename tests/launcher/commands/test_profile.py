"""`elastic profile`: measurements, files and errors."""

from __future__ import annotations

import importlib
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from elastic.domain.errors import FieldError
from elastic.domain.types import LayerSpec
from elastic.launcher import cli
from elastic.planning.cost.profile import (
    Device,
    LayerTimes,
    Measurement,
    Profile,
    add_measurement,
    format_profile,
    new_profile,
    parse_profile,
)

SCRIPT = """
import sys, torch
from torch import nn
from elastic import ListStack, Microbatch, Trainer
from elastic.worker.model.optimizer import adamw

class First(nn.Module):
    def __init__(self):
        super().__init__()
        self.inner = nn.Linear(8, 32)
    def forward(self, hidden, microbatch):
        return self.inner(microbatch.fields["x"])

class Middle(nn.Module):
    def __init__(self, wide):
        super().__init__()
        self.a, self.b = nn.Linear(32, wide), nn.Linear(wide, 32)
    def forward(self, hidden, microbatch):
        return hidden + self.b(torch.tanh(self.a(hidden)))

class Last(nn.Module):
    def __init__(self):
        super().__init__()
        self.inner = nn.Linear(32, 1)
    def forward(self, hidden, microbatch):
        return self.inner(hidden).square().mean()

layers = [First, lambda: Middle(64), lambda: Middle(64), lambda: Middle(int(sys.argv[1])), Last]
print("said by the script")
Trainer(
    stack=ListStack(layers, seed=1),
    optimizer=adamw(0.1),
    data=lambda step, index: Microbatch(step, index, {"x": torch.ones(16, 8)}),
    steps=3, microbatches=2, tokens_per_microbatch=16,
).run()
print("left")
"""


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    (tmp_path / "script.py").write_text(SCRIPT)
    (tmp_path / "plain.py").write_text("print('no trainer')")
    (tmp_path / "unused.py").write_text(
        SCRIPT.replace(").run()", ")").replace("int(sys.argv[1])", "48")
    )
    (tmp_path / "broken.py").write_text("raise SystemExit(7)")
    (tmp_path / "known.json").write_text(format_profile(known()))
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PYTHONPATH", str(Path(__file__).resolve().parents[3]))
    return tmp_path


def known() -> Profile:
    layer = LayerSpec(8, 16, 8, 1.0, 2.0)
    return Profile(model="m", layers=(layer,), devices=(Device("a", (LayerTimes(1.0, 2.0),)),))


def run(*words: str) -> subprocess.CompletedProcess[str]:
    """Run the command in its own process, which has not imported torch."""
    command = [sys.executable, "-m", "elastic", "profile", *words]
    return subprocess.run(command, capture_output=True, text=True, timeout=240, check=False)


def test_a_script_is_measured_unchanged(place: Path) -> None:
    done = run("--device", "here", "--repeat", "3", "--warmup", "1", "script.py", "48")
    assert done.returncode == 0, done.stderr
    assert "said by the script" in done.stderr and "left" in done.stderr
    assert "equal layers: 2 as 1" in done.stdout
    profile = parse_profile((place / "profile.json").read_text())
    assert (profile.model, profile.tokens_per_microbatch, profile.tp) == ("script", 16, 1)
    assert [device.name for device in profile.devices] == ["here"]
    first, middle, same, other, last = profile.layers
    assert [la.param_bytes for la in profile.layers] == [1152, 16768, 16768, 12608, 132]
    assert middle.state_bytes == 2 * 16768 + 4 * 4 and middle.gradient_bytes == 16768
    assert [la.output_bytes for la in profile.layers] == [2048, 2048, 2048, 2048, 0]
    assert first.activation_bytes == 16 * 8 * 4
    assert middle.activation_bytes == 16 * 32 * 4 + 16 * 64 * 4
    assert same == middle != other
    for la in (middle, other, last):
        assert (
            min(la.forward_s, la.backward_s, la.backward_input_s, la.backward_weight_s, la.update_s)
            > 0
        )
    times = profile.devices[0].layers
    assert times[1] == times[2] and times[1].forward_s == middle.forward_s


@pytest.mark.chaos
def test_another_device_type_is_merged(place: Path) -> None:
    out = ("--repeat", "1", "--warmup", "0", "script.py")
    assert run("--out", "p.json", "--device", "a", *out, "48").returncode == 0
    done = run("--into", "p.json", "--device", "b", "--json", "--links", *out, "48")
    assert done.returncode == 0, done.stderr
    answer = json.loads(done.stdout)
    profile = parse_profile((place / "p.json").read_text())
    assert [device.name for device in profile.devices] == ["a", "b"] and answer["like"] == [
        0,
        1,
        1,
        3,
        4,
    ]
    assert profile.link.bytes_per_s > 0 and profile.link.latency_s > 0 and profile.contention >= 0
    assert profile.copy_bytes_per_s > 0
    before = (place / "p.json").read_bytes()
    other = run("--into", "p.json", "--device", "c", *out, "40")
    assert other.returncode == 2 and "layers[3].param_bytes" in other.stderr
    assert (place / "p.json").read_bytes() == before


@pytest.mark.parametrize(
    ("words", "part"),
    [
        ([], "SCRIPT is missing"),
        (["--links"], "SCRIPT is missing"),
        (["missing.py"], "no such file"),
        (["--repeat", "0", "script.py"], "--repeat"),
        (["--repeat", "x", "script.py"], "--repeat"),
        (["--warmup", "-1", "script.py"], "--warmup"),
        (["--nproc-per-node", "0", "script.py"], "--nproc-per-node"),
        (["--accumulate", "slow", "script.py"], "--accumulate"),
        (["--out", "known.json", "script.py"], "--out"),
        (["--out", "no/such/out.json", "script.py"], "--out"),
        (["--out", ".", "script.py"], "--out"),
        (["--into", "none.json", "script.py"], "--into"),
        (["--into", "script.py", "script.py"], "--into"),
        (["--into", "known.json", "--out", "x.json", "script.py"], "--into"),
        (["--into", "known.json", "--device", "a", "script.py"], "--device"),
        (["--no-such-flag", "script.py"], "--no-such-flag"),
    ],
)
def test_wrong_flags(
    place: Path, capfd: pytest.CaptureFixture[str], words: list[str], part: str
) -> None:
    before = {path: path.read_bytes() for path in place.iterdir()}
    assert cli.main(["profile", *words]) == 2
    out, err = capfd.readouterr()
    assert out == "" and part in err and len(err.splitlines()) == 1
    assert {path: path.read_bytes() for path in place.iterdir()} == before


@pytest.mark.parametrize(
    ("words", "code", "part"),
    [
        (["plain.py"], 2, "'plain.py' is not usable: it made no Trainer; give a script that"),
        (["unused.py"], 2, "'unused.py' is not usable: it ended before Trainer.run(); give a"),
        (["broken.py"], 1, "ended with 7 before it made a Trainer; its output is above"),
        (["--nproc-per-node", "2", "script.py", "48"], 2, "--nproc-per-node"),
    ],
)
def test_scripts_that_cannot_be_measured(
    place: Path, words: list[str], code: int, part: str
) -> None:
    done = run(*words)
    assert done.returncode == code and part in done.stderr
    assert not (place / "profile.json").exists() and sorted(os.listdir(place)) == [
        "broken.py", "known.json", "plain.py", "script.py", "unused.py",
    ]  # fmt: skip


def test_a_script_finds_the_variables_of_torchrun(place: Path) -> None:
    (place / "plain.py").write_text(
        "import torch.distributed as dist\ndist.init_process_group('gloo')\nprint(dist.get_rank())"
    )
    done = run("plain.py")
    assert done.returncode == 2 and "Traceback" not in done.stderr
    assert "it made no Trainer" in done.stderr


def test_a_long_measurement_is_not_silent(
    place: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(importlib.import_module("elastic.launcher.commands.profile"), "TELL_S", 0.1)
    script = SCRIPT.replace("torch.tanh", "time.sleep(0.02) or torch.tanh").replace(
        "sys,", "sys, time,"
    )
    (place / "script.py").write_text(script)
    assert cli.main(["profile", "--repeat", "3", "--links", "script.py", "48"]) == 0
    err = capfd.readouterr().err
    assert "elastic profile: waiting for script.py to make its Trainer (" in err
    assert "elastic profile: measuring layer 2 of 5 (" in err
    assert "elastic profile: measuring the link (" in err


def found(**changes: Any) -> Measurement:
    layer = LayerSpec(8, 16, 8, 3.0, 4.0)
    values: dict[str, Any] = {
        "layers": (layer,),
        "device": Device("b", (LayerTimes(3.0, 4.0),)),
        "like": (0,),
        "stated": (layer,),
        "tp": 1,
        "tokens_per_microbatch": 0,
    }
    return Measurement(**{**values, **changes})


def test_merging() -> None:
    both = add_measurement(known(), found())
    assert [device.name for device in both.devices] == ["a", "b"] and both.layers == known().layers
    with pytest.raises(FieldError, match="has it already"):
        add_measurement(both, found())
    anew = found(device=Device("a", (LayerTimes(5.0, 6.0),)))
    forced = add_measurement(both, anew, force=True)
    assert [d.layers[0].forward_s for d in forced.devices] == [
        5.0,
        3.0,
    ] and forced.layers == anew.layers
    assert new_profile("m", found()).devices == (found().device,)


@pytest.mark.parametrize(
    ("changes", "field"),
    [
        ({"tp": 2}, "tp"),
        ({"tokens_per_microbatch": 5}, "tokens_per_microbatch"),
        ({"layers": ()}, "layers"),
        ({"layers": (LayerSpec(9, 16, 8, 1.0, 2.0),)}, r"layers\[0\].param_bytes"),
        ({"layers": (LayerSpec(8, 16, 8, 1.0, 2.0, output_bytes=3),)}, r"layers\[0\].output_bytes"),
    ],
)
def test_another_model_is_refused(changes: dict[str, Any], field: str) -> None:
    with pytest.raises(FieldError, match=field):
        add_measurement(known(), found(**changes))
