"""Byte-level training samples, a function of (seed, step, micro-batch)."""

from __future__ import annotations

import torch

from elastic.worker.contrib.corpus import ByteCorpus
from elastic.worker.model.microbatch import Microbatch
from elastic.worker.model.rng import derive_seed

__all__ = ["ByteCorpus", "ByteDataset"]
SAMPLES = 1 << 32
"""Used in place of a layer's index, so that samples and layers never share a seed."""


class ByteDataset:
    """Draws random windows of a corpus as micro-batches.

    Fields of a micro-batch: tokens and labels (the next bytes), int64 [batch, sequence].
    """

    def __init__(self, corpus: ByteCorpus, seq_len: int, microbatch_size: int, seed: int) -> None:
        corpus.need(seq_len + 1)
        self.corpus, self.seq_len = corpus, seq_len
        self.microbatch_size, self.seed = microbatch_size, seed

    def offsets(self, step: int, index: int) -> list[int]:
        """Return the position of each sample of micro-batch `index` of `step` in the corpus."""
        room = len(self.corpus) - self.seq_len
        keys = (self.seed, step, index, SAMPLES)
        return [derive_seed(*keys, n) % room for n in range(self.microbatch_size)]

    def microbatch(self, step: int, index: int) -> Microbatch:
        starts = self.offsets(step, index)
        windows = b"".join(self.corpus.read(start, self.seq_len + 1) for start in starts)
        flat = torch.frombuffer(bytearray(windows), dtype=torch.uint8)
        rows = flat.view(self.microbatch_size, -1).long()
        fields = {"tokens": rows[:, :-1].contiguous(), "labels": rows[:, 1:].contiguous()}
        return Microbatch(step, index, fields)
