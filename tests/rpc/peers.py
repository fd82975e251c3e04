"""The other process of the tests: `python -m tests.rpc.peers node|coordinator ADDRESS [TERM]`."""

from __future__ import annotations

import sys
import threading

from elastic.core.protocol.messages import Heartbeat
from tests.rpc.conftest import ClientBench, ServerBench


def node(address: str) -> None:
    """Connect, say hello, and live until killed."""
    client = ClientBench(address, "node9")
    client.expect("up")
    client.session.send(Heartbeat("node9", "x", 0, 0), 0)
    threading.Event().wait()


def coordinator(address: str) -> None:
    """Serve until killed."""
    bench = ServerBench(address, int(sys.argv[3]))
    print(bench.address, flush=True)
    threading.Event().wait()


if __name__ == "__main__":
    {"node": node, "coordinator": coordinator}[sys.argv[1]](sys.argv[2])
