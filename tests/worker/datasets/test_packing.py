"""Documents packed into rows."""

from __future__ import annotations

import pytest
import torch

from elastic import PackedDocuments, from_dataset
from elastic.domain.errors import FieldError

DOCUMENTS = [[1, 2, 3], [], [4], [5, 6, 7, 8, 9], [10, 11]]


def test_rows_hold_all_tokens_and_begin_documents_anew() -> None:
    rows = PackedDocuments(DOCUMENTS, 4)
    assert len(rows) == 2
    assert [rows[n]["input_ids"].tolist() for n in range(2)] == [[1, 2, 3, 4], [5, 6, 7, 8]]
    assert rows[0]["position_ids"].tolist() == [0, 1, 2, 0]
    assert rows[0]["labels"].tolist() == [-100, 2, 3, -100]


def test_a_document_goes_on_in_the_next_row() -> None:
    rows = PackedDocuments(DOCUMENTS, 2)
    assert [rows[n]["input_ids"].tolist() for n in range(5)] == [
        [1, 2],
        [3, 4],
        [5, 6],
        [7, 8],
        [9, 10],
    ]
    assert [rows[n]["position_ids"].tolist() for n in range(5)] == [
        [0, 1],
        [2, 0],
        [0, 1],
        [2, 3],
        [4, 0],
    ]
    assert rows[3]["labels"].tolist() == [7, 8]


def test_rows_are_samples() -> None:
    fields = from_dataset(PackedDocuments(DOCUMENTS, 4), rows=2, microbatches=1, shuffle=False)(
        0, 0
    ).fields
    assert fields["input_ids"].shape == (2, 4) and fields["input_ids"].dtype == torch.int64


@pytest.mark.parametrize(
    ("documents", "length", "text"),
    [
        (DOCUMENTS, 12, "11 tokens in 5 documents"),
        (DOCUMENTS, 0, "length"),
        ([1, 2, 3], 2, "a list of documents"),
        ([{"ids": [1, 2, 3]}], 2, "a list of documents"),
        (["some text"], 2, "call a tokenizer"),
    ],
)
def test_wrong_use_is_refused_with_a_remedy(documents: object, length: int, text: str) -> None:
    with pytest.raises(FieldError, match=text):
        PackedDocuments(documents, length)  # type: ignore[arg-type]


def test_the_end_of_the_rows() -> None:
    with pytest.raises(IndexError):
        PackedDocuments(DOCUMENTS, 4)[2]
