"""Stands in for an agent on another machine: says how it was started and stays."""

from __future__ import annotations

import os
import signal
import sys

print(*sys.argv[1:], os.environ.get("HOSTED_WORD", ""), "in", os.getcwd(), flush=True)
print("ready", flush=True)
signal.pause()
