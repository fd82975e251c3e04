"""The cluster file: what it says, and what it says when it is wrong."""

from __future__ import annotations

from dataclasses import replace

import pytest

from elastic.domain.errors import FieldError
from elastic.planning.capacity.capacity import cluster_nodes, cluster_profile, plan_request
from elastic.planning.capacity.cluster import Cluster, Group, parse_cluster
from elastic.planning.cost.profile import LinkProfile
from elastic.planning.cost.published_profiles import published_profile
from elastic.planning.plan.units import duration_of, rate_of, size_of

TEXT = """
[model]
name = "gpt3-2.7b"
microbatches = 32
microbatch_size = 2
schedule = "1f1b"

[[nodes]]
count = 2
device = "a100-40"
devices = 4
domain = "zone-a"

[[nodes]]
name = "spot"
device = "T4"
memory = "10GiB"
lifetime = "2m"
slow = 1.5

[links]
inside = { bandwidth = "300GB/s" }
link = { bandwidth = "25Gbit", latency = "10us" }
"""


def test_a_file_becomes_a_cluster() -> None:
    cluster = parse_cluster(TEXT)
    assert cluster == Cluster(
        model="gpt3-2.7b",
        microbatches=32,
        microbatch_size=2,
        schedule="1f1b",
        groups=(
            Group(count=2, device="a100-40", devices=4, domain="zone-a"),
            Group(name="spot", device="T4", memory_bytes=10 << 30, lifetime_s=120.0, slow=1.5),
        ),
        inside=LinkProfile(300e9, 0.0),
        link=LinkProfile(3.125e9, 1e-5),
    )
    assert cluster.n_nodes == 3


def test_a_cluster_becomes_a_request() -> None:
    cluster = parse_cluster(TEXT)
    profile = cluster_profile(cluster)
    request = plan_request(cluster, profile)
    assert [info.node for info in request.nodes] == ["node0", "node1", "spot0"]
    assert [info.device for info in request.nodes] == ["A100-40", "A100-40", "T4"]
    assert [info.workers for info in request.nodes] == [4, 4, 1]
    assert request.nodes[0].memory_bytes == profile.device("A100-40").memory_bytes > 0
    assert request.nodes[2].memory_bytes == 10 << 30
    assert request.nodes[2].lifetime_s == 120.0
    assert request.slow == (("spot0", 1.5),)
    assert (request.spec.n_microbatches, request.spec.tp, request.schedule) == (32, 1, "1f1b")
    assert profile.tokens_per_microbatch == 2 * 2048
    assert profile.link == LinkProfile(3.125e9, 1e-5)
    assert profile.across == LinkProfile()


def test_a_measured_profile_takes_the_place_of_the_catalogue() -> None:
    text = TEXT.replace('name = "gpt3-2.7b"', 'profile = "mine.json"').replace("a100-40", "A100-40")
    cluster = parse_cluster(text)
    assert (cluster.model, cluster.profile_file) == ("", "mine.json")
    measured = replace(published_profile("gpt2-small", ["T4", "A100-40"]), across=LinkProfile(7.0))
    profile = cluster_profile(cluster, measured)
    assert profile.devices == measured.devices
    assert (profile.link, profile.across) == (LinkProfile(3.125e9, 1e-5), LinkProfile(7.0))
    assert [info.device for info in cluster_nodes(cluster, profile)] == ["A100-40", "A100-40", "T4"]
    with pytest.raises(FieldError, match=r"nodes\[0\].device: 'A100-40' .* knows T4"):
        cluster_profile(cluster, published_profile("gpt2-small", ["T4"]))
    with pytest.raises(FieldError, match=r"model.tp: 2 .* measured with 1"):
        cluster_profile(replace(cluster, tp=2), measured)


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ("[model]", "[model", r"cluster file: .*not TOML"),
        ("[model]", "[modle]", r"modle: .*no such key; known are model, nodes, links"),
        ('name = "gpt3-2.7b"', 'name = "gpt5"', r"model.name: 'gpt5' .*one of bert-large"),
        ('name = "gpt3-2.7b"', "", r"model.name: '' .*either name = MODEL or profile = FILE"),
        ('name = "gpt3-2.7b"', "name = 3", r"model.name: 3 .*text"),
        ("microbatches = 32", "", r"model.microbatches: None .*how many"),
        ("microbatches = 32", "microbatches = 0", r"model.microbatches: 0 .*from 1"),
        ("microbatches = 32", "microbatches = true", r"model.microbatches: True"),
        ("microbatches = 32", "microbatches = 3.5", r"model.microbatches: 3.5"),
        ("microbatch_size = 2", "microbatch = 2", r"model.microbatch: 2 .*known are name, profile"),
        ('"1f1b"', '"gpipe"', r"model.schedule: 'gpipe' .*zero-bubble"),
        ("microbatch_size = 2", "tp = 2", r"nodes\[1\].devices: 1 .*model.tp = 2"),
        ("count = 2", "count = -2", r"nodes\[0\].count: -2"),
        ("count = 2", "count = 1000000", r"nodes\[0\].count: 1000000 .*to 100000"),
        ("count = 2", "count = 100000", r"nodes: 100001 .*at most 100000"),
        ("count = 2", "cuont = 2", r"nodes\[0\].cuont: 2 .*known are count"),
        ('"a100-40"', '"a100"', r"nodes\[0\].device: 'a100' .*A100-40"),
        ('"spot"', '"spot 1"', r"nodes\[1\].name: 'spot 1' .*letters"),
        ('"spot"', '"spot1"', r"nodes\[1\].name: 'spot1' .*digit"),
        ('"spot"', '"node"', r"nodes\[1\].name: 'node' .*own"),
        ('"10GiB"', '"10 apples"', r"nodes\[1\].memory: '10 apples' .*40GiB"),
        ('"10GiB"', "0", r"nodes\[1\].memory: 0 .*above 0"),
        ('"2m"', '"soon"', r"nodes\[1\].lifetime: 'soon' .*30s"),
        ('"2m"', "-1", r"nodes\[1\].lifetime: -1"),
        ("1.5", "0", r"nodes\[1\].slow: 0 "),
        ("1.5", "nan", r"nodes\[1\].slow: nan"),
        ("1.5", "true", r"nodes\[1\].slow: True"),
        ('"25Gbit"', '"25G"', r"links.link.bandwidth: '25G' .*25Gbit"),
        ('"10us"', '"10 parsec"', r"links.link.latency: '10 parsec'"),
        (
            'bandwidth = "300GB/s"',
            'latency = "1us"',
            r"links.inside.bandwidth: None .*leave the link out",
        ),
        ("inside =", "outside =", r"links.outside: .*inside, link, across"),
        ('{ bandwidth = "300GB/s" }', '"300GB/s"', r"links.inside: '300GB/s' .*a table"),
    ],
)
def test_what_is_wrong_is_named(old: str, new: str, message: str) -> None:
    assert old in TEXT
    with pytest.raises(FieldError, match=message):
        parse_cluster(TEXT.replace(old, new, 1))


def test_a_file_needs_nodes() -> None:
    head = '[model]\nname = "gpt2"\nmicrobatches = 1\n'
    with pytest.raises(FieldError, match=r"nodes: None .*\[\[nodes\]\]"):
        parse_cluster(head)
    with pytest.raises(FieldError, match=r"nodes: \{'count': 1\} .*\[\[nodes\]\]"):
        parse_cluster(head + "[nodes]\ncount = 1\n")
    with pytest.raises(FieldError, match=r"nodes\[0\].device: '' "):
        parse_cluster(head + "[[nodes]]\n")


def test_quantities() -> None:
    assert size_of("x", "40GiB") == 40 << 30
    assert size_of("x", "500 MB") == 500_000_000
    assert size_of("x", 12) == 12
    assert rate_of("x", "100Gbit/s") == rate_of("x", "100Gbps") == 12.5e9
    assert rate_of("x", "1.5 GiB/s") == 1.5 * 2**30
    assert duration_of("x", "1.5h") == 5400.0
    assert duration_of("x", 0.25) == 0.25
    assert duration_of("x", "10us") == pytest.approx(1e-5)
    strange: tuple[object, ...] = (True, None, [], {}, "-3", float("inf"), float("nan"), "12 GiBs")
    for wrong in strange:
        for read in (size_of, rate_of, duration_of):
            with pytest.raises(FieldError, match=r"^x: "):
                read("x", wrong)
