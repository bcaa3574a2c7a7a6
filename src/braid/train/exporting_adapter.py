"""Export of the adapters of a LoRA run by themselves, in peft's format."""

from __future__ import annotations

import json
from pathlib import Path

import torch
from torch import Tensor

from braid.checkpoint import LazyCheckpoint
from braid.errors import ConfigError
from braid.interchange import side_files
from braid.interchange.hub import adapter_for
from braid.interchange.tables import NameLink, links
from braid.lora import DOWN, UP
from braid.train.export_settings import run_of
from braid.train.lora_weights import is_adapter
from braid.train.state import weight_names
from braid.train.stored_run import describe

PREFIX = "base_model.model."
"""What peft puts before the name of a module."""


def export_adapter(path: Path, out: Path, model_type: str | None = None) -> int:
    """Write adapter_config.json and adapter_model.safetensors to the folder `out`. Returns the number of
    adapted modules."""
    from safetensors.torch import save_file

    run, source = describe(path).run, side_files.source_of(run_of(path))
    lora = run.train.lora
    if not lora.rank:
        raise ConfigError(
            f"--adapter: {path} is of a run without LoRA\n  set   train.lora.rank, or no --adapter"
        )
    model_type = model_type or (source.config.get("model_type") if source else None)
    if model_type is None:
        raise ConfigError(f"--model-type is missing: {path} was not imported\n  set   llama, for example")
    names = frozenset(name for name in weight_names(path) if is_adapter(name))
    stored, tensors = LazyCheckpoint(path, names), dict[str, Tensor]()
    wanted = {f"{name.removesuffix(f'.{UP}')}.weight" for name in names if name.endswith(UP)}
    joined = []
    for link in links(adapter_for(model_type, "memory"), run.model):
        if wanted.isdisjoint(link.ours):
            continue
        wanted -= set(link.ours)
        if not _keeps_inputs(link, stored):
            joined.append(f"{link.theirs} holds {', '.join(link.ours)}")
            continue
        stem, module = link.ours[0].removesuffix(".weight"), PREFIX + link.theirs.removesuffix(".weight")
        tensors[f"{module}.lora_A.weight"] = stored[f"{stem}.{DOWN}"].contiguous()
        tensors[f"{module}.lora_B.weight"] = link.move.to_theirs([stored[f"{stem}.{UP}"]]).contiguous()
    joined += [f"{model_type} has no {name}" for name in sorted(wanted)]
    if joined:
        raise ConfigError(
            "\n  ".join(
                [
                    "--adapter: peft has one adapter for each linear layer of transformers, and these differ:",
                    *joined,
                    "set   no --adapter, which exports merged weights",
                ]
            )
        )
    out.mkdir(parents=True, exist_ok=True)
    save_file(tensors, out / "adapter_model.safetensors")
    modules = sorted({name.removeprefix(PREFIX).rsplit(".", 2)[0] for name in tensors})
    config = {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": None,
        "r": lora.rank,
        "lora_alpha": lora.alpha,
        "lora_dropout": 0.0,
        "bias": "none",
        "fan_in_fan_out": False,
        "inference_mode": True,
        "target_modules": modules,
    }
    (out / "adapter_config.json").write_text(json.dumps(config, indent=2) + "\n")
    return len(modules)


def _keeps_inputs(link: NameLink, stored: LazyCheckpoint) -> bool:
    """Whether their weight has the inputs of ours, and its outputs in some order: then its adapter is ours,
    with the outputs in that order."""
    if len(link.ours) > 1:
        return False
    stem = link.ours[0].removesuffix(".weight")
    down, up = (stored[f"{stem}.{kind}"].double() for kind in (DOWN, UP))
    generator = torch.Generator().manual_seed(0)
    up = torch.randn(up.shape, generator=generator, dtype=torch.float64)
    theirs = link.move.to_theirs([up @ down])
    moved = link.move.to_theirs([up])
    return theirs.shape == (len(moved), down.shape[1]) and torch.allclose(theirs, moved @ down)
