"""Export of the adapters of a LoRA run by themselves, for peft."""

from __future__ import annotations

import json
from pathlib import Path

from braid.checkpoint import LazyCheckpoint
from braid.errors import ConfigError
from braid.interchange import peft, side_files
from braid.interchange.hub import adapter_for
from braid.train.export_settings import run_of
from braid.train.lora_weights import is_adapter
from braid.train.state import weight_names
from braid.train.stored_run import describe


def export_adapter(path: Path, out: Path, model_type: str | None = None) -> int:
    """Write adapter_config.json and adapter_model.safetensors to the folder `out`. Returns the number of
    adapters of peft."""
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
    names = weight_names(path)
    outlines = LazyCheckpoint(path, frozenset(name for name in names if name.endswith(".weight"))).outlines()
    rows = {name: len(outline) for name, outline in outlines.items()}
    stored = LazyCheckpoint(path, frozenset(name for name in names if is_adapter(name)))
    adapters, lost = peft.fit(adapter_for(model_type, "memory"), run.model, stored, rows)
    if lost:
        raise ConfigError(
            "\n  ".join(
                [
                    f"--adapter: some adapters have no place in transformers' {model_type}",
                    *lost,
                    "set   no --adapter, which exports merged weights, or other train.lora.targets",
                ]
            )
        )
    out.mkdir(parents=True, exist_ok=True)
    save_file(peft.tensors(adapters), out / "adapter_model.safetensors")
    settings = peft.config(adapters, lora, run.model)
    (out / "adapter_config.json").write_text(json.dumps(settings, indent=2) + "\n")
    return len(adapters)
