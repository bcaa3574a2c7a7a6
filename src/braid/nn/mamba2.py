"""Mamba-2, the layer `M`.

One projection gives what is written (x), where (B), what is read (C), the gate (z) and the time step (dt). Its
outputs are ordered by group: the x of the group's heads, its B, its C, then z and dt of its heads. The
convolution sees x, B and C of every group. A shard of the groups is then one contiguous slice of each.

Shapes: B rows, T tokens, C hidden channels, G groups, R heads per group, H = G · R heads, D head channels,
N state channels, I = H · D inner channels, V = R · D + 2 N channels of a group that are convolved, K taps,
P = K - 1.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from braid import architecture
from braid.kernels.causal_conv import causal_conv
from braid.kernels.ssd import Ssd, step
from braid.nn.canonical import Canonical, under
from braid.nn.linear import Linear


@dataclass(kw_only=True)
class Mamba2Cache:
    """What generation keeps of the tokens so far: its size does not depend on how many they are."""

    conv_BCP: Tensor
    """The last K - 1 inputs of the convolution."""
    state_BHDN: Tensor
    """The state, float32 or better."""


class Mamba2(nn.Module):
    """Projects, convolves, scans, gates and projects back."""

    def __init__(
        self,
        shape: architecture.Mamba2,
        hidden: int,
        eps: float,
        ssd: Ssd,
        *,
        device: torch.device | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        self.shape = shape
        self.ssd = ssd
        self.repeats = shape.heads // shape.groups
        inner, group_inner = shape.heads * shape.head_dim, self.repeats * shape.head_dim
        convolved = group_inner + 2 * shape.state
        outputs = (shape.groups, convolved + group_inner + self.repeats)
        self.xbczdt = Linear(hidden, outputs, bias=shape.bias, device=device, dtype=dtype)
        self.o = Linear(inner, hidden, bias=shape.bias, fill="residual", device=device, dtype=dtype)
        self.conv_weight_GVK = nn.Parameter(
            torch.empty(shape.groups, convolved, shape.conv, device=device, dtype=dtype)
        )
        self.conv_bias_GV = (
            nn.Parameter(torch.empty(shape.groups, convolved, device=device, dtype=dtype))
            if shape.conv_bias
            else None
        )
        self.a_log_H, self.skip_H, self.dt_bias_H = (
            nn.Parameter(torch.empty(shape.heads, device=device, dtype=dtype)) for _ in range(3)
        )
        parts = shape.groups if shape.norm_per_group else 1
        self.gate_norm = GatedRmsNorm(inner, parts, eps, device=device, dtype=dtype)

    def forward(
        self, x_BTC: Tensor, documents_BT: Tensor | None = None, cache: Mamba2Cache | None = None
    ) -> Tensor:
        """`documents_BT` is None where every row is a single document. With a cache, the tokens go on from it
        and it is brought up to date."""
        shape = self.shape
        inner = self.repeats * shape.head_dim
        projected = self.xbczdt(x_BTC).unflatten(-1, (shape.groups, -1))
        convolved_BTGV, z_BTGI, dt_BTGR = projected.split([inner + 2 * shape.state, inner, self.repeats], -1)
        convolved_BTGV = self._convolve(convolved_BTGV, documents_BT, cache)
        x_BTGI, b_BTGN, c_BTGN = convolved_BTGV.split([inner, shape.state, shape.state], -1)
        x_BTHD = x_BTGI.flatten(2).unflatten(2, (shape.heads, shape.head_dim))
        y_BTHD = self._scan(x_BTHD, self._time_step(dt_BTGR.flatten(2)), b_BTGN, c_BTGN, documents_BT, cache)
        return self.o(self.gate_norm(y_BTHD.flatten(2), z_BTGI.flatten(2)))

    def new_cache(self, rows: int, device: torch.device, dtype: torch.dtype) -> Mamba2Cache:
        """The cache before the first token; `dtype` is that of the activations."""
        shape = self.shape
        groups, convolved, taps = self.conv_weight_GVK.shape
        wide = torch.promote_types(dtype, torch.float32)
        return Mamba2Cache(
            conv_BCP=torch.zeros(rows, groups * convolved, taps - 1, device=device, dtype=dtype),
            state_BHDN=torch.zeros(rows, shape.heads, shape.head_dim, shape.state, device=device, dtype=wide),
        )

    # -------------------------------------------------------------------------------------- parts

    def _convolve(self, x_BTGV: Tensor, documents_BT: Tensor | None, cache: Mamba2Cache | None) -> Tensor:
        y_BTC, state_BCP = causal_conv(
            x_BTGV.flatten(2),
            self.conv_weight_GVK.flatten(0, 1),
            None if self.conv_bias_GV is None else self.conv_bias_GV.flatten(),
            documents_BT,
            None if cache is None else cache.conv_BCP,
        )
        if cache is not None and state_BCP is not None:
            cache.conv_BCP.copy_(state_BCP.detach())
        return F.silu(y_BTC).view_as(x_BTGV)

    def _time_step(self, dt_BTH: Tensor) -> Tensor:
        """The time that passes with each token, float32 or better."""
        wide = torch.promote_types(dt_BTH.dtype, torch.float32)
        dt_BTH = F.softplus(dt_BTH.to(wide) + self.dt_bias_H.to(wide))
        return dt_BTH.clamp(self.shape.dt_min, self.shape.dt_max)

    def _scan(
        self,
        x_BTHD: Tensor,
        dt_BTH: Tensor,
        b_BTGN: Tensor,
        c_BTGN: Tensor,
        documents_BT: Tensor | None,
        cache: Mamba2Cache | None,
    ) -> Tensor:
        a_H = -self.a_log_H.to(dt_BTH.dtype).exp()
        if cache is not None and x_BTHD.shape[1] == 1:
            token = (x_BTHD[:, 0], dt_BTH[:, 0], a_H, b_BTGN[:, 0], c_BTGN[:, 0], self.skip_H)
            y_BHD, state_BHDN = step(*token, cache.state_BHDN)
            y_BTHD = y_BHD.unsqueeze(1)
        else:
            before = None if cache is None else cache.state_BHDN
            tokens = (x_BTHD, dt_BTH, a_H, b_BTGN, c_BTGN, self.skip_H)
            y_BTHD, state_BHDN = self.ssd(*tokens, documents_BT, before)
        if cache is not None:
            cache.state_BHDN.copy_(state_BHDN.detach())
        return y_BTHD

    # -------------------------------------------------------------------------------------- facts

    def canonical(self) -> dict[str, Canonical]:
        shape, every = self.shape, slice(None)
        inner = self.repeats * shape.head_dim
        x, b, c, z, dt = _places(inner, shape.state, shape.state, inner, self.repeats)
        tensors: dict[str, Canonical] = {}
        for name, place in (("z", z), ("x", x), ("B", b), ("C", c), ("dt", dt)):
            tensors |= under(name, "xbczdt", self.xbczdt.part((every, place)))
        for name, place in (("x", x), ("B", b), ("C", c)):
            tensors |= self._conv_part(f"conv.{name}", place)
        tensors["A_log"] = Canonical(parameter="a_log_H", shape=(shape.heads,), fill="decay_log")
        tensors["D"] = Canonical(parameter="skip_H", shape=(shape.heads,), fill="ones")
        tensors["dt_bias"] = Canonical(parameter="dt_bias_H", shape=(shape.heads,), fill="time_step")
        tensors |= under("gate_norm", "gate_norm", self.gate_norm.canonical())
        return tensors | under("o", "o", self.o.canonical())

    def _conv_part(self, name: str, place: slice) -> dict[str, Canonical]:
        groups, _, taps = self.conv_weight_GVK.shape
        channels, index = groups * (place.stop - place.start), (slice(None), place)
        weight = Canonical(parameter="conv_weight_GVK", shape=(channels, taps), fill="taps", index=index)
        if self.conv_bias_GV is None:
            return {f"{name}.weight": weight}
        bias = Canonical(parameter="conv_bias_GV", shape=(channels,), fill="zeros", index=index)
        return {f"{name}.weight": weight, f"{name}.bias": bias}

    def flops(self, tokens: int) -> int:
        """Of the recurrence: a state is written and read once for each token, 2 operations per entry each."""
        shape = self.shape
        states = shape.heads * shape.head_dim * shape.state
        conv = 2 * self.conv_weight_GVK.numel()
        return self.xbczdt.flops(tokens) + self.o.flops(tokens) + tokens * (conv + 4 * states)


class GatedRmsNorm(nn.Module):
    """RMSNorm of y · silu(z), over all channels or over equal parts of them."""

    def __init__(
        self,
        channels: int,
        parts: int,
        eps: float,
        *,
        device: torch.device | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        self.parts = parts
        self.eps = eps
        self.weight = nn.Parameter(torch.empty(channels, device=device, dtype=dtype))

    def forward(self, y_I: Tensor, z_I: Tensor) -> Tensor:
        wide = torch.promote_types(y_I.dtype, torch.float32)
        gated = (y_I.to(wide) * F.silu(z_I.to(wide))).unflatten(-1, (self.parts, -1))
        normed = F.rms_norm(gated, gated.shape[-1:], None, self.eps).flatten(-2)
        return (normed * self.weight.to(wide)).to(y_I.dtype)

    def canonical(self) -> dict[str, Canonical]:
        return {"weight": Canonical(parameter="weight", shape=tuple(self.weight.shape), fill="ones")}


def _places(*sizes: int) -> list[slice]:
    """Slices of the given sizes, one after the other."""
    ends = [sum(sizes[: i + 1]) for i in range(len(sizes))]
    return [slice(end - size, end) for end, size in zip(ends, sizes, strict=True)]
