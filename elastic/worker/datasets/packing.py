"""Documents of different lengths, packed one behind the other into rows of one length."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from elastic.domain.errors import FieldError
from elastic.worker.model.checks import Described, description, whole_number

IGNORED = -100
"""Label of a position that has no part in the loss, as in torch's cross entropy."""
TOKENS = "token numbers: call a tokenizer first"
DOCUMENTS = "a list of documents, each a list or an array of token numbers"


class PackedDocuments:
    """Map-style dataset of rows of `length` tokens, cut from all documents one behind the other.

    Fields of a row, int64 [length] each:

    - `input_ids`: the tokens. The tokens behind the last whole row are left out.
    - `position_ids`: begins at 0 with the row and with each document in it. Without an
      `attention_mask`, models of transformers take such positions to keep the attention inside a
      document; with FlashAttention only if a micro-batch has one row.
    - `labels`: the tokens, but `IGNORED` where a document begins: no token before it predicts it.
      Models of transformers shift the labels themselves.

    Args:
        documents: token numbers of each document. Only the rows that are asked for are read; the
            lengths of all documents are read at once.
        length: tokens per row.

    Raises FieldError if the documents have too few tokens for one row, or are not usable.
    """

    def __init__(self, documents: Sequence[Sequence[int]], length: int) -> None:
        self._documents, self._length = documents, whole_number("length", length, 1)
        try:
            lengths = [len(document) for document in documents]
        except TypeError:
            raise FieldError("documents", description(documents), DOCUMENTS) from None
        self._starts = np.cumsum([0, *lengths])
        if lengths and not isinstance(documents[0], Sequence | np.ndarray | Tensor):
            raise FieldError("documents[0]", description(documents[0]), DOCUMENTS)
        if lengths and isinstance(documents[0], str | bytes):
            raise FieldError("documents[0]", description(documents[0]), TOKENS)
        if len(self) == 0:
            what = Described(f"{int(self._starts[-1])} tokens in {len(lengths)} documents")
            remedy = f"a row needs {self._length}: give more text, or a smaller length"
            raise FieldError("documents", what, remedy)

    def __len__(self) -> int:
        return int(self._starts[-1]) // self._length

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        if not 0 <= index < len(self):
            raise IndexError(f"row {index} of {len(self)}")
        first, stop = index * self._length, (index + 1) * self._length
        number = int(np.searchsorted(self._starts, first, side="right")) - 1
        ids, positions, labels = [], [], []
        while first < stop:
            begins = int(self._starts[number])
            ends = min(stop, int(self._starts[number + 1]))
            if ends > first:  # not an empty document
                part = torch.as_tensor(self._documents[number]).long()[
                    first - begins : ends - begins
                ]
                ids.append(part)
                positions.append(torch.arange(first - begins, ends - begins))
                label = part.clone()
                if first == begins:
                    label[0] = IGNORED
                labels.append(label)
            first, number = ends, number + 1
        fields = {"input_ids": ids, "position_ids": positions, "labels": labels}
        return {name: torch.cat(parts) for name, parts in fields.items()}
