"""An encoder of packed items: what plain torch computes item by item, whatever shares a pack with it."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from braid.architecture import Attention, Moe
from braid.encoders import Encoder, Pixels, PositionTable, Projector
from braid.errors import DataError
from braid.model import declaration, nodes
from braid.model.encoder import EncoderModel, Items, module_seed, own_rows
from braid.nn.recompute import Replays
from braid.pattern import parse
from braid.schedule.phases import IN
from tests.model.cases import assert_near
from tests.model.encoder_cases import (
    ENCODER,
    HYPER,
    IMAGES,
    LENGTHS,
    build,
    gradients,
    items,
    pictures,
    probe,
)

PATTERNS = ["[*-]", "[+E]", "[M-]", "[GE]", "-"]


def loss_of(model: EncoderModel, given: Items) -> tuple[Tensor, Tensor]:
    """Rows, and a loss with gradients everywhere."""
    rows, losses = model.run(model.segments, None, model.prepare(given))
    total = (rows * probe(len(rows), rows.shape[1])).sum() if len(rows) else rows.sum()
    return rows, total + sum(losses.aux.values(), torch.zeros(()))


# ------------------------------------------------------------------------------------------- plain torch


def norm(x: Tensor, weight: Tensor) -> Tensor:
    return x / (x.square().mean(-1, keepdim=True) + 1e-5).sqrt() * weight


def rotated(x_LHD: Tensor) -> Tensor:
    length, _, dim = x_LHD.shape
    angles = torch.arange(length).double()[:, None] * 10_000.0 ** (-torch.arange(0, dim, 2).double() / dim)
    turned = torch.view_as_complex(torch.stack(x_LHD.chunk(2, -1), -1)) * torch.polar(
        torch.ones_like(angles), angles
    ).unsqueeze(1)
    return torch.cat([turned.real, turned.imag], -1)


def plain(w: dict[str, Tensor], patches_LI: Tensor) -> Tensor:
    """The rows of one item through attention and an MLP."""
    x = patches_LI @ w["patches.weight"].T + w["patches.bias"]
    h, at = norm(x, w["blocks.0.attention.norm.weight"]), "blocks.0.attention"
    q, k, v = ((h @ w[f"{at}.{name}.weight"].T).view(len(h), 4, 6) for name in "qkv")
    scores = torch.einsum("ihd,jhd->hij", rotated(q), rotated(k)) / 6**0.5
    y = torch.einsum("hij,jhd->ihd", scores.softmax(-1), v).flatten(1)
    x = x + y @ w[f"{at}.o.weight"].T
    h, at = norm(x, w["blocks.0.mlp.norm.weight"]), "blocks.0.mlp"
    up, gate = (h @ w[f"{at}.{name}.weight"].T for name in ("up", "gate"))
    x = x + (F.silu(gate) * up) @ w[f"{at}.down.weight"].T
    joined = norm(norm(x, w["final_norm.weight"]).view(-1, 24), w["projector.norm.weight"])
    up = F.gelu(joined @ w["projector.up.weight"].T + w["projector.up.bias"])
    return up @ w["projector.out.weight"].T + w["projector.out.bias"]


def test_rows_and_gradients_are_those_of_plain_torch() -> None:
    model, given = build("[*-]"), items()
    rows, loss = loss_of(model, given)
    loss.backward()
    tensors = model.tensors()
    weights = {
        name: place.read(tensors[place.parameter]).detach().clone().requires_grad_()
        for name, place in model.canonical().items()
    }
    expected = torch.cat([plain(weights, item) for item in given.patches_NI.split(LENGTHS)])
    (expected * probe(*expected.shape)).sum().backward()
    wanted = {name: weight.grad for name, weight in weights.items()}
    assert_near({"rows": rows.detach()}, {"rows": expected.detach()}, 1e-12)
    assert_near(gradients(model), wanted, 1e-10)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    "projector", [Projector(width=3, bias=False), Projector(width=3, activation="swiglu", ffn=4)]
)
def test_an_affine_or_gated_projector(projector: Projector) -> None:
    model = build("-", replace(ENCODER, projector=projector, group=1))
    joined = torch.randn(5, 12, dtype=torch.float64)
    assert model.projector is not None
    tensors = model.tensors()
    w = {name: place.read(tensors[place.parameter]) for name, place in model.canonical().items()}
    at, expected = "projector", joined
    if projector.ffn:
        up, gate = (joined @ w[f"{at}.{name}.weight"].T + w[f"{at}.{name}.bias"] for name in ("up", "gate"))
        expected = F.silu(gate) * up
    expected = F.linear(expected, w[f"{at}.out.weight"], w.get(f"{at}.out.bias"))
    torch.testing.assert_close(model.projector(joined), expected, rtol=1e-12, atol=1e-12)


# ------------------------------------------------------------------------------------------------ packs


@pytest.mark.parametrize("shape", [ENCODER, HYPER], ids=["plain", "hyper"])
@pytest.mark.parametrize("text", PATTERNS)
def test_items_of_a_pack_do_not_see_one_another(text: str, shape: Encoder) -> None:
    assert shape.moe is not None
    shape = replace(shape, dropout=0.2, moe=replace(shape.moe, aux_loss=0.0, z_loss=0.0))
    together, apart, given = build(text, shape), build(text, shape), items()
    rows, loss = loss_of(together, given)
    loss.backward()
    alone = []
    for place, patches in enumerate(given.patches_NI.split(LENGTHS)):
        one = replace(
            given,
            patches_NI=patches,
            lengths=LENGTHS[place : place + 1],
            grids=given.grids[place : place + 1],
            samples=given.samples[place : place + 1],
            numbers=given.numbers[place : place + 1],
        )
        alone.append(apart(one))
    (torch.cat(alone) * probe(*rows.shape)).sum().backward()
    assert_near({"rows": rows.detach()}, {"rows": torch.cat(alone).detach()}, 1e-11)
    assert_near(gradients(together), gradients(apart), 1e-10)


@pytest.mark.parametrize("shape", [ENCODER, HYPER], ids=["plain", "hyper"])
@pytest.mark.parametrize("text", PATTERNS)
def test_a_lane_without_items_has_no_rows_and_zero_gradients(text: str, shape: Encoder) -> None:
    model = build(text, shape)
    rows, loss = loss_of(model, items(()))
    assert rows.shape == (0, 20)
    loss.backward()
    for name, gradient in gradients(model).items():
        assert not gradient.count_nonzero(), name


def test_items_of_one_row() -> None:
    model = build("[*-]", replace(ENCODER, group=1))
    rows, _ = loss_of(model, items((1, 1, 1)))
    assert rows.shape == (3, 20)


@pytest.mark.parametrize("rows", [0, 1, 4, 7])
def test_ranks_hold_every_row_once_and_the_first_ones_most(rows: int) -> None:
    held = [own_rows(rows, rank, 4) for rank in range(4)]
    assert [row for part in held for row in part] == list(range(rows))
    assert len(held[0]) == -(-rows // 4)


def test_modules_of_one_run_have_masks_of_their_own() -> None:
    seeds = {module_seed(seed, name) for seed in (0, 1) for name in ("vision", "audio")}
    assert len(seeds) == 4
    assert all(0 <= seed < 2**63 for seed in seeds)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"lengths": (4, 2, 10, 5)}, r"item 1 of sample 6 has 5 patches: .* a multiple of group \(2\)"),
        ({"lengths": (4, 0, 10, 8)}, r"item 1 of sample 5 has 0 patches"),
        ({"lengths": (4, 2, 10, 8)}, r"patches are 22 x 7, but items of 24 patches with 7 numbers"),
    ],
)
def test_items_that_do_not_fit_are_named(change: dict[str, Any], message: str) -> None:
    with pytest.raises(DataError, match=message):
        build("-").prepare(replace(items(), **change))


# ------------------------------------------------------------------------------- schedules and recompute


@pytest.mark.parametrize("recomputed", [[], ["norm", "core", "activation", "experts"], ["block"], ["hyper"]])
@pytest.mark.parametrize("fine", [False, True])
@pytest.mark.parametrize("images", [False, True])
def test_phases_and_recompute_change_no_bit(recomputed: list[str], fine: bool, images: bool) -> None:
    shape = replace(HYPER if "hyper" in recomputed else ENCODER, dropout=0.1)
    if images:
        scale = None if "hyper" in recomputed else 0.6
        shape = replace(IMAGES, dropout=0.1, hyper=shape.hyper, layer_scale=scale)
    whole, phased = (build("[*-][ME]", shape) for _ in range(2))
    given = pictures() if images else items()
    rows, loss = loss_of(whole, given)
    loss.backward()
    phased.recompute(Replays(recomputed) if recomputed else None)
    form = declaration.form_of(phased.shape, "fp32", fine=fine)
    (chain,) = declaration.chains(phased.layout, form)
    context, tensors, losses = phased.prepare(given), dict[str, Tensor](), []
    for phase in chain.phases:
        written, found = nodes.run(phased, phase, context, tensors)
        tensors |= written
        losses += [] if found is None else [found]
    merged = nodes.merge_losses(phased, losses)
    again = (tensors["out"] * probe(*rows.shape)).sum() + sum(merged.aux.values(), torch.zeros(()))
    again.backward()
    assert torch.equal(tensors["out"], rows)
    assert torch.equal(again, loss)
    expected = gradients(whole)
    for name, gradient in gradients(phased).items():
        assert torch.equal(gradient, expected[name]), name


@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
@pytest.mark.parametrize("shape", [HYPER, IMAGES], ids=["hyper", "images"])
@pytest.mark.parametrize("text", ["[*-]|[ME]", "[*-]||-"])
def test_declared_units_hold_every_parameter_and_phases_use_every_unit(
    text: str, shape: Encoder, dtype: str
) -> None:
    model = build(text.replace("|", ""), shape)
    form = declaration.form_of(shape, dtype)
    layout = parse(text)
    units = declaration.units(layout, form)
    for name, _ in model.named_parameters():
        assert any(name.startswith(f"{unit.path}.") for unit in units), name
    chains = declaration.chains(layout, form)
    used = {path for chain in chains for phase in chain.phases for path in phase.units}
    assert used == {unit.path for unit in units}
    assert [IN in chain.phases[0].reads for chain in chains] == [False] + [True] * (len(chains) - 1)
    assert all(chain.phases[-1].writes == ("out",) for chain in chains)


@pytest.mark.parametrize("shape", [HYPER, IMAGES], ids=["hyper", "images"])
def test_flops_of_phases_add_up(shape: Encoder) -> None:
    model = build("[*-][M-]", shape)
    (chain,) = declaration.chains(model.layout, declaration.form_of(shape, "fp32"))
    assert sum(model.phase_flops(phase, 8) for phase in chain.phases) == model.flops(8)


def test_prefix_tokens_take_part_in_all_but_the_projector() -> None:
    with_prefix, without = (build("[*-]", replace(IMAGES, prefix=prefix)) for prefix in (3, 0))
    assert with_prefix.projector is not None
    head = with_prefix.projector.flops(2)
    assert with_prefix.flops(8) - head == without.flops(11) - without.projector.flops(2)  # type: ignore[union-attr]


# ------------------------------------------------------------------------------------------------ images


def test_images_of_a_pack_do_not_see_one_another() -> None:
    """Each has its own prefix tokens, positions and window."""
    together, apart, given = build("[*-][*-]", IMAGES), build("[*-][*-]", IMAGES), pictures()
    rows, loss = loss_of(together, given)
    loss.backward()
    parts = zip(given.patches_NI.split(given.lengths), given.grids, given.samples, given.numbers, strict=True)
    alone = [
        apart(
            replace(
                given, patches_NI=each, lengths=[len(each)], grids=[grid], samples=[sample], numbers=[number]
            )
        )
        for each, grid, sample, number in parts
    ]
    (torch.cat(alone) * probe(*rows.shape)).sum().backward()
    assert_near({"rows": rows.detach()}, {"rows": torch.cat(alone).detach()}, 1e-11)
    assert_near(gradients(together), gradients(apart), 1e-10)


def test_prefix_tokens_stand_before_the_patches_of_every_item() -> None:
    """They are as they were learned, without the bias of patches and without positions."""
    shape = replace(IMAGES, positions=None, pixels=Pixels(patch=1), input=3)
    model, grids = build("-", shape), ((2, 2), (2, 4))
    given = items([4, 8], 3, grids=grids)
    weights = {name: weight.detach() for name, weight in model.named_parameters()}
    bias = torch.randn(12, dtype=torch.float64)
    model.get_parameter("patches.projection.bias").data.copy_(bias)
    projected = given.patches_NI @ weights["patches.projection.weight"].T + bias
    first, second = projected.split([4, 8])
    prefix = weights["patches.prefix"]
    with torch.no_grad():
        found = model.embed(model.prepare(given))
    torch.testing.assert_close(found[0], torch.cat([prefix, first, prefix, second]), rtol=1e-12, atol=1e-12)


def test_a_lane_without_images_has_no_rows_and_zero_gradients() -> None:
    model = build("[*-]", IMAGES)
    rows, loss = loss_of(model, pictures(()))
    assert rows.shape == (0, 20)
    loss.backward()
    for name, gradient in gradients(model).items():
        assert not gradient.count_nonzero(), name


def test_jitter_depends_on_seed_step_and_item_and_is_off_in_evaluation() -> None:
    model, given = build("[*-]", IMAGES), pictures()
    plain = build("[*-]", replace(IMAGES, positions=replace(IMAGES.positions, jitter=False)))
    jittered = model(given)
    assert torch.equal(model(given), jittered)
    for change in ({"seed": 5}, {"step": 4}, {"samples": [1, 2, 3, 4]}, {"numbers": [1, 0, 1, 0]}):
        assert not torch.allclose(model(replace(given, **change)), jittered)  # type: ignore[arg-type]
    evaluated = plain(given)
    assert not torch.allclose(evaluated, jittered)
    assert torch.equal(model(replace(given, training=False)), evaluated)
    model.get_parameter("patches.positions").requires_grad_(False)
    assert torch.equal(model(given), evaluated), "frozen positions are read as in evaluation"


def test_initial_factors_positions_and_tokens() -> None:
    model = build("[*-]", replace(IMAGES, hidden=64, prefix=50, positions=PositionTable(rows=30, columns=30)))
    tensors = {name: weight.detach() for name, weight in model.named_parameters()}
    assert float(tensors["patches.positions"].std()) == pytest.approx(1 / 8, rel=0.02)
    assert float(tensors["patches.prefix"].std()) == pytest.approx(1 / 8, rel=0.05)
    scale = model.canonical()["blocks.0.attention.scale.weight"]
    assert scale.read(tensors[scale.parameter]).tolist() == pytest.approx([0.6] * 64)
    assert not scale.decays


@pytest.mark.parametrize(
    ("grid", "message"),
    [
        ((1, 24), r"item 1 of sample 5 is 1 x 24 patches: the encoder joins 2 x 2 of them .* multiples of 2"),
        ((8, 3), r"item 1 of sample 5 is 8 x 3 patches"),
        ((4, 4), r"item 1 of sample 5 has 24 patches, but is said to be 4 x 4 of them"),
    ],
)
def test_shapes_that_do_not_fit_are_named(grid: tuple[int, int], message: str) -> None:
    given = pictures()
    with pytest.raises(DataError, match=message):
        build("-", IMAGES).prepare(replace(given, grids=[given.grids[0], grid, *given.grids[2:]]))


# ------------------------------------------------------------------------------------------------ config


def test_a_sound_encoder_has_no_problems() -> None:
    assert list(ENCODER.problems("model")) == []


@pytest.mark.parametrize(
    ("change", "field"),
    [
        ({"input": 0}, "model.input"),
        ({"group": 0}, "model.group"),
        ({"pattern": "*-/*"}, "model.pattern"),
        ({"projector": Projector(width=0)}, "model.projector.width"),
        ({"projector": Projector(width=1, ffn=-1)}, "model.projector.ffn"),
        ({"projector": Projector(width=1, norm_eps=0.0)}, "model.projector.norm_eps"),
        ({"prefix": -1}, "model.prefix"),
        ({"layer_scale": float("nan")}, "model.layer_scale"),
        ({"layer_scale": 1.0, "hyper": HYPER.hyper}, "model.layer_scale"),
        ({"positions": PositionTable(rows=0), "group": 1}, "model.positions.rows"),
        ({"positions": PositionTable(columns=0), "group": 4}, "model.positions.columns"),
        ({"positions": PositionTable()}, "model.group"),
        ({"pixels": Pixels(patch=2), "group": 1}, "model.input"),
        ({"pixels": Pixels(patch=0), "group": 1, "input": 0}, "model.pixels.patch model.input"),
        # What a patch should have cannot be said yet.
        ({"pixels": Pixels(patch=0), "group": 1, "input": 12}, "model.pixels.patch"),
        (
            {"pixels": Pixels(patch=2, frames=2, channels=1), "group": 1, "input": 8},
            "model.pixels.mean model.pixels.std",
        ),
        ({"pixels": Pixels(patch=2, channels=2), "group": 1, "input": 8}, "model.pixels.channels"),
        ({"pixels": Pixels(patch=2, std=(1.0, 0.0, 1.0)), "group": 1, "input": 12}, "model.pixels.std[1]"),
        ({"attention": Attention(heads=2, kv_heads=2, head_dim=4, window=5)}, "model.attention.window"),
        ({"moe": Moe(experts=4, top_k=2, ffn=2, capacity_factor=1.0)}, "model.moe.capacity_factor"),
        ({"moe": Moe(experts=4, top_k=2, ffn=2, sequence_aux_loss=1.0)}, "model.moe.sequence_aux_loss"),
        ({"moe": Moe(experts=4, top_k=2, ffn=2, jitter=0.1)}, "model.moe.jitter"),
        ({"moe": Moe(experts=4, top_k=2, ffn=2, routing="round_robin")}, "model.moe.routing"),
    ],
)
def test_problems_name_the_field(change: dict[str, Any], field: str) -> None:
    found = {problem.field for problem in replace(ENCODER, **change).problems("model")}
    assert found == set(field.split())
