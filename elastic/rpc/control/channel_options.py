"""gRPC settings of both sides, and the format of addresses."""

from __future__ import annotations

from elastic.domain.errors import FieldError
from elastic.rpc.control.connection_watch import HANDSHAKE_S, together_s
from elastic.rpc.control.envelope import MAX_BODY_BYTES, PIECE_BYTES

SPARE_BYTES = 4096
"""Upper limit of the size of an envelope without its body."""

RETRY_MIN_S, RETRY_MAX_S = 0.05, 0.5
"""Shortest and longest pause between two attempts to reach the coordinator, with jitter."""
MAX_ATTEMPTS_PER_S = 1000
"""Limit on the attempts to connect of all nodes of a job per second."""
CONNECT_TIMEOUT_S = 2.0
"""Time limit of an attempt to connect, where another one follows. It is longer in large jobs."""
RESOLUTION_KEY, RESOLUTION_S = "grpc.dns_min_time_between_resolutions_ms", 2.0
"""Shortest time between two resolutions of a name, which follow failed connections. gRPC's default
is 30 s, for which a replaced pod would not be found if its name was last resolved too early."""
IDLE_S = 30.0
"""Time after which a connection without a call is closed. An agent's session is a call."""
MAX_CONNECTIONS = 16_384
MAX_CALLS = 100
"""Upper limit of calls at a time on one connection. An agent has two at most, a command one."""
TERM = "term"
"""Metadata key of a stream: the term of the coordinator that opened it."""
PROTOCOL_KEY = "protocol"
"""Metadata key of a stream, in both directions: the version of the side that sends it."""
REFUSED_RETRY_MAX_S = 30.0
"""Longest pause between two attempts while the coordinator has another version."""


def addresses_of(text: str) -> tuple[str, ...]:
    """Return the addresses in a comma-separated list. Raises FieldError for a malformed one."""
    found = tuple(dict.fromkeys(part.strip() for part in text.split(",")))
    for address in found:
        check_address(address)
    return found


def check_address(address: str, lowest_port: int = 1) -> None:
    """Raise FieldError unless `address` is host:port."""
    host, _, port = address.rpartition(":")
    if not host or not (port.isascii() and port.isdigit() and lowest_port <= int(port) < 65536):
        raise FieldError(
            "address", address, f"host:port is needed, with a port from {lowest_port} to 65535"
        )


def retry_max_s(nodes: int) -> float:
    """Return the longest pause of a node between two attempts to reach the coordinator."""
    return max(RETRY_MAX_S, nodes / MAX_ATTEMPTS_PER_S)


def client_options(
    keepalive_s: float, connect_s: float = CONNECT_TIMEOUT_S, nodes: int = 1
) -> list[tuple[str, int]]:
    """Return client options. A silent server is noticed in two keepalive intervals.

    `connect_s`: time limit of one attempt to connect, handshake included. `nodes`: number of nodes
    of the job.
    """
    return [
        ("grpc.enable_http_proxy", 0),
        ("grpc.enable_retries", 0),
        ("grpc.service_config_disable_resolution", 1),
        ("grpc.use_local_subchannel_pool", 1),
        ("grpc.initial_reconnect_backoff_ms", _ms(RETRY_MIN_S)),
        ("grpc.max_reconnect_backoff_ms", _ms(retry_max_s(nodes))),
        ("grpc.min_reconnect_backoff_ms", _ms(connect_s)),  # time limit of one attempt
        (RESOLUTION_KEY, _ms(RESOLUTION_S)),
        *_both(keepalive_s, MAX_BODY_BYTES),
    ]


def server_options(keepalive_s: float, nodes: int = 1) -> list[tuple[str, int]]:
    """Return server options for a job of `nodes` nodes. A silent node is noticed in two keepalive
    intervals.

    The largest message is a piece: gRPC reads a whole message before the server can require a
    proof.
    """
    return [
        ("grpc.so_reuseport", 0),
        ("grpc.http2.min_ping_interval_without_data_ms", 100),
        ("grpc.http2.max_ping_strikes", 0),
        ("grpc.server_handshake_timeout_ms", _ms(max(HANDSHAKE_S, together_s(nodes)))),
        ("grpc.max_connection_idle_ms", _ms(IDLE_S)),
        ("grpc.max_allowed_incoming_connections", MAX_CONNECTIONS),
        ("grpc.max_concurrent_streams", MAX_CALLS),
        *_both(keepalive_s, PIECE_BYTES),
    ]


def _both(keepalive_s: float, received_bytes: int) -> list[tuple[str, int]]:
    return [
        ("grpc.max_receive_message_length", received_bytes + SPARE_BYTES),
        ("grpc.max_send_message_length", MAX_BODY_BYTES + SPARE_BYTES),
        ("grpc.keepalive_time_ms", _ms(keepalive_s)),
        ("grpc.keepalive_timeout_ms", _ms(keepalive_s)),
        ("grpc.http2.ping_timeout_ms", _ms(keepalive_s)),  # the default is a minute
        ("grpc.keepalive_permit_without_calls", 1),
        ("grpc.http2.max_pings_without_data", 0),
    ]


def _ms(seconds: float) -> int:
    return round(seconds * 1000)
