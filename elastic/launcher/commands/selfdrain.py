"""`elastic drain --self`: this machine's own node leaves; for a container's preStop hook."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path
from typing import Any

from elastic.config import load_config
from elastic.domain.errors import ElasticError, FieldError, UsageError
from elastic.launcher.run.rundir import launcher_of

LOOK_S = 0.1


def drain_self(run_dir: Path, deadline_s: float) -> dict[str, Any]:
    """Tell the launcher of `run_dir` to leave, and wait until it has ended.

    Raises UsageError when nothing runs there or the run cannot leave; ElasticError when time is up.
    """
    pid = launcher_of(run_dir)
    if pid is None:
        raise UsageError(f"nothing runs in {run_dir} on this machine: give its --run-dir")
    config = load_config(run_dir)
    if not config.grace_s:
        raise FieldError("--self", str(run_dir), "the run there was started without --grace: it cannot leave")
    os.kill(pid, signal.SIGTERM)
    end = time.monotonic() + deadline_s
    while launcher_of(run_dir) == pid:
        if time.monotonic() >= end:
            raise ElasticError(f"the node has not left within {deadline_s:g} s")
        time.sleep(LOOK_S)
    return {"run_dir": str(run_dir), "left": True}
