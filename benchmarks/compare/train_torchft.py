"""Training script for torchft: fault-tolerant DistributedDataParallel, one replica group per node.

It follows torchft's example of DDP training (train_ddp.py), with the same limits. The gradients
go through `Manager.allreduce`, because `DistributedDataParallel` of torchft 0.2 ends the survivors
of a loss with a failed assertion on CPUs (`ddp.py`, `_comm_hook`).
"""

from __future__ import annotations

import argparse
import os
import time
from datetime import timedelta
from typing import Any

import torch
from torch.nn.functional import mse_loss
from torch.nn.utils import parameters_to_vector, vector_to_parameters
from torchft import Manager, Optimizer, ProcessGroupGloo

from benchmarks.compare.job import LR, NODE, SHARE, STEPS, Records, batch, evaluate, model, wait


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--collective", type=float, default=5.0, help="seconds of a collective")
    parser.add_argument(
        "--timeout", type=float, default=30.0, help="seconds of the manager's calls"
    )
    args = parser.parse_args()
    torch.set_num_threads(1)
    records, network, group = Records(), model(), int(os.environ[NODE])
    inner = torch.optim.AdamW(network.parameters(), lr=LR)

    def load_state_dict(state: dict[str, Any]) -> None:
        network.load_state_dict(state["model"])
        inner.load_state_dict(state["optimizer"])

    def state_dict() -> dict[str, Any]:
        return {"model": network.state_dict(), "optimizer": inner.state_dict()}

    manager = Manager(
        pg=ProcessGroupGloo(timeout=timedelta(seconds=args.collective)),
        min_replica_size=1,
        load_state_dict=load_state_dict,
        state_dict=state_dict,
        replica_id=f"node{group}",
        timeout=timedelta(seconds=args.timeout),
    )
    optimizer, parameters = Optimizer(manager, inner), [*network.parameters()]
    while (step := manager.current_step()) < STEPS:
        optimizer.zero_grad()
        for index in range(group * SHARE, (group + 1) * SHARE):
            began = time.perf_counter()
            x, y = batch(step, index)
            loss = mse_loss(network(x), y) / SHARE  # torchft divides by the groups
            wait(began)
            records.microbatch(step, index)
            torch.autograd.backward(loss)
        grads = [p.grad for p in parameters if p.grad is not None]
        flat = parameters_to_vector(grads)
        manager.allreduce(flat).wait()
        vector_to_parameters(flat, grads)
        optimizer.step()
        if manager.current_step() > step:
            number = manager.num_participants() * SHARE
            records.write("step", step=manager.current_step() - 1, microbatches=number)
    records.write("end", loss=evaluate(network))
    manager.shutdown(wait=False)


if __name__ == "__main__":
    main()
