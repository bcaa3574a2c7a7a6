"""Several residual streams, overlapped and recomputed: trained as plainly, to the last bit."""

from __future__ import annotations

from dataclasses import dataclass, replace

import pytest

from braid.config import Mesh, Run
from braid.parallel.sharding import Strategy
from tests.engine import test_recompute_overlap
from tests.engine.driven import Case as Sharded
from tests.engine.overlap_cases import Case, assert_same_bits, train
from tests.engine.recomputed import Overlapped
from tests.engine.test_overlap import PIPELINE, check
from tests.engine.test_recompute_sharded import compare

STREAMS = Case(streams=3)
ALONE = (
    replace(STREAMS, tied=True),
    replace(STREAMS, pattern="[*E]-[*E]/*E/*E", tied=True, delayed=True),
    replace(STREAMS, pattern="[M*E]*-[G*E]E/*E", dtype="bf16", shared=False, dropout=0.1, delayed=True),
    replace(STREAMS, pattern="[*E]-", latent=4, delayed=True, late_weights=True),
    replace(STREAMS, pattern="/*E", streams=1, early_release=True),
)
RANKS = (
    replace(STREAMS, world=2, ep=2, pattern="[M*E]-[G*E]/*E", dtype="bf16", delayed=True),
    replace(PIPELINE, pattern="[*E]|[M*E]-|[G*E]|*E/*E", streams=2, tied=True, delayed=True),
    replace(PIPELINE, pattern="|[*E]|*E|/*E/*E", streams=4, dtype="bf16", micro_batches=3),
    Case(world=2, pp=2, pattern="|[*E]||", streams=2, micro_batches=3),
)


@pytest.mark.parametrize("case", ALONE, ids=str)
def test_one_process_has_the_same_losses_gradients_and_weights(case):
    check(case)


@pytest.mark.parametrize("case", RANKS, ids=str)
def test_ranks_have_the_same_losses_gradients_and_weights(case):
    check(case)


# ------------------------------------------------------------------------------------------- recompute


@dataclass(frozen=True, kw_only=True)
class Again(Overlapped):
    """With streams kept between spans of so many blocks."""

    streams: int = 3
    recompute: tuple[str, ...] = ("hyper",)
    span: int = 2

    def run(self, *, overlap: bool) -> Run:
        run = super().run(overlap=overlap)
        return replace(run, train=replace(run.train, recompute_span=self.span))

    def __str__(self) -> str:
        return f"{super().__str__()} span{self.span}"


@dataclass(frozen=True, kw_only=True)
class Asked(Again):
    """Without overlap it is recomputed where backward asks for it; instead of overlap, nothing is."""

    def run(self, *, overlap: bool) -> Run:
        names = () if overlap else self.recompute
        run = super().run(overlap=False)
        return replace(run, train=replace(run.train, recompute=names))


SPANS = (
    Again(pattern="[*E]-[*E]/*E/*E", tied=True, delayed=True),
    Again(pattern="[M*E]*-[G*E]E/*E", dtype="bf16", shared=False, dropout=0.1, span=3),
    Again(pattern="*E-*E", recompute=("hyper", "norm", "activation", "core", "experts"), span=9, delayed=True),
    Again(pattern="[*E]-E", latent=4, recompute=("block",), dropout=0.1),
    Again(pattern="[*E]-E/*E", recompute=("full",), dtype="bf16", delayed=True),
    Again(pattern="[*E][*E][*E]", span=0),
)
SPANS_OF_RANKS = (
    Again(world=2, ep=2, pattern="[M*E]-[G*E]/*E", dtype="bf16", delayed=True),
    Again(world=4, pp=2, ep=2, micro_batches=4, pattern="[*E]-|[M*E]-|G[*E]|*E/*E", tied=True, span=5),
)


@pytest.mark.parametrize("case", SPANS, ids=str)
def test_streams_are_made_again_by_ops_with_the_same_bits(case: Again) -> None:
    test_recompute_overlap.check(case)


@pytest.mark.parametrize("case", SPANS_OF_RANKS, ids=str)
def test_ranks_make_streams_again_with_the_same_bits(case: Again) -> None:
    test_recompute_overlap.check(case)


@pytest.mark.parametrize("case", SPANS, ids=str)
def test_streams_are_made_again_where_backward_asks_with_the_same_bits(case: Again) -> None:
    asked = Asked(**{name: getattr(case, name) for name in vars(case)})
    assert_same_bits(train(0, asked, overlap=True), train(0, asked, overlap=False))


# ------------------------------------------------------------------------------------- shared weights

SHARED = Sharded(block="[*E]", streams=2, between="", dtype="bf16")
STRATEGIES: list[Strategy] = ["none", "optimizer", "gradients", "all"]


@pytest.mark.parametrize("names", [(), ("hyper",)], ids=["kept", "again"])
def test_ops_and_hooks_of_every_strategy_have_the_same_bits(names: tuple[str, ...]) -> None:
    """Streams of a span are made again when the weights before it are released already."""
    case = replace(SHARED, recompute=names, mesh=Mesh(ep=2))
    compare(2, [case], STRATEGIES, ["late", "hooks"] if names else ["late"])


def test_weights_of_one_dtype_are_there_when_streams_are_made_again() -> None:
    case = replace(SHARED, dtype="fp32", block="[M*E]", tail="/*E", recompute=("hyper", "norm"))
    compare(2, [case], ["all"], ["phases", "hooks"])


@pytest.mark.long
@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
@pytest.mark.parametrize("world", [2, 4])
def test_a_larger_sample(world: int, dtype: str) -> None:
    cases = [
        replace(SHARED, block=block, blocks=blocks, micro_batches=number, dtype=dtype, recompute=names)
        for block, blocks, number in (("[*E]", 4, 3), ("[M*E]", 1, 4), ("[M*E]", 3, 1))
        for names in ((), ("hyper",), ("full",))
    ]
    compare(world, cases, STRATEGIES, ["late"], timeout_s=600.0)
