"""Errors of both commands name the flag that gave a value, and not an internal field."""

from __future__ import annotations

import errno
import socket
from pathlib import Path

import click
import pytest

from elastic.command_line import (
    MAX_INPUT_BYTES,
    CommandLine,
    ParsedType,
    content_errors,
    input_bytes,
    reason_of,
)
from elastic.domain.errors import FieldError

PATH = ParsedType("FILE", lambda _, text: Path(text))
WORDS = ("x.csv", "--nodes", "3", "--from", "7", "--model", "m.json", "--model", "n.json",
         "--physics", "boot_s=1")  # fmt: skip


@pytest.mark.parametrize(
    ("field", "value", "shown"),
    [
        ("nodes", 3, "--nodes"),
        ("market.nodes", 3, "--nodes"),
        ("first_s", 7, "--from"),
        ("physics.boot_s", 1, "--physics boot_s"),
        ("duration", 60, "--duration"),  # its default
        ("file", "m.json", "--model"),
        ("file", "n.json", "--model"),
        ("trace", "there/x.csv", "TRACE"),
        ("trace", "", "TRACE"),
        ("x.csv, line 3", "0", "TRACE: x.csv, line 3"),
        ("x.csv: end", 0, "TRACE: x.csv: end"),
        ("there/x.csv", "0", "TRACE: there/x.csv"),
        # these stay
        ("--model", "m.json", "--model"),
        ("--from, --to", "1, 2", "--from, --to"),
        ("TRACE, --nodes", "both", "TRACE, --nodes"),
        ("Profile.nodes", 3, "Profile.nodes"),
        ("x.csvs, line 3", "0", "x.csvs, line 3"),
        ("job.shape", "99", "job.shape"),  # a file has it: the flag was not given
        ("other", 5, "other"),
    ],
)
def test_an_error_names_the_flag(
    field: str, value: object, shown: str, capsys: pytest.CaptureFixture[str]
) -> None:
    @click.group("prog", cls=CommandLine)
    def prog() -> None:
        """Test."""

    @prog.command("work")
    @click.argument("traces", nargs=-1, type=PATH, metavar="[TRACE]...")
    @click.option("--nodes", type=int)
    @click.option("--from", "first_s", type=int)
    @click.option("--model", multiple=True)
    @click.option("--physics", multiple=True)
    @click.option("--shape")
    @click.option("--duration", default=60)
    def work(**_: object) -> None:
        raise FieldError(field, value, "another one")

    assert prog.run(["work", f"there/{WORDS[0]}", *WORDS[1:]]) == 2
    text = f"prog work: {shown}: {value!r} is not usable: another one\n"
    assert capsys.readouterr().err == text


def test_an_environment_variable_is_named_also_for_an_internal_field(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    @click.group("prog", cls=CommandLine)
    def prog() -> None:
        """Test."""

    @prog.command("work")
    @click.option("--nodes", type=int, envvar="NODES")
    def work(nodes: int) -> None:
        raise FieldError("market.nodes", nodes, "another one")

    monkeypatch.setenv("NODES", "3")
    assert prog.run(["work"]) == 2
    assert capsys.readouterr().err == (
        "prog work: --nodes: 3 is not usable: another one "
        "(given by the environment variable NODES)\n"
    )


def test_reasons_are_plain_words(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    (tmp_path / "loop").symlink_to("loop")
    for name, why in (
        ("absent", "there is no such file"),
        ("", "it is a directory"),
        ("file/below", "a part of its path is not a directory"),
        ("loop", "it is a link to itself"),
        ("a" * 300, "its name is too long"),
        ("a\0b", "it cannot be the name of a file"),
    ):
        with pytest.raises(FieldError, match=f"--x: .* is not usable: {why}; name a readable file"):
            input_bytes("--x", tmp_path / name)
    assert reason_of(socket.gaierror(-2, "Name or service not known")) == (
        "there is no host of this name"
    )
    assert reason_of(TimeoutError()) == "it does not answer in time"
    assert reason_of(OSError(errno.EIO, "Input/output error")) == "Input/output error"


def test_a_device_and_a_large_file_are_not_read_whole(tmp_path: Path) -> None:
    with pytest.raises(FieldError, match=f"it has more than {MAX_INPUT_BYTES} bytes"):
        input_bytes("--x", Path("/dev/zero"), 1 << 60)
    large = tmp_path / "large"
    with large.open("wb") as file:
        file.truncate(1 << 40)  # it needs no room on the disk
    with pytest.raises(FieldError, match=f"it has more than {1 << 39} bytes"):
        input_bytes("--x", large, 1 << 39)


@pytest.mark.parametrize(
    ("field", "text"),
    [
        ("Profile", "it is not a profile: a number"),
        ("Profile.link.rate", "it is not a profile: link.rate: 7 is not usable: a number"),
        ("line 3", "it is not a profile: line 3: 7 is not usable: a number"),
    ],
)
def test_an_error_of_the_content_names_flag_and_file(field: str, text: str) -> None:
    with pytest.raises(FieldError) as caught, content_errors("--model", "m.json", "a profile"):
        raise FieldError(field, 7, "a number")
    assert str(caught.value) == f"--model: 'm.json' is not usable: {text}"
