"""`elastic certs`, and certificates, tokens and public addresses on the command line."""

from __future__ import annotations

import datetime
import os
import stat
from pathlib import Path

import pytest
from cryptography import x509

from elastic.config import FILE
from elastic.domain.errors import FieldError
from elastic.launcher import cli
from elastic.launcher.flags.certs import make_certificates
from elastic.launcher.flags.request import Request
from elastic.launcher.flags.validators import is_loopback
from elastic.launcher.run.rundir import RunDir
from elastic.rpc.security.tls import TOKEN_FILE, Certificates, load
from tests.launcher import helpers
from tests.security.parts import TOKEN, Authority


def mode(path: Path) -> int:
    return stat.S_IMODE(path.stat().st_mode)


def names(path: Path) -> list[str]:
    found = x509.load_pem_x509_certificate(path.read_bytes()).extensions
    alternative = found.get_extension_for_class(x509.SubjectAlternativeName).value
    return [str(name.value) for name in alternative]


def test_an_authority_and_hosts_are_made_added_and_renewed(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out, made = tmp_path / "certs", ["certs", "--out", str(tmp_path / "certs"), "--hosts"]
    assert cli.main([*made, "node1/10.0.0.1,10.0.0.2"]) == 0
    assert names(out / "node1" / "tls.crt")[:2] == ["node1", "10.0.0.1"]
    assert "127.0.0.1" in names(out / "10.0.0.2" / "tls.crt")
    keys = [out / "ca.key", out / "node1" / "tls.key", out / "10.0.0.2" / "tls.key"]
    assert [mode(key) for key in keys] == [0o600] * 3
    assert not (out / "node1" / "ca.key").exists(), "the authority's key stays where it was made"
    before = {path: path.read_bytes() for path in out.rglob("*.*") if path.is_file()}
    assert cli.main([*made, "node3,node1"]) == 2
    assert "--force" in capsys.readouterr().err
    assert {path: path.read_bytes() for path in before} == before
    assert not (out / "node3").exists(), "all or none"
    assert cli.main([*made, "node3"]) == 0
    assert cli.main([*made, "node1", "--force", "--days", "3"]) == 0
    changed = {path.name for path in before if path.read_bytes() != before[path]}
    assert changed == {"tls.crt", "tls.key"}
    for host in ("node1", "node3", "10.0.0.2"):
        Certificates(out / host)
    (out / "ca.key").write_bytes((out / "node1" / "tls.key").read_bytes())
    assert cli.main([*made, "node4"]) == 2
    assert "do not belong together" in capsys.readouterr().err


def test_renewal_keeps_the_names_of_a_certificate_and_adds_new_ones(tmp_path: Path) -> None:
    """A certificate of etcd without the members' names would stop every member."""
    words = ["certs", "--out", str(tmp_path), "--hosts"]
    etcd = tmp_path / "demo-etcd" / "tls.crt"
    assert cli.main([*words, "demo-etcd/demo-etcd-0.demo-etcd/10.0.0.1"]) == 0
    before = names(etcd)
    assert cli.main([*words, "demo-etcd", "--force"]) == 0
    assert names(etcd) == before
    assert cli.main([*words, "demo-etcd/demo-etcd-1.demo-etcd/::2", "--force"]) == 0
    assert names(etcd) == [*before, "demo-etcd-1.demo-etcd", "::2"]


def test_the_advised_command_renews_every_certificate_with_its_names(tmp_path: Path) -> None:
    hosts = {"node1": "node1/10.0.0.1", "10.0.0.2": "10.0.0.2", "_.example.com": "*.example.com"}
    first = ["certs", "--out", str(tmp_path), "--hosts", ",".join(hosts.values()), "--days", "9"]
    assert cli.main(first) == 0
    paths = [tmp_path / folder / "tls.crt" for folder in hosts]
    before = [names(path) for path in paths]
    assert cli.main(["certs", "--out", str(tmp_path), "--force", "--days", "99"]) == 0
    assert [names(path) for path in paths] == before
    soon = datetime.datetime.now(datetime.UTC) + datetime.timedelta(days=98)
    assert all(ends(path) > soon for path in paths)
    assert not (tmp_path / "localhost").exists()


def test_names_that_cannot_be_kept_are_an_error(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    force = ["certs", "--out", str(tmp_path / "pki"), "--force"]
    assert cli.main(force) == 2
    assert "--out: " in capsys.readouterr().err and not (tmp_path / "pki").exists()
    make_certificates(tmp_path / "pki", [["node1", "10.0.0.1"], ["node2"]])
    one, two = (tmp_path / "pki" / node / "tls.crt" for node in ("node1", "node2"))
    for damaged in (b"", two.read_bytes()):
        one.write_bytes(damaged)
        before = two.read_bytes()
        for hosts in ([], ["--hosts", "node1"]):
            assert cli.main([*force, *hosts]) == 2
            err = capsys.readouterr().err
            assert f"{one}" in err and len(err.splitlines()) == 1
        assert (one.read_bytes(), two.read_bytes()) == (damaged, before), "all or none"


def ends(path: Path) -> datetime.datetime:
    return x509.load_pem_x509_certificate(path.read_bytes()).not_valid_after_utc


@pytest.mark.parametrize(
    ("ca_days", "words", "field"),
    [
        (None, ["--days", "900", "--ca-days", "10"], "--days"),
        (None, ["--ca-days", "364"], "--days"),
        (30, [], "--days"),
        (30, ["--days", "31"], "--days"),
        (30, ["--days", "9", "--ca-days", "90"], "--ca-days"),
        (-1, ["--days", "1"], "--out"),
        (0.5, ["--days", "1"], "--out"),
    ],
)
def test_no_certificate_outlives_its_authority(
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    ca_days: float | None,
    words: list[str],
    field: str,
) -> None:
    out = tmp_path / "certs"
    if ca_days is not None:
        make_certificates(out, [], ca_days=ca_days)
    before = sorted(tmp_path.rglob("*"))
    assert cli.main(["certs", "--out", str(out), "--hosts", "new", *words]) == 2
    err = capsys.readouterr().err
    assert err.startswith(f"elastic certs: {field}: ") and len(err.splitlines()) == 1
    assert sorted(tmp_path.rglob("*")) == before


def test_a_certificate_may_last_as_long_as_its_authority(tmp_path: Path) -> None:
    words = ["certs", "--out", str(tmp_path), "--days", "9"]
    assert cli.main([*words, "--ca-days", "9"]) == 0
    assert cli.main([*words[:-1], "8", "--hosts", "later"]) == 0
    assert ends(tmp_path / "later" / "tls.crt") <= ends(tmp_path / "ca.crt")
    assert ends(tmp_path / "localhost" / "tls.crt") <= ends(tmp_path / "ca.crt")


def read(place: Path, *words: str, **environ: str) -> Request:
    (place / "script.py").write_text("")
    return helpers.read(
        *words, "--run-dir", str(place / "run"), str(place / "script.py"), **environ
    )


@pytest.mark.parametrize("host", ["127.0.0.1", "localhost", "[::1]", "127.9.9.9", "::1"])
def test_loopback(host: str) -> None:
    assert is_loopback(host)


@pytest.mark.parametrize(
    "host", ["10.0.0.1", "0.0.0.0", "[::]", "192.168.1.1", "no.such.host.invalid"]
)
def test_not_loopback(host: str) -> None:
    assert not is_loopback(host)


def test_an_address_that_others_reach_needs_certificates_or_insecure(
    tmp_path: Path, authority: Authority
) -> None:
    there = ("--nnodes", "2", "--rdzv-backend", "c10d", "--rdzv-endpoint", "10.0.0.1:29400")
    with pytest.raises(FieldError, match="--certs DIR"):
        read(tmp_path, *there)
    assert read(tmp_path, *there, "--certs", str(authority.good)).guard.warning == ""
    loud = read(tmp_path, *there, "--insecure").guard.warning
    assert "plain text" in loud and "anybody may join" in loud
    assert (
        "anybody"
        not in read(tmp_path, *there, "--insecure", ELASTIC_JOIN_TOKEN=TOKEN).guard.warning
    )
    assert read(tmp_path, *there, PET_INSECURE="1").guard.warning == loud
    here = ("--nnodes", "2", "--rdzv-backend", "c10d", "--rdzv-endpoint", "localhost:29400")
    assert read(tmp_path, *here).guard.warning == ""


def test_the_token_is_in_no_file_but_its_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("ELASTIC_JOIN_TOKEN", TOKEN)
    wanted = read(tmp_path, "--standalone", **os.environ)
    assert wanted.guard.token == TOKEN
    assert TOKEN not in repr(wanted)
    run_dir = RunDir(wanted)
    try:
        path = run_dir.path / TOKEN_FILE
        assert (mode(path), path.read_text().strip()) == (0o600, TOKEN)
        assert TOKEN not in (run_dir.path / FILE).read_text()
        assert "ELASTIC_JOIN_TOKEN" not in os.environ, "children do not inherit it"
        found = load(run_dir.path, "")
        assert found.token == TOKEN and TOKEN not in repr(found)
    finally:
        run_dir.close()
    assert not path.exists()


def test_a_job_on_this_machine_alone_gets_a_token_of_its_own(tmp_path: Path) -> None:
    one, two = (read(tmp_path, "--standalone").guard.token for _ in range(2))
    assert len(one) == 64 and one != two
    (tmp_path / "token").write_text(TOKEN + "\n")
    assert (
        read(tmp_path, "--standalone", "--join-token-file", str(tmp_path / "token")).guard.token
        == TOKEN
    )
    (tmp_path / "token").write_text("short")
    with pytest.raises(FieldError, match="16 to 4096 printable") as caught:
        read(tmp_path, "--standalone", "--join-token-file", str(tmp_path / "token"))
    assert "short" not in str(caught.value)
