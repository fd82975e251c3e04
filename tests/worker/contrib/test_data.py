from __future__ import annotations

import itertools
import os
from pathlib import Path

import pytest
import torch

from elastic.domain.errors import FieldError
from elastic.worker.contrib.corpus import MAPPED_FILES
from elastic.worker.contrib.data import ByteCorpus, ByteDataset


def write(path: Path, data: bytes) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(data)
    return path


def folder(root: Path) -> Path:
    write(root / "b.txt", b"second")
    write(root / "a" / "z.txt", b"first ")
    write(root / "empty.txt", b"")
    write(root / ".git" / "x", b"hidden")
    write(root / ".hidden", b"hidden")
    return root


def test_file_is_its_bytes(tmp_path: Path) -> None:
    corpus = ByteCorpus(write(tmp_path / "t", bytes(range(256))))
    assert len(corpus) == 256
    assert corpus.read(250, 6) == bytes(range(250, 256)) and corpus.read(7, 0) == b""


def test_folder_is_its_files_end_to_end(tmp_path: Path) -> None:
    corpus = ByteCorpus(folder(tmp_path))
    text = b"first second"
    assert len(corpus) == len(text)
    for start, stop in itertools.combinations(range(len(text) + 1), 2):
        assert corpus.read(start, stop - start) == text[start:stop]
    for start, count in ((-1, 2), (0, 13), (12, 1), (3, -1)):
        with pytest.raises(IndexError):
            corpus.read(start, count)


def test_links(tmp_path: Path) -> None:
    text = folder(tmp_path / "text")
    (text / "loop").symlink_to(text)
    (text / "broken").symlink_to(tmp_path / "nowhere")
    (text / "null").symlink_to("/dev/null")
    os.mkfifo(text / "pipe")
    (text / "c.txt").symlink_to(write(tmp_path / "other.txt", b" third"))
    corpus = ByteCorpus(text)
    assert corpus.read(0, len(corpus)) == b"first second third"


def test_more_files_than_the_limit_of_mapped_files(tmp_path: Path) -> None:
    for i in range(MAPPED_FILES + 20):
        write(tmp_path / f"{i:04}", b"%04d" % i)
    corpus = ByteCorpus(tmp_path)
    assert corpus.read(0, len(corpus)) == b"".join(b"%04d" % i for i in range(MAPPED_FILES + 20))


def test_default_is_the_standard_library() -> None:
    corpus = ByteCorpus()
    assert len(corpus) > 5_000_000
    text = corpus.read(0, 2000).decode()
    assert "import" in text
    assert all("site-packages" not in name for name in corpus._files)


@pytest.mark.parametrize(
    "kind", ["missing", "empty file", "empty folder", "device", "nothing", "nul"]
)
def test_an_unusable_path_is_a_field_error(kind: str, tmp_path: Path) -> None:
    write(tmp_path / "empty", b"")
    (tmp_path / "folder").mkdir()
    paths: dict[str, str | Path] = {
        "missing": tmp_path / "nope",
        "empty file": tmp_path / "empty",
        "empty folder": tmp_path / "folder",
        "device": "/dev/null",
        "nothing": "",
        "nul": "a\0b",
    }
    with pytest.raises(FieldError) as caught:
        ByteCorpus(paths[kind])
    assert caught.value.field == "data"


@pytest.mark.skipif(os.geteuid() == 0, reason="root reads all files")
def test_unreadable_text_is_a_field_error(tmp_path: Path) -> None:
    write(tmp_path / "t" / "secret", b"text").chmod(0)
    for path in (tmp_path / "t", tmp_path / "t" / "secret"):
        with pytest.raises(FieldError, match="data"):
            ByteCorpus(path)


def test_too_short_text_is_refused(tmp_path: Path) -> None:
    corpus = ByteCorpus(write(tmp_path / "t", b"0123456789"))
    with pytest.raises(FieldError, match="10 bytes"):
        ByteDataset(corpus, 10, 1, 0)
    only = ByteDataset(corpus, 9, 2, 0).microbatch(0, 0)
    assert only.fields["tokens"].tolist() == [list(b"012345678")] * 2


def test_text_that_shrinks_is_a_field_error(tmp_path: Path) -> None:
    path = write(tmp_path / "t", b"x" * 100)
    corpus = ByteCorpus(path)
    path.write_bytes(b"x" * 10)
    with pytest.raises(FieldError, match="shrank"):
        corpus.read(50, 10)


def test_samples_depend_on_seed_step_and_index_alone(tmp_path: Path) -> None:
    corpus = ByteCorpus(write(tmp_path / "t", os.urandom(10_000)))
    one, other = ByteDataset(corpus, 16, 3, 5), ByteDataset(corpus, 16, 3, 5)
    keys = list(itertools.product(range(3), range(4)))
    first = {key: one.microbatch(*key) for key in keys}
    for key in reversed(keys):
        again = other.microbatch(*key)
        assert (again.step, again.index) == key
        assert torch.equal(again.fields["tokens"], first[key].fields["tokens"])
    offsets = {tuple(one.offsets(*key)) for key in keys}
    assert len(offsets) == len(keys)
    assert ByteDataset(corpus, 16, 3, 6).offsets(0, 0) != one.offsets(0, 0)


def test_labels_are_the_next_bytes(tmp_path: Path) -> None:
    corpus = ByteCorpus(write(tmp_path / "t", bytes(i % 251 for i in range(5000))))
    fields = ByteDataset(corpus, 16, 3, 5).microbatch(2, 1).fields
    tokens, labels = fields["tokens"], fields["labels"]
    assert tokens.shape == labels.shape == (3, 16) and tokens.dtype == labels.dtype == torch.int64
    assert torch.equal(tokens[:, 1:], labels[:, :-1])
    assert torch.equal((tokens + 1) % 251, labels)
    assert tokens.is_contiguous() and labels.is_contiguous()
