"""Network and local communication between the processes of a job.

- `control`: agents and commands talk to the coordinator over gRPC. Start with `control.envelope`.
- `bulk`: vaults send copies of the state to each other over TCP. Start with `bulk.transfer`.
- `security`: certificates, the join token, and the count of what was rejected. Start with
  `security.tls`.
- `frames`: length-prefixed messages over a socket, for `bulk` and between a worker and its agent.
- `link_shaping`: makes a link as slow as a test asks for.

Nothing here decides anything about the job, and nothing imports torch. gRPC is imported only by the
modules of `control`. gRPC reads the environment variables below once per process, so they are
set before it starts.
"""

from __future__ import annotations

import os

os.environ.setdefault("GRPC_ENABLE_FORK_SUPPORT", "0")  # workers are started by exec
os.environ.setdefault("GRPC_VERBOSITY", "NONE")
