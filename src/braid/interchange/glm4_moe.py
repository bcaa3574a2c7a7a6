"""GLM-4.5 (arXiv 2508.06471): attention with partial RoPE, the experts and the MTP depth of DeepSeek-V3."""

from __future__ import annotations

from types import MappingProxyType
from typing import Any

from braid.architecture import Mlp, Model
from braid.interchange.deepseek import MOE_HUB, MOE_MEMORY, depths, read_moe, write_moe
from braid.interchange.family import ModelFamily, head_copy, needed, read_model, write_model
from braid.interchange.llama import (
    ATTENTION,
    EMBEDDING,
    ENDS,
    MLP,
    read_attention,
    write_attention,
)
from braid.interchange.rope import write_rope
from braid.interchange.settings import Settings
from braid.interchange.tables import Adapter, TableRow
from braid.pattern import Kind

ROPE_FRACTION = 0.5


def _adapter(moe: tuple[TableRow, ...]) -> Adapter:
    return Adapter(
        name="glm4_moe",
        counting="pair",
        prefix="model.layers.{layer}.",
        ends=ENDS,
        layers=MappingProxyType({Kind.ATTENTION: ATTENTION, Kind.MLP: MLP, Kind.MOE: moe}),
        depths=depths(),
        copies=head_copy(EMBEDDING),
    )


def _read(settings: Settings) -> Model:
    """Queries, keys and values may have biases, the output projection has none."""
    settings.only("hidden_act", "silu", default="silu")
    settings.unused("num_nextn_predict_layers", "num_mtp_layers")
    layers = settings.integer("num_hidden_layers")
    dense = min(settings.integer("first_k_dense_replace", 1), layers)
    return Model(
        pattern="[*-]" * dense + "[*E]" * (layers - dense),
        attention=read_attention(
            settings,
            heads=96,
            kv_heads=8,
            head_dim=None,
            fraction=ROPE_FRACTION,
            qk_norm=settings.flag("use_qk_norm", False),
            bias=settings.flag("attention_bias", False),
            o_bias=False,
        ),
        mlp=Mlp(ffn=settings.integer("intermediate_size", 10944)),
        moe=read_moe(settings, experts=128, ffn=1408),
        **read_model(settings, default_eps=1e-5),
    )


def _write(shape: Model) -> dict[str, Any]:
    attention = needed(shape.attention, "attention")
    fraction = {"partial_rotary_factor": attention.rope_fraction}
    return {
        **write_model(shape),
        **write_attention(shape),
        **write_moe(shape),
        "hidden_act": "silu",
        "rope_parameters": {**write_rope(attention), **fraction},
        "use_qk_norm": attention.qk_norm,
        "attention_bias": attention.bias,
    }


FAMILIES = (
    ModelFamily(
        model_type="glm4_moe",
        architecture="Glm4MoeForCausalLM",
        hub=_adapter(MOE_HUB),
        memory=_adapter(MOE_MEMORY),
        read=_read,
        write=_write,
        depth="*E",
    ),
)
