"""Item 1: a command that waits says for what, since when, and what ends the wait."""

from __future__ import annotations

from tests.launcher.cases.case import Case, Command
from tests.launcher.cases.scripts import PLAIN, train

JOB = {"train.py": PLAIN}
STATUS = "elastic status"
LARGER = "ListStack([lambda: Layer(4, 64), lambda: Layer(64, 64), lambda: Loss(64, 4)], seed=0)"
"""A model whose parameters need more than 1 KiB."""

CASES = (
    Case(
        item=1,
        title="An agent whose coordinator does not exist",
        files=JOB,
        command=Command(
            line="elastic agent --coordinator 127.0.0.1:{free} --node a train.py",
            wait="no coordinator has answered a at 127.0.0.1:PORT for N s",
            shows=("Connection refused", "a ends after N s unless one answers"),
        ),
        then=Command(
            line=STATUS,
            shows=("phase: waiting", "a coordinator at 127.0.0.1:PORT to answer a"),
        ),
    ),
    Case(
        item=1,
        title="A coordinator that is short of nodes",
        files=JOB,
        command=Command(
            line="elastic coordinator --address 127.0.0.1:{free} --nnodes 2 train.py",
            wait="waiting for N s: nodes: 0 of at least 2 are here",
            shows=("the job starts when 2 more join",),
        ),
        then=Command(
            line=STATUS,
            shows=("phase: waiting", "nodes: 0 of at least 2 are here"),
            hides=("lease_s",),
        ),
    ),
    Case(
        item=1,
        title="Another program listens at the coordinator's address",
        files=JOB,
        command=Command(
            line="elastic run --nnodes 2 --rdzv-backend c10d --rdzv-endpoint 127.0.0.1:{held} "
            "--rdzv-conf is_host=true train.py",
            code=2,
            shows=("another program of this machine listens there: end it, or give another port",),
        ),
    ),
    Case(
        item=1,
        title="The same, if this machine need not start the coordinator",
        files=JOB,
        command=Command(
            line="elastic run --nnodes 2 --rdzv-backend c10d --rdzv-endpoint 127.0.0.1:{held} "
            "train.py",
            wait="another program answers there, and no coordinator: end it, or use another "
            "address",
        ),
        then=Command(
            line=STATUS,
            shows=(
                "elastic: waiting for an answer of the coordinator at 127.0.0.1:PORT",
                "phase: waiting",
                "another program answers there, and no coordinator",
            ),
        ),
    ),
    Case(
        item=1,
        title="Static rendezvous of two nodes, only the first is started",
        files=JOB,
        command=Command(
            line="elastic run --nnodes 2 --node-rank 0 --master-port {free} train.py",
            wait="waiting for N s: nodes: 1 of at least 2 are here",
            shows=("the job starts when 1 more joins",),
        ),
        then=Command(line=STATUS, shows=("nodes: 1 of at least 2 are here",)),
    ),
    Case(
        item=1,
        title="Static rendezvous of two nodes, only the second is started",
        files=JOB,
        is_long=True,
        command=Command(
            line="elastic run --nnodes 2 --node-rank 1 --master-port {free} train.py",
            wait="no coordinator has answered node1 at 127.0.0.1:PORT for N s",
        ),
    ),
    Case(
        item=1,
        title="No plan fits the memory of the nodes",
        files={"train.py": train(f"trainer(stack={LARGER}).run()")},
        is_long=True,
        command=Command(
            line="elastic run --standalone --nnodes 2 --node-memory 1KiB train.py",
            wait="waiting for N s: a plan that fits",
            shows=("paused: ", "the job continues when a plan fits"),
        ),
        then=Command(line=STATUS, shows=("phase: paused", "cause: ", "waiting: ")),
    ),
    Case(
        item=1,
        title="A coordinator whose etcd does not answer",
        files=JOB,
        command=Command(
            line="elastic coordinator --address 127.0.0.1:{free} --store etcd://127.0.0.1:{idle} "
            "--rdzv-id job train.py",
            wait="the store: no etcd answers at etcd://127.0.0.1:PORT",
        ),
        then=Command(line=STATUS, shows=("phase: waiting", "the store: no etcd answers")),
    ),
)
