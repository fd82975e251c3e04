"""Stand-in for a remote agent: prints its arguments and ends with its parent."""

from __future__ import annotations

import os
import signal
import sys

from elastic import lifeline

lifeline.watch(int(sys.argv[sys.argv.index("--parent-pipe") + 1]))
print(*sys.argv[1:], os.environ.get("HOSTED_WORD", ""), "in", os.getcwd(), flush=True)
print("ready", flush=True)
signal.pause()
