"""A MoE layer on some ranks: who works with whom, what each is given, and what they find, put together again.

Shapes: B rows, T tokens of a row, N = B · T, t tokens of a rank, C hidden channels, E experts.
"""

from __future__ import annotations

import zlib
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from braid import architecture
from braid.distributed.collectives import ALONE, Group, Groups, own_slice
from braid.kernels.grouped_mlp import REFERENCE
from braid.nn.moe.balance import measure_balance
from braid.nn.moe.layer import Moe
from braid.nn.moe.token_dispatcher import DispatcherName, choose
from braid.nn.moe.token_ids import Tokens
from tests.nn.moe_cases import forward, tensors

HIDDEN, ROWS, TOKENS, EXPERTS = 6, 4, 8, 8
EARLIER_E = tuple(range(3, 3 + EXPERTS))
"""What the step's earlier micro-batches did to experts."""


class Layout(NamedTuple):
    """Sizes of axes; of each view the first varies fastest: tp, cp, dp and etp, ep, edp."""

    tp: int = 1
    cp: int = 1
    dp: int = 1
    etp: int = 1
    ep: int = 1

    @property
    def world(self) -> int:
        return self.tp * self.cp * self.dp


@dataclass(frozen=True, kw_only=True)
class Case:
    """A layer and its micro-batch."""

    shape: architecture.Moe
    padded: bool = False
    favourite: int | None = None
    """The expert that the selection bias sends every token to."""


class Found(NamedTuple):
    """What a rank finds, or one process alone."""

    y_BtC: Tensor
    x_grad_BtC: Tensor
    losses: dict[str, float]
    counts_E: Tensor
    kept_E: Tensor
    raw_counts_E: Tensor
    grads: dict[str, tuple[tuple[int, ...], Tensor]]
    """Every canonical tensor that is held: where the part begins, and its gradient before sums over ranks."""
    holders: dict[str, int]
    """How many ranks each part's gradient is to be summed over."""


def groups_of(layout: Layout) -> Groups:
    """All groups of this process. Every rank calls this with the same layout."""
    tp, cp, dp, etp, ep = layout
    world = layout.world
    ranks_DCT = torch.arange(world).view(dp, cp, tp)
    ranks_XEF = torch.arange(world).view(world // (ep * etp), ep, etp)
    return Groups(
        tp=_group("tp", ranks_DCT.reshape(-1, tp)),
        cp=_group("cp", ranks_DCT.transpose(1, 2).reshape(-1, cp)),
        dp=_group("dp", ranks_DCT.permute(1, 2, 0).reshape(-1, dp)),
        tp_cp=_group("tp_cp", ranks_DCT.reshape(dp, -1)),
        dp_cp=_group("dp_cp", ranks_DCT.permute(2, 0, 1).reshape(tp, -1)),
        slab=_group("slab", ranks_DCT.reshape(1, -1)),
        etp=_group("etp", ranks_XEF.reshape(-1, etp)),
        ep=_group("ep", ranks_XEF.transpose(1, 2).reshape(-1, ep)),
        ep_etp=_group("ep_etp", ranks_XEF.reshape(-1, ep * etp)),
        dispatch=_group("dispatch", ranks_XEF.reshape(-1, ep * etp)),
        edp=_group("edp", ranks_XEF.permute(1, 2, 0).reshape(ep * etp, -1)),
    )


def _group(name: str, members: Tensor) -> Group:
    if members.shape[1] == 1:
        return ALONE
    me = dist.get_rank()
    handles = [dist.new_group(ranks) for ranks in members.tolist()]
    for ranks, handle in zip(members.tolist(), handles, strict=True):
        if me in ranks:
            return Group(name=name, size=len(ranks), rank=ranks.index(me), handle=handle)
    raise AssertionError(f"rank {me} is in no group of {name}")


def random(name: str, *sizes: int) -> Tensor:
    generator = torch.Generator().manual_seed(zlib.crc32(name.encode()))
    return torch.randn(sizes, generator=generator, dtype=torch.float64)


def build(case: Case, groups: Groups = Groups(), asked: DispatcherName = "auto") -> Moe:
    """The layer with weights that depend on their canonical names alone."""
    dispatcher = choose(case.shape, HIDDEN, groups, asked).function
    moe = Moe(case.shape, HIDDEN, REFERENCE.function, dispatcher, groups=groups, dtype=torch.float64)
    held = tensors(moe)
    for name, place in moe.canonical().items():
        place.write(held[place.parameter], place.held.of(random(name, *place.shape) / 2))
    if case.favourite is not None:
        assert moe.router.bias is not None
        moe.router.bias[case.favourite] += 100
    return moe


def padding(case: Case) -> Tensor:
    """Rows without padding, one that ends with it, and one of padding alone: ranks differ in what they have."""
    mask_BT = torch.zeros(ROWS, TOKENS, dtype=torch.bool)
    if case.padded:
        mask_BT[2, 3:] = True
        mask_BT[3] = True
    return mask_BT


def part(x_BT: Tensor, groups: Groups) -> Tensor:
    """This rank's tokens: some rows, and a slice of each."""
    return own_slice(own_slice(x_BT, groups.dp, 0), groups.tp_cp, 1).contiguous()


def tokens_of(case: Case, groups: Groups) -> Tokens:
    mask_BT = padding(case)
    mask_Bt = part(mask_BT, groups)
    return Tokens(
        sample_B=own_slice(torch.arange(ROWS) + 100, groups.dp, 0),
        position_T=own_slice(torch.arange(TOKENS), groups.tp_cp, 0),
        padding_BT=mask_Bt if mask_Bt.any() else None,
        padding_count=int(mask_Bt.sum()),
        global_tokens=int((~mask_BT).sum()),
        global_rows=ROWS,
        layer=3,
        seed=7,
        step=2,
        training=True,
    )


def run(case: Case, groups: Groups = Groups(), asked: DispatcherName = "auto") -> Found:
    """Forward and backward of this rank's part of the micro-batch, and of every loss."""
    moe, tokens = build(case, groups, asked), tokens_of(case, groups)
    x_BtC = part(random("x", ROWS, TOKENS, HIDDEN), groups).requires_grad_()
    y_NC, routing = forward(moe, x_BtC.flatten(0, 1), tokens)
    balance = measure_balance(routing, case.shape, tokens, torch.tensor(EARLIER_E), groups)
    y_BtC = y_NC.view_as(x_BtC)
    probe_BtC = part(random("probe", ROWS, TOKENS, HIDDEN), groups)
    torch.stack([(y_BtC * probe_BtC).sum(), *balance.losses.values()]).sum().backward()
    assert x_BtC.grad is not None
    return Found(
        y_BtC.detach(),
        x_BtC.grad,
        {name: loss.item() for name, loss in balance.losses.items()},
        balance.counts_E,
        balance.kept_E,
        balance.raw_counts_E,
        *_gradients(moe, groups),
    )


def _gradients(moe: Moe, groups: Groups) -> tuple[dict[str, Any], dict[str, int]]:
    grads, holders = {}, {}
    parameters = dict(moe.named_parameters())
    for name, place in moe.canonical().items():
        if place.parameter in parameters:
            grad = parameters[place.parameter].grad
            assert grad is not None, name
            sharers = groups.edp if name.startswith("experts.") else groups.dp_cp
            grads[name] = (place.held.offset, place.read(grad).clone())
            holders[name] = place.copies.size * sharers.size
    return grads, holders


def joined(found: list[Found], layout: Layout) -> Found:
    """What all ranks found, as one process would have: parts and counts are summed, slices put together."""
    first = found[0]
    grads: dict[str, tuple[tuple[int, ...], Tensor]] = {}
    for name in sorted({name for each in found for name in each.grads}):
        parts = [(*each.grads[name], each.holders[name]) for each in found if name in each.grads]
        ends = [[o + n for o, n in zip(offset, grad.shape, strict=True)] for offset, grad, _ in parts]
        whole = torch.zeros([max(end) for end in zip(*ends, strict=True)], dtype=torch.float64)
        for offset, grad, holders in parts:
            assert sum(other == offset for other, _, _ in parts) == holders, name
            whole[tuple(slice(o, o + n) for o, n in zip(offset, grad.shape, strict=True))] += grad
        grads[name] = ((0,) * whole.ndim, whole)
    return Found(
        _placed([each.y_BtC for each in found], layout),
        _placed([each.x_grad_BtC for each in found], layout),
        {name: sum(each.losses[name] for each in found) for name in first.losses},
        sum(each.counts_E for each in found[1:]) + first.counts_E,
        sum(each.kept_E for each in found[1:]) + first.kept_E,
        first.raw_counts_E,
        grads,
        {},
    )


def _placed(parts: list[Tensor], layout: Layout) -> Tensor:
    """Slices of ranks as whole rows: sequences over cp and tp, samples over dp."""
    across = layout.cp * layout.tp
    rows = [torch.cat(parts[i : i + across], 1) for i in range(0, len(parts), across)]
    return torch.cat(rows)
