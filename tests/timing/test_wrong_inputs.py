"""Files of calibrations and clusters that are wrong, and settings that do not fit them: each has a clear error,
all problems of a file at once, and no input gives a traceback or a guess."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from braid.cli import main
from braid.errors import BraidError, ConfigError, DataError
from braid.timing.calibration import from_json, load, to_json
from braid.timing.files import LARGEST
from braid.timing.links import cluster_from_json, cluster_to_json, filled, load_cluster
from braid.timing.predict import calibration_for
from tests.timing.synthetic import calibration

CLUSTER = load_cluster("h100-ib")
CLUSTER_FIELDS = json.loads(cluster_to_json(CLUSTER))
CALIBRATION_FIELDS = json.loads(to_json(calibration()))


@pytest.mark.parametrize(
    ("changed", "said"),
    [
        ({"nic_bandwidth": 0}, "nic_bandwidth: must be positive, not 0"),
        (
            {"nic_bandwidth": 400},
            r"nic_bandwidth: 400 is impossible; .* bytes per second \(400 Gb/s are 50e9\)",
        ),
        ({"node_bandwidth": 1e30}, "node_bandwidth: 1e.30 is not of type float"),
        ({"nic_latency": -1e-6}, "nic_latency: must be positive"),
        ({"nic_latency": 10}, "nic_latency: 10 is impossible; .* 0.1 seconds"),
        ({"ranks_per_node": True}, "ranks_per_node: True is not of type int"),
        ({"ranks_per_node": 8.0}, "ranks_per_node: 8.0 is not of type int"),
        ({"domain": 10**9}, "domain: 1000000000 is impossible"),
        ({"domain": 4}, "domain: 4 must be a multiple of ranks_per_node, 8"),
        ({"measured": "yes"}, "measured: 'yes' is not of type bool"),
        ({"device": None}, "device: None is not of type str"),
        ({"nic_share": [1] * 1000}, r"nic_share: \[1, 1, 1, 1, 1, 1, \.\.\.\] is not of type float"),
    ],
)
def test_impossible_clusters_are_refused(changed: dict[str, object], said: str) -> None:
    with pytest.raises(DataError, match=said):
        cluster_from_json(json.dumps({**CLUSTER_FIELDS, **changed}), "c.json")


@pytest.mark.parametrize(
    "text", ['{"nic_share": NaN}', '{"nic_share": Infinity}', '{"a": 1, "a": 2}', "[" * 10**5]
)
def test_what_is_no_json_is_refused(text: str) -> None:
    for read in (cluster_from_json, from_json):
        with pytest.raises(DataError, match=r"mine\.json: not JSON"):
            read(text, "mine.json")


def test_numbers_beyond_floats_are_refused() -> None:
    for number in ("1e999", "1" + "0" * 400):
        text = json.dumps({**CLUSTER_FIELDS, "nic_bandwidth": "?"}).replace('"?"', number)
        with pytest.raises(DataError, match=r"nic_bandwidth: .* is not of type float"):
            cluster_from_json(text)
        text = json.dumps({**CALIBRATION_FIELDS, "optimizer": "?"}).replace('"?"', number)
        with pytest.raises(DataError, match=r"optimizer: .* is not a number"):
            from_json(text)


def test_all_problems_of_a_cluster_are_shown_at_once() -> None:
    wrong = {**CLUSTER_FIELDS, "ranks_per_node": 0, "device": "h999", "nic_bandwith": 1, "nic_share": 2}
    del wrong["name"]
    with pytest.raises(DataError) as caught:
        cluster_from_json(json.dumps(wrong), "c.json")
    lines = str(caught.value).splitlines()
    assert all(line.startswith("c.json: ") for line in lines)
    found = {line.split(": ")[1] for line in lines}
    assert found == {"ranks_per_node", "device", "nic_bandwith", "nic_share", "name"}


TABLE = CALIBRATION_FIELDS["products"][0]
KERNEL = CALIBRATION_FIELDS["kernels"][0]


@pytest.mark.parametrize(
    ("changed", "said"),
    [
        ({"format": None}, "format: must be 1, not None; run `braid calibrate` again"),
        ({"format": 2}, "format: must be 1, not 2; a newer braid wrote it"),
        ({"sustained": -1}, "sustained: must be positive"),
        ({"launch_seconds": True}, "launch_seconds: True is not a number"),
        ({"op_seconds": -1}, "op_seconds: must be positive"),
        ({"device": ""}, "device: '' is not a name"),
        ({"spread": {"products": -0.1}}, "spread.products: must be a relative error"),
        ({"spread": 0.1}, "spread: must be an object of numbers"),
        ({"sources": ["me"]}, "sources: must be an object of texts"),
        ({"contention": {"node": 0.5}}, "contention.node: must be how many times longer"),
        (
            {"collectives": {"all_gather": {"1": [[1, 1]]}}},
            "collectives.all_gather.1: must be of at least 2 ranks",
        ),
        ({"collectives": {"gather": {"2": [[1, 1]]}}}, "collectives.gather: must be one of all_gather"),
        ({"collectives": {"all_gather": {"two": [[1, 1]]}}}, "collectives: invalid literal"),
        ({"collectives": [1]}, "collectives: "),
        ({"bandwidth": [[1]]}, "bandwidth: "),
        (
            {"bandwidth": [[1, 0], [2, 1]]},
            "bandwidth: sizes must be positive and ascend, with positive seconds",
        ),
        ({"bandwidth": [["1", 1]]}, "bandwidth: '1' is not a number"),
        ({"products": [{**TABLE, "seconds": TABLE["seconds"][:5]}]}, r"products\[0\].seconds: 5 of 7 x 7 x 7"),
        ({"products": [{**TABLE, "m": [1.5]}]}, "products: 1.5 is not a whole number"),
        ({"products": [{**TABLE, "pass": "sideways"}]}, r"products\[0\].pass: 'sideways' must be one of"),
        ({"kernels": [{**KERNEL, "by": "luck"}]}, r"kernels\[0\].by: 'luck' must be flops or bytes"),
        ({"kernels": [{**KERNEL, "points": []}]}, r"kernels\[0\].points: sizes must be positive"),
        ({"kernels": [3]}, "kernels: "),
    ],
)
def test_impossible_calibrations_are_refused(changed: dict[str, object], said: str) -> None:
    with pytest.raises(DataError, match=f"mine.json: {said}"):
        from_json(json.dumps({**CALIBRATION_FIELDS, **changed}), "mine.json")


JSON = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats(allow_nan=False, allow_subnormal=False)
    | st.text(max_size=3),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3), inner, max_size=3),
    max_leaves=6,
)


@settings(max_examples=40, deadline=None)
@given(st.sampled_from(sorted(CALIBRATION_FIELDS)), st.sampled_from(sorted(CLUSTER_FIELDS)), JSON)
def test_no_value_gives_a_traceback(ours: str, theirs: str, value: object) -> None:
    small = {**CALIBRATION_FIELDS, "products": [], "kernels": [], ours: value}
    for read, fields in ((from_json, small), (cluster_from_json, {**CLUSTER_FIELDS, theirs: value})):
        try:
            read(json.dumps(fields))
        except BraidError as error:
            assert str(error)


def test_files_that_cannot_be_read_are_named(tmp_path: Path) -> None:
    (tmp_path / "bytes.json").write_bytes(b"\xff\xfe\x00")
    with (tmp_path / "huge.json").open("wb") as file:
        file.truncate(LARGEST + 1)
    said = {
        ".": "a folder, not a file",
        "nothing.json": "No such file",
        "bytes.json": "not JSON: not text in UTF-8",
        "huge.json": "bytes are more than",
    }
    for name, reason in said.items():
        for read in (load, load_cluster):
            with pytest.raises(DataError, match=reason):
                read(f"{tmp_path}/{name}")


# -------------------------------------------------------------------------- what does not fit together


def test_a_calibration_of_another_device_is_refused() -> None:
    assert calibration_for(CLUSTER, None).device == "h100"
    with pytest.raises(
        ConfigError, match=r"calibration = 'h200'\n  rule  must be of the device of the cluster h100-ib, h100"
    ):
        calibration_for(CLUSTER, calibration())
    mine = calibration()
    assert calibration_for(load_cluster("h200-ib"), mine) is mine


@pytest.mark.parametrize(
    ("cluster", "world", "domain"),
    [("h100-ib", 4, 4), ("h100-ib", 8, 8), ("h100-ib", 2048, 8), ("gb200-nvl72", 36, 36),
     ("gb200-nvl72", 144, 72), ("gb200-nvl72", 256, 64), ("gb200-nvl72", 2048, 64)],
)  # fmt: skip
def test_jobs_fill_domains_alike(cluster: str, world: int, domain: int) -> None:
    assert filled(load_cluster(cluster), world).domain == domain


@pytest.mark.parametrize(("world", "remedy"), [(12, "8 or 16"), (20, "16 or 24"), (9, "8 or 16")])
def test_a_world_that_leaves_machines_half_empty_is_refused(world: int, remedy: str) -> None:
    with pytest.raises(
        ConfigError, match=rf"world = {world}\n  rule  must fill machines of 8 GPUs.*\n  set   {remedy}"
    ):
        filled(CLUSTER, world)


WORDS = ["plan", "tiny", "--world", "8"]


def test_the_command_says_what_is_wrong(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    other, broken = tmp_path / "other.json", tmp_path / "cluster.json"
    other.write_text(to_json(replace(load("h200"), source="measured")))
    broken.write_text(json.dumps({**CLUSTER_FIELDS, "nic_bandwidth": 0, "nic_latency": -1}))
    cases = [
        (
            ["--cluster", "h100-ib", "--calibration", str(other)],
            2,
            "must be of the device of the cluster h100-ib",
        ),
        (["--cluster", str(broken)], 3, "nic_latency: must be positive"),
        (["--cluster", str(tmp_path)], 3, "a folder, not a file"),
        (["--calibration", str(other)], 2, "--calibration needs --cluster"),
        (["--time"], 2, "h100-ib"),
        *((["--cluster", "h100-ib", "--load", load], 2, "load") for load in ("nan", "0.5")),
    ]
    for words, code, said in cases:
        assert main([*WORDS, *words]) == code
        told = capsys.readouterr().err
        assert said in told
        assert "Traceback" not in told
