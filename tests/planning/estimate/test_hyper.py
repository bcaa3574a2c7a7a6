"""What models with several residual streams keep is what their modules say, to the byte: on a CPU."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import product

import pytest
import torch

from braid.architecture import HyperConnections
from braid.choices import recomputed
from braid.model.language import LanguageModel
from braid.nn.cost import Workload
from tests.covers import cover
from tests.model.cases import batch
from tests.planning.estimate.test_kept import MOES, check_model, model_of
from tests.planning.estimate.test_recompute import Measured, beside

DTYPES = (torch.float32, torch.bfloat16)
TEXTS = ("[M-][*E][G-]E/*-", "[+E][+-]/+E/+E", "*-*-")
HYPER = HyperConnections(streams=3, sinkhorn_steps=4)
EACH = ("hyper", "norm", "activation", "core")
CHOICES = (("hyper",), ("hyper", "norm"), ("norm",), EACH, ("block",), ("full",))


@pytest.mark.parametrize("dtype", [*DTYPES, torch.float64], ids=str)
@pytest.mark.parametrize("text", TEXTS)
def test_whole_models(text: str, dtype: torch.dtype) -> None:
    dropout = 0.1 if dtype is torch.float32 else 0.0
    check_model(model_of(text, MOES[1], dtype, dropout=dropout, hyper=HYPER))


@pytest.mark.parametrize("exit_", ["learned", "mean"])
@pytest.mark.parametrize("streams", [1, 2])
def test_few_streams_and_their_mean(streams: int, exit_: str) -> None:
    hyper = HyperConnections(streams=streams, sinkhorn_steps=1, exit=exit_)  # type: ignore[arg-type]
    check_model(model_of("*E", MOES[0], torch.bfloat16, hyper=hyper))


def held(model: LanguageModel, names: Sequence[str], span: int) -> tuple[int, int, int]:
    """What is said to be kept, what is, and how many regions are replayed."""
    context, replays = model.prepare(batch([[130]] * 2)), Measured(names)
    model.recompute(replays, span)
    with replays.save_hooks():
        loss = model.losses(context).share(10, [10] * len(model.layout.mtp))
    real = replays.kept(list(model.parameters()), beside(context, names))
    workload = Workload(
        rows=2, tokens=130, dtype=model.dtype, device="cpu", recompute=recomputed(names), span=span
    )
    told = sum(cost.kept for cost in model.costs(workload).values())
    loss.backward()
    assert replays.kept(list(model.parameters())) == 0
    return told, real, replays.count


RECOMPUTED = list(product(TEXTS, DTYPES, CHOICES))
PAIRS = cover(RECOMPUTED, lambda point: dict(zip(("text", "dtype", "names"), point, strict=True)))


@pytest.mark.parametrize(
    ("text", "dtype", "names"),
    [pytest.param(*point, marks=() if point in PAIRS else pytest.mark.long) for point in RECOMPUTED],
    ids=lambda value: "+".join(value) if isinstance(value, tuple) else str(value),
)
def test_recomputed(text: str, dtype: torch.dtype, names: Sequence[str]) -> None:
    dropout = 0.1 if dtype is torch.float32 else 0.0
    told, real, _ = held(model_of(text, MOES[1], dtype, dropout=dropout, hyper=HYPER), names, 1)
    assert told == real


@pytest.mark.parametrize("span", [1, 2, 3, 8])
def test_every_layer_of_a_span_is_made_again_once(span: int) -> None:
    model = model_of("[*-]*-[*-]E*", MOES[0], torch.bfloat16, hyper=HYPER)
    told, real, replays = held(model, ["hyper"], span)
    assert told == real
    assert replays == 2 * len(model.layout.layers)


def test_longer_spans_hold_less() -> None:
    def kept(*names: str, span: int = 1) -> int:
        return held(model_of("*-" * 4, MOES[0], torch.bfloat16, hyper=HYPER), names, span)[1]

    assert kept("hyper", span=4) < kept("hyper", span=2) < kept("hyper") < kept()


def test_backward_holds_all_blocks_of_a_span_that_it_makes_again() -> None:
    model = model_of("*-" * 4, MOES[0], torch.float32, hyper=HYPER)

    def passing(span: int) -> int:
        again = recomputed(["hyper"])
        workload = Workload(rows=2, tokens=130, dtype=model.dtype, device="cpu", recompute=again, span=span)
        return model.costs(workload)["blocks.0"].passing

    one, two, three = map(passing, (1, 2, 3))
    stream = 2 * 130 * HYPER.streams * model.shape.hidden * model.dtype.itemsize
    assert three - two == two - one > stream
