"""The hash of a finished job's parameters, from the vaults of its holders."""

from __future__ import annotations

from pathlib import Path

from elastic.domain.types import JobSpec, LayerSpec, Pipeline, Plan, Stage, Unit
from elastic.rpc.frames import CHUNK_BYTES
from elastic.worker.recovery.final_hash import job_sha256
from elastic.worker.replica.export import params_sha256
from elastic.worker.transport.cancellation import AbandonSignal
from tests.agent.vault.copies import make, put, state_run
from tests.agent.vault.nodes import nodes

N_STEPS, CHUNKS = 3, 4


def test_the_hash_of_a_large_job_shows_progress(tmp_path: Path) -> None:
    """The other nodes wait meanwhile, so that the job would count as stalled."""
    stages = Stage(Unit("a"), 0, 1), Stage(Unit("b"), 1, 2)
    plan = Plan(1, 2, 1, 1, (Pipeline(stages, (0,)),))
    spec = JobSpec((LayerSpec(1, 1, 1, 1.0, 1.0),) * 2, 1, N_STEPS)
    signs, runs = list[int](), list[bytes]()
    with nodes(tmp_path, "a", "b") as made:
        for layer, node in enumerate(made):
            values = bytes([layer + 1]) * (CHUNKS * CHUNK_BYTES)
            shape = (len(values) // 4,)
            runs.append(state_run(N_STEPS, [("param/w", "float32", shape, 0, values)], {}))
            copy = make(runs[-1], layer=layer, step=N_STEPS, owner=node.name)
            put(node.vault, copy, runs[-1])
        vaults = {node.name: node.server.address for node in made}
        sha = job_sha256(plan, spec, vaults, "a", AbandonSignal(), lambda: signs.append(1))
    assert sha == params_sha256([memoryview(run)] for run in runs)
    assert len(signs) >= 2 * CHUNKS + 2, "each chunk that was read, and each hashed layer"
