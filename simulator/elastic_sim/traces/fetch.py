"""Downloads recorded traces from their authors' repositories, at pinned commits, and checks what came."""

from __future__ import annotations

import hashlib
import http.client
import os
import urllib.error
import urllib.request
import uuid
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from elastic.domain.errors import FieldError

HOST = "https://raw.githubusercontent.com"
TIMEOUT_S = 60.0
MOST_BYTES = 64 << 20


@dataclass(frozen=True, slots=True)
class Original:
    """One file of somebody else's."""

    name: str
    path: str
    """At the host: owner/repository/commit/path."""
    sha256: str
    format: str
    """One of `elastic_sim.traces.importers.FORMATS`."""


_BAMBOO = "uclasystem/bamboo/80809293289419d40a870b4a9ccb8df0082ce3fb"
_OOBLECK = "SymbioticLab/Oobleck/796655600207cfb59fae5804740ff720f7428fc5/tools/simulator/traces"
_PARCAE = "JF-D/Parcae/efedee7e069d795cbfd6b7667312bdc12f31eb8f/aws/traces/gpt-1.5b"
_AWS = f"{_BAMBOO}/doc/data/aws-spot-instances"

ORIGINALS = {
    original.name: original
    for original in (
        Original(
            "p3",
            f"{_BAMBOO}/traces/p3-trace.csv",
            "0b7828fcd4637799590578287415d4d4bbb5e3cfef5fbaf23ca8e5b3ef6bdd68",
            "bamboo",
        ),
        Original(
            "g4dn",
            f"{_BAMBOO}/traces/g4dn-trace.csv",
            "6a21d2003cfa16acfb65fb87b5521dd995c72f49a37900979eea177e853592eb",
            "bamboo",
        ),
        Original(
            "g4dn-1c",
            f"{_AWS}-g4dn-xlarge-us-east-1c-2020-11-20-1930-to-2020-11-21-2200.csv",
            "ae2d777db0631989c6f0e8014219f563bb59e1be13aa6b61e46c3aa7f6c29420",
            "counts",
        ),
        Original(
            "g4dn-1d",
            f"{_AWS}-g4dn-xlarge-us-east-1d-2020-11-23-1730-to-2020-11-24-1530.csv",
            "90020c19125a30a427bf3434b17c13654fa39314c6a45e810cdb015ed8046ff0",
            "counts",
        ),
        Original(
            "p2",
            f"{_AWS}-p2-xlarge-2020-11-20-to-2020-11-23.csv",
            "2fe17bc77cc1ad484362784f217304e7b21e987fc154c2f5d40f166214fb8726",
            "counts",
        ),
        Original(
            "oobleck-10m",
            f"{_OOBLECK}/10m.csv",
            "5b5641f2409eb7b19593da79c649e27cf78bd9deddec537e5148f2a8f044836a",
            "bamboo",
        ),
        Original(
            "oobleck-30m",
            f"{_OOBLECK}/30m.csv",
            "9aca78731d568373036b00fd5b1e1d48492a017dda3b6ccef1fefe83b389f366",
            "bamboo",
        ),
        Original(
            "oobleck-1h",
            f"{_OOBLECK}/1h.csv",
            "6d45260a1d92f840fbe433928c2279275035fe3e5c2e6f572e7c85b00666aa53",
            "bamboo",
        ),
        Original(
            "oobleck-3h",
            f"{_OOBLECK}/3h.csv",
            "0467fefcd585ce4d9a2287baf1689a220351077ce03299f501cb5d64e63ba732",
            "bamboo",
        ),
        Original(
            "oobleck-6h",
            f"{_OOBLECK}/6h.csv",
            "5a6d0f9156e45f4ffecb83f8d34b5474229caa3c7f2b46c5466fe40484ef74b2",
            "bamboo",
        ),
        Original(
            "oobleck-scaled-p3",
            f"{_OOBLECK}/scaled/scale_p3-trace.csv",
            "62d9e1a09de6f122e1bdac06af667745c6fcfb30d9c33955dd345372f2ae3750",
            "bamboo",
        ),
        Original(
            "oobleck-scaled-g4dn",
            f"{_OOBLECK}/scaled/scale_gcp-trace.csv",
            "b6b2b23f2bc13318c84a44f532249ebda0d59535173bc5bd45a7f0b29ae766d0",
            "bamboo",
        ),
        Original(
            "parcae-hadp",
            f"{_PARCAE}/trace_hh_55_65.txt",
            "c16138bfb5dc00f4e671a7259b3569626eca0d72ac48fef16e33070be334ecfe",
            "parcae",
        ),
        Original(
            "parcae-hasp",
            f"{_PARCAE}/trace_hl_15_25.txt",
            "776404627938767d8578cbca11336a364e28065cfa2464076d960155e21f6589",
            "parcae",
        ),
        Original(
            "parcae-ladp",
            f"{_PARCAE}/trace_lh_80_90.txt",
            "1c765474c2fbcca16c7430c35d5706831221d95107466d60304aabbf570ccfc2",
            "parcae",
        ),
        Original(
            "parcae-lasp",
            f"{_PARCAE}/trace_ll_10_11.txt",
            "1e349371675a953671f161c6a41633379fe4f93f9ad22b3f6ba6728918f0b40f",
            "parcae",
        ),
    )
}


def fetch(original: Original, directory: Path, host: str = HOST) -> Path:
    """Download into `directory`; a file that is there and right is kept. Raises FieldError if it cannot be had, or is
    not what it was: then nothing is written."""
    target = directory / Path(original.path).name
    try:
        if directory.exists() and not directory.is_dir():
            raise NotADirectoryError("it is a file")
        if target.is_file() and _sha256(target.read_bytes()) == original.sha256:
            return target
    except OSError as error:
        raise _unusable(directory, error) from error
    url = f"{host}/{original.path}"
    data = b"".join(_download(url))
    found = _sha256(data)
    if found != original.sha256:
        raise FieldError(url, found, f"its SHA-256 should be {original.sha256}: it is another file now")
    fresh = target.with_name(f".{target.name}.{uuid.uuid4().hex}")
    try:
        directory.mkdir(parents=True, exist_ok=True)
        try:
            fresh.write_bytes(data)
            os.replace(fresh, target)
        finally:
            fresh.unlink(missing_ok=True)
    except OSError as error:
        raise _unusable(directory, error) from error
    return target


def _unusable(directory: Path, error: OSError) -> FieldError:
    return FieldError("--to", str(directory), f"name a folder that can be written: {error}")


def _download(url: str) -> Iterator[bytes]:
    left = MOST_BYTES
    try:
        with urllib.request.urlopen(
            url, timeout=TIMEOUT_S
        ) as answer:  # only the hosts named here, or by a test
            while block := answer.read(1 << 16):
                left -= len(block)
                if left < 0:
                    raise FieldError(url, f"more than {MOST_BYTES} bytes", "a trace is smaller")
                yield block
            if answer.length:
                raise http.client.IncompleteRead(b"", answer.length)
    except http.client.InvalidURL as error:
        raise FieldError("--host", url, f"an address as {HOST} is needed: {error}"[:200]) from error
    except (urllib.error.URLError, http.client.HTTPException, OSError, ValueError) as error:
        said = f"{type(error).__name__}: {error}".strip()[:120]
        raise FieldError(url, said, "it must be reachable; traces/ has generated ones") from error


def _sha256(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()
