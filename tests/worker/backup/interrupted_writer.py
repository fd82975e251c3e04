"""A worker process that publishes two gradients and stops while it copies the third."""

from __future__ import annotations

import os
import signal
import sys

os.environ["OMP_NUM_THREADS"] = "1"

import torch

from elastic.rpc.frames import connect_unix
from elastic.worker.backup.publisher import Publisher
from elastic.worker.replica.gradient_sum import GradientSum
from elastic.worker.transport.cancellation import AbandonSignal
from tests.worker.model.toy_model import replicas, run


def main(address: str, directory: str) -> None:
    layers = replicas()
    publisher = Publisher(connect_unix(address).send, directory, "a")
    publisher.publish_states(layers, 1, "")
    for index in range(2):
        run(layers, 0, index)
        publisher.publish_gradients(layers, 0, 1, "", AbandonSignal())
        publisher.on_acked(99)
    sys.stdin.readline()  # The test writes a line when the agent has acknowledged all copies.
    run(layers, 0, 2)
    whole = GradientSum.write_gradient

    def write_half(self: GradientSum, out: torch.Tensor) -> None:
        whole(self, out)
        if self.index == 1:
            out[out.numel() // 2 :] = 255
            print("in the middle", flush=True)
            signal.pause()

    GradientSum.write_gradient = write_half  # type: ignore[method-assign]
    publisher.publish_gradients(layers, 0, 1, "", AbandonSignal())


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2])
