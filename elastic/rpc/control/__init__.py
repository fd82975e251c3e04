"""Messages between the coordinator and its agents and commands, over gRPC.

`envelope` has the wire format. `server` is the coordinator's side: one session per node, and calls
of the command line. `client` is the other side. `broadcast` encodes a message to many nodes once,
`channel_options` has gRPC's settings, `connection_watch` bounds unauthenticated connections, and
`event_loop` runs all of gRPC's work.

Messages pass through unchanged: the coordinator decides whether a sender may say something. Start
with `envelope`.
"""

from __future__ import annotations

import os

# gRPC reads this once, when it is first imported, and has no other setting for the lowest version of
# TLS. It names the cipher suites below TLS 1.3; nobody has a pre-shared key, so those handshakes fail.
# It is taken back because a worker's own use of gRPC must not inherit it.
_before = os.environ.get("GRPC_SSL_CIPHER_SUITES")
os.environ["GRPC_SSL_CIPHER_SUITES"] = "PSK-AES128-CBC-SHA"

import grpc  # noqa: E402, F401

if _before is None:
    del os.environ["GRPC_SSL_CIPHER_SUITES"]
else:
    os.environ["GRPC_SSL_CIPHER_SUITES"] = _before
