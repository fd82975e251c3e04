"""`--backend ray`: options, security, and errors without ray or a cluster."""

from __future__ import annotations

import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

from elastic.launcher import cli
from elastic.launcher.flags.certs import make_certificates
from elastic.launcher.flags.ray_options import RayOptions
from elastic.launcher.flags.request import Request
from elastic.launcher.flags.validators import PRIVATE_NAME
from elastic.launcher.ray.supervisor import secrets
from elastic.launcher.run.rundir import RunDir
from elastic.rpc.security.tls import Certificates
from tests.launcher import helpers


def read(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, *words: str) -> Request:
    monkeypatch.chdir(tmp_path)
    Path("script.py").touch()
    return helpers.read(*words, "script.py")


def test_the_defaults(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    wanted = read(monkeypatch, tmp_path, "--backend", "ray", "--nnodes", "2:4")
    assert wanted.ray == RayOptions(address="auto", resources=(), spares=1)
    assert wanted.nodes == () and wanted.hosts is True
    config = wanted.config
    assert not config.standalone and config.coordinator == config.master_addr == ""
    assert (config.min_nodes, config.max_nodes, config.local_nodes) == (2, 4, 1)


def test_the_launcher_makes_token_and_certificates(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    private = read(monkeypatch, tmp_path, "--backend", "ray")
    assert private.guard.private and private.guard.token and not private.guard.warning
    run_dir = RunDir(private)
    config = run_dir.config
    assert Path(config.certs).parent == run_dir.path and config.certs_name == PRIVATE_NAME
    handed = secrets(config, run_dir.path)
    assert set(handed) == {
        "join.token",
        "job-certs/ca.crt",
        "job-certs/tls.crt",
        "job-certs/tls.key",
    }
    Certificates(Path(config.certs))
    run_dir.close()
    assert not Path(config.certs).exists() and not (run_dir.path / "join.token").exists()
    make_certificates(tmp_path / "c", [["localhost"]])
    given = read(
        monkeypatch,
        tmp_path,
        "--backend",
        "ray",
        "--certs",
        "c/localhost",
        "--certs-name",
        "localhost",
    )
    assert not given.guard.private and given.config.certs == str(tmp_path / "c" / "localhost")
    plain = read(monkeypatch, tmp_path, "--backend", "ray", "--insecure")
    assert not plain.config.certs and plain.guard.token and "plain text" in plain.guard.warning


def test_the_local_backend(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    wanted = read(monkeypatch, tmp_path)
    assert wanted.ray is None and wanted.config.standalone and wanted.nodes == ("node0",)


@pytest.mark.parametrize(
    ("given", "address"),
    [
        ("auto", "auto"),
        ("head", "head:6379"),
        ("head:1", "head:1"),
        ("ray://head", "ray://head:10001"),
    ],
)
def test_addresses(
    given: str, address: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    wanted = read(monkeypatch, tmp_path, "--backend", "ray", "--address", given)
    assert wanted.ray is not None and wanted.ray.address == address


def test_resources_and_the_address_to_serve(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    words = (
        "--backend",
        "ray",
        "--ray-resources",
        '{"GPU": 0.5, "CPU": 4}',
        "--rdzv-endpoint",
        "10.0.0.5:29400",
    )
    wanted = read(monkeypatch, tmp_path, *words)
    assert wanted.ray is not None and wanted.ray.resources == (("CPU", 4.0), ("GPU", 0.5))
    assert wanted.config.coordinator == "10.0.0.5:29400"


@pytest.mark.parametrize(
    ("missing", "why"),
    [
        (True, "pip install 'elastic-runtime[ray]'"),
        pytest.param(
            False,
            "--address",
            marks=pytest.mark.skipif(not find_spec("ray"), reason="ray is optional"),
        ),
    ],
)
def test_missing_ray_or_cluster_is_an_error(
    missing: bool,
    why: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
) -> None:
    if missing:
        monkeypatch.setitem(sys.modules, "ray", None)
        monkeypatch.delitem(sys.modules, "elastic.launcher.ray.ray", raising=False)
    monkeypatch.chdir(tmp_path)
    Path("script.py").touch()
    assert (
        cli.main(["run", "--backend", "ray", "--address", "nonsense.invalid:1", "script.py"]) == 2
    )
    out, err = capfd.readouterr()
    assert out == "" and why in err and err.count("\n") == 1, err
    assert not Path("runs").exists()
