"""Round-trip times of a session, measured through a proxy that delays and resets it."""

from __future__ import annotations

import contextlib
import time

import pytest

from elastic.core.protocol.messages import Heartbeat
from elastic.rpc.control.round_trips import SAMPLES, WINDOW, RoundTrips
from tests.patience import LONG_S
from tests.rpc.conftest import ClientBench, ServerBench
from tests.scenarios.network.proxy import Proxy

RTT_S = 0.06


def await_measurement(client: ClientBench, least_s: float) -> float:
    end = time.monotonic() + LONG_S
    while not client.session.rtt_s >= least_s > 0 and time.monotonic() < end:
        time.sleep(0.01)
    return client.session.rtt_s


def test_the_delay_of_the_network_is_measured(server: ServerBench) -> None:
    with contextlib.closing(Proxy(server.address, RTT_S)) as proxy:
        client = ClientBench(proxy.address)
        try:
            client.expect("up")
            session = server.accepted()
            assert await_measurement(client, RTT_S) >= RTT_S
            client.session.send(Heartbeat("node0", "i", 1, 0), 0)
            assert server.message()[0] == Heartbeat("node0", "i", 1, 0), "pings are no messages"
            proxy.reset()
            client.expect("down")
            assert server.expect("close") == (session,)
            client.expect("up")
            server.accepted()
            assert client.session.rtt_s >= RTT_S, "it is known during the reconnect"
        finally:
            client.session.close()


@pytest.mark.parametrize("samples", [(0.3, 0.02, 0.9), (0.02,) * 9])
def test_the_least_of_the_newest_measurements_counts(samples: tuple[float, ...]) -> None:
    """A busy machine delays single pings."""
    trips = RoundTrips()
    for sample in samples:
        trips.record(sample)
    assert trips.least_s == 0.02
    for _ in range(WINDOW):
        trips.record(0.4)
    assert trips.least_s == 0.4, "another route is slower"
    few = RoundTrips()
    for sample in samples[: SAMPLES - 1]:
        few.record(sample)
    assert few.least_s == 0.0
