"""What `braid calibrate` measures: all of it runs, on a CPU with tiny sizes; tables follow from samples."""

import itertools
from dataclasses import replace

import pytest
import torch
import torch.distributed as dist

from braid.architecture import Attention, Mlp
from braid.errors import DataError
from braid.nn.work import Piece, Product
from braid.timing import measure, measure_kernels, samples
from braid.timing.calibration import from_json, missing, seconds, to_json
from braid.timing.kernel_pieces import pieces_of
from braid.timing.measure_collectives import OPS, collectives, contention, group_sizes
from braid.timing.measure_kernels import Case
from braid.timing.samples import Sample, Samples
from braid.timing.step_models import MODELS, predicted, small_run, step_work
from braid.timing.stopwatch import Stopwatch
from braid.timing.tables import calibration_of
from braid.train.step_timing import steps
from tests.ranks import run_ranks
from tests.timing.synthetic import law

WATCH = Stopwatch(torch.device("cpu"))
TINY = measure.Sizes(
    tokens=(16, 32), channels=(16, 32), held_out=1, group_tokens=(8,), group_channels=(16,), groups=(2,),
    moved_rows=(4, 8), moved_channels=128, parameters=1024, launches=2, copied=64,
)  # fmt: skip
FEW = {
    "rows": 1, "tokens": 32, "heads": 4, "kv_heads": 2, "key_heads": 2, "head_dim": 16, "v_dim": 16,
    "key_dim": 16, "value_dim": 16, "state": 16, "channels": 32, "groups": 2, "part": 32, "rest": 16,
    "vocab": 64, "experts": 8, "top_k": 2, "slots": 2, "window": 8, "document": 16,
}  # fmt: skip
MEASURED_AS_KERNELS = {"attention", "ssd", "delta_rule", "causal_conv", "hyper_connection"}


def shrunk() -> list[Case]:
    """One tiny case of each kernel and choice."""
    found: dict[str, Case] = {}
    for case in measure_kernels.cases():
        shape = {
            name: min(value, FEW[name]) if isinstance(value, int) and name in FEW else value
            for name, value in case.shape.items()
        }
        small = Case(case.name, shape)
        found[str(small)] = small
    return list(found.values())


def test_everything_is_measured_in_all_passes():
    passes = set(measure.PASSES)
    products = list(measure.products(TINY, WATCH))
    assert len(products) == 3 * (2**3 + 1)
    assert [each.held_out for each in products].count(True) == 3
    assert {each.pass_ for each in products} == passes
    assert {each.pass_ for each in measure.grouped_products(TINY, WATCH)} == passes
    names = {each.name for each in measure.moved(TINY, WATCH)}
    assert names == {"add", "rms_norm", "glu", "rotary"}
    (step,) = measure.optimizer_step(TINY, WATCH)
    assert step.shape == {"parameters": 1024, "bytes": 34 * 1024}
    assert len(list(measure.launches(TINY, WATCH))) == 3
    assert [(each.name, each.shape) for each in measure.host_link(TINY, WATCH)] == [
        ("to_host", {"bytes": 64}),
        ("to_device", {"bytes": 64}),
    ]
    assert all(each.seconds > 0 for each in products)


def test_every_kernel_runs_in_both_directions():
    cases = shrunk()
    assert {case.name for case in cases} == set(measure_kernels.NAMES)
    for case in cases:
        runs = measure_kernels.runs_of(case, torch.device("cpu"))
        assert {"forward", "backward"} <= set(runs)
        for run in runs.values():
            run()


def test_a_kernel_that_fails_is_reported_and_others_are_measured():
    good = Case("permute", {"tokens": 4, "channels": 8, "slots": 2})
    found, skipped = measure_kernels.measure([Case("permute", {"tokens": 4, "channels": 8}), good], WATCH)
    assert [each.pass_ for each in found] == ["forward", "backward"]
    assert skipped == {"permute tokens 4 channels 8": "KeyError: 'slots'"}


def test_kernels_that_models_name_have_keys_and_sizes_of_their_own_work():
    for case in measure_kernels.cases():
        pieces = pieces_of(case.name, case.shape)
        assert bool(pieces) == (case.name in MEASURED_AS_KERNELS), case
        for kernel in pieces.values():
            assert kernel.bytes > 0
    whole = {"tokens": 4096, "rows": 2, "document": 0, "window": 0, "causal": 1}
    heads = {"heads": 8, "kv_heads": 2, "head_dim": 64, "v_dim": 64}
    forward = pieces_of("attention", {**whole, **heads})["forward"]
    assert forward.flops == 2 * 4 * 8 * 64 * 4096 * 4096 // 2


def test_whole_steps_run():
    tiny = small_run(
        "[*-]", hidden=16, tokens=16, samples=2, mlp=Mlp(ffn=24),
        attention=Attention(heads=2, kv_heads=1, head_dim=8),
    )  # fmt: skip
    tiny = replace(tiny, train=replace(tiny.train, dtype="fp32"))
    found = list(steps(0.0, {"tiny": tiny}))
    assert [(each.name, each.pass_) for each in found] == [("tiny", "step"), ("tiny", "host")]
    assert all(each.seconds > 0 for each in found)


# ------------------------------------------------------------------------------------------- tables


def made_up() -> Samples:
    """Samples of a GPU that follows a law."""
    sizes, found = measure.Sizes(tokens=(128, 1024, 8192), channels=(128, 1024, 8192)), list[Sample]()
    layers = [(each, False) for each in itertools.product(sizes.tokens, sizes.channels, sizes.channels)]
    layers += [(each, True) for each in measure._held_out(sizes)]
    for (layer, held_out), groups in itertools.product(layers, (1, 4, 64)):
        for pass_ in measure.PASSES:
            m, n, k = measure.product_shape(pass_, *layer)
            shape = {"m": m, "n": n, "k": k, "groups": groups}
            if groups == 1 or not held_out:
                kind = "plain" if groups == 1 else "grouped"
                taken = law(m, n, k, groups)
                found.append(
                    Sample(
                        what="product", name=kind, shape=shape, pass_=pass_, seconds=taken, held_out=held_out
                    )
                )
    for case in measure_kernels.cases():
        pieces = pieces_of(case.name, case.shape)
        taken = {pass_: 2e-6 + each.flops / 4e14 + each.bytes / 3e12 for pass_, each in pieces.items()}
        if "wgrad" in taken:
            taken["backward+wgrad"] = taken["backward"] + taken.pop("wgrad")
        found += [
            Sample(what="kernel", name=case.name, shape=case.shape, pass_=pass_, seconds=each)
            for pass_, each in taken.items()
        ]
    for power in range(16, 31):
        found.append(
            Sample(what="moved", name="add", shape={"bytes": 2**power}, seconds=2e-6 + 2**power / 4e12)
        )
    found.append(Sample(what="optimizer", name="adamw", shape={"bytes": 3 * 10**12}, seconds=1.0))
    found.append(Sample(what="launch", name="add", shape={"launches": 1}, seconds=5e-6))
    for way, taken in (("to_host", 0.02), ("to_device", 0.025)):
        found.append(Sample(what="host_link", name=way, shape={"bytes": 10**9}, seconds=taken))
    return Samples(
        device="NVIDIA H200", when="2026-11-18", versions={"torch": "2.11"}, memory_bytes=10**11,
        samples=tuple(found), skipped={"router tokens 8": "OutOfMemoryError"},
    )  # fmt: skip


def measure_piece(sample: Sample) -> Piece:
    return Piece(Product(*(int(sample.shape[name]) for name in ("m", "n", "k", "groups"))))


@pytest.fixture(scope="module")
def measured() -> Samples:
    return made_up()


def test_tables_follow_from_samples(measured):
    found = calibration_of(measured)
    assert (found.device, found.source, found.optimizer) == ("h200", "measured", 3e12)
    assert found.skipped == measured.skipped
    assert found.launch_seconds == 5e-6
    assert found.host_link == {"to_host": 5e10, "to_device": 4e10}
    for sample in measured.of("product"):
        piece = measure_piece(sample)
        assert seconds(piece, sample.pass_, found) == pytest.approx(sample.seconds)
    for case in measure_kernels.cases():
        for pass_, kernel in pieces_of(case.name, case.shape).items():
            expected = 2e-6 + kernel.flops / 4e14 + kernel.bytes / 3e12
            assert seconds(Piece(kernel), pass_, found) == pytest.approx(expected, rel=0.3)
    assert 0 < found.spread["products"] < 0.5
    assert to_json(from_json(to_json(found))) == to_json(found)


def test_the_sustained_factor_is_measured_over_predicted(measured):
    """Seconds of a launch come from whole steps too; a step that the host limits says nothing of the device."""
    alone = calibration_of(measured)
    assert alone.sustained == 1
    times = {"dense": 1.2, "experts": 1.3, "hybrid": 50.0}
    limited = "hybrid"
    found = []
    for name, factor in times.items():
        taken = factor * predicted(MODELS[name], alone)
        host = taken if name == limited else 1e-3
        shape = {"steps": 3}
        found.append(Sample(what="step", name=name, shape=shape, pass_="step", seconds=taken))
        found.append(Sample(what="step", name=name, shape=shape, pass_="host", seconds=host))
    whole = calibration_of(replace(measured, samples=(*measured.samples, *found)))
    assert whole.sustained == pytest.approx(1.25)
    assert whole.spread["sustained"] >= 0.04
    work, _ = step_work(MODELS["dense"])
    launches = sum(piece.launches for pieces in work.passes().values() for piece in pieces)
    assert whole.launch_seconds <= 1e-3 / launches * 1.5


def test_nothing_that_models_name_is_missing_from_a_whole_measurement(measured):
    found = calibration_of(measured)
    for run in MODELS.values():
        assert missing(step_work(run)[0], found) == []


def test_samples_are_kept_in_files(measured, tmp_path):
    path = tmp_path / "h200.samples.json"
    path.write_text(samples.to_json(measured))
    assert samples.to_json(samples.load(path)) == path.read_text()
    assert len(samples.load(path).of("product", held_out=True)) == 3 * 60
    with pytest.raises(DataError, match="not samples of `braid calibrate`"):
        samples.from_json('{"samples": [{"what": "product"}]}', "mine.json")
    with pytest.raises(DataError, match="No such file"):
        samples.load(tmp_path / "none.json")


# -------------------------------------------------------------------------------------- collectives


def check_collectives(rank, world):
    cpu = torch.device("cpu")
    found = list(collectives(cpu, sizes=(64, 1024)))
    both = list(contention(cpu, elements=64, width=8))
    assert dist.get_world_size() == world
    timed = [(each.name, each.shape["ranks"], each.shape["bytes"], each.seconds) for each in found]
    return timed, [each.name for each in both]


def test_collectives_are_measured_on_all_ranks_alike():
    """Every rank has the seconds of the slowest."""
    first, second = run_ranks(2, check_collectives)
    assert first == second
    timed, together = first
    assert [(name, ranks, size) for name, ranks, size, _ in timed] == [
        (op, 2, size) for op in OPS for size in (64, 1024)
    ]
    assert all(taken > 0 for *_, taken in timed)
    assert together == ["alone", "together"]


def test_groups_are_powers_of_two_and_the_whole_job():
    assert group_sizes(8) == [2, 4, 8]
    assert group_sizes(6) == [2, 6]
    assert group_sizes(1) == []


def test_collectives_become_tables(measured):
    points = [(1024, 1e-5), (4096, 2e-5), (16384, 5e-5)]
    found = [
        Sample(what="collective", name="all_reduce", shape={"ranks": 2, "bytes": size}, seconds=taken)
        for size, taken in points
    ]
    found += [
        Sample(what="contention", name=name, shape={"ranks": 2}, seconds=taken)
        for name, taken in (("alone", 1.0), ("together", 1.25))
    ]
    whole = calibration_of(replace(measured, samples=(*measured.samples, *found)))
    assert whole.collectives == {"all_reduce": {2: tuple(points)}}
    assert whole.contention == {"node": 1.25}
    assert whole.spread["node"] > 0
