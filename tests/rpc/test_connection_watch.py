"""Names of peers, as gRPC and the system write them."""

from __future__ import annotations

import pytest

from elastic.rpc.control.connection_watch import peer_of


@pytest.mark.parametrize(
    ("text", "peer"),
    [
        ("ipv4:10.0.0.1:443", ("10.0.0.1", 443)),
        ("ipv6:%5B::1%5D:443", ("::1", 443)),
        ("ipv6:[fe80::1%25eth0]:443", ("fe80::1", 443)),
        ("ipv6:%5B::ffff:10.0.0.1%5D:443", ("10.0.0.1", 443)),
        ("unix:", None),
        ("unix:/tmp/socket", None),
        ("", None),
        ("ipv4:10.0.0.1:", None),
    ],
)
def test_a_peer_is_an_address_and_a_port(text: str, peer: tuple[str, int] | None) -> None:
    assert peer_of(text) == peer
