"""Directories and files that cannot be made or written: one line, exit code 2, nothing started."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from elastic.launcher import cli
from tests.disks import fill, small_disk

CLUSTER = Path(__file__).parents[3] / "examples" / "clusters" / "small.toml"
UNWRITABLE = ("/proc", "/proc/x", "/proc/x/y", "/sys/x")
"""Directories in which nobody can make a file, not even root."""
pytestmark = pytest.mark.skipif(not os.path.isdir("/proc/self"), reason="needs /proc")


def refusal(capfd: pytest.CaptureFixture[str], *words: str) -> str:
    """The only line of a command that ends with 2."""
    assert cli.main(words) == 2
    out, err = capfd.readouterr()
    assert out == "" and len(err.splitlines()) == 1 and "Traceback" not in err
    return err


def run_words(flag: str, path: object) -> list[str]:
    return ["run", "--standalone", "--nnodes", "1", flag, str(path), "script.py"]


@pytest.mark.parametrize("path", UNWRITABLE)
@pytest.mark.parametrize("flag", ["--run-dir", "--log-dir", "--checkpoint-dir"])
def test_directories_of_a_run(
    place: Path, capfd: pytest.CaptureFixture[str], flag: str, path: str
) -> None:
    err = refusal(capfd, *run_words(flag, path))
    assert err.startswith(f"elastic run: {flag}: '{path}' is not usable: ")
    assert not (place / "runs").exists()


@pytest.mark.parametrize(
    "words",
    [
        ["certs", "--out", "{}"],
        ["plan", str(CLUSTER), "--svg", "{}/x.svg"],
        ["profile", "--out", "{}/p.json", "script.py"],
        ["export", ".", "{}/out"],
    ],
)
@pytest.mark.parametrize("path", UNWRITABLE)
def test_outputs_of_other_commands(
    place: Path, capfd: pytest.CaptureFixture[str], words: list[str], path: str
) -> None:
    given = [word.format(path) for word in words]
    flag = "OUT" if given[0] == "export" else next(word for word in given if word[:2] == "--")
    assert f" {flag}: '{path}" in refusal(capfd, *given)


@pytest.mark.parametrize(
    "words",
    [
        ["plan", str(CLUSTER), "--svg", "{}.svg"],
        ["profile", "--out", "{}.svg", "script.py"],
        ["export", ".", "{}.svg"],
    ],
)
@pytest.mark.parametrize("link", ["nowhere", "loop", "~no-such-user/x"])
def test_outputs_that_are_links_to_no_file(
    place: Path, capfd: pytest.CaptureFixture[str], words: list[str], link: str
) -> None:
    (place / "nowhere.svg").symlink_to("/no/such/file")
    (place / "loop.svg").symlink_to("loop.svg")
    err = refusal(capfd, *[word.format(link) for word in words])
    assert f"'{link}.svg' is not usable: " in err


def test_an_output_may_be_a_link_to_a_new_file(place: Path) -> None:
    (place / "link.svg").symlink_to("new.svg")
    assert cli.main(["plan", str(CLUSTER), "--svg", "link.svg"]) == 0
    assert (place / "new.svg").stat().st_size > 0


def test_the_default_run_directory(
    place: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir("/proc")
    words = ["run", "--standalone", "--nnodes", "1", str(place / "script.py")]
    assert "--run-dir: '/proc/runs/" in refusal(capfd, *words)


@pytest.mark.parametrize(
    "words",
    [
        ["run", "--standalone", "script.py"],
        ["run", "--standalone", "--run-dir", "/tmp/x", "-m", "json.tool"],
        ["certs", "--out", "here"],
        ["status", "--certs", "here"],
    ],
)
def test_a_working_directory_that_is_gone(
    place: Path,
    capfd: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    words: list[str],
) -> None:
    (place / "gone").mkdir()
    monkeypatch.chdir(place / "gone")
    (place / "gone").rmdir()
    err = refusal(capfd, *words)
    assert "working directory is gone" in err or "no such file" in err


# ---- full disks ----


@pytest.mark.parametrize("flag", ["--run-dir", "--log-dir"])
def test_a_full_disk(place: Path, capfd: pytest.CaptureFixture[str], flag: str) -> None:
    with small_disk(place / "disk", "64k"):
        (place / "disk" / "made").mkdir()
        filler = fill(place / "disk")
        err = refusal(capfd, *run_words(flag, place / "disk" / "made"))
        assert flag in err and "No space left on device" in err
        filler.unlink()


def test_certificates_on_a_full_disk(place: Path, capfd: pytest.CaptureFixture[str]) -> None:
    with small_disk(place / "disk", "64k"):
        fill(place / "disk")
        err = refusal(capfd, "certs", "--out", str(place / "disk"))
        assert "--out" in err and "No space left on device" in err


def test_training_starts_with_a_full_disk_of_checkpoints(place: Path) -> None:
    with small_disk(place / "disk", "64k"):
        fill(place / "disk")
        assert cli.main(run_words("--checkpoint-dir", place / "disk")) == 0


def test_a_picture_that_cannot_be_finished(place: Path, capfd: pytest.CaptureFixture[str]) -> None:
    (place / "full.svg").symlink_to("/dev/full")
    err = refusal(capfd, "plan", str(CLUSTER), "--svg", "full.svg")
    assert "--svg" in err and "No space left on device" in err
