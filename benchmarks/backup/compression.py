"""Ratio and speed of lossless compression of copies.

    python -m benchmarks.backup.compression [--quick]

The benchmark trains the example GPT for some steps, without agents, and compresses the very bytes
that its vaults would send. It uses one core and 1 MiB at a time, as on the wire. `zstandard` and
`lz4` take part where they are installed.
"""

from __future__ import annotations

import argparse
import importlib
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from statistics import median

import blosc
import numpy as np
import numpy.typing as npt
import torch

from benchmarks.results import Row, save
from elastic.core.protocol.compression import MARGIN
from elastic.domain.types import Accumulate
from elastic.rpc.bulk.blocks import BLOCK_BYTES
from elastic.worker.contrib.corpus import ByteCorpus
from elastic.worker.contrib.data import ByteDataset
from elastic.worker.contrib.megatron.gpt import GPTConfig
from elastic.worker.contrib.megatron.stack import GPTStack
from elastic.worker.model.learning_rate import cosine
from elastic.worker.model.optimizer import adamw
from elastic.worker.replica.build import build_replica
from elastic.worker.replica.replica import LayerReplica

Bytes = npt.NDArray[np.uint8]
CHOSEN = "blosc bit shuffle lz4"


@dataclass(frozen=True, kw_only=True)
class CompressionSetting:
    hidden: int = 256
    steps: int = 4
    microbatches: int = 4
    turns: int = 5


QUICK = CompressionSetting(hidden=64, steps=2, microbatches=2, turns=1)


@dataclass(frozen=True, slots=True)
class Codec:
    name: str
    pack: Callable[[memoryview], bytes]
    unpack: Callable[[bytes], object]


def train(setting: CompressionSetting, accumulate: Accumulate, dtype: str) -> dict[str, Bytes]:
    """Return copies by name: gradient and state of a middle layer after the last two steps."""
    config = GPTConfig(
        layers=2, hidden=setting.hidden, heads=4, seq_len=128, micro_batch_size=4, dtype=dtype
    )
    stack, device = GPTStack(config), torch.device("cpu")
    with tempfile.TemporaryDirectory() as folder:
        tp = stack.tensor_parallel(0, 1, str(Path(folder) / "store"), device)
    optimizer = adamw(
        cosine(2e-3, warmup=5, steps=20), weight_decay=0.1, master_weights=dtype != "fp32"
    )
    layers = [
        build_replica(stack, i, tp, optimizer, accumulate, 0, device)
        for i in range(config.n_layers)
    ]
    data = ByteDataset(ByteCorpus(None), config.seq_len, config.micro_batch_size, 0).microbatch
    found: dict[str, Bytes] = {}
    for step in range(setting.steps):
        for index in range(setting.microbatches):
            hidden = None
            for layer in layers:
                hidden = layer.forward(hidden, data(step, index))
            assert isinstance(hidden, torch.Tensor)
            torch.autograd.backward(hidden)
            for layer in layers:
                layer.collect(index, skip=False)
        found[f"gradient, {accumulate.value}"] = written(
            layers[1].gradient_nbytes, layers[1].write_gradient
        )
        found[f"state, {dtype}, before"] = found.get(f"state, {dtype}", np.zeros(0, np.uint8))
        found[f"state, {dtype}"] = update(layers, optimizer.lr(step))
    stack.release()
    return found


def update(layers: list[LayerReplica], lr: float) -> Bytes:
    for layer in layers:
        layer.update(layer.gradient.clone(), 1.0, lr)
        layer.clear()
    return written(layers[1].state_nbytes(), layers[1].write_state)


def written(nbytes: int, write: Callable[[torch.Tensor], None]) -> Bytes:
    out = torch.empty(nbytes, dtype=torch.uint8)
    write(out)
    return out.numpy()


def shuffled(piece: memoryview) -> bytes:
    """Return the bytes grouped by their position in 8-byte words; a remainder stays at the end."""
    whole = len(piece) // 8 * 8
    return np.frombuffer(piece[:whole], np.uint8).reshape(-1, 8).T.tobytes() + bytes(piece[whole:])


def unshuffled(data: bytes) -> bytes:
    whole = len(data) // 8 * 8
    return np.frombuffer(data[:whole], np.uint8).reshape(8, -1).T.tobytes() + data[whole:]


def codecs() -> Iterator[Codec]:
    for shuffle, word in ((blosc.BITSHUFFLE, "bit shuffle"), (blosc.SHUFFLE, "byte shuffle")):
        for inner, level in (("lz4", 5), ("zstd", 1)):
            yield Codec(
                f"blosc {word} {inner}",
                lambda piece, s=shuffle, c=inner, n=level: blosc.compress(piece, 8, n, s, c),  # type: ignore[misc]
                blosc.decompress,
            )
    for name in ("zstandard", "lz4.block"):
        try:
            module = importlib.import_module(name)
        except ImportError:
            continue
        if name == "zstandard":
            packs, unpacks = (
                module.ZstdCompressor(level=1).compress,
                module.ZstdDecompressor().decompress,
            )
        else:
            packs, unpacks = module.compress, module.decompress
        yield Codec(
            f"{name} and numpy byte shuffle",
            lambda piece, f=packs: f(shuffled(piece)),  # type: ignore[misc]
            lambda block, f=unpacks: unshuffled(f(block)),  # type: ignore[misc]
        )


def measure(name: str, data: Bytes, codec: Codec, turns: int) -> tuple[list[Row], float, float]:
    """Return rows of one codec on one copy, its compression ratio, and bytes per CPU second."""
    view = memoryview(data)  # type: ignore[arg-type]
    packing: list[float] = []
    unpacking: list[float] = []
    pieces = [view[start : start + BLOCK_BYTES] for start in range(0, len(view), BLOCK_BYTES)]
    blocks: list[bytes] = []
    for _ in range(turns):
        began = time.thread_time()
        blocks = [codec.pack(piece) for piece in pieces]
        middle = time.thread_time()
        for block in blocks:
            codec.unpack(block)
        packing.append(middle - began)
        unpacking.append(time.thread_time() - middle)
    assert b"".join(bytes(codec.unpack(block)) for block in blocks) == bytes(view)  # type: ignore[call-overload]
    fraction, rate = sum(map(len, blocks)) / len(view), len(view) / max(median(packing), 1e-9)
    label = f"{name}: {codec.name}"
    return (
        [
            Row(f"{label}, ratio", 1 / fraction, "x", None, "higher"),
            Row(f"{label}, packed", rate / 1e6, "MB/s", None, "higher"),
            Row(
                f"{label}, unpacked",
                len(view) / max(median(unpacking), 1e-9) / 1e6,
                "MB/s",
                None,
                "higher",
            ),
        ],
        fraction,
        rate,
    )


def rows(setting: CompressionSetting) -> list[Row]:
    copies = train(setting, Accumulate.EXACT, "fp32") | train(setting, Accumulate.FAST, "bf16")
    for name in ("state, fp32", "state, bf16"):
        before = copies.pop(f"{name}, before")
        copies[f"{name}, XOR with the previous version"] = copies[name] ^ before
    out: list[Row] = []
    for name, data in copies.items():
        for codec in codecs():
            if "XOR" in name and codec.name != CHOSEN:
                continue
            found, fraction, rate = measure(name, data, codec, setting.turns)
            out += found
            if codec.name == CHOSEN and "XOR" not in name:
                link = max(0.0, rate * (MARGIN - fraction)) / 1e6
                out.append(Row(f"{name}: pays on links below", link, "MB/s", None, "higher"))
    return out


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument(
        "--quick", action="store_true", help="a tiny model, once; nothing is written"
    )
    args = parser.parse_args()
    torch.set_num_threads(1)
    if args.quick:
        for row in rows(QUICK):
            print(f"{row.metric}: {row.value:.4g} {row.unit}")
    else:
        save("compression", rows(CompressionSetting()))


if __name__ == "__main__":
    main()
