"""Agents and commands talk to the coordinator: gRPC, and framed Unix sockets (`frames`) on one machine.

gRPC is only imported by the submodules that need it. Its settings below are process-wide and must stand in
the environment before it is first imported: no handlers around fork (workers are started by exec), and no
chatter.
"""

from __future__ import annotations

import os

os.environ.setdefault("GRPC_ENABLE_FORK_SUPPORT", "0")
os.environ.setdefault("GRPC_VERBOSITY", "NONE")
