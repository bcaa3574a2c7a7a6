"""Models with several residual streams: a plain residual net where alpha is 0, and what holds for any model.

What layers and kernels do by themselves is in `tests/nn/test_hyper_connection.py` and `tests/kernels`, what
ranks do in `tests/topology`, nodes in `tests/engine/test_hyper.py`.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from braid.architecture import HyperConnections, Model
from braid.config import Run
from braid.errors import ConfigError
from braid.model.context import MicroBatch
from braid.model.generate import generate
from braid.model.language import LanguageModel, Losses
from braid.model.mtp import targets
from braid.nn.hyper_connection import HyperConnection, HyperExit
from braid.planning.plan import check, plan
from tests.model.cases import assert_near, batch, build, canonical_grads
from tests.model.test_hybrid import HYBRID
from tests.runs import small_run

TINY_EPS = 1e-13
"""What norms and mixing add, where it is to make no difference."""


def streamed(streams: int = 3, shape: Model = HYBRID, **hyper: Any) -> Model:
    return replace(shape, hyper=HyperConnections(streams=streams, **hyper))


def trained(model: LanguageModel, given: MicroBatch) -> Losses:
    """Losses, with gradients left in the model."""
    losses = model(given)
    losses.share(20, [20] * len(model.layout.mtp)).backward()
    return losses


# --------------------------------------------------------------------------------------- a plain net


def plain_and_streamed(text: str, shape: Model, hyper: HyperConnections) -> tuple[LanguageModel, LanguageModel]:
    """The same weights in a plain residual net, and in one with streams that nothing is projected from."""
    assert shape.moe is not None
    moe = replace(shape.moe, aux_loss=0.1, score="sigmoid", selection_bias=True)
    shape = replace(shape, norm_eps=TINY_EPS, dropout=0.2, moe=moe)
    plain, several = build(text, shape), build(text, replace(shape, hyper=hyper), seed=2)
    target = several.tensors()
    with torch.no_grad():
        for name, weight in plain.tensors().items():
            if name.endswith(".projection.weight"):
                for part, half in zip(("embedding", "hidden"), weight.chunk(2, 1), strict=True):
                    target[name.replace(".projection", f".{part}_projection")].copy_(half)
            else:
                target[name].copy_(weight)
        for module in several.modules():
            if isinstance(module, HyperConnection | HyperExit):
                module.alpha.zero_()
    return plain, several


EVERY_KIND = ("[M-][*E][G-]E", "[+E]-+", "*-")
FORMS = (
    HyperConnections(streams=1, eps=TINY_EPS),
    HyperConnections(streams=2, eps=TINY_EPS, exit="mean"),
    HyperConnections(streams=4, eps=TINY_EPS, sinkhorn_steps=1),
)


@pytest.mark.parametrize("hyper", FORMS, ids=lambda hyper: f"{hyper.streams}-{hyper.exit}")
@pytest.mark.parametrize("text", EVERY_KIND)
def test_with_alpha_zero_a_model_is_a_plain_residual_net(text: str, hyper: HyperConnections) -> None:
    """Losses and gradients of all that both have: every kind of layer, experts, dropout, padding."""
    plain, several = plain_and_streamed(text, HYBRID, hyper)
    given = batch([[9, 5], [11]])
    wanted, found = trained(plain, given), trained(several, given)
    torch.testing.assert_close(found.loss_sum, wanted.loss_sum, rtol=1e-9, atol=0.0)
    for name, value in wanted.aux.items():
        torch.testing.assert_close(found.aux[name], value, rtol=1e-9, atol=0.0)
    grads, expected = canonical_grads(several), canonical_grads(plain)
    assert_near({name: grads[name] for name in expected}, expected, 1e-8)


@pytest.mark.parametrize("norm", ["rms", "layer"])
def test_with_alpha_zero_depths_predict_as_those_of_a_plain_net(norm: Any) -> None:
    """A depth reads streams as they leave the blocks, and a plain one the hidden state behind a norm: that is
    the same to its own norm as long as the other has not learned. It alone is trained differently."""
    text, hyper = "[M-][*E]/*E/*E", HyperConnections(streams=3, eps=TINY_EPS)
    plain, several = plain_and_streamed(text, replace(HYBRID, norm=norm), hyper)
    given = batch([[9, 5], [11]])
    wanted, found = trained(plain, given), trained(several, given)
    for one, other in zip(found.mtp, wanted.mtp, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-9, atol=0.0)
    grads, expected = canonical_grads(several), canonical_grads(plain)
    for depth in "01":
        halves = [grads[f"mtp.{depth}.{part}_projection.weight"] for part in ("embedding", "hidden")]
        grads[f"mtp.{depth}.projection.weight"] = torch.cat(halves, 1)
    between = {name for name in expected if name.startswith(("final_norm.", "mtp.0.final_norm."))}
    same = expected.keys() - between
    assert_near({name: grads[name] for name in same}, {name: expected[name] for name in same}, 1e-8)


# --------------------------------------------------------------------------------------------- depths


def test_every_depth_equals_its_definition_in_plain_torch() -> None:
    """A stream after the other, with streams that differ."""
    model, whole = build("[*-]/*E/*E", streamed(3, replace(HYBRID, mtp_loss=0.6))), batch([[7, 6], [13]])
    assert model.embedding is not None
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if ".connection." in name or "exit." in name:
                parameter.normal_()
    losses, context = model(whole), model.prepare(whole)
    streams = model.stack(model.embed(context), model.segments, context)
    assert not torch.allclose(streams[:, :, 0], streams[:, :, 1], rtol=0.1)
    for depth, module in enumerate(model.mtp.values()):
        shown = targets(whole, depth)
        embedded = (
            module.embedding_norm(model.embedding(shown.tokens_BT)) @ module.embedding_projection.weight.T
        )
        before = [module.hidden_norm(each) @ module.hidden_projection.weight.T for each in streams.unbind(2)]
        entered = torch.stack([each + embedded for each in before], 2)
        streams = module.blocks["0"](entered, model.prepare(whole))
        hidden = module.final_norm(_left(streams, module.exit))
        scores = (hidden @ model.embedding.weight.T).flatten(0, 1)
        each = F.cross_entropy(scores, shown.labels_BT.flatten(), reduction="none")
        wanted = each[shown.loss_mask_BT.flatten()].sum()
        torch.testing.assert_close(losses.mtp[depth][0], wanted, rtol=1e-11, atol=1e-11)


def _left(streams_BtSC: Tensor, leave: HyperExit) -> Tensor:
    """One stream out of several, by the formula."""
    flat = streams_BtSC.flatten(2)
    length = (flat.square().mean(-1, keepdim=True) + HYBRID.norm_eps).sqrt()
    weights_BtS = torch.sigmoid(leave.alpha * (flat @ leave.weight.T) / length + leave.bias) + 1e-6
    return (weights_BtS.unsqueeze(-1) * streams_BtSC).sum(2)


# ----------------------------------------------------------------------------------------- one and all


@pytest.mark.parametrize("streams", [1, 2, 5])
@pytest.mark.parametrize("tied", [True, False])
def test_every_weight_learns(streams: int, tied: bool) -> None:
    """The ways around every layer and out of every depth, also where there is but one stream."""
    model = build("[M-][G*E]/*E/*E", streamed(streams, replace(HYBRID, tied=tied)))
    trained(model, batch([[20, 17], [30]]))
    ways = [name for name, _ in model.named_parameters() if ".connection." in name or "exit." in name]
    assert len(ways) == 3 * (len(model.layout.layers) + 4 + 3)
    for name, parameter in model.named_parameters():
        assert parameter.grad is not None, name
        assert parameter.grad.any() or ".experts." in name, name


@pytest.mark.parametrize("streams", [1, 3])
def test_rows_of_padding_alone_change_nothing(streams: int) -> None:
    assert HYBRID.moe is not None
    shape = streamed(streams, replace(HYBRID, moe=replace(HYBRID.moe, aux_loss=0.5)))
    padded, bare = build("[M*E][G-]/*E", shape), build("[M*E][G-]/*E", shape)
    for model, rows in ((padded, [[12], [], []]), (bare, [[12]])):
        given = batch(rows)
        for name in ("tokens_BT", "labels_BT", "loss_mask_BT"):
            getattr(given, name)[:1] = getattr(batch([[12]]), name)
        losses = trained(model, given)
        assert losses.loss_sum.isfinite()
    assert_near(canonical_grads(padded), canonical_grads(bare), 1e-12)


def test_a_micro_batch_of_padding_alone_costs_nothing() -> None:
    model = build("[M*E][G-]/*E", streamed())
    losses = trained(model, _padding(batch([[7], [7]])))
    assert losses.loss_sum.item() == 0
    assert int(losses.token_count) == 0
    assert not any(grad.any() for grad in canonical_grads(model).values())


def _padding(given: MicroBatch) -> MicroBatch:
    """Nothing else of it is left."""
    nowhere = torch.full_like(given.documents_BT, -1)
    return replace(given, documents_BT=nowhere, loss_mask_BT=torch.zeros_like(given.loss_mask_BT))


# ------------------------------------------------------------------------------------------- generation


@pytest.mark.parametrize(("text", "streams"), [("[M*E][G-]/*E", 3), ("[G+E]M", 2), ("*-", 1)])
def test_cached_decoding_equals_the_forward_without_cache(text: str, streams: int) -> None:
    model = build(text, streamed(streams))
    tokens = torch.randint(0, 17, (2, 15), generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        full = model.logits(model.prepare(MicroBatch.of_tokens(tokens)))
        caches, parts, seen = model.new_caches(2), [], 0
        for size in (6, 1, 1, 3, 1, 3):
            unseen = MicroBatch.of_tokens(tokens[:, seen : seen + size], start=seen)
            parts.append(model.logits(model.prepare(unseen, caches)))
            seen += size
    torch.testing.assert_close(torch.cat(parts, 1), full, rtol=1e-12, atol=1e-12)
    rows = generate(model, tokens[:, :4], 7, temperature=0.0)
    wanted = model.logits(model.prepare(MicroBatch.of_tokens(rows))).argmax(-1)
    assert torch.equal(rows[:, 4:], wanted[:, 3:-1])


# -------------------------------------------------------------------------------------------- problems


def run_with(hyper: HyperConnections | None = None, **train: Any) -> Run:
    run = small_run()
    return replace(run, model=replace(run.model, hyper=hyper), train=replace(run.train, **train))


FOUR = HyperConnections()
GUARDS: dict[str, tuple[Run, Run]] = {
    "model.hyper.streams": (run_with(replace(FOUR, streams=0)), run_with(replace(FOUR, streams=1))),
    "model.hyper.sinkhorn_steps": (
        run_with(replace(FOUR, sinkhorn_steps=0)),
        run_with(replace(FOUR, sinkhorn_steps=1)),
    ),
    "model.hyper.eps": (run_with(replace(FOUR, eps=0.0)), run_with(replace(FOUR, eps=1e-30))),
    "model.hyper.exit": (
        run_with(replace(FOUR, exit="sum")),  # type: ignore[arg-type]
        run_with(replace(FOUR, exit="mean")),
    ),
    "train.recompute": (run_with(recompute=("hyper",)), run_with(FOUR, recompute=("hyper",))),
    "train.recompute_span": (
        run_with(FOUR, recompute=("hyper",), recompute_span=-1),
        run_with(FOUR, recompute=("hyper",), recompute_span=0),
    ),
}


@pytest.mark.parametrize("field", GUARDS)
def test_what_cannot_be_is_refused_and_its_neighbour_is_not(field: str) -> None:
    refused, allowed = GUARDS[field]
    with pytest.raises(ConfigError, match=field.replace(".", r"\.")):
        plan(refused, 1)
    (problem,) = check(refused, 1)
    assert problem.field == field
    assert problem.remedy
    assert plan(allowed, 1).run == allowed


def test_all_of_a_plain_model_may_be_recomputed() -> None:
    """`full` asks for whatever there is, `hyper` for what there must be."""
    assert check(run_with(recompute=("full",)), 1) == []
    (problem,) = check(run_with(recompute=("norm", "hyper")), 1)
    assert problem.remedy.startswith("norm, or")
