"""Measures braid's named kernels in both directions, as `kernels.choose` gives them to a run.

Shapes: B rows, T tokens, N = B · T, Q query heads, K key-value heads, D channels of a query or key head, V of a
value head, H heads of a scan, G groups, S streams or slots, C channels, E experts, M permuted rows.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from functools import partial
from itertools import product
from multiprocessing import get_context
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor

from braid.kernels import (
    attention,
    causal_conv,
    delta_rule,
    gated_norm,
    hyper_connection,
    linear_cross_entropy,
    permute,
    router,
    ssd,
)
from braid.kernels.hyper_connection import ConnectionForm, Parameters, PostInputs
from braid.kernels.linear_cross_entropy import VocabShard
from braid.timing.samples import Sample, Value
from braid.timing.stopwatch import Stopwatch

DTYPE = torch.bfloat16
Shape = Mapping[str, Value]
Runs = Mapping[str, Callable[[], Any]]
"""What is timed, by pass."""


@dataclass(frozen=True)
class Case:
    """A kernel and its shape."""

    name: str
    shape: Shape

    def __str__(self) -> str:
        return f"{self.name} {' '.join(f'{key} {value}' for key, value in self.shape.items())}"


def measure(cases: Sequence[Case], watch: Stopwatch) -> tuple[list[Sample], dict[str, str]]:
    """The samples of all cases, and why some have none."""
    found, skipped = [], {}
    for case in cases:
        try:
            for pass_, run in runs_of(case, watch.device).items():
                sample = Sample(
                    what="kernel", name=case.name, shape=case.shape, pass_=pass_, seconds=watch.seconds(run)
                )
                found.append(sample)
        except Exception as error:  # a kernel that fails is reported; it must not lose the others
            skipped[str(case)] = f"{type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}"
    return found, skipped


def compile_all(
    cases: Sequence[Case],
    others: Sequence[Callable[[torch.device], None]],
    device: torch.device,
    processes: int,
) -> None:
    """Run one case of each kernel and width, and all others, in several processes: they share the compiled
    kernels on disk. In threads, backward kernels would be compiled one after another, as autograd has one
    thread for a GPU. Errors come again when the case is timed."""
    widths: dict[tuple[object, ...], Case] = {}
    for case in sorted(cases, key=lambda each: int(each.shape["tokens"])):
        sizes = tuple(pair for pair in case.shape.items() if pair[0] not in ("rows", "tokens"))
        widths.setdefault((case.name, sizes), case)
    with ProcessPoolExecutor(processes, mp_context=get_context("spawn")) as pool:
        started = [pool.submit(_run_once, case, device) for case in widths.values()]
        started += [pool.submit(other, device) for other in others]
        for each in started:
            each.exception()


def _run_once(case: Case, device: torch.device) -> None:
    for run in runs_of(case, device).values():
        run()
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def runs_of(case: Case, device: torch.device) -> Runs:
    """The passes of a case, with inputs of its shape."""
    return _RUNS[case.name](case.shape, device)


# -------------------------------------------------------------------------------------------- kernels


def _draw(device: torch.device, *sizes: int, dtype: torch.dtype = DTYPE, scale: float = 1.0) -> Tensor:
    return torch.empty(sizes, dtype=dtype, device=device).normal_(std=scale)


def _ways(function: Callable[..., Any], leaves: Sequence[Tensor]) -> Runs:
    """Forward as in training, and backward alone."""
    leaves = [leaf.detach().requires_grad_() for leaf in leaves]
    results = _tuple(function(*leaves))
    grads = [torch.empty_like(result).normal_() for result in results]
    return {
        "forward": lambda: function(*leaves),
        "backward": lambda: torch.autograd.grad(results, leaves, grads, retain_graph=True, allow_unused=True),
    }


def _tuple(results: Any) -> tuple[Tensor, ...]:
    return tuple(results) if isinstance(results, (tuple, list)) else (results,)


def _numbers(shape: Shape, *names: str) -> list[int]:
    return [int(shape[name]) for name in names]


def _documents(rows: int, tokens: int, each: int) -> Tensor:
    return (torch.arange(tokens) // each).expand(rows, tokens)


def _attention(shape: Shape, device: torch.device) -> Runs:
    rows, tokens, heads, kv_heads, head_dim, v_dim = _numbers(
        shape, "rows", "tokens", "heads", "kv_heads", "head_dim", "v_dim"
    )
    causal, window, document = _numbers(shape, "causal", "window", "document")
    attend = attention.choose(device, DTYPE, causal=bool(causal)).function
    documents_BT = _documents(rows, tokens, document or tokens)
    spans = attention.spans_of(documents_BT, window or None, device, causal=bool(causal))
    q_BTQD = _draw(device, rows, tokens, heads, head_dim)
    k_BTKD = _draw(device, rows, tokens, kv_heads, head_dim)
    v_BTKV = _draw(device, rows, tokens, kv_heads, v_dim)
    return _ways(lambda q, k, v: attend(q, k, v, spans), [q_BTQD, k_BTKD, v_BTKV])


def _ssd(shape: Shape, device: torch.device) -> Runs:
    rows, tokens, heads, head_dim, groups, state = _numbers(
        shape, "rows", "tokens", "heads", "head_dim", "groups", "state"
    )
    scan = ssd.choose(device, DTYPE).function
    x_BTHD = _draw(device, rows, tokens, heads, head_dim)
    b_BTGN, c_BTGN = (_draw(device, rows, tokens, groups, state) for _ in range(2))
    dt_BTH = torch.exp(torch.rand(rows, tokens, heads, device=device) * 4.6 - 6.9)
    a_H, skip_H = -1 - 15 * torch.rand(heads, device=device), torch.ones(heads, device=device)
    documents_BT = torch.zeros(rows, tokens, dtype=torch.int64, device=device)
    inputs = [x_BTHD, dt_BTH, a_H, b_BTGN, c_BTGN, skip_H]
    return _ways(lambda x, dt, a, b, c, skip: scan(x, dt, a, b, c, skip, documents_BT)[0], inputs)


def _delta_rule(shape: Shape, device: torch.device) -> Runs:
    rows, tokens, key_heads, heads, key_dim, value_dim = _numbers(
        shape, "rows", "tokens", "key_heads", "heads", "key_dim", "value_dim"
    )
    rule = delta_rule.choose(device, DTYPE).function
    q_BTGK, k_BTGK = (_draw(device, rows, tokens, key_heads, key_dim) for _ in range(2))
    v_BTHV = _draw(device, rows, tokens, heads, value_dim)
    log_decay_BTH = -torch.rand(rows, tokens, heads, device=device) * 0.2
    beta_BTH = torch.rand(rows, tokens, heads, device=device).to(DTYPE)
    documents_BT = torch.zeros(rows, tokens, dtype=torch.int64, device=device)
    inputs = [q_BTGK, k_BTGK, v_BTHV, log_decay_BTH, beta_BTH]
    return _ways(lambda q, k, v, decay, beta: rule(q, k, v, decay, beta, documents_BT)[0], inputs)


def _causal_conv(shape: Shape, device: torch.device) -> Runs:
    rows, tokens, groups, part, rest, taps = _numbers(shape, "rows", "tokens", "groups", "part", "rest", "taps")
    convolve = causal_conv.choose(device, DTYPE).function
    sizes = [part, rest, rest]
    width = sum(sizes)
    x_BTGV = _draw(device, rows, tokens, groups, width)
    weight_CK, bias_C = _draw(device, groups * width, taps), _draw(device, groups * width)
    documents_BT = torch.zeros(rows, tokens, dtype=torch.int64, device=device)
    return _ways(lambda x, w, b: convolve(x, w, b, documents_BT, sizes), [x_BTGV, weight_CK, bias_C])


def _gated_norm(shape: Shape, device: torch.device) -> Runs:
    tokens, groups, channels, gate_first = _numbers(shape, "tokens", "groups", "channels", "gate_first")
    norm = gated_norm.choose(device, DTYPE).function
    y, z = (_draw(device, 1, tokens, groups, channels) for _ in range(2))
    weight = _draw(device, groups, channels) if gate_first else _draw(device, channels)
    return _ways(lambda y, z, weight: norm(y, z, weight, 1e-5, gate_first=bool(gate_first)), [y, z, weight])


FORM = ConnectionForm(steps=20, eps=1e-6, norm_eps=1e-5)


def _hyper_parameters(shape: Shape, device: torch.device, rows: int, scales: int) -> Parameters:
    streams, channels = _numbers(shape, "streams", "channels")
    width = streams * channels
    return Parameters(
        _draw(device, rows, width, dtype=torch.float32, scale=width**-0.5),
        torch.linspace(0.7, 1.1, scales, device=device),
        _draw(device, rows, dtype=torch.float32, scale=0.3),
    )


class _Drops:
    """A wgrad store that computes no gradients of weights: backward alone."""

    def put(self, parameter: Tensor, product: Callable[[], Tensor]) -> None:
        return None


def _hyper_connection(shape: Shape, device: torch.device) -> Runs:
    """One of the three parts; `backward+wgrad` is with the gradients of the parameters."""
    tokens, streams, channels = _numbers(shape, "tokens", "streams", "channels")
    connect = hyper_connection.choose(device, DTYPE, streams=streams).function
    x_NSC = _draw(device, tokens, streams, channels)
    if shape["part"] == "exit":
        exit_parameters = _hyper_parameters(shape, device, streams, 1)
        return _with_wgrad(
            lambda store, x, *given: connect.contract(x, Parameters(*given), FORM, store),
            [x_NSC, *exit_parameters],
        )
    parameters = _hyper_parameters(shape, device, streams * (streams + 2), 3)
    if shape["part"] == "post":
        with torch.no_grad():
            entered = connect.pre(x_NSC, parameters, FORM)
        inputs = [*entered.post_inputs, entered.branch_NC]
        return _ways(lambda x, post, res, y: connect.post(PostInputs(x, post, res), y), inputs)

    def pre(store: _Drops | None, x_NSC: Tensor, *given: Tensor) -> tuple[Tensor, ...]:
        entered = connect.pre(x_NSC, Parameters(*given), FORM, store)
        return entered.branch_NC, *entered.post_inputs

    return _with_wgrad(pre, [x_NSC, *parameters])


def _with_wgrad(function: Callable[..., Any], leaves: Sequence[Tensor]) -> Runs:
    """Backward without and with the gradients of parameters."""
    whole, alone = (_ways(partial(function, store), leaves) for store in (None, _Drops()))
    return {**alone, "backward+wgrad": whole["backward"]}


def _linear_cross_entropy(shape: Shape, device: torch.device) -> Runs:
    tokens, channels, vocab = _numbers(shape, "tokens", "channels", "vocab")
    loss = linear_cross_entropy.choose(device, DTYPE).function
    row_N = torch.randint(0, vocab, (tokens,), device=device)
    mask_N = torch.ones(tokens, dtype=torch.bool, device=device)
    inputs = [_draw(device, tokens, channels), _draw(device, vocab, channels, scale=channels**-0.5)]
    return _ways(lambda x, weight: loss(x, weight, row_N, mask_N, VocabShard(vocab)), inputs)


def _permute(shape: Shape, device: torch.device) -> Runs:
    """Forward permutes; backward, its gradient, sums the rows of each token."""
    tokens, channels, slots = _numbers(shape, "tokens", "channels", "slots")
    kernels = permute.choose(device).function
    row_NS = torch.randperm(tokens * slots, device=device).view(tokens, slots)
    token_M = torch.empty(tokens * slots, dtype=torch.int64, device=device)
    token_M[row_NS.flatten()] = torch.arange(tokens, device=device).repeat_interleave(slots)
    x_NC, y_MC = _draw(device, tokens, channels), _draw(device, tokens * slots, channels)
    return {
        "forward": lambda: kernels.permute(x_NC, token_M, row_NS, gaps=False),
        "backward": lambda: kernels.unpermute(y_MC, row_NS, gaps=False),
    }


def _router(shape: Shape, device: torch.device) -> Runs:
    """Logits, scores and the choice of experts; backward of the logits."""
    tokens, channels, experts, top_k = _numbers(shape, "tokens", "channels", "experts", "top_k")
    kernels = router.choose(device, DTYPE).function
    x_NC = _draw(device, tokens, channels)
    weight_EC = _draw(device, experts, channels, dtype=torch.float32, scale=channels**-0.5)
    ways = dict(_ways(lambda x, weight: kernels.logits(x, weight, torch.float32), [x_NC, weight_EC]))
    leaf = x_NC.detach().requires_grad_()

    def forward() -> None:
        scores_NE = kernels.logits(leaf, weight_EC, torch.float32).softmax(-1)
        scores_NE.gather(1, kernels.top_k(scores_NE, top_k))

    return ways | {"forward": forward}


_RUNS: Mapping[str, Callable[[Shape, torch.device], Runs]] = MappingProxyType(
    {
        "attention": _attention,
        "ssd": _ssd,
        "delta_rule": _delta_rule,
        "causal_conv": _causal_conv,
        "gated_norm": _gated_norm,
        "hyper_connection": _hyper_connection,
        "linear_cross_entropy": _linear_cross_entropy,
        "permute": _permute,
        "router": _router,
    }
)
NAMES = tuple(_RUNS)
"""Kernels that are measured."""


# ------------------------------------------------------------------------------- what is measured


def cases(*, tokens: Sequence[int] = (1024, 4096, 16384, 65536)) -> Iterator[Case]:
    """All cases. `tokens` are those of a micro-batch; widths are those of published models."""
    yield from _attention_cases(max(tokens))
    for count in tokens:
        rows = max(count // 4096, 1)
        scanned = {"rows": rows, "tokens": count // rows}
        yield Case("ssd", {**scanned, "heads": 64, "head_dim": 64, "groups": 8, "state": 128})
        heads = {"key_heads": 16, "heads": 32, "key_dim": 128, "value_dim": 128}
        yield Case("delta_rule", {**scanned, **heads})
        yield Case("causal_conv", {**scanned, "groups": 8, "part": 512, "rest": 128, "taps": 4})
        for channels, part in product((2048, 4096), ("pre", "post", "exit")):
            sizes = {"tokens": count, "streams": 4, "channels": channels}
            yield Case("hyper_connection", {**sizes, "part": part})
    yield Case("ssd", {"rows": 4, "tokens": 4096, "heads": 32, "head_dim": 128, "groups": 8, "state": 128})
    yield from _composed_cases(min(16384, max(tokens)))


def _composed_cases(tokens: int) -> Iterator[Case]:
    """Kernels that models count by products and bytes: measured at one size, to compare with these."""
    yield Case("gated_norm", {"tokens": tokens, "groups": 8, "channels": 512, "gate_first": 1})
    yield Case("gated_norm", {"tokens": tokens, "groups": 32, "channels": 128, "gate_first": 0})
    yield Case("permute", {"tokens": tokens, "channels": 2048, "slots": 8})
    yield Case("router", {"tokens": tokens, "channels": 2048, "experts": 128, "top_k": 8})
    yield Case("linear_cross_entropy", {"tokens": tokens, "channels": 4096, "vocab": 131072})


def _attention_cases(most: int) -> Iterator[Case]:
    """Sequences of different lengths that make the same number of tokens, and a few shorter micro-batches."""
    total = min(16384, most)
    lengths = [length for length in (512, 1024, 2048, 4096, 8192, 16384) if length <= total]
    widths = ((64, 64, 32, 8), (128, 128, 16, 4), (256, 256, 16, 2), (192, 128, 16, 16))
    for head_dim, v_dim, heads, kv_heads in widths:
        for length in lengths:
            yield _attention_case(total // length, length, heads, kv_heads, head_dim, v_dim)
        yield _attention_case(1, min(1024, total), heads, kv_heads, head_dim, v_dim)
    if most > 16384:
        yield _attention_case(1, 65536, 16, 4, 128, 128)
    for length in lengths[1:]:
        yield _attention_case(total // length, length, 16, 4, 128, 128, window=min(1024, length // 2))
        yield _attention_case(total // length, length, 32, 8, 64, 64, window=128)
        yield _attention_case(total // length, length, 16, 4, 128, 128, document=max(length // 4, 128))
    for head_dim in (64, 128):
        for length in lengths[:4]:
            yield _attention_case(total // length, length, 16, 16, head_dim, head_dim, causal=0)


def _attention_case(
    rows: int, tokens: int, heads: int, kv_heads: int, head_dim: int, v_dim: int,
    *, causal: int = 1, window: int = 0, document: int = 0,
) -> Case:  # fmt: skip
    """`document` are the tokens of each packed document, 0 for one that fills the row."""
    return Case(
        "attention",
        {
            "rows": rows, "tokens": tokens, "heads": heads, "kv_heads": kv_heads,
            "head_dim": head_dim, "v_dim": v_dim, "causal": causal, "window": window, "document": document,
        },
    )  # fmt: skip
