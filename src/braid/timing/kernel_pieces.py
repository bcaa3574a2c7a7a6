"""What the named kernels of a sample are to a model: key, operations and bytes, by the modules' own `work`."""

from __future__ import annotations

from collections.abc import Mapping

import torch

from braid import architecture
from braid.kernels import hyper_connection, ssd
from braid.kernels.delta_rule import REFERENCE as DELTA_RULE
from braid.nn.cost import Workload
from braid.nn.delta_net import DeltaNet
from braid.nn.hyper_connection import HyperConnection, HyperExit
from braid.nn.mamba2 import Mamba2
from braid.nn.work import Kernel, Pass, Work, attention_work
from braid.timing.samples import Value

META = torch.device("meta")
DTYPE = torch.bfloat16


def pieces_of(name: str, shape: Mapping[str, Value]) -> dict[Pass, Kernel]:
    """The kernels of each pass; empty for one that models count by products and bytes."""
    if name == "quantise":
        return {"forward": Kernel(name, (("of", str(shape["of"])),), 0, int(shape["bytes"]))}
    work = _work(name, {key: value for key, value in shape.items() if isinstance(value, int)}, shape)
    found: dict[Pass, Kernel] = {}
    for pass_, pieces in work.passes().items():
        for piece in pieces:
            if isinstance(piece.what, Kernel) and piece.what.name == name:
                found[pass_] = piece.what
    return found


def _work(name: str, sizes: Mapping[str, int], shape: Mapping[str, Value]) -> Work:
    rows, tokens = sizes.get("rows", 1), sizes["tokens"]
    workload = Workload(rows=rows, tokens=tokens, dtype=DTYPE)
    match name:
        case "attention":
            documents = tokens // (sizes["document"] or tokens)
            packed = Workload(rows=rows, tokens=tokens, dtype=DTYPE, items=documents if documents > 1 else 0)
            return attention_work(
                packed, sizes["heads"], sizes["kv_heads"], (sizes["head_dim"], sizes["v_dim"]),
                window=sizes["window"] or None, causal=bool(sizes["causal"]),
            )  # fmt: skip
        case "ssd":
            mamba = architecture.Mamba2(
                heads=sizes["heads"], head_dim=sizes["head_dim"], state=sizes["state"], groups=sizes["groups"]
            )
            return Mamba2(mamba, 64, 1e-5, ssd.REFERENCE.function, device=META, dtype=DTYPE).work(workload)
        case "causal_conv":
            groups, part, rest = sizes["groups"], sizes["part"], sizes["rest"]
            mamba = architecture.Mamba2(
                heads=groups, head_dim=part, state=rest, groups=groups, conv=sizes["taps"]
            )
            return Mamba2(mamba, 64, 1e-5, ssd.REFERENCE.function, device=META, dtype=DTYPE).work(workload)
        case "delta_rule":
            delta = architecture.DeltaNet(
                key_heads=sizes["key_heads"], value_heads=sizes["heads"], key_dim=sizes["key_dim"],
                value_dim=sizes["value_dim"],
            )  # fmt: skip
            return DeltaNet(delta, 64, 1e-5, DELTA_RULE.function, device=META, dtype=DTYPE).work(workload)
        case "hyper_connection":
            hyper = architecture.HyperConnections(streams=sizes["streams"])
            given = (hyper, sizes["channels"], 1e-5, hyper_connection.REFERENCE.function)
            if shape["part"] == "exit":
                return HyperExit(*given, device=META, dtype=DTYPE).work(workload)
            connection = HyperConnection(*given, device=META, dtype=DTYPE)
            return connection.pre_work(workload) if shape["part"] == "pre" else connection.post_work(workload)
        case _:
            return Work()
