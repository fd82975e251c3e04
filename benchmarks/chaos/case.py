"""Random cases: a job, its shape, and one to four faults, all from one seed.

A case runs in one of two places:

    machine    `elastic run --standalone`
    network    a coordinator and agents, each in a network namespace of its own

Faults that the product injects itself are written as for `--fault`. A `partition` on one machine is
one of them: the agent loses its messages, but no packet is lost. The others are carried out by
this benchmark and have the same form:

    pause-coordinator step=3 microbatch=2 duration=4       SIGSTOP, then SIGCONT
    oom node=2 step=3 target=worker                        the kernel kills the worker or the agent
    full disk=memory step=3 duration=4                     no byte is free for so long
    partition node=coordinator step=3 duration=4           network: the cable is pulled
    cut node=1 peer=2 step=3 duration=9 both=1 silent=1    network: packets are dropped
    kill-coordinator step=3                                network: it restarts at once
    drain node=1 step=3                                    network
    join step=3                                            network
"""

from __future__ import annotations

import itertools
import random
import re
from dataclasses import dataclass

from elastic.core.protocol.fault_spec import FaultKind, FaultSpec, Phase, parse_fault

MICROBATCHES = 6
LAST_FAULT_STEP = 14
OWN_KINDS = ("pause-coordinator", "oom", "full")
"""Kinds that this benchmark carries out in both places."""
NETWORK_KINDS = ("partition", "cut", "kill-coordinator", "drain", "join")
"""Kinds that this benchmark carries out in network namespaces, where no launcher runs."""
DISKS = ("memory", "memory-and-tmp", "run", "checkpoints")
LINEAR = "linear"
MODELS: dict[str, tuple[int, int, tuple[str, ...]]] = {
    LINEAR: (60, 8, ("-m", "benchmarks.chaos.train")),
    "gpt": (36, 6, ()),
    "gpt-tied-dropout": (36, 6, ("--tie-embeddings", "--dropout", "0.1")),
    "gpt-bf16": (36, 6, ("--dtype", "bf16")),
}
"""Name: (steps, layers including those that are added to the model, arguments)."""
GPT = (
    "-m", "examples.train_gpt", "--layers", "4", "--hidden", "64", "--heads", "4", "--seq-len",
    "64", "--micro-batch-size", "2", "--num-microbatches", str(MICROBATCHES),
)  # fmt: skip
GRADIENTS, STATES = ("stream", "stream:2", "log", "recompute"), ("snapshot", "replay:4")


@dataclass(frozen=True, kw_only=True)
class OuterFault:
    """A fault that this benchmark carries out itself."""

    kind: str
    step: int = 0
    microbatch: int = 0
    recovery: bool = False
    """Due during a recovery at `step` or later."""
    node: str = ""
    peer: str = ""
    duration_s: float = 5.0
    target: str = "worker"
    """Process that the kernel kills: worker or agent."""
    disk: str = ""
    both: bool = False
    silent: bool = False


@dataclass(frozen=True, kw_only=True)
class Case:
    """One run. `faults` are texts; `outer` tells which of them this benchmark carries out."""

    seed: int
    place: str
    model: str
    nodes: int
    joins: int
    flags: tuple[str, ...]
    checkpoint_every: int
    faults: tuple[str, ...]

    @property
    def steps(self) -> int:
        return MODELS[self.model][0]

    @property
    def silence_s(self) -> float:
        """Seconds of silence after which a node is lost."""
        words = dict(itertools.pairwise(self.flags))
        return float(words.get("--silence", 3.0))

    @property
    def due(self) -> list[int]:
        """Steps after which a checkpoint is due."""
        return list(range(self.checkpoint_every, self.steps + 1, self.checkpoint_every))

    @property
    def script(self) -> tuple[str, ...]:
        """The training script without extra time."""
        steps, _, words = MODELS[self.model]
        head = words if self.model == LINEAR else (*GPT, *words)
        every = ("--checkpoint-every", str(self.checkpoint_every))
        return (*head, "--steps", str(steps), *every)

    @property
    def paced_script(self) -> tuple[str, ...]:
        """The same script, slow enough for faults that last some seconds."""
        return (*self.script, *(("--pace", "0.005") if self.model == LINEAR else ()))

    def outer(self, fault: str) -> bool:
        kind = fault.split()[0]
        return kind in OWN_KINDS or (self.place == "network" and kind in NETWORK_KINDS)

    @property
    def injected(self) -> list[FaultSpec]:
        """Faults of the product, in the order of their numbers."""
        return [parse_fault(text) for text in self.faults if not self.outer(text)]

    @property
    def own(self) -> list[OuterFault]:
        return [parse_outer(text) for text in self.faults if self.outer(text)]

    @property
    def disks(self) -> set[str]:
        return {fault.disk for fault in self.own if fault.disk}


def parse_outer(text: str) -> OuterFault:
    """Parse the text of a fault that this benchmark carries out."""
    kind, *words = text.split()
    given = dict(word.split("=", 1) for word in words)
    names = {key: re.sub(r"^(\d+)$", r"node\1", given.get(key, "")) for key in ("node", "peer")}
    return OuterFault(
        kind=kind,
        step=int(given.get("step", 0)),
        microbatch=int(given.get("microbatch", 0)),
        recovery=given.get("phase") == Phase.RECOVERY,
        node=names["node"],
        peer=names["peer"],
        duration_s=float(given.get("duration", 5.0)),
        target=given.get("target", "worker"),
        disk=given.get("disk", ""),
        both="both" in given,
        silent="silent" in given,
    )


def random_case(seed: int) -> Case:
    """Return the case of this seed."""
    rng = random.Random(seed)
    place = rng.choice(("machine", "machine", "network"))
    nodes = rng.randint(3, 6)
    model = rng.choice((LINEAR, LINEAR, LINEAR, "gpt", "gpt-tied-dropout", "gpt-bf16"))
    pipelines, several = _shape(rng, nodes, MODELS[model][1])
    flags = ["--pipelines", pipelines, "--backup", _backup(rng, several)]
    flags += ["--schedule", rng.choice(("auto", "1f1b", "interleaved", "zero-bubble"))]
    flags += ["--compress", rng.choice(("auto", "off", "on"))]
    flags += ["--silence", rng.choice(("3", "3", "5"))]
    faults, joins = _faults(rng, place, nodes)
    if place == "machine" and (any("slow-link" in f for f in faults) or rng.random() < 0.2):
        flags += ["--link", f"bandwidth={rng.choice((100, 400, 1000))}Mbit latency=1ms"]
    return Case(
        seed=seed,
        place=place,
        model=model,
        nodes=nodes,
        joins=joins,
        flags=tuple(flags),
        checkpoint_every=rng.choice((2, 4, 6)),
        faults=tuple(faults),
    )


def _shape(rng: random.Random, nodes: int, layers: int) -> tuple[str, bool]:
    """Return the value of --pipelines, and whether it surely has several pipelines."""
    kind = rng.randrange(4)
    if kind == 0:
        return "auto", False
    if kind == 1:
        count = rng.randint(1, nodes)
        return str(count), count > 1
    depths, left = list[int](), nodes if kind == 2 else rng.randint(2, nodes)
    while left:
        depths.append(rng.randint(1, min(left, layers)))
        left -= depths[-1]
    return "+".join(map(str, depths)), len(depths) > 1


def _backup(rng: random.Random, several: bool) -> str:
    if rng.random() < 0.2:
        return "auto"
    gradients = rng.choice((*GRADIENTS, *(("reduce", "reduce:2") if several else ())))
    states = (*STATES, *(("replica", "snapshot/sharded", "replay:4/sharded") if several else ()))
    return f"{gradients}+{rng.choice(states)}"


def _faults(rng: random.Random, place: str, nodes: int) -> tuple[list[str], int]:
    """Return one to four faults, and the number of nodes that join. At least one node is left."""
    kinds = ["kill"] * 4 + ["kill-worker", "stop", "slow", "drain", "join"]
    kinds += [
        "corrupt",
        "kill-coordinator",
        "pause-coordinator",
        "partition",
        "oom",
        "full",
        "full",
    ]
    kinds += ["slow-link"] if place == "machine" else ["cut"] * 4 + ["partition"]
    left, joins, faults = list(range(nodes)), 0, list[str]()
    step = rng.randint(1, LAST_FAULT_STEP - 6)
    for number in range(rng.randint(1, 4)):
        kind = rng.choice(kinds)
        if rng.random() < 0.6:
            step = rng.randint(1, LAST_FAULT_STEP)
        point = _point(rng, kind, step, number, place)
        node = rng.choice(left)
        target = rng.choice(("worker", "agent"))
        if kind in ("kill", "drain") or (kind == "oom" and target == "agent"):
            if len(left) == 1:
                continue
            left.remove(node)
        joins += kind == "join"
        faults.append(f"{kind}{_fields(rng, kind, place, node, nodes, target)} {point}")
    return faults, joins


def _point(rng: random.Random, kind: str, step: int, number: int, place: str) -> str:
    """Return the fields that address a fault in time."""
    if number and rng.random() < 0.25:
        return f"step={step} phase=recovery"
    outside = kind in (*OWN_KINDS, "join", "drain", "kill-coordinator", "corrupt") or (
        place == "network" and kind in NETWORK_KINDS
    )
    choice = rng.randrange(2 if outside else 5)
    microbatch = rng.randrange(MICROBATCHES)
    return [
        f"step={step} microbatch={microbatch}",
        f"step={step}",
        f"step={step} microbatch={microbatch} phase=forward",
        f"step={step} phase=reduce",
        f"step={step} phase=optimizer",
    ][choice]


def _fields(rng: random.Random, kind: str, place: str, node: int, nodes: int, target: str) -> str:
    """Return the fields of a fault besides its point in time, each after a space."""
    seconds = rng.choice((1, 2, 4, 6, 9))
    match kind:
        case FaultKind.KILL_COORDINATOR:
            return f" down={min(seconds, 5)}" if place == "machine" else ""
        case FaultKind.JOIN:
            return ""
        case FaultKind.SLOW | FaultKind.SLOW_LINK:
            return f" node={node} factor={rng.choice((2, 3, 8))}"
        case FaultKind.DRAIN:
            return f" node={node} deadline={rng.choice((3, 30))}"
        case FaultKind.PARTITION:
            whom = "coordinator" if place == "network" and rng.random() < 0.4 else str(node)
            return f" node={whom} duration={seconds}"
        case FaultKind.CUT:
            peer = rng.choice([n for n in range(nodes) if n != node])
            both, silent = rng.random() < 0.5, rng.random() < 0.5
            words = " both=1" * both + " silent=1" * silent
            return f" node={node} peer={peer} duration={2 * seconds}{words}"
        case "pause-coordinator":
            return f" duration={seconds}"
        case "oom":
            return f" node={node} target={target}"
        case "full":
            disk = rng.choice(DISKS)
            whose = f" node={node}" if place == "network" and disk.startswith("memory") else ""
            return f" disk={disk}{whose} duration={seconds}"
    return f" node={node}"
