"""The model of a checkpoint, whole on one process: to generate from, or to look at."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path

import torch

from braid import kernels
from braid.config import Mesh, Run
from braid.data import ItemLimits, Tokenizer, tokenizer_from
from braid.data.prompts import Prompt, PromptItems
from braid.distributed.collectives import Groups
from braid.errors import ConfigError, enumeration
from braid.lora import Lora
from braid.model.encoder import EncoderModel, Items
from braid.model.generate import Sampling, checked_prompt, continuation, decode_text
from braid.model.language import LanguageModel
from braid.model.multimodal import Rows
from braid.model.names import language_names
from braid.nn.dtypes import DTYPES
from braid.planning.local_model import build_local_encoder, choose_encoder_kernels
from braid.planning.plan import Plan, canonical_names, plan
from braid.train.device import Device, DeviceName, choose_device
from braid.train.lora_weights import is_adapter, load_merged
from braid.train.state import load_weights, resolve_checkpoint, shapes_of, stored_weights
from braid.train.stored_run import check_claims, describe
from braid.train.surgery import check_plan, plan_by_name


@dataclass(frozen=True, kw_only=True, eq=False)
class LoadedModel:
    """A language model with its encoders."""

    path: Path
    """The checkpoint."""
    run: Run
    language: LanguageModel
    encoders: Mapping[str, EncoderModel]
    tokenizer: Tokenizer

    def generate(self, prompt: Prompt, *, tokens: int, temperature: float, seed: int) -> str:
        """The prompt and its continuation. Encoders run once."""
        return self.text(prompt, Sampling(tokens=tokens, temperature=temperature, seed=seed))

    def text(self, prompt: Prompt, sampling: Sampling) -> str:
        """The same, with all ways of sampling."""
        told = self.continuation(prompt, sampling)
        return decode_text(self.tokenizer, prompt.ids, self._placeholders(prompt)) + told

    def continuation(self, prompt: Prompt, sampling: Sampling) -> str:
        """What the model writes behind a prompt."""
        used = {name: self.encoders[name] for name in prompt.items}
        return continuation(
            self.language,
            self.tokenizer,
            checked_prompt(self.tokenizer, prompt.ids, sampling),
            sampling,
            rows=encode(used, prompt.items),
            modules=self._placeholders(prompt),
            never=[module.token for module in self.run.modules.values()],
        )

    def _placeholders(self, prompt: Prompt) -> dict[str, int]:
        return {name: self.run.modules[name].token for name in prompt.items}


@torch.no_grad()
def encode(encoders: Mapping[str, EncoderModel], items: Mapping[str, PromptItems]) -> Rows:
    """The rows of the items of a prompt."""
    rows: dict[str, torch.Tensor] = {}
    for name, source in items.items():
        lengths = source.lengths
        rows[name] = encoders[name](
            Items(
                patches_NI=source.patches.patches_NI,
                lengths=lengths,
                grids=source.patches.grids,
                samples=[0] * len(lengths),
                numbers=range(len(lengths)),
                training=False,
            )
        )
    return rows


def load_models(path: Path | str, device: Device | DeviceName = "auto") -> LoadedModel:
    """Everything in a checkpoint, or in the newest checkpoint of a run's folder."""
    path = resolve_checkpoint(Path(path))
    language, tokenizer = load_model(path, device)
    run = on_one_process(describe(path).run)
    planned = plan(run, world=1)
    encoders = {name: _load_encoder(path, planned, name, language.device) for name in run.modules}
    return LoadedModel(path=path, run=run, language=language, encoders=encoders, tokenizer=tokenizer)


def load_model(path: Path | str, device: Device | DeviceName = "auto") -> tuple[LanguageModel, Tokenizer]:
    """The language model and the tokenizer of a checkpoint, or of the newest checkpoint in a run's folder."""
    path = resolve_checkpoint(Path(path))
    if not isinstance(device, Device):
        device = choose_device(device)
    saved = describe(path)
    check_claims(path, saved.run)
    dtype = DTYPES[saved.run.train.dtype]
    lora = saved.run.train.lora
    without = replace(saved.run.train, lora=Lora())
    alone = plan(replace(saved.run, mesh=Mesh(), modules={}, train=without), world=1)
    layout, wanted = alone.layout, canonical_names(alone)
    # By shapes alone, before a model of that size is built: the file may claim any.
    every = stored_weights(path)
    stored = shapes_of({name: every[name] for name in language_names(every) if not is_adapter(name)})
    check_plan(str(path), plan_by_name(wanted), stored, wanted)
    chosen = kernels.choose(saved.run.model, layout.kinds(), device.torch, dtype)
    model = LanguageModel(saved.run.model, layout, chosen, device=device.torch, dtype=dtype)
    if lora.rank:
        load_merged(path, model, lora)
    else:
        load_weights(path, model, model.tensors())
    return model, tokenizer_from(saved.tokenizer)


def on_one_process(run: Run) -> Run:
    """The run with everything on one rank. An encoder has as many segments as pipeline ranks."""
    modules = {
        name: replace(
            module,
            mesh=Mesh(),
            ahead=0,
            model=replace(module.model, pattern=module.model.pattern.replace("|", "")),
        )
        for name, module in run.modules.items()
    }
    return replace(run, mesh=Mesh(), modules=modules)


def _load_encoder(path: Path, planned: Plan, name: str, device: torch.device) -> EncoderModel:
    chosen = choose_encoder_kernels(planned, name, device)
    model = build_local_encoder(planned, name, Groups(), chosen, device=device)
    load_weights(path, model, model.tensors(), planned.encoders[name].prefix)
    return model


def image_limits(run: Run) -> dict[str, ItemLimits]:
    """The module that reads the images of a prompt: that of the data, or the only one that could; or none."""
    able = {name: module for name, module in run.modules.items() if module.model.pixels is not None}
    chosen = {name: module for name, module in able.items() if module.items == "image"} or able
    if len(chosen) > 1:
        raise ConfigError(
            f"{enumeration(list(chosen))} could read the images of a prompt: set modules.NAME.items of one of "
            "them to image"
        )
    return {
        name: ItemLimits(
            encoder=module.model,
            token=module.token,
            most_items=module.most_items,
            most_patches=module.most_patches,
        )
        for name, module in chosen.items()
    }
