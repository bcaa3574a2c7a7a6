"""The work of a rank: products and kernels have the operations that modules count, however ranks share them."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from itertools import product
from types import MappingProxyType
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from braid import encoders, kernels, pattern
from braid.architecture import Attention, DeltaNet, HyperConnections, LatentAttention, Mamba2, Mlp, Model, Moe
from braid.distributed.collectives import ALONE, Group, Groups
from braid.model.encoder import EncoderModel
from braid.model.language import LanguageModel
from braid.nn.cost import Workload
from braid.nn.gated_norm import GateThenNorm
from braid.nn.head_partition import HeadPartition, Part
from braid.nn.hyper_connection import HyperMean, expand, expand_work
from braid.nn.layer_scale import LayerScale
from braid.nn.moe import token_dispatcher
from braid.nn.moe.balance import balance_work, measure_balance
from braid.nn.moe.router import Router, route
from braid.nn.moe.token_ids import Tokens
from braid.nn.qk_norm import QkNormOverHeads
from braid.nn.work import Kernel, Moved, Pass, Piece, Product, Work
from tests.model.encoder_cases import HYPER, IMAGES
from tests.nn.op_counts import Counts, forward_and_backward

ROWS, TOKENS = 2, 64
WORKLOAD = Workload(rows=ROWS, tokens=TOKENS, dtype=torch.bfloat16)
MOE = Moe(experts=8, top_k=3, ffn=24, shared_ffn=16, shared_gate=True, latent=20, aux_loss=0.1, z_loss=0.1)
MODEL = Model(
    pattern="[*-]",
    hidden=32,
    vocab=261,
    tied=False,
    attention=Attention(heads=8, kv_heads=4, head_dim=8, qk_norm=True, gate=True),
    latent_attention=LatentAttention(heads=8, q_rank=6, kv_rank=10, nope_dim=3, rope_dim=4, v_dim=5),
    mamba2=Mamba2(heads=8, head_dim=16, state=16, groups=8),
    delta_net=DeltaNet(key_heads=8, value_heads=8, key_dim=16, value_dim=16),
    mlp=Mlp(ffn=48),
    moe=MOE,
)


def imagined(tp: int = 1, cp: int = 1, ep: int = 1, etp: int = 1, rank: int = 0) -> Groups:
    """The groups of a rank of tp, and of the first ranks of all others; none can communicate."""

    def group(name: str, size: int, at: int = 0) -> Group:
        return ALONE if size == 1 else Group(name=name, size=size, rank=at, handle=None)

    runs = {length: group("run", length, rank % length) for length in range(2, tp) if tp % length == 0}
    return Groups(
        tp=group("tp", tp, rank),
        cp=group("cp", cp),
        tp_cp=group("tp_cp", tp * cp),
        slab=group("slab", max(tp * cp, ep * etp)),
        ep=group("ep", ep),
        etp=group("etp", etp),
        ep_etp=group("ep_etp", ep * etp),
        dispatch=group("dispatch", ep * etp),
        tp_runs=MappingProxyType(runs),
    )


def build(
    shape: Model, groups: Groups = Groups(), dispatcher: Any = "auto", segments: tuple[int, ...] | None = None
) -> LanguageModel:
    layout = pattern.parse(shape.pattern)
    chosen = kernels.choose(shape, layout.kinds(), torch.device("cpu"), torch.bfloat16)
    sends = None
    if shape.moe is not None:
        sends = token_dispatcher.choose(shape.moe, shape.hidden, groups, dispatcher).function
    on: dict[str, Any] = {"groups": groups, "dispatcher": sends, "segments": segments}
    return LanguageModel(shape, layout, chosen, device=torch.device("meta"), dtype=torch.bfloat16, **on)


def total(works: dict[str, dict[str, Work]]) -> Work:
    return sum((work for phases in works.values() for work in phases.values()), Work())


def attention_flops(work: Work, which: Pass) -> int:
    kernels = [piece.what for piece in work.passes()[which] if isinstance(piece.what, Kernel)]
    return sum(kernel.flops for kernel in kernels if kernel.name == "attention")


TEXTS = ("[*-]", "[+E]", "[M-]", "[G-]E", "*-|*E/*E", "[*-][*E]/*-/*-")
SPLITS = ((1, 1, 1, 1), (2, 1, 1, 1), (1, 2, 1, 1), (4, 2, 4, 2), (2, 2, 4, 1), (2, 1, 1, 2))
VARIANTS: dict[str, dict[str, Any]] = {
    "": {},
    "window": {
        "attention": Attention(
            heads=8, kv_heads=4, head_dim=8, window=7, qk_norm=True, qk_norm_over="all", positions="none"
        )
    },
    "hyper": {"hyper": HyperConnections(streams=3, sinkhorn_steps=2), "residual_scale": 1.0},
    "hyper mean": {"hyper": HyperConnections(streams=3, sinkhorn_steps=2, exit="mean")},
    "layer norm": {
        "norm": "layer",
        "mlp": Mlp(ffn=48, activation="gelu_tanh", bias=True),
        "residual_scale": 0.5,
    },
    "bias": {"moe": replace(MOE, latent=None, bias=True, selection_bias=True, score="sigmoid"), "tied": True},
}


@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("text", TEXTS)
def test_forward_has_the_operations_that_modules_count(text: str, variant: str) -> None:
    shape = replace(MODEL, pattern=text, **VARIANTS[variant])
    for tp, cp, ep, etp in SPLITS:
        model = build(shape, imagined(tp, cp, ep, etp))
        work = total(model.works(WORKLOAD))
        assert work.flops("forward") == ROWS * model.flops(TOKENS), (tp, cp, ep, etp)


@pytest.mark.parametrize("text", TEXTS)
def test_every_product_has_two_gradients_with_as_many_operations(text: str) -> None:
    work = total(build(replace(MODEL, pattern=text), imagined(2, 2, 4, 1)).works(WORKLOAD))

    def products(which: Pass) -> int:
        return sum(
            piece.what.flops
            for runs_in, pieces in work.passes().items()
            for piece in pieces
            if isinstance(piece.what, Product) and (piece.counts_as or runs_in) == which
        )

    assert products("forward") == products("backward") == products("wgrad") > 0


def test_the_backward_of_attention_computes_scores_and_their_gradient_twice() -> None:
    plain = total(build(MODEL).works(WORKLOAD))
    assert 2 * attention_flops(plain, "backward") == 7 * attention_flops(plain, "forward")
    latent = total(build(replace(MODEL, pattern="[+-]")).works(WORKLOAD))
    forward, backward = (attention_flops(latent, which) for which in ("forward", "backward"))
    assert backward * (7 + 5) == forward * (4 * 7 + 3 * 5)


@pytest.mark.parametrize("variant", ["", "hyper", "layer norm", "bias"])
@pytest.mark.parametrize("text", TEXTS)
def test_ranks_have_the_operations_of_the_whole_model(text: str, variant: str) -> None:
    """All of them, the head included: 261 ids are not a multiple of the ranks that share them."""
    shape = replace(MODEL, pattern=text, **VARIANTS[variant])
    whole, count = build(shape).flops(TOKENS), len(pattern.parse(text).segments)
    for tp, cp, ep, etp in ((2, 1, 2, 1), (4, 2, 4, 2), (1, 4, 2, 2)):
        flops = sum(
            cp * build(shape, imagined(tp, cp, ep, etp, rank), segments=(segment,)).flops(TOKENS)
            for rank, segment in product(range(tp), range(count))
        )
        assert flops == whole, (tp, cp, ep, etp)


@pytest.mark.parametrize("dispatcher", ["all_to_all", "all_gather"])
def test_uneven_experts_have_more_rows(dispatcher: str) -> None:
    model = build(replace(MODEL, pattern="[*E]"), imagined(2, 1, 2, 1), dispatcher)
    even, uneven = (model.works(WORKLOAD, load)["blocks.0"] for load in (1.0, 1.5))
    assert 2 * uneven["experts"].flops("forward") == 3 * even["experts"].flops("forward")
    assert {kind for kind in even if even[kind] != uneven[kind]} == {"experts"}


def test_products_of_experts_are_grouped() -> None:
    """2 · 64 tokens of 4 ranks choose 3 of 8 experts each; one of them has 24 ffn channels for gate and up."""
    model = build(replace(MODEL, pattern="E"), imagined(2, 2, 4, 1))
    products = [
        piece.what
        for piece in model.works(WORKLOAD)["blocks.0"]["experts"].forward
        if piece.region == "experts"
    ]
    rows = 2 * 64 // 4 * 3
    assert products[:2] == [
        Product(rows // 2, 48, 20, 2, 2 * rows * 48 * 20),
        Product(rows // 2, 20, 24, 2, 2 * rows * 20 * 24),
    ]


def test_parts_and_phases_are_those_of_a_schedule() -> None:
    works = build(replace(MODEL, pattern="-|*E/*E")).works(WORKLOAD)
    moe = {"mix", "dispatch", "experts", "combine", "post"}
    assert {part: set(phases) for part, phases in works.items()} == {
        "embedding": {"embed"},
        "blocks.0": {"mix"},
        "blocks.1": {"mix"},
        "blocks.2": moe,
        "head": {"final_norm", "head"},
        "mtp.0": {"enter", "final_norm", "head"},
        "mtp.0.blocks.0": moe,
    }


def test_calls_have_the_phase_and_direction_that_they_run_in() -> None:
    """What a block sends again has the phase of its first time."""
    model = build(replace(MODEL, pattern="*E/*-"), imagined(2, 2, 4, 1))
    workload = replace(WORKLOAD, recompute=frozenset({"block"}))
    phases: dict[str, set[str]] = {}
    directions: dict[str, set[str]] = {}
    for cost in model.costs(workload).values():
        for call in cost.calls:
            phases.setdefault(call.purpose, set()).add(call.phase)
            directions.setdefault(call.purpose, set()).add(call.direction)
    assert phases["dispatch of rows"] == phases["dispatch of probabilities"] == {"dispatch"}
    assert phases["combine of rows"] == {"combine"}
    assert phases["dispatch of row counts"] == phases["attention tokens"] == {"mix"}
    assert phases["embeddings"] == {"embed", "enter"}
    assert phases["head tokens"] == phases["sums of logits"] == {"head"}
    assert directions["dispatch of rows"] == {"forward", "backward", "recompute"}
    assert directions["combine of rows"] == {"forward", "backward"}
    assert directions["dispatch of row counts"] == {"forward"}


def test_what_regions_replay() -> None:
    block = build(replace(MODEL, pattern="[*-]")).works(WORKLOAD)["blocks.0"]["mix"]
    norms = block.replayed({"norm"})
    assert [piece.what for piece in norms] == [Moved(ROWS * TOKENS * (2 * 32 * 2 + 4))] * 2
    (activation,) = block.replayed({"activation"})
    assert activation.what == Moved(ROWS * TOKENS * 48 * 3 * 2)
    core = block.replayed({"core"})
    assert [piece.what.name for piece in core if isinstance(piece.what, Kernel)] == ["attention"]
    assert not any(isinstance(piece.what, Product) for piece in (*norms, activation, *core))


# -------------------------------------------------------------------------------------------- the head


@pytest.mark.parametrize("tokens", [16, 64])
def test_the_head_computes_gradients_where_its_kernel_does(tokens: int) -> None:
    """With fewer tokens than channels, backward computes the logits again, which does not count."""
    head = build(MODEL).works(replace(WORKLOAD, rows=1, tokens=tokens))["head"]["head"]
    logits = 2 * tokens * 32 * 261
    assert [head.flops(which) for which in ("forward", "backward", "wgrad")] == [logits] * 3
    products = {
        name: [p for p in pieces if isinstance(p.what, Product)] for name, pieces in head.passes().items()
    }
    assert {name: len(found) for name, found in products.items()} == {
        "forward": 3 if tokens > 32 else 1,
        "backward": 0 if tokens > 32 else 3,
        "wgrad": 0,
    }


# ------------------------------------------------------------------------------------------- encoders


@pytest.mark.parametrize(
    "shape", [HYPER, IMAGES, replace(IMAGES, final_norm=True)], ids=["hyper", "images", "norm"]
)
@pytest.mark.parametrize(("tp", "cp"), [(1, 1), (2, 1), (2, 2)])
def test_a_pack_has_the_operations_of_its_items(shape: encoders.Encoder, tp: int, cp: int) -> None:
    """Items of 16 patches, with prefix tokens where the encoder has them; attention stays within items."""
    layout, dtype = pattern.parse("[*E]-"), torch.bfloat16
    chosen = kernels.choose(shape, layout.kinds(), torch.device("cpu"), dtype)
    shape = replace(shape, pattern="[*E]-", prefix=4 if shape.prefix else 0)
    on: dict[str, Any] = {"groups": imagined(tp, cp), "device": torch.device("meta"), "dtype": dtype}
    model = EncoderModel(shape, layout, chosen, **on)
    workload = Workload(rows=1, tokens=3 * (16 + shape.prefix), items=3, dtype=dtype)
    works = model.works(workload)
    assert total(works).flops("forward") == 3 * model.flops(16)
    assert set(works["head"]) == {"head"} | ({"final_norm"} if shape.final_norm or shape.hyper else set())


# ------------------------------------------------------------------------------- modules made of torch ops


def leaf(*sizes: int, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    return torch.randn(*sizes, dtype=dtype).requires_grad_()


def filled(module: nn.Module) -> Any:
    for parameter in module.parameters():
        nn.init.ones_(parameter)
    return module


def both_passes(work: Work) -> list[Counts]:
    return [
        Counts(sum(piece.launches for piece in pieces), sum(_bytes(piece) for piece in pieces))
        for pieces in (work.forward, work.backward)
    ]


def _bytes(piece: Piece) -> int:
    assert isinstance(piece.what, Moved)
    return piece.what.bytes


def _total(losses: dict[str, Tensor]) -> Tensor:
    first, *others = losses.values()
    return sum(others, first)


ROW = Workload(rows=2, tokens=256, dtype=torch.bfloat16)
PARTS = (Part("q", 32), Part("k", 32, shared=True), Part("v", 32, shared=True))


def composed() -> dict[str, tuple[Work, Any, tuple[Tensor, ...]]]:
    """Modules that a GPU runs as the same ops of torch as a CPU."""
    tp, partition = imagined(2).tp, HeadPartition(all_groups=4, all_heads=8, ranks=Groups())
    scale = filled(LayerScale(128, 0.1, dtype=torch.bfloat16))
    norms = filled(QkNormOverHeads(partition, PARTS, 1e-5, dtype=torch.bfloat16))
    gated = filled(GateThenNorm(128, 1, 1e-5, tp=tp, sharers=tp, dtype=torch.bfloat16))
    mean = HyperMean(HyperConnections(streams=4, exit="mean"), 128)
    return {
        "LayerScale": (scale.work(ROW, 512), scale, (leaf(2, 256, 128),)),
        "QK-norm over heads": (norms.work(ROW), norms, (leaf(2, 256, 4, 128),)),
        "gated norm over ranks": (gated.work(ROW, 512), gated, (leaf(2, 256, 128), leaf(2, 256, 1, 128))),
        "mean of streams": (mean.work(ROW), mean, (leaf(2, 256, 4, 128),)),
        "streams": (expand_work(ROW, 512, 128, 4), partial(expand, streams=4), (leaf(2, 256, 128),)),
    }


@pytest.mark.parametrize("name", composed())
def test_ops_of_torch_are_counted_one_by_one(name: str) -> None:
    """Launches are those that run, and bytes what these ops read and write."""
    work, module, inputs = composed()[name]
    for said, real in zip(both_passes(work), forward_and_backward(module, *inputs), strict=True):
        assert said.launches == real.launches
        assert said.bytes == pytest.approx(real.bytes, rel=0.02)


@pytest.mark.parametrize(
    "shape",
    [
        Moe(experts=64, top_k=6, ffn=24, aux_loss=0.1),
        Moe(experts=64, top_k=6, ffn=24, aux_loss=0.1, z_loss=0.1, normalize_top_k=False),
        Moe(experts=64, top_k=6, ffn=24, score="sigmoid", selection_bias=True, sequence_aux_loss=0.1),
    ],
    ids=lambda shape: shape.score,
)
def test_the_choice_of_experts_is_counted_op_by_op(shape: Moe) -> None:
    """But for top-k, which one kernel computes on a GPU: here it sorts, and copies what it takes."""
    router = Router(shape, 8, dtype=torch.bfloat16)
    tokens = Tokens(sample_B=torch.arange(2), position_T=torch.arange(256), training=True)
    logits_NE, bias_E = leaf(512, 64, dtype=torch.float32), torch.zeros(64) if shape.selection_bias else None

    def choose(logits_NE: Tensor) -> tuple[Tensor, Tensor]:
        routing = route(logits_NE, shape, tokens, bias_E)
        return routing.probs_NS, _total(measure_balance(routing, shape, tokens).losses)

    scores = 512 * 64 * 4
    work = router._choice_work(scores, 512 * 6 * 4) + balance_work(shape, ROW, 4, Groups())
    said = both_passes(work)
    real = forward_and_backward(choose, logits_NE, without=("aten.sort", "aten.clone", "aten.stack"))
    top_k = 1 + (shape.score == "sigmoid")
    assert said[0].launches == pytest.approx(real[0].launches + top_k, abs=3)
    assert said[1].launches == pytest.approx(real[1].launches, abs=4)
    assert said[0].bytes == pytest.approx(real[0].bytes + top_k * scores, rel=0.2)
    assert said[1].bytes == pytest.approx(real[1].bytes, rel=0.2)


# ----------------------------------------------------------------------------------------- closed forms


def test_works_add_up_in_order() -> None:
    first, second = (Piece(Moved(size)) for size in (1, 2))
    both = Work((first,), (first,)) + Work((second,), (second,), (second,))
    assert both == Work((first, second), (second, first), (second,))
    assert Work((first,)).times(3).forward == (first,) * 3


def test_a_rank_of_tp_has_its_share_of_a_product() -> None:
    """The MLP reads the tokens of both tp ranks of its cp rank, and has half the ffn channels."""
    work = build(replace(MODEL, pattern="-"), imagined(2, 2)).works(WORKLOAD)["blocks.0"]["mix"]
    tokens = ROWS * TOKENS // 2
    assert [p.what for p in work.forward if isinstance(p.what, Product)] == [
        Product(tokens, 48, 32),
        Product(tokens, 32, 24),
    ]
    assert [p.what for p in work.wgrad] == [Product(32, 24, tokens), Product(48, 32, tokens)]
