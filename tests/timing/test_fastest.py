"""`train.precision fp8`: what a calibration says that pays is picked, and nothing else, with the reason."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from braid.architecture import Attention, Mlp, Moe
from braid.cli import main
from braid.config import Run
from braid.errors import ConfigError, DataError
from braid.nn.work import Kernel, Piece, Product
from braid.planning.estimate.rank import held_modules
from braid.planning.plan import plan
from braid.timing.calibration import Calibration, from_json, load, missing, seconds, to_json
from braid.timing.fastest import fastest, picked
from braid.timing.step_models import small_run
from tests.timing import synthetic

ROOT = Path(__file__).parents[2]


def run_of(*settings: str, experts: bool = True) -> Run:
    layers: dict[str, object] = {
        "attention": Attention(heads=16, kv_heads=4, head_dim=128),
        "mlp": Mlp(ffn=8192),
    }
    if experts:
        layers["moe"] = Moe(experts=16, top_k=4, ffn=4096)
    pattern = "[*-]" * 3 + ("[*E]" * 3 if experts else "")
    run = small_run(pattern, hidden=2048, tokens=4096, samples=4, **layers)
    return replace(run, train=replace(run.train, precision=settings))


def calibration(dense: float, experts: float, quantising: float = 0.1) -> Calibration:
    """Products in fp8_block take so many times as long as in bfloat16."""
    plain = synthetic.calibration()
    narrow = tuple(
        replace(
            table, format="fp8_block",
            seconds=tuple((experts if table.groups > 1 else dense) * each for each in table.seconds),
        )
        for table in plain.products
    )  # fmt: skip
    kinds = ("rows", "tokens", "both", "weight", "activation", "activation backward")
    quantisers = tuple(
        replace(
            synthetic.curve("quantise", "bytes", of=of),
            points=((1e6, quantising * 1e-6), (1e9, quantising * 3e-4)),
        )
        for of in (*kinds, "activation backward, by tokens")
    )
    kernels = plain.kernels + quantisers
    return replace(plain, products=plain.products + narrow, kernels=kernels)


@pytest.mark.parametrize(
    ("dense", "experts", "settings"),
    [
        (0.6, 0.6, ("dense=fp8_block", "experts=fp8_block")),
        (0.6, 1.0, ("dense=fp8_block",)),
        (1.0, 0.6, ("experts=fp8_block",)),
        (1.0, 1.0, ("bf16",)),
        (0.97, 0.97, ("bf16",)),
    ],
)
def test_what_pays_is_picked(dense: float, experts: float, settings: tuple[str, ...]) -> None:
    found = picked(run_of("fp8"), 1, calibration(dense, experts))
    assert found.run.train.precision == settings
    assert len(found.reasons) == 2
    for reason in found.reasons:
        assert reason.endswith("times as fast on h200, by its calibration")
        assert ("makes all layers" in reason) != ("stay in bf16" in reason)


def test_weight_gradients_stay_where_quantising_for_them_costs_more_than_it_saves() -> None:
    known = calibration(0.6, 1.0)
    slow = {"tokens", "both", "activation backward, by tokens"}
    kernels = tuple(
        replace(table, points=tuple((size, 400 * taken) for size, taken in table.points))
        if dict(table.key).get("of") in slow
        else table
        for table in known.kernels
    )
    found = picked(run_of("fp8", experts=False), 1, replace(known, kernels=kernels))
    assert found.run.train.precision == ("dense=fp8_block", "dense.weight_grad=bf16")


def test_settings_after_the_word_win_and_others_are_no_business_of_it() -> None:
    known = calibration(0.6, 0.6)
    found = picked(run_of("fp8", "experts=bf16", "ends"), 1, known)
    assert found.run.train.precision == ("dense=fp8_block", "experts=bf16", "ends")
    run = run_of("mxfp8")
    assert fastest(run, 1, None).run is run
    assert fastest(run, 1, None).reasons == ()


@pytest.mark.parametrize(
    ("device", "said"),
    [
        (None, "no GPU decides"),
        ("NVIDIA GeForce RTX 4090", "no calibration for NVIDIA GeForce RTX 4090"),
        ("NVIDIA A100-SXM4-80GB", "the calibration of a100 has no products in fp8"),
    ],
)
def test_where_nothing_is_known_nothing_is_quantised(device: str | None, said: str) -> None:
    found = fastest(run_of("fp8", "ends"), 1, device)
    assert found.run.train.precision == ("bf16",)
    (reason,) = found.reasons
    assert said in reason
    assert plan(found.run, 1)


def test_what_cannot_be_quantised_has_its_reason() -> None:
    """Two blocks are the first and the last."""
    run = small_run(
        "[*-][*-]", hidden=2048, tokens=4096, samples=4, mlp=Mlp(ffn=8192),
        attention=Attention(heads=16, kv_heads=4, head_dim=128),
    )  # fmt: skip
    found = picked(replace(run, train=replace(run.train, precision=("fp8",))), 1, calibration(0.6, 0.6))
    assert found.run.train.precision == ("bf16",)
    assert any("the first and the last block are not quantised" in reason for reason in found.reasons)


def test_products_are_counted_in_their_formats() -> None:
    """Inner blocks alone; operations are those without quantisation."""

    def pieces(*settings: str) -> tuple[list[Piece], int]:
        (held,) = held_modules(plan(run_of(*settings), 1), 0, "cuda")
        works = [work for kinds in held.model.works(held.workload).values() for work in kinds.values()]
        flops = sum(work.flops(which) for work in works for which in ("forward", "backward", "wgrad"))
        return [piece for work in works for all_ in work.passes().values() for piece in all_], flops

    plain, flops = pieces()
    found, same = pieces("fp8_block")
    assert same == flops
    products = [piece.what for piece in found if isinstance(piece.what, Product)]
    assert not any(piece.what.format for piece in plain if isinstance(piece.what, Product))
    of_experts = [each for each in products if each.groups > 1]
    assert len(of_experts) == 3 * 6
    assert sum(each.format == "fp8_block" for each in of_experts) == 2 * 4
    quantised = [
        piece.what for piece in found if isinstance(piece.what, Kernel) and piece.what.name == "quantise"
    ]
    assert {dict(each.key)["of"] for each in quantised} == {
        "rows", "tokens", "both", "activation", "activation backward", "activation backward, by tokens"
    }  # fmt: skip
    inner = 4 * 4096
    activation = next(each for each in quantised if each.key == (("of", "activation"),))
    assert activation.bytes == inner * (2 * 8192 * 2 + 8192)


def test_emulated_products_have_no_seconds() -> None:
    run = run_of("mxfp8")
    (held,) = held_modules(plan(run, 1), 0, "cuda")
    unknown = {
        text for work in held.model.works(held.workload).values() for each in work.values()
        for text in missing(each, calibration(0.6, 0.6))
    }  # fmt: skip
    assert "h200: no calibration for products that are emulated, forward" in unknown
    with pytest.raises(ConfigError, match="that are emulated"):
        seconds(Piece(Product(64, 64, 64, format="emulated")), "forward", calibration(1.0, 1.0))


def test_formats_are_in_files_and_unknown_ones_are_refused() -> None:
    known = from_json(to_json(calibration(0.5, 0.5)))
    assert from_json(to_json(known)) == known
    assert {table.format for table in known.products} == {"", "fp8_block"}
    with pytest.raises(DataError, match=r"products\[0\].format: 'fp4' must be one of fp8_block"):
        from_json(to_json(known).replace('"format": ""', '"format": "fp4"', 1))


def test_the_shipped_tables_tell_what_a_benchmark_measured() -> None:
    """A SwiGLU MLP in fp8_block beside bfloat16, weights included (benchmarks/results/fp8_dense.json)."""
    known = load("h200")
    measured = json.loads((ROOT / "benchmarks/results/fp8_dense.json").read_text())["whole"]
    whole = {}
    ways = {"bf16": "bf16", "all": "fp8_block", "bf16 weight gradients": "fp8_block dense.weight_grad=bf16"}
    for name, settings in ways.items():
        run = small_run("-" * 3, hidden=4096, tokens=16384, samples=1, mlp=Mlp(ffn=14336))
        run = replace(run, train=replace(run.train, precision=tuple(settings.split())))
        (held,) = held_modules(plan(run, 1), 0, "cuda")
        passes = held.model.works(held.workload)["blocks.1"]["mix"].passes().items()
        whole[name] = sum(seconds(piece, pass_, known) for pass_, pieces in passes for piece in pieces)
    for name in ("all", "bf16 weight gradients"):
        assert whole["bf16"] / whole[name] == pytest.approx(measured[name]["faster"], rel=0.06), name


def test_plan_names_what_it_picks(capsys: pytest.CaptureFixture[str]) -> None:
    words = ["plan", "hybrid-300m", "--train.precision", "fp8"]
    assert main([*words, "--cluster", "h200-ib"]) == 0
    out = capsys.readouterr().out
    assert "fp8: " in out
    assert "on h200, by its calibration" in out
    assert main(words) == 0
    assert "nothing is quantised, as no GPU decides" in capsys.readouterr().out
