"""Calibration: seconds between measured sizes, what is missing, and files."""

import itertools
import json
import statistics
from dataclasses import replace
from math import log

import pytest
from hypothesis import given
from hypothesis import strategies as st

from braid import recipes
from braid.errors import ConfigError, DataError
from braid.nn.work import Kernel, Moved, Piece, Product, Work
from braid.planning.estimate.rank import held_modules
from braid.planning.plan import plan
from braid.timing import calibration as module
from braid.timing.calibration import component, from_json, load, missing, seconds, shipped, to_json
from braid.timing.interpolation import along, between, never_falling, never_falling_grid, within
from braid.timing.step_models import MODELS, predicted, step_work
from tests.timing.synthetic import BANDWIDTH, GROUPS, PEAK, SIZES, calibration, product_law

KNOWN = calibration()
sizes = st.integers(1, 10**5)


def attention(flops: int, **key: int) -> Piece:
    named = {"causal": 1, "head_dim": 128, "v_dim": 128, "tokens": 4096, **key}
    return Piece(Kernel("attention", tuple(sorted(named.items())), flops, 1))


# --------------------------------------------------------------------------------------- interpolation


@pytest.mark.parametrize("groups", [1, *GROUPS])
@pytest.mark.parametrize("pass_", ["forward", "backward", "wgrad"])
def test_measured_products_have_their_measured_seconds(pass_, groups):
    for m, n, k in itertools.product(SIZES, repeat=3):
        product = Product(m, n, k, groups)
        assert seconds(Piece(product), pass_, KNOWN) == pytest.approx(product_law(product), rel=1e-9)


@given(sizes, sizes, sizes, st.integers(1, 256))
def test_products_never_beat_the_peak(m, n, k, groups):
    product = Product(m, n, k, groups)
    assert seconds(Piece(product), "forward", KNOWN) >= product.flops / PEAK


def test_a_table_that_is_faster_than_the_peak_is_not_believed():
    fast = calibration(products=(replace(KNOWN.products[0], seconds=(1e-9,) * 343),))
    assert seconds(Piece(Product(4096, 4096, 4096)), "forward", fast) == 2 * 4096**3 / PEAK


def test_kernels_never_beat_the_peak_of_what_they_are_measured_by():
    """Operations of attention; hyper-connections are measured by bytes, and their operations take no time."""
    (table,) = (each for each in KNOWN.kernels if each.name == "hyper_connection")
    fast = tuple((size, 1e-9) for size, _ in table.points)
    known = calibration(kernels=tuple(replace(each, points=fast) for each in KNOWN.kernels))
    assert seconds(attention(10**12), "forward", known) == 10**12 / PEAK
    streams = Kernel("hyper_connection", (("part", "pre"), ("streams", 4)), 10**12, 10**9)
    assert seconds(Piece(streams), "wgrad", known) == pytest.approx(1e-9)


@given(st.tuples(sizes, sizes, sizes, st.integers(2, 256)), st.integers(0, 3), st.integers(1, 10**4))
def test_a_larger_product_takes_no_less_time(size, axis, more):
    """Of experts; a plain one is another kernel than a group of one."""
    larger = [each + more * (place == axis) for place, each in enumerate(size)]
    before, after = (seconds(Piece(Product(*each)), "wgrad", KNOWN) for each in (size, larger))
    assert after >= before * (1 - 1e-12)


def test_products_between_measured_sizes_are_near():
    """Held-out shapes: the law has corners that interpolation rounds."""
    held_out = [Product(m, n, k) for m, n, k in itertools.product((192, 1024, 3000, 6144), repeat=3)]
    errors = [abs(log(seconds(Piece(each), "forward", KNOWN) / product_law(each))) for each in held_out]
    assert statistics.median(errors) < 0.03
    assert max(errors) < 0.25


def test_outside_of_the_grid_products_have_the_rate_of_its_edge():
    largest, larger = Product(8192, 8192, 8192), Product(8192, 131072, 8192)
    there, beyond = (seconds(Piece(each), "forward", KNOWN) for each in (largest, larger))
    assert beyond == pytest.approx(16 * there)
    few, many = (seconds(Piece(Product(128, 128, 128, g)), "forward", KNOWN) for g in (64, 128))
    assert many == pytest.approx(2 * few)


def test_a_product_takes_as_long_as_its_sizes_whatever_it_counts_as():
    product = Product(128, 512, 2048)
    assert seconds(Piece(product), "forward", KNOWN) == pytest.approx(product_law(product))


@given(
    st.lists(st.tuples(st.integers(1, 10**6), st.floats(1e-7, 1.0)), min_size=1, unique_by=lambda p: p[0]),
    sizes,
)
def test_curves_pass_through_their_points_and_never_fall(points, size):
    rising = never_falling(points)
    for measured, expected in rising:
        assert along(rising, measured) == pytest.approx(expected)
        assert between(rising, measured) == pytest.approx(expected)
    assert along(rising, size + 1) >= along(rising, size) * (1 - 1e-9)


def test_a_grid_with_noise_is_raised_to_what_smaller_sizes_took():
    axes = ((1, 2), (1, 2), (1, 2))
    rising = never_falling_grid(axes, [1, 2, 3, 1, 5, 1, 1, 4])
    assert rising == (1, 2, 3, 3, 5, 5, 5, 5)
    assert within(axes, rising, (2, 2, 2)) == pytest.approx(5)


def test_memory_traffic_never_beats_the_bandwidth():
    for size in (1, 1000, 2**20, 2**40):
        assert seconds(Piece(Moved(size)), "forward", KNOWN) >= size / BANDWIDTH
    fast = calibration(bandwidth=((1000.0, 1e-12),))
    assert seconds(Piece(Moved(1000)), "forward", fast) == 1000 / BANDWIDTH


def test_no_work_takes_no_time():
    assert seconds(Piece(Moved(0)), "forward", KNOWN) == 0
    assert seconds(Piece(Product(0, 5, 5)), "forward", KNOWN) == 0


# ------------------------------------------------------------------------------------------- kernels


def test_kernels_are_interpolated_by_size_and_by_length():
    short, long = (seconds(attention(10**10, tokens=tokens), "forward", KNOWN) for tokens in (1024, 4096))
    assert short == long == pytest.approx(1e-6 + 2e-5)
    slower = module.KernelTable(
        name="attention",
        key=KNOWN.kernels[0].key,
        pass_="forward",
        by="flops",
        points=((1e9, 1.0), (1e12, 1000.0)),
    )
    mixed = calibration(kernels=(slower, *KNOWN.kernels[1:]))
    keys = dict(KNOWN.kernels[0].key)
    ends = [seconds(attention(10**10, **{**keys, "tokens": t}), "forward", mixed) for t in (1024, 4096)]
    middle = seconds(attention(10**10, **{**keys, "tokens": 2048}), "forward", mixed)
    assert middle == pytest.approx((ends[0] * ends[1]) ** 0.5)
    beyond = seconds(attention(10**10, **{**keys, "tokens": 10**6}), "forward", mixed)
    assert beyond == pytest.approx(ends[1])


def test_a_head_dim_that_is_near_takes_the_nearest_table():
    assert seconds(attention(10**12, head_dim=96, v_dim=96), "forward", KNOWN) > 0
    work = Work(forward=(attention(10**12, head_dim=512, v_dim=512),))
    (reason,) = missing(work, KNOWN)
    assert "no calibration for kernel attention" in reason
    assert "head_dim 512" in reason
    assert "head_dim 128" in reason


def test_choices_of_a_key_must_be_measured():
    """Causal or not, parts of a hyper-connection, numbers of streams."""
    other = attention(10**12, causal=0)
    streams = Piece(Kernel("hyper_connection", (("part", "pre"), ("streams", 2)), 1, 1))
    part = Piece(Kernel("hyper_connection", (("part", "exit"), ("streams", 4)), 1, 1))
    found = missing(Work(forward=(other,), wgrad=(streams, part)), KNOWN)
    assert len(found) == 3


def test_what_is_missing_is_listed_once_and_has_no_seconds():
    kernel = Piece(Kernel("ssd", (("head_dim", 64),), 10**12, 1))
    work = Work(forward=(kernel, kernel, Piece(Product(8, 8, 8))), backward=(kernel,))
    found = missing(work, KNOWN)
    assert found == [f"h200: no calibration for kernel ssd (head_dim 64), {p}" for p in ("forward", "backward")]
    with pytest.raises(ConfigError, match="no calibration for kernel ssd"):
        seconds(kernel, "forward", KNOWN)
    bare = calibration(products=(), bandwidth=())
    assert missing(
        Work(forward=(Piece(Product(8, 8, 8)), Piece(Product(8, 8, 8, 2)), Piece(Moved(1)))), bare
    ) == [
        "h200: no calibration for products, forward",
        "h200: no calibration for grouped products, forward",
        "h200: no calibration for memory traffic",
    ]


def test_pieces_belong_to_components():
    kinds = {
        name: Piece(Kernel(name, (), 1, 1)) for name in ("attention", "ssd", "delta_rule", "hyper_connection")
    }
    assert {name: component(piece) for name, piece in kinds.items()} == {
        "attention": "attention", "ssd": "scans", "delta_rule": "scans", "hyper_connection": "memory",
    }  # fmt: skip
    assert component(Piece(Product(1, 1, 1))) == "products"
    assert component(Piece(Moved(1))) == "memory"


# --------------------------------------------------------------------------------------------- files


def test_files_keep_everything():
    text = to_json(KNOWN)
    again = from_json(text)
    assert to_json(again) == text
    assert again.collectives["all_reduce"][8][0] == (
        16384.0,
        pytest.approx(KNOWN.collectives["all_reduce"][8][0][1], rel=1e-3),
    )
    product = Product(300, 700, 900, 8)
    ours, its = (seconds(Piece(product), "forward", each) for each in (KNOWN, again))
    assert its == pytest.approx(ours, rel=1e-3)


def broken(**changed: object) -> str:
    given = json.loads(to_json(KNOWN))
    return json.dumps({**given, **changed})


PRODUCTS = json.loads(to_json(KNOWN))["products"][0]


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("{", "h9.json: not JSON"),
        ("[]", "h9.json: not an object"),
        ("{}", "h9.json: format: must be 1"),
        (broken(format=7), "h9.json: format: must be 1, not 7; a newer braid wrote it: update braid"),
        (broken(format=0), "h9.json: format: must be 1, not 0; run `braid calibrate` again"),
        (broken(lanch_seconds=1), "h9.json: lanch_seconds: unknown field"),
        (broken(source="guessed"), "h9.json: source: 'guessed' must be one of shipped, measured"),
        (broken(host_link={"to_host": 5e10}), "h9.json: host_link: must have to_device and to_host"),
        (broken(host_link={"to_host": 0, "to_device": 1}), "h9.json: host_link.to_host: must be positive"),
        (broken(sustained=0), "h9.json: sustained: must be positive"),
        (broken(peak_flops="fast"), "h9.json: peak_flops: 'fast' is not a number"),
        (broken(bandwidth=[[2, 1], [1, 1]]), "h9.json: bandwidth: sizes must be positive and ascend"),
        (broken(kernels=[{"name": "x"}]), "h9.json: kernels: 'key': missing"),
        (broken(products=[{**PRODUCTS, "m": [1]}]), r"products\[0\].seconds: 343 of 1 x"),
    ],
)  # fmt: skip
def test_errors_name_file_and_field(text, said):
    with pytest.raises(DataError, match=said):
        from_json(text, "h9.json")


def test_all_missing_fields_are_named_at_once():
    given = json.loads(to_json(KNOWN))
    del given["products"], given["optimizer"]
    with pytest.raises(DataError, match=r"optimizer: missing\nh9\.json: products: missing"):
        from_json(json.dumps(given), "h9.json")


def test_an_unknown_device_lists_those_that_are_shipped(tmp_path):
    with pytest.raises(ConfigError, match=r"no calibration for device 'h20'.*: shipped ones are .*h200"):
        load("h20")
    with pytest.raises(DataError, match=r"nothing.json: No such file"):
        load(str(tmp_path / "nothing.json"))
    (tmp_path / "mine.json").write_text(to_json(KNOWN))
    assert load(str(tmp_path / "mine.json")).name == "a made-up GPU"


@pytest.mark.parametrize("name", shipped())
def test_shipped_devices_say_where_their_tables_come_from(name):
    found = load(name)
    assert found.device == name
    assert found.source == "shipped"
    tables = {"products", "kernels", "bandwidth", "optimizer", "launch_seconds", "sustained", "collectives"}
    assert tables | ({"host_link"} if found.host_link else set()) <= set(found.sources)
    assert bool(found.host_link) == (name != "gb200"), "nobody has measured its link to the host"
    assert {"products", "memory", "attention", "sustained", "node", "network"} <= set(found.spread)
    for piece in (Piece(Product(4096, 4096, 4096)), Piece(Product(512, 2048, 2048, 16)), Piece(Moved(10**8))):
        assert 0 < seconds(piece, "forward", found) < 0.01


@pytest.mark.parametrize(
    "recipe", ["deepseek-v3", "deepseek-v4-like", "nemotron-nano-30b-a3b", "qwen3-next-80b-a3b"]
)
def test_published_models_are_made_of_what_was_measured(recipe):
    (held,) = held_modules(plan(recipes.load(recipe), 1), 0, "cuda")
    works = held.model.works(held.workload).values()
    assert missing(sum((each for part in works for each in part.values()), Work()), load("h200")) == []


@pytest.mark.parametrize("name", shipped())
@pytest.mark.parametrize("model", sorted(MODELS))
def test_shipped_devices_have_seconds_for_all_work_of_a_step(name, model):
    """At the layers of the measured models; faster devices take less."""
    found = load(name)
    assert missing(step_work(MODELS[model])[0], found) == []
    taken, measured = predicted(MODELS[model], found), predicted(MODELS[model], load("h200"))
    assert taken > measured if name in ("a100", "h100") else taken <= measured
