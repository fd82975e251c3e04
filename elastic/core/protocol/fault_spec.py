"""Injected faults: their text (`--fault "kill node=2 step=3 microbatch=5"`) and when each is due.

    kind               carried out by   own fields            default
    kill               worker           node                  (whole node, SIGKILL)
    kill-worker        worker           node worker           worker=0
    stop               worker           node worker           worker=0 (SIGSTOP)
    slow               worker           node worker factor    factor=3, all workers
    slow-link          worker           node factor           factor=3 (with --link)
    partition          agent            node duration         duration=5 (its messages are lost)
    cut                agent            node peer duration    duration=5 (packets to the peer)
    corrupt            agent            node                  (one byte of each copy in the vault)
    kill-coordinator   launcher         down                  down=5
    drain              launcher         node deadline         deadline=30
    join               launcher

Every fault has a point in time: step= (from 0, default 0), optionally with microbatch= (from 0) or
phase=. Faults of the launcher can only have phase=recovery. Meaning of the fields:

- step alone: at the start of the step;
- microbatch=m: before the backward pass of the first micro-batch >= m that the node runs in that
  step (phase=forward: before its forward pass);
- phase=reduce: in the data-parallel reduction, after the first layer was reduced;
- phase=optimizer: after the first layer's update;
- phase=evaluation: before the first forward pass that the node runs in the evaluation at that step
  or later; with microbatch=m, of the first micro-batch >= m of the evaluation;
- phase=recovery: during the installation, in a recovery at that step or later; after=N skips the
  first N recoveries.

If a node does not reach the point in its step (it was a spare, or ran other micro-batches), the
fault is due at the first chance in a later step. A process claims a fault before it carries it out
(`elastic.config.claim_fault`), so that the fault happens only once although workers restart.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Callable
from dataclasses import dataclass
from enum import StrEnum
from math import inf
from typing import Any

from elastic.domain import codec
from elastic.domain.errors import FieldError

FLAG = "--fault"


class FaultKind(StrEnum):
    """Kind of an injected fault."""

    KILL = "kill"
    KILL_WORKER = "kill-worker"
    STOP = "stop"
    SLOW = "slow"
    SLOW_LINK = "slow-link"
    PARTITION = "partition"
    CUT = "cut"
    CORRUPT = "corrupt"
    KILL_COORDINATOR = "kill-coordinator"
    DRAIN = "drain"
    JOIN = "join"


class Phase(StrEnum):
    """Point of a step at which a process asks whether a fault is due."""

    START = "start"
    FORWARD = "forward"
    BACKWARD = "backward"
    REDUCE = "reduce"
    OPTIMIZER = "optimizer"
    EVALUATION = "evaluation"
    RECOVERY = "recovery"


LAUNCHER_KINDS = frozenset({FaultKind.KILL_COORDINATOR, FaultKind.DRAIN, FaultKind.JOIN})
"""Kinds that the launcher (`elastic run`) carries out."""
NODE_KINDS = frozenset(FaultKind) - {FaultKind.KILL_COORDINATOR, FaultKind.JOIN}
WITH_MICROBATCH = (Phase.FORWARD, Phase.BACKWARD, Phase.EVALUATION)
"""Phases in which a fault may name a micro-batch."""
_PHASES = tuple(phase for phase in Phase if phase is not Phase.START)
_SECONDS = {"": 1.0, "s": 1.0, "ms": 0.001, "m": 60.0}
_NUMBER = r"[0-9]+(?:\.[0-9]*)?(?:[eE][+-]?[0-9]+)?"


@dataclass(frozen=True, slots=True, kw_only=True)
class FaultSpec:
    """One injected fault. Build it with `parse_fault`, which checks the fields."""

    kind: FaultKind
    node: str = ""
    """Name of the node; "": the kind has no node."""
    peer: str = ""
    """Name of the node to which packets are dropped; "": the kind has no peer."""
    worker: int | None = None
    """Local rank; None: rank 0 (kill-worker, stop) or all ranks (other kinds)."""
    step: int = 0
    microbatch: int | None = None
    phase: Phase | None = None
    after: int = 0
    """Number of recoveries to skip; with phase=recovery only."""
    factor: float = 3.0
    duration_s: float = 5.0
    down_s: float = 5.0
    deadline_s: float = 30.0

    @property
    def text(self) -> str:
        """Text that `parse_fault` parses to an equal spec; it omits fields at their default."""
        words, default = [self.kind.value], FaultSpec(kind=self.kind)
        for key, (name, _, _) in _FIELDS.items():
            value = getattr(self, name)
            if value != getattr(default, name):
                words.append(f"{key}={_format(value)}")
        return " ".join(words)


def parse_fault(text: str) -> FaultSpec:
    """Parse a `--fault` value. Raises FieldError that names the wrong part."""
    try:
        first, *words = shlex.split(text) or [""]
    except ValueError as error:
        raise FieldError(FLAG, text, f"quotes do not match: {error}") from None
    if not first:
        raise FieldError(FLAG, text, 'a kind and fields, as in "kill node=2 step=3 microbatch=5"')
    if first not in list(FaultKind):
        raise FieldError(FLAG, first, f"the kind is one of {', '.join(FaultKind)}")
    kind, given = FaultKind(first), dict[str, str]()
    for word in words:
        key, equals, value = word.partition("=")
        if not equals or not value:
            raise FieldError(FLAG, word, f"fields are written key=value (in {text!r})")
        if key not in _FIELDS:
            raise FieldError(FLAG, word, f"the fields are {', '.join(_FIELDS)}")
        if key in given:
            raise FieldError(FLAG, word, f"{key}= is given twice")
        given[key] = value
    _check_fields(kind, given)
    read = {_FIELDS[key][0]: _FIELDS[key][1](key, value) for key, value in given.items()}
    return FaultSpec(kind=kind, **read)


def dump_faults(specs: tuple[FaultSpec, ...]) -> str:
    """Return a JSON list for an environment variable; a fault's number is its index in the list."""
    return codec.dumps([spec.text for spec in specs])


def load_faults(text: str) -> tuple[FaultSpec, ...]:
    """Return the faults in a text of `dump_faults`; "": no faults."""
    return tuple(parse_fault(item) for item in codec.loads(tuple[str, ...], text or "[]"))


def due(
    spec: FaultSpec,
    *,
    node: str,
    worker: int,
    step: int,
    phase: Phase,
    microbatch: int | None = None,
    recoveries: int = 0,
) -> bool:
    """Return whether a worker must carry out `spec` now, if it was not carried out yet.

    `phase`: the point that the worker has reached: START of `step`; before FORWARD or BACKWARD of
    `microbatch`, or in the EVALUATION before `step`; REDUCE after the first layer was reduced;
    OPTIMIZER after the first layer's update; RECOVERY during an installation, after `recoveries`
    earlier recoveries.
    """
    if spec.kind in LAUNCHER_KINDS or spec.node != node or not _concerns(spec, worker):
        return False
    apart = (Phase.RECOVERY, Phase.EVALUATION)
    if step < spec.step or (spec.phase is not phase and {spec.phase, phase} & {*apart}):
        return False
    if spec.phase is Phase.RECOVERY:
        return recoveries >= spec.after
    if spec.phase is Phase.EVALUATION:
        return step > spec.step or (microbatch or 0) >= (spec.microbatch or 0)
    if spec.phase in (Phase.REDUCE, Phase.OPTIMIZER):
        return phase is spec.phase
    if step > spec.step:
        return True
    if spec.microbatch is None and spec.phase is None:
        return True
    point = spec.phase or Phase.BACKWARD
    return phase is point and microbatch is not None and microbatch >= (spec.microbatch or 0)


def launcher_due(
    spec: FaultSpec, *, step: int, microbatch: int, recoveries: int, recovering: bool
) -> bool:
    """Return whether the launcher must carry out `spec` now, if it was not carried out yet.

    `recoveries`: number of finished recoveries; `recovering`: whether a recovery is under way.
    """
    if spec.kind not in LAUNCHER_KINDS or step < spec.step:
        return False
    if spec.phase is Phase.RECOVERY:
        return recovering and recoveries >= spec.after
    return step > spec.step or microbatch >= (spec.microbatch or 0)


def node_id(text: str) -> str:
    """Return the node's name: `2` and `node2` both give node2. Raises FieldError."""
    if not re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9._-]*", text):
        raise FieldError(f"{FLAG} node", text, "a number (2 is node2) or a node's name")
    return f"node{int(text)}" if re.fullmatch(r"[0-9]+", text) else text


def _check_fields(kind: FaultKind, fields: dict[str, str]) -> None:
    """Raise FieldError if a field is missing or does not go with the kind or the phase."""
    if kind in NODE_KINDS and "node" not in fields:
        raise FieldError(FLAG, kind.value, f"{kind} needs node=, as in {kind.value!r} node=2")
    if kind not in NODE_KINDS and "node" in fields:
        raise FieldError(FLAG, f"node={fields['node']}", f"{kind} has no node: leave node= out")
    if kind is FaultKind.CUT and "peer" not in fields:
        raise FieldError(FLAG, kind.value, f"{kind} needs peer=, as in '{kind} node=2 peer=3'")
    for key, value in fields.items():
        kinds = _FIELDS[key][2]
        if kinds and kind not in kinds:
            raise FieldError(FLAG, f"{key}={value}", f"goes with {', '.join(kinds)}")
    phase = fields.get("phase")
    if phase is not None and phase not in _PHASES:
        raise FieldError(f"{FLAG} phase", phase, f"one of {', '.join(_PHASES)}")
    if phase is not None and kind in LAUNCHER_KINDS and phase != Phase.RECOVERY:
        remedy = f"{kind} knows recovery only; use step= and microbatch="
        raise FieldError(f"{FLAG} phase", phase, remedy)
    if "microbatch" in fields and phase not in (None, *WITH_MICROBATCH):
        value = f"microbatch={fields['microbatch']}"
        raise FieldError(FLAG, value, f"phase={phase} has no micro-batch")
    if "after" in fields and phase != Phase.RECOVERY:
        raise FieldError(FLAG, f"after={fields['after']}", "after= goes with phase=recovery")


def _concerns(spec: FaultSpec, worker: int) -> bool:
    if spec.worker is not None:
        return spec.worker == worker
    return worker == 0 or spec.kind not in (FaultKind.KILL_WORKER, FaultKind.STOP)


def _integer(key: str, value: str) -> int:
    if not re.fullmatch(r"[0-9]{1,9}", value):
        raise FieldError(f"{FLAG} {key}", value, "a whole number from 0 up")
    return int(value)


def _factor(key: str, value: str) -> float:
    if not re.fullmatch(_NUMBER, value) or not 1.0 < float(value) <= 1000.0:
        raise FieldError(f"{FLAG} {key}", value, "a number above 1 and up to 1000")
    return float(value)


def _seconds(key: str, value: str) -> float:
    match = re.fullmatch(rf"({_NUMBER})(ms|s|m|)", value)
    seconds = float(match[1]) * _SECONDS[match[2]] if match else inf
    if seconds > 1e6:
        remedy = "a number of seconds from 0 to 1e6, as in 5, 500ms or 2m"
        raise FieldError(f"{FLAG} {key}", value, remedy)
    return seconds


def _format(value: object) -> str:
    if isinstance(value, float):
        return repr(value).removesuffix(".0")
    return re.sub(r"^node(0|[1-9]\d*)$", r"\1", str(value))


_FIELDS: dict[str, tuple[str, Callable[[str, str], Any], tuple[FaultKind, ...]]] = {
    "node": ("node", lambda _, value: node_id(value), ()),
    "peer": ("peer", lambda _, value: node_id(value), (FaultKind.CUT,)),
    "worker": ("worker", _integer, (FaultKind.KILL_WORKER, FaultKind.STOP, FaultKind.SLOW)),
    "step": ("step", _integer, ()),
    "microbatch": ("microbatch", _integer, ()),
    "phase": ("phase", lambda _, value: Phase(value), ()),
    "after": ("after", _integer, ()),
    "factor": ("factor", _factor, (FaultKind.SLOW, FaultKind.SLOW_LINK)),
    "duration": ("duration_s", _seconds, (FaultKind.PARTITION, FaultKind.CUT)),
    "down": ("down_s", _seconds, (FaultKind.KILL_COORDINATOR,)),
    "deadline": ("deadline_s", _seconds, (FaultKind.DRAIN,)),
}
"""Key: (field of FaultSpec, function that parses its text, kinds that have it; (): all)."""
