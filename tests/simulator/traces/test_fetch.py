"""Downloads from a local HTTP server: right files are kept, all others are refused."""

from __future__ import annotations

import hashlib
import threading
from collections.abc import Iterator
from dataclasses import replace
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import ClassVar

import pytest
from elastic_sim.traces import fetch as module
from elastic_sim.traces.fetch import PUBLISHED_TRACES, PublishedTrace, fetch
from elastic_sim.traces.importers import FORMATS

from elastic.domain.errors import FieldError

DATA = b"0,add,node1\n60000,remove,node1\n"
GOOD = PublishedTrace(
    "t", "owner/repository/commit/t.csv", hashlib.sha256(DATA).hexdigest(), "bamboo"
)


BROKEN = {
    "status": b"gibberish\r\n\r\n",
    "short": b"HTTP/1.0 200 OK\r\nContent-Length: 1000\r\n\r\n" + DATA,
    "chunks": b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n40\r\n" + DATA,
}


class Handler(BaseHTTPRequestHandler):
    asked: ClassVar[list[str]] = []

    def do_GET(self) -> None:
        self.asked.append(self.path)
        if "broken" in self.path:
            self.wfile.write(BROKEN[self.path.rpartition("/")[2]])
            return
        self.send_response(200 if self.path.endswith("t.csv") else 404)
        self.end_headers()
        if self.path.endswith("t.csv"):
            self.wfile.write(DATA)

    def log_message(self, format: str, *args: object) -> None:
        """Quiet."""


@pytest.fixture
def host() -> Iterator[str]:
    Handler.asked = []
    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield f"http://127.0.0.1:{server.server_port}"
    server.shutdown()
    server.server_close()


def test_a_right_file_is_kept_and_not_downloaded_again(host: str, tmp_path: Path) -> None:
    path = fetch(GOOD, tmp_path / "traces", host)
    assert path.read_bytes() == DATA and Handler.asked == [f"/{GOOD.path}"]
    assert fetch(GOOD, tmp_path / "traces", host) == path and len(Handler.asked) == 1
    path.write_bytes(b"torn")
    assert fetch(GOOD, tmp_path / "traces", host).read_bytes() == DATA


def test_other_content_is_refused_and_nothing_is_written(host: str, tmp_path: Path) -> None:
    other = PublishedTrace("t", GOOD.path, "0" * 64, "bamboo")
    with pytest.raises(FieldError, match=r"--host: .*t\.csv has changed there"):
        fetch(other, tmp_path, host)
    assert not list(tmp_path.iterdir())


def test_unreachable_and_oversized_files_are_refused(
    host: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(FieldError, match=r"--host: .*it answers 404 .* for owner/x; name a mirror"):
        fetch(PublishedTrace("x", "owner/x", "0" * 64, "bamboo"), tmp_path, host)
    with pytest.raises(FieldError, match=r"--host: .*cannot be reached: it refuses the connection"):
        fetch(GOOD, tmp_path, "http://127.0.0.1:1")
    with pytest.raises(FieldError, match=r"--host: .*cannot be reached: its TLS certificate is"):
        fetch(GOOD, tmp_path, host.replace("http:", "https:"))
    monkeypatch.setattr(module, "MAX_BYTES", 10)
    with pytest.raises(FieldError, match="a trace is smaller"):
        fetch(GOOD, tmp_path, host)


@pytest.mark.parametrize("how", sorted(BROKEN))
def test_broken_responses_are_refused(how: str, host: str, tmp_path: Path) -> None:
    """An invalid status line, and bodies that end too early."""
    with pytest.raises(FieldError, match=r"--host: .* is incomplete or damaged"):
        fetch(replace(GOOD, path=f"owner/broken/{how}"), tmp_path, host)
    assert not list(tmp_path.iterdir())


def test_a_target_that_is_no_folder_is_refused(host: str, tmp_path: Path) -> None:
    file = tmp_path / "file"
    file.write_text("mine")
    for target in (file, file / "below"):
        with pytest.raises(FieldError, match="--to"):
            fetch(GOOD, target, host)
    (tmp_path / "t.csv").mkdir()
    with pytest.raises(FieldError, match="--to"):
        fetch(GOOD, tmp_path, host)
    assert file.read_text() == "mine" and {path.name for path in tmp_path.iterdir()} == {
        "file",
        "t.csv",
    }


@pytest.mark.parametrize(
    "host", ["http://a b", "", "abc", "file:///etc", "http://", "http://a:port", "http://[::1"]
)
def test_an_invalid_host_is_refused(host: str, tmp_path: Path) -> None:
    with pytest.raises(FieldError, match=r"--host: .* write an address as https://"):
        fetch(GOOD, tmp_path, host)


def test_published_traces_are_pinned() -> None:
    assert (
        len({original.path for original in PUBLISHED_TRACES.values()})
        == len(PUBLISHED_TRACES)
        >= 16
    )
    for original in PUBLISHED_TRACES.values():
        commit = original.path.split("/")[2]
        assert len(commit) == 40 and len(original.sha256) == 64 and original.format in FORMATS
