"""Bugs that hyper-connections have had elsewhere, each by its symptom.

Those that other tests show already, by what was wrong:

- mixing that was not transposed: `test_the_first_index_of_the_mixing_is_the_source`, of every kernel, with
  gradients in `test_reference_equals_one_number_at_a_time` and `test_results_and_gradients_are_near_float64`
- sums of squares in float16: `test_large_float16_streams_do_not_overflow`
- mappings in bfloat16: `test_mappings_of_bfloat16_streams_are_as_good_as_float32`
- weight gradients of depths that were delayed and lost, results that stayed several streams behind a dense
  last layer, interleaved pipelines, full recompute that lost arguments: `tests/engine/test_hyper.py`
- optimizer state beside the wrong weight: `tests/model/test_hyper_checkpoint.py`
- norms and results that recompute kept alive: `tests/estimate/test_hyper.py`
- gradients of zeros: `test_tokens_of_zeros_have_finite_gradients`, of every kernel

braid has no CUDA graphs, no fp8 and no offload of activations, and so none of their bugs.
"""

from __future__ import annotations

import ast
import gc
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

import braid
from braid.architecture import HyperConnections, Model
from braid.distributed.collectives import Groups
from braid.kernels import hyper_connection as op
from braid.model.block import Block
from braid.model.language import LanguageModel
from braid.model.mtp import Mtp
from braid.nn.hyper_connection import HyperConnection, HyperExit
from braid.nn.recompute import Replays
from braid.pattern import Stage, parse
from braid.planning.plan import plan
from braid.schedule import Stream
from tests.engine.overlap_cases import TOKENS, VOCAB, Case, make_state
from tests.model.cases import batch, build, canonical_grads, part
from tests.model.test_hybrid import HYBRID, legal_groups
from tests.planning.estimate.reality import Allocations

STREAMED = replace(HYBRID, hyper=HyperConnections(streams=3))
PLAIN = op.REFERENCE.function


def trained(model: LanguageModel, rows: list[list[int]]) -> Tensor:
    loss = model(batch(rows)).share(20, [20] * len(model.layout.mtp))
    loss.backward()
    return loss.detach()


# ------------------------------------------------------------------------------------------ pipelines


@pytest.mark.parametrize("dtype", ["bf16", "fp32"])
@pytest.mark.parametrize("streams", [0, 1, 4])
def test_a_stage_waits_for_as_much_as_the_stage_before_it_sends(streams: int, dtype: str) -> None:
    """Messages had the size of one stream: p2p crashed, or what came was cut off."""
    text = "|[*E]|*-|/*E"
    worked_out = plan(Case(pattern=text, streams=streams, dtype=dtype).run(overlap=False), 1)
    layout = parse(text)
    # One process holds the segments of four ranks.
    every = replace(worked_out, layout=layout, stages=(Stage(rank=0, segments=layout.segments),))
    state = make_state(every, Groups())
    message = state.links(2, worked_out.run).message((0, 0))
    model, given, stream = state.model, batch([[TOKENS]] * 2, VOCAB), None
    context = model.prepare(given)
    for segment in range(3):
        stream, _ = model.run([segment], stream, context)
        assert stream is not None
        assert (stream.shape, stream.dtype) == (message.shape, message.dtype)
    assert model.run([3], stream, context)[0] is None


def test_no_field_of_a_run_is_read_with_a_default() -> None:
    """A field was renamed; whoever read it by name, or else took a default, went on with one stream."""
    fields = {name for each in (Model, HyperConnections) for name in each.__dataclass_fields__}
    for path in sorted(Path(braid.__file__).parent.rglob("*.py")):
        for call in ast.walk(ast.parse(path.read_text())):
            if isinstance(call, ast.Call) and isinstance(call.func, ast.Name) and call.func.id == "getattr":
                read = call.args[1].value if isinstance(call.args[1], ast.Constant) else None
                assert len(call.args) == 2 or read not in fields, f"{path}:{call.lineno}"


def test_results_join_the_streams_where_layers_compute() -> None:
    """On the stream of communication they met memory that was already used for something else: gradients of
    1e8 in interleaved pipelines."""
    case = Case(world=2, pp=2, pattern="[*E]|[M*E]-|[G*E]|*E/*E", streams=2, micro_batches=4)
    phases = [phase for segment in plan(case.run(overlap=True), 2).schedule.phases for phase in segment]
    posts = [phase for phase in phases if phase.kind == "post"]
    assert len(posts) == 5
    assert {phase.stream for phase in posts} == {Stream.COMPUTE}
    combines = [phase for phase in phases if phase.kind == "combine"]
    assert {len(phase.reads) for phase in combines} == {1}, "it communicates, and does nothing else"


# --------------------------------------------------------------------------------------------- numbers


def test_weights_of_a_branch_learn_from_unrounded_products() -> None:
    """Gradients of the way in were three times as noisy, where products were rounded before they were added."""
    tokens, streams, hidden = 5, 4, 96
    shape = HyperConnections(streams=streams)
    narrow = HyperConnection(shape, hidden, 1e-5, PLAIN, dtype=torch.bfloat16)
    exact = HyperConnection(shape, hidden, 1e-5, PLAIN, dtype=torch.float64)
    x = torch.randn(1, tokens, streams, hidden).bfloat16()
    grad = torch.randn(1, tokens, hidden).bfloat16()
    found = []
    with torch.no_grad():
        for parameter, same in zip(narrow.parameters(), exact.parameters(), strict=True):
            same.copy_(parameter.normal_(std=0.1))
    for module, dtype in ((narrow, torch.bfloat16), (exact, torch.float64)):
        branch, _ = module(x.to(dtype))
        assert branch.dtype == dtype
        found.append(torch.autograd.grad(branch, (module.weight, module.bias), grad.to(dtype)))
    for one, wanted in zip(*found, strict=True):
        assert one.dtype == torch.float32
        assert (one.double() - wanted).norm() < 2e-5 * wanted.norm()


def test_backward_adds_the_same_eps_as_forward() -> None:
    """It had one of its own, which no test saw while both were small."""
    shape = HyperConnections(streams=3, sinkhorn_steps=3, eps=0.2)
    connection = HyperConnection(shape, 4, 0.5, PLAIN, dtype=torch.float64)
    leave = HyperExit(shape, 4, 0.5, PLAIN, dtype=torch.float64)
    for parameter in (*connection.parameters(), *leave.parameters()):
        nn.init.normal_(parameter)
    x = torch.randn(1, 2, 3, 4, dtype=torch.float64, requires_grad=True)

    def through(x: Tensor) -> Tensor:
        branch, ways = connection(x)
        return leave(connection.post(ways, torch.tanh(branch)))

    assert torch.autograd.gradcheck(through, (x,))


def test_streams_are_of_one_dtype_from_the_embedding_to_the_exits() -> None:
    """They became float32 at a layer, and took twice the memory from there on; so did their gradients."""
    model = build("[M-][*E]G-/*E/*E", STREAMED, torch.bfloat16)
    seen: set[tuple[str, torch.dtype]] = set()

    def noting(what: str, *tensors: Tensor) -> None:
        for tensor in tensors:
            seen.add((what, tensor.dtype))
            if tensor.requires_grad:
                tensor.register_hook(lambda grad: seen.add((f"gradient of {what}", grad.dtype)))

    for module in model.modules():
        if isinstance(module, Block):
            module.register_forward_hook(lambda _, given, made: noting("streams", given[0], made))
        if isinstance(module, HyperConnection):
            module.register_forward_hook(lambda _, given, made: noting("branch", given[0], made[0]))
        if isinstance(module, HyperExit):
            module.register_forward_hook(lambda _, given, made: noting("hidden", given[0], made))
    trained(model, [[9, 5], [14]])
    whats = ("streams", "branch", "hidden")
    wanted = {f"{of}{what}" for of in ("", "gradient of ") for what in whats}
    assert seen == {(what, torch.bfloat16) for what in wanted}
    wide = {p.dtype for name, p in model.named_parameters() if ".connection." in name or "exit." in name}
    assert wide == {torch.float32}


@pytest.mark.parametrize("text", ["[M-][*E]G/*E", "+E"])
def test_a_token_of_zeros_spoils_nothing(text: str) -> None:
    """The length of such a token was divided by without an eps, and everything became NaN."""
    model = build(text, STREAMED, torch.float32)
    assert model.embedding is not None
    with torch.no_grad():
        model.embedding.weight.zero_()
    assert trained(model, [[5, 6], [9]]).isfinite()
    assert all(grad.isfinite().all() for grad in canonical_grads(model).values())


@pytest.mark.parametrize("shape", [HYBRID, STREAMED], ids=["one stream", "three streams"])
@pytest.mark.parametrize("text", ["-E", "[-E]/-E"])
def test_no_tokens_at_all_go_through(text: str, shape: Model) -> None:
    """A view of nothing does not say how large its last dim is."""
    model = build(text, shape)
    for given in (batch([[0], [0]]), part(batch([[5]]), slice(0, 0))):
        loss = model(given).share(0, [0] * len(model.layout.mtp))
        loss.backward()
        assert loss.item() == 0
    assert not any(grad.any() for grad in canonical_grads(model).values())


# ---------------------------------------------------------------------------------- weights and shapes


def test_every_weight_has_a_name_in_checkpoints() -> None:
    """Those of the exit were lost: only modules were looked at, and they belonged to none."""
    model = build("[M-][G*E]/*E/*E", replace(STREAMED, tied=False))
    tensors = model.canonical()
    assert {tensor.parameter for tensor in tensors.values()} == model.tensors().keys()
    parts = ("weight", "alpha", "bias")
    exits = {f"{of}exit.{part}" for of in ("", "mtp.0.", "mtp.1.") for part in parts}
    layers = ("blocks.0.mamba2", "blocks.0.mlp", "blocks.1.delta_net", "blocks.1.attention", "blocks.1.moe")
    layers += tuple(f"mtp.{depth}.blocks.0.{layer}" for depth in range(2) for layer in ("attention", "moe"))
    connections = {f"{layer}.connection.{part}" for layer in layers for part in parts}
    found = {name for name in tensors if ".connection." in name or "exit." in name}
    assert found == exits | connections


def test_a_depth_neither_makes_streams_nor_ends_them_for_the_next() -> None:
    """They were multiplied twice, or had become one before a depth read them."""
    model, given = build("[*E]/*E/*E", STREAMED), batch([[9], [4, 5]])
    streams, one = torch.Size([2, 9, 3, 20]), torch.Size([2, 9, 20])
    seen: list[tuple[type, torch.Size, object]] = []

    def note(module: nn.Module, given: tuple[Tensor, ...], made: object) -> None:
        shapes = tuple(each.shape for each in made) if isinstance(made, tuple) else made.shape  # type: ignore
        seen.append((type(module), given[0].shape, shapes))

    for module in model.modules():
        if isinstance(module, Block | Mtp | HyperExit):
            module.register_forward_hook(note)
    model(given)
    block, leave, depth = (Block, streams, streams), (HyperExit, streams, one), (Mtp, streams, (streams, one))
    assert seen == [block, leave, block, leave, depth, block, leave, depth]
    assert model.hidden(model.prepare(given)).shape == one


@pytest.mark.parametrize("hyper", [None, HyperConnections(streams=2)], ids=["one stream", "two streams"])
def test_exits_are_there_where_something_uses_them(hyper: HyperConnections | None) -> None:
    """One in a nested stack got no gradient, over which data parallelism stumbled."""
    model = build("[*-]/*-/*-", replace(HYBRID, hyper=hyper))
    trained(model, [[9], [4, 5]])
    exits = [module for module in model.modules() if isinstance(module, HyperExit)]
    assert len(exits) == (0 if hyper is None else 3)
    assert all(parameter.grad is not None and parameter.grad.any() for parameter in model.parameters())


@pytest.mark.parametrize("text", [*legal_groups(2), "MG*-E"])
def test_any_group_of_layers_has_ways_around_each(text: str) -> None:
    """Some layers could not be built, where what makes them returned before it came to this."""
    model = build(f"[{text}]", STREAMED)
    connections = [module for module in model.modules() if isinstance(module, HyperConnection)]
    assert len(connections) == len(text)
    assert trained(model, [[7]]).isfinite()
    assert all(connection.weight.grad is not None for connection in connections)


# --------------------------------------------------------------------------------------------- memory


@pytest.mark.parametrize("names", [(), ("hyper",), ("block",)], ids=lambda names: "+".join(names) or "nothing")
def test_steps_leave_nothing_behind(names: tuple[str, ...]) -> None:
    """What a step recomputed was still referred to: gigabytes for each layer."""
    model = build("[M*E]-[G-]/*E", STREAMED, torch.float32)
    trained(model, [[9], [4, 5]])
    left = []
    gc.disable()
    try:
        with Allocations(
            [*model.parameters(), *(parameter.grad for parameter in model.parameters())]
        ) as tracked:
            for _ in range(3):
                replays = Replays(names)
                model.recompute(replays, span=2)
                trained(model, [[9], [4, 5]])
                replays.finish()
                left.append(tracked.now)
    finally:
        gc.enable()
    assert left[0] == left[1] == left[2] < 1000


def test_a_region_may_be_given_what_has_no_gradient() -> None:
    """Values came back as gradients, where a region was given other things than tensors that have one."""

    def region(x: Tensor, places: Tensor, scale: Tensor) -> Tensor:
        return (x[places] * scale).exp()

    found = []
    for names in ((), ("hyper",)):
        x = torch.arange(6.0, requires_grad=True)
        places, scale = torch.tensor([1, 1, 4]), torch.full((3,), 0.5)
        replays = Replays(names)
        with replays.save_hooks():
            y = replays.run("hyper", region, x, places, scale)
            loss = y.square().sum()
        loss.backward()
        assert places.grad is scale.grad is None
        assert replays.count == len(names)
        found.append(x.grad)
    assert torch.equal(*found)
