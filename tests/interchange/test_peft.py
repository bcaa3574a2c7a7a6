"""LoRA in peft's format: transformers and peft compute what braid computes, for every family."""

from __future__ import annotations

import json
import warnings

import pytest
import torch
from safetensors.torch import save_file
from torch import nn

from braid.interchange import adapter_for, convert, peft
from braid.lora import DOWN, UP, Lora
from tests.interchange.models import CONFIGS, model_type, our_model, our_shape, their_model
from tests.interchange.widened import widened
from tests.model.cases import batch, canonical_grads

pytestmark = pytest.mark.costly("every family is built by transformers and compared, gradients too")

pytest.importorskip("transformers")

EVERY = (
    "*.attention.*",
    "*.mamba2.[!o]*",
    "*.delta_net.*",
    "*.mlp.*",
    "*.shared.*",
    "*.latent.*",
    "*.experts.*",
)
"""All but what peft refuses in models with Mamba-2."""
ONE_OF_EACH = ("*.down", "*.up", "*.q", "*.mamba2.x", "*.delta_net.v")
"""Only one of what transformers joins."""
FAMILIES = [*{model_type(case): case for case in reversed(CONFIGS)}.values(), "nemotron_h, latent experts"]
"""The first case of each."""
LENGTH = 13
EXACT = 1e-12
GRADIENTS = 1e-11


class Sides:
    """The same model here and there, before it has adapters there, and the adapters of ours."""

    def __init__(self, case: str, lora: Lora) -> None:
        self.lora, self.theirs = lora, their_model(case, torch.float64)
        self.shape, self.table = our_shape(case, self.theirs), adapter_for(model_type(case), "memory")
        weights = convert(self.theirs.state_dict(), self.table, self.shape, "to_ours")
        self.ours = our_model(self.shape, weights, torch.float64)
        self.ours.adapt(lora)
        self.rows = {name: len(weight) for name, weight in weights.items()}
        held, generator = self.ours.tensors(), torch.Generator().manual_seed(7)
        self.adapters = {}
        for name, tensor in self.ours.canonical().items():
            if name.endswith((DOWN, UP)):
                value = torch.randn(tensor.shape, generator=generator, dtype=torch.float64) / 3
                tensor.write(held[tensor.parameter], value)
                self.adapters[name] = value
        assert self.adapters
        self.given = batch([[LENGTH]])

    def exported(self) -> tuple[list[peft.PeftAdapter], dict[str, torch.Tensor], dict]:
        fitted, lost = peft.fit(self.table, self.shape, self.adapters, self.rows)
        assert not lost
        return fitted, peft.tensors(fitted), peft.config(fitted, self.lora, self.shape)

    def our_logits(self) -> torch.Tensor:
        return self.ours.logits(self.ours.prepare(self.given))[..., : self.theirs.config.vocab_size]

    def their_logits(self, model: nn.Module) -> torch.Tensor:
        with widened(torch.float64):
            return model(self.given.tokens_BT, use_cache=False).logits

    def refused(self) -> list[str]:
        return peft.fit(self.table, self.shape, self.adapters, self.rows)[1]


def apart(found: torch.Tensor, wanted: torch.Tensor) -> float:
    return float((found - wanted).detach().norm() / wanted.detach().norm())


@pytest.mark.parametrize("targets", [EVERY, ONE_OF_EACH], ids=["all", "one of each"])
@pytest.mark.parametrize("case", FAMILIES)
@torch.no_grad()
def test_products_as_peft_makes_them_are_those_of_braid(case, targets):
    """Without peft: A and B of every parameter, read as its ParamWrapper reads them."""
    sides = Sides(case, Lora(rank=2, alpha=3.0, targets=targets))
    fitted, tensors, config = sides.exported()
    assert len(tensors) == 2 * len(fitted)
    if sides.shape.moe is not None:
        # peft takes modules of these names for experts, wherever they are.
        assert not [name for name in config["target_modules"] if name.endswith(("gate_proj", "down_proj"))]
    for each in fitted:
        weight = sides.theirs.get_parameter(each.theirs)
        experts = len(weight) if weight.dim() == 3 else 1
        down_ERI = each.down.unflatten(0, (experts, -1))
        up_ORE = each.up.unflatten(1, (-1, experts))
        name = each.theirs if each.theirs in (config["target_parameters"] or ()) else each.module
        assert name in [*config["target_modules"], *(config["target_parameters"] or ())]
        rank = config["rank_pattern"].get(name, config["r"])
        assert up_ORE.shape[1] == rank
        scale = config["alpha_pattern"].get(name, config["lora_alpha"]) / rank
        transposed = weight.dim() == 3 and model_type(case) == "gpt_oss"
        order = "e i o" if transposed else "e o i"
        added = scale * torch.einsum(f"o r e, e r i -> {order}", up_ORE, down_ERI)
        weight.data += added.view_as(weight)
    assert apart(sides.their_logits(sides.theirs), sides.our_logits()) < EXACT


@pytest.mark.parametrize("targets", [EVERY, ONE_OF_EACH], ids=["all", "one of each"])
@pytest.mark.parametrize("case", FAMILIES)
def test_peft_computes_the_logits_and_gradients_of_braid(case, targets, tmp_path):
    library = pytest.importorskip("peft", reason="pip install peft")
    sides = Sides(case, Lora(rank=2, alpha=3.0, targets=targets))
    _, tensors, config = sides.exported()
    save_file(tensors, tmp_path / "adapter_model.safetensors")
    (tmp_path / "adapter_config.json").write_text(json.dumps(config))
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        model = library.PeftModel.from_pretrained(
            sides.theirs, tmp_path, autocast_adapter_dtype=False, is_trainable=True
        )
    # Of patterns for parameters peft says that no module matches them, and heeds them.
    assert not [str(each.message) for each in told if "_pattern keys did not match" not in str(each.message)]
    theirs, ours = sides.their_logits(model), sides.our_logits()
    assert apart(theirs, ours) < EXACT
    falling = torch.linspace(1, -1, ours.numel(), dtype=torch.float64).view_as(ours)
    for logits in (theirs, ours):
        (logits * falling).sum().backward()
    found = {
        name.replace(".default.", "."): parameter.grad
        for name, parameter in model.named_parameters()
        if parameter.requires_grad
    }
    grads = {name: grad for name, grad in canonical_grads(sides.ours).items() if name in sides.adapters}
    wanted = peft.tensors(peft.fit(sides.table, sides.shape, grads, sides.rows)[0])
    assert found.keys() == wanted.keys() == tensors.keys()
    for name, grad in found.items():
        # Beside its blocks, B of what is joined is zero here and could be anything there.
        assert apart(grad.where(tensors[name] != 0, 0), wanted[name]) < GRADIENTS, name


@pytest.mark.parametrize("case", ["mamba2", "nemotron_h"])
def test_what_peft_refuses_is_named(case):
    """Its kernels of training would miss the adapter; other families have no such rule."""
    told = Sides(case, Lora(rank=2, targets=("*.mamba2.*",))).refused()
    assert told
    assert all("out_proj.weight is one that peft refuses: leave blocks." in line for line in told)
    assert not Sides("bamba", Lora(rank=2, targets=("*.mamba2.*",))).refused()
