"""Links: how families lie on nodes, and the seconds of collectives and messages."""

import json
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from braid.errors import ConfigError, DataError
from braid.nn.cost import Call
from braid.timing.calibration import shipped
from braid.timing.links import (
    Cluster,
    Span,
    call_seconds,
    cluster_from_json,
    cluster_to_json,
    clusters,
    exchange_seconds,
    link_spread,
    load_cluster,
    message_seconds,
    missing_calls,
    node_seconds,
    once_per_node,
    same_node,
    span,
)
from braid.topology import FAMILIES, Grid, standard
from tests.timing.synthetic import calibration

KNOWN = calibration()
CLUSTER = Cluster(
    name="ours", device="h200", ranks_per_node=8, domain=8, node_bandwidth=6e11, node_latency=5e-6,
    nic_bandwidth=5e10, nic_latency=1e-5, nic_share=0.8,
)  # fmt: skip
small = st.sampled_from([1, 2, 3, 4])


@st.composite
def grids(draw) -> Grid:
    cp, dp, pp = (draw(small) for _ in range(3))
    tp = draw(st.sampled_from([1, 2, 3, 4, 8]))
    slab = tp * cp * dp
    etp = draw(st.sampled_from([n for n in range(1, slab + 1) if slab % n == 0]))
    ep = draw(st.sampled_from([n for n in range(1, slab // etp + 1) if slab // etp % n == 0]))
    return standard(tp=tp, cp=cp, dp=dp, pp=pp, etp=etp, ep=ep, offset=draw(st.sampled_from([0, 0, 8, 3])))


def brute(groups, domain: int) -> Span:
    """The fewest members that share a node, and the most nodes, rank by rank."""
    counts = [[sum(r // domain == node for r in g) for node in {r // domain for r in g}] for g in groups]
    return Span(len(groups[0]), min(min(each) for each in counts), max(len(each) for each in counts))


@settings(deadline=None)  # some grids have thousands of ranks
@given(grids(), st.sampled_from(sorted(FAMILIES)), st.sampled_from([1, 2, 4, 8, 72]))
def test_spans_are_those_of_the_ranks(grid, family, domain):
    view, axes = FAMILIES[family]
    assert span(grid, family, domain) == brute(grid.groups(axes, view), domain)


@settings(deadline=None)
@given(grids(), st.sampled_from([2, 8]))
def test_families_outside_of_the_grid_have_spans_too(grid, domain):
    assert span(grid, "dispatch", domain) == span(grid, "ep_etp", domain)
    ends = [(each[0], each[-1]) for each in grid.groups("pp")]
    assert span(grid, "ends", domain) == brute(ends, domain)
    tp = grid.dense.size_of("tp")
    assert span(grid, f"tp_run_{tp}", domain) == brute(grid.groups("tp"), domain)


def test_an_unknown_family_is_named():
    with pytest.raises(ConfigError, match=r"no family of groups 'sp'.*: families are tp, cp"):
        span(standard(tp=2), "sp", 8)


def call(op: str, ranks: int, payload: int) -> Call:
    return Call(op, "tp", ranks, "tokens", payload)  # type: ignore[arg-type]


NODE = Span(8, 8, 1)


def test_within_a_node_measured_sizes_have_their_seconds():
    for op, tables in KNOWN.collectives.items():
        for size, expected in tables[8]:
            payload = int(size) // 8 if op == "all_gather" else int(size)
            assert call_seconds(call(op, 8, payload), NODE, CLUSTER, KNOWN) == pytest.approx(expected)
    balanced = call_seconds(call("all_to_all_v", 8, 2**20), NODE, CLUSTER, KNOWN)
    assert balanced == call_seconds(call("all_to_all", 8, 2**20), NODE, CLUSTER, KNOWN)


def test_other_group_sizes_take_as_long_per_byte_on_a_link():
    two, three = (node_seconds("all_gather", ranks, 2**26, CLUSTER, KNOWN) for ranks in (2, 3))
    assert three == pytest.approx(two * (2 / 3) / (1 / 2))


def test_slower_links_than_those_of_the_calibration_limit():
    slow = replace(CLUSTER, node_bandwidth=1e10)
    assert call_seconds(call("all_reduce", 8, 2**28), NODE, slow, KNOWN) == 2 * 7 / 8 * 2**28 / 1e10


def test_over_nodes_a_ring_has_the_network_of_all_members_of_a_node():
    whole, four = 2**30, Span(32, 8, 4)
    gathered = call_seconds(call("all_gather", 32, whole // 32), four, CLUSTER, KNOWN)
    assert gathered == pytest.approx(31 / 32 * whole / (8 * 4e10) + 4e-5)
    one_each = call_seconds(call("all_gather", 32, whole // 32), Span(32, 1, 32), CLUSTER, KNOWN)
    assert one_each == pytest.approx(31 / 32 * whole / 4e10 + 32e-5)
    summed = call_seconds(call("all_reduce", 32, whole), Span(32, 1, 32), CLUSTER, KNOWN)
    assert summed == pytest.approx(2 * one_each)
    fast = replace(CLUSTER, nic_bandwidth=1e15)
    bound = call_seconds(call("reduce_scatter", 32, whole), four, fast, KNOWN)
    assert bound >= 31 / 32 * whole / CLUSTER.node_bandwidth


def test_an_exchange_takes_the_longer_of_network_and_node():
    payload, two = 2**28, Span(16, 8, 2)
    slow_network = exchange_seconds(payload, two, CLUSTER, KNOWN)
    assert slow_network == pytest.approx(payload / 2 / 4e10 + 1e-5)
    slow_node = exchange_seconds(payload, two, replace(CLUSTER, node_bandwidth=1e9), KNOWN)
    assert slow_node == pytest.approx(7 / 8 * payload / 2 / 1e9 + 1e-5)
    once = exchange_seconds(payload, two, CLUSTER, KNOWN, top_k=8)
    assert once == pytest.approx(payload / 2 / 4e10 * once_per_node(8, 2) + 1e-5)
    by_call = call_seconds(call("all_to_all_v", 16, payload), two, CLUSTER, KNOWN, top_k=8)
    assert by_call == once


def test_a_token_goes_once_to_a_node():
    assert once_per_node(1, 4) == pytest.approx(1)
    assert once_per_node(8, 1) == pytest.approx(1 / 8)
    assert once_per_node(8, 10**6) == pytest.approx(1, rel=1e-4)


def test_one_rank_and_no_bytes_take_no_time():
    assert call_seconds(call("all_reduce", 1, 2**20), Span(1, 1, 1), CLUSTER, KNOWN) == 0
    assert node_seconds("all_reduce", 8, 0, CLUSTER, KNOWN) == 0


def test_messages_go_over_the_link_between_their_ranks():
    assert message_seconds(6e11, same_node(0, 7, CLUSTER), CLUSTER) == pytest.approx(1.000005)
    assert message_seconds(4e10, same_node(7, 8, CLUSTER), CLUSTER) == pytest.approx(1.00001)


def test_collectives_that_were_not_measured_are_listed():
    bare = calibration(collectives={})
    calls = [call("all_reduce", 8, 1), call("all_to_all_v", 8, 1), call("all_reduce", 8, 2)]
    found = missing_calls(calls, {"tp": NODE}, bare)
    assert [text.partition(" within")[0] for text in found] == [
        "h200: no calibration for all_reduce", "h200: no calibration for all_to_all",
    ]  # fmt: skip
    assert missing_calls(calls, {"tp": NODE}, KNOWN) == []
    with pytest.raises(ConfigError, match="no calibration for all_reduce within a node"):
        call_seconds(calls[0], NODE, CLUSTER, bare)


def test_links_that_nobody_measured_have_a_wide_spread():
    assert link_spread("network", CLUSTER, KNOWN) == 0.25
    assert link_spread("node", CLUSTER, KNOWN) == 0.25
    measured = calibration(spread={"node": 0.05, "network": 0.08})
    assert link_spread("node", CLUSTER, measured) == 0.05
    assert link_spread("network", CLUSTER, measured) == 0.25
    assert link_spread("network", replace(CLUSTER, measured=True), measured) == 0.08


# --------------------------------------------------------------------------------------------- files


def test_cluster_files_keep_everything():
    assert cluster_from_json(cluster_to_json(CLUSTER)) == CLUSTER


@pytest.mark.parametrize(
    ("changed", "said"),
    [
        ({"nic_bandwith": 1}, "c.json: nic_bandwith: unknown field.*nic_bandwidth"),
        ({"ranks_per_node": 0}, "c.json: ranks_per_node: must be positive"),
        ({"domain": 12}, "c.json: domain: 12 must be a multiple of ranks_per_node, 8"),
        ({"nic_bandwidth": "fast"}, "c.json: nic_bandwidth: 'fast' is not of type float"),
        ({"nic_share": 1.5}, "c.json: nic_share: 1.5 is impossible; from 0.01 to 1 a share"),
        ({"device": "h999"}, "c.json: device: 'h999' is none of"),
    ],
)
def test_errors_name_file_and_field(changed, said):
    given = {**json.loads(cluster_to_json(CLUSTER)), **changed}
    with pytest.raises(DataError, match=said):
        cluster_from_json(json.dumps(given), "c.json")


def test_a_file_that_is_no_cluster_is_named(tmp_path):
    with pytest.raises(DataError, match=r"c\.json: device: missing\nc\.json: ranks_per_node: missing"):
        cluster_from_json('{"name": "ours"}', "c.json")
    with pytest.raises(DataError, match="not JSON"):
        cluster_from_json("{")
    with pytest.raises(DataError, match="not an object"):
        cluster_from_json("[]")
    with pytest.raises(DataError, match="No such file"):
        load_cluster(str(tmp_path / "c.json"))


def test_an_unknown_cluster_lists_those_that_are_shipped(tmp_path):
    with pytest.raises(ConfigError, match=r"no cluster 'h100'.*: shipped ones are a100-ib, .*gb200-nvl72"):
        load_cluster("h100")
    (tmp_path / "mine.json").write_text(cluster_to_json(CLUSTER))
    assert load_cluster(str(tmp_path / "mine.json")) == CLUSTER


@pytest.mark.parametrize("name", clusters())
def test_shipped_clusters_have_a_calibration(name):
    found = load_cluster(name)
    assert found.name == name
    assert found.device in shipped()
    assert found.source
