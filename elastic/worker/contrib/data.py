"""Byte-level training samples; which ones depends on (seed, step, micro-batch) alone."""

from __future__ import annotations

import torch

from elastic.worker.contrib.corpus import ByteCorpus
from elastic.worker.model.layers import Microbatch
from elastic.worker.model.rng import keyed

__all__ = ["ByteCorpus", "ByteDataset"]
SAMPLES = 1 << 32
"""Stands where a layer's index stands in other keys, so that samples share no key with a layer."""


class ByteDataset:
    """Random windows of a corpus. Fields: tokens and labels (the next bytes), int64 [batch, sequence]."""

    def __init__(self, corpus: ByteCorpus, seq_len: int, microbatch_size: int, seed: int) -> None:
        corpus.need(seq_len + 1)
        self.corpus, self.seq_len, self.microbatch_size, self.seed = corpus, seq_len, microbatch_size, seed

    def offsets(self, step: int, index: int) -> list[int]:
        """Where the samples of micro-batch `index` of `step` begin."""
        room = len(self.corpus) - self.seq_len
        return [keyed(self.seed, step, index, SAMPLES, n) % room for n in range(self.microbatch_size)]

    def microbatch(self, step: int, index: int) -> Microbatch:
        windows = b"".join(self.corpus.read(start, self.seq_len + 1) for start in self.offsets(step, index))
        rows = torch.frombuffer(bytearray(windows), dtype=torch.uint8).view(self.microbatch_size, -1).long()
        return Microbatch(
            step, index, {"tokens": rows[:, :-1].contiguous(), "labels": rows[:, 1:].contiguous()}
        )
