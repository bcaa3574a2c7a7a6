"""DeepSeek-V4: what braid has of it goes by its names both ways, and computes what transformers computes.

Its attention cannot be built. Where the two are compared, both have the same simple function in its place.
Shapes: B rows, t tokens, S streams, C channels.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from braid.architecture import Glu, HyperConnections, LatentAttention, Model, Moe
from braid.checkpoint import Piece, save
from braid.errors import CheckpointError, ConfigError
from braid.interchange import (
    FAMILIES,
    adapter_for,
    config_of,
    convert,
    family_of,
    from_hf,
    reader_of,
    shape_of,
    to_hf,
    to_ours,
)
from braid.interchange.deepseek_v4 import LATENT
from braid.interchange.files import SafetensorsFolder
from braid.interchange.tables import links
from braid.model.block import PreNorm
from braid.model.language import LanguageModel
from braid.model.mtp import targets
from braid.nn import latent_attention
from braid.recipes import load
from braid.train.state import load_weights
from tests.interchange.layouts import optimized
from tests.interchange.layouts import same as assert_same
from tests.interchange.models import BOUNDS, our_model
from tests.interchange.widened import widened
from tests.model.cases import assert_near, batch, build, canonical_grads

BF16, FP32, FP64 = torch.bfloat16, torch.float32, torch.float64
FORMS = ("hub", "memory", "packed")
SHAPE = Model(
    pattern="[+E][+E]/+E",
    hidden=12,
    vocab=17,
    tied=False,
    norm_eps=1e-3,
    latent_attention=LatentAttention(heads=3, q_rank=5, kv_rank=4, nope_dim=3, rope_dim=2, v_dim=5),
    moe=Moe(
        experts=5,
        top_k=2,
        ffn=7,
        shared_ffn=7,
        glu=Glu(limit=0.6),
        score="sqrt_softplus",
        scale=1.7,
        selection_bias=True,
        aux_loss=0.0,
    ),
    hyper=HyperConnections(streams=3, sinkhorn_steps=6, eps=1e-2),
)
MAIN = replace(SHAPE, pattern="[+E][+E]")
PLAIN = replace(SHAPE, hyper=None, moe=replace(SHAPE.moe, glu=Glu(), score="sigmoid"))
PUBLISHED: Mapping[str, Any] = {
    "architectures": ["DeepseekV4ForCausalLM"],
    "attention_bias": False,
    "attention_dropout": 0.0,
    "bos_token_id": 0,
    "compress_ratios": [0, 0, *[4, 128] * 20, 4, 0],
    "compress_rope_theta": 160000,
    "eos_token_id": 1,
    "expert_dtype": "fp4",
    "hc_eps": 1e-06,
    "hc_mult": 4,
    "hc_sinkhorn_iters": 20,
    "head_dim": 512,
    "hidden_act": "silu",
    "hidden_size": 4096,
    "index_head_dim": 128,
    "index_n_heads": 64,
    "index_topk": 512,
    "initializer_range": 0.02,
    "max_position_embeddings": 1048576,
    "model_type": "deepseek_v4",
    "moe_intermediate_size": 2048,
    "n_routed_experts": 256,
    "n_shared_experts": 1,
    "norm_topk_prob": True,
    "num_attention_heads": 64,
    "num_experts_per_tok": 6,
    "num_hash_layers": 3,
    "num_hidden_layers": 43,
    "num_key_value_heads": 1,
    "num_nextn_predict_layers": 1,
    "o_groups": 8,
    "o_lora_rank": 1024,
    "q_lora_rank": 1024,
    "qk_rope_head_dim": 64,
    "quantization_config": {"quant_method": "fp8", "fmt": "e4m3", "weight_block_size": [128, 128]},
    "rms_norm_eps": 1e-06,
    "rope_scaling": {"type": "yarn", "factor": 16, "original_max_position_embeddings": 65536},
    "rope_theta": 10000,
    "routed_scaling_factor": 1.5,
    "scoring_func": "sqrtsoftplus",
    "sliding_window": 128,
    "swiglu_limit": 10.0,
    "tie_word_embeddings": False,
    "topk_method": "noaux_tc",
    "torch_dtype": "bfloat16",
    "use_cache": True,
    "vocab_size": 129280,
}
"""The settings of the 284B-A13B model."""


def weights(shape: Model, dtype: torch.dtype) -> dict[str, Tensor]:
    """Random weights by canonical name, each in the dtype that it has in a model of this one."""
    model = build(shape.pattern, shape, dtype=dtype)
    tensors = model.tensors()
    read = {name: t.read(tensors[t.parameter]).detach() for name, t in model.canonical().items()}
    return {name: torch.randn_like(tensor) for name, tensor in read.items()}


def hyper(names: Mapping[str, Any]) -> set[str]:
    """Those of our names, or of theirs, that are weights of hyper-connections."""
    marks = (".connection.", "exit.", "hc_attn_", "hc_ffn_", "hc_head", ".attn_hc.", ".ffn_hc.")
    return {name for name in names if any(mark in name for mark in marks)}


# ----------------------------------------------------------------------------------------------- names


@pytest.mark.parametrize("dtype", [BF16, FP32, FP64], ids=str)
@pytest.mark.parametrize("form", FORMS)
def test_every_tensor_goes_there_and_back(form: str, dtype: torch.dtype) -> None:
    ours, adapter = weights(SHAPE, dtype), adapter_for("deepseek_v4", form)
    assert {ours[name].dtype for name in hyper(ours)} == {torch.promote_types(dtype, FP32)}
    theirs = convert(ours, adapter, SHAPE, "to_theirs")
    assert_same(dict(convert(theirs, adapter, SHAPE, "to_ours")), ours)


@pytest.mark.parametrize(
    "shape",
    [
        replace(SHAPE, tied=True),
        replace(SHAPE, pattern="+E[+E]/+E/+E"),
        replace(SHAPE, latent_attention=replace(SHAPE.latent_attention, q_rank=None)),
        replace(SHAPE, moe=replace(SHAPE.moe, shared_ffn=0)),
        replace(SHAPE, moe=replace(SHAPE.moe, shared_ffn=14, glu=Glu(), score="sigmoid")),
        replace(SHAPE, hyper=HyperConnections(streams=1, sinkhorn_steps=1, eps=1e-4)),
    ],
    ids=["tied", "depths", "no query latent", "no shared expert", "two shared experts", "one stream"],
)
def test_every_shape_goes_into_a_folder_and_back(shape: Model, tmp_path: Path) -> None:
    ours, depths = weights(shape, FP32), shape.pattern.count("/")
    for form in FORMS:
        to_hf(shape, ours, tmp_path / form, model_type="deepseek_v4", form=form)
        back, tensors = from_hf(tmp_path / form, mtp_depths=depths)
        assert back == replace(shape, pattern=back.pattern)
        assert back.pattern == "[+E][+E]" + "/+E" * depths
        if shape.pattern == back.pattern:
            assert_same(dict(tensors), ours)
        main = from_hf(tmp_path / form)[1]
        assert main.keys() == {name for name in tensors if not name.startswith("mtp.")}


@pytest.mark.parametrize("form", FORMS)
def test_what_is_wide_in_a_narrow_model_is_so_in_its_files(form: str, tmp_path: Path) -> None:
    narrow = weights(SHAPE, BF16)
    wide = {name for name, tensor in narrow.items() if tensor.dtype == FP32}
    assert wide == hyper(narrow) | {name for name in narrow if ".router." in name}
    to_hf(SHAPE, narrow, tmp_path / "same", model_type="deepseek_v4", form=form, dtype=BF16)
    assert_same(dict(from_hf(tmp_path / "same", mtp_depths=1)[1]), narrow)
    ours = weights(SHAPE, FP32)
    to_hf(SHAPE, ours, tmp_path / "narrowed", model_type="deepseek_v4", form=form, dtype=BF16)
    kept = {name: tensor if name in wide else tensor.to(BF16) for name, tensor in ours.items()}
    assert_same(dict(from_hf(tmp_path / "narrowed", mtp_depths=1)[1]), kept)
    to_hf(SHAPE, weights(SHAPE, FP64), tmp_path / "less", model_type="deepseek_v4", form=form, dtype=FP32)
    less = dict(SafetensorsFolder(tmp_path / "less"))
    assert {less[name].dtype for name in hyper(less)} == {FP32}


@pytest.mark.parametrize(
    "form", [FORMS[0], *(pytest.param(form, marks=pytest.mark.long) for form in FORMS[1:])]
)
def test_the_state_of_the_optimizer_comes_along(form: str, tmp_path: Path) -> None:
    ours, family = weights(SHAPE, FP32), family_of("deepseek_v4")
    moments = optimized(ours, [name for name in ours if not name.endswith("router.bias")])
    ours |= {f"optimizer.{moment}.{name}": t for moment, held in moments.items() for name, t in held.items()}
    to_hf(SHAPE, ours, tmp_path, model_type="deepseek_v4", form=form, dtype=BF16, updates=3)
    found = to_ours(SafetensorsFolder(tmp_path), reader_of(family), SHAPE, dtype=BF16)
    assert_same(dict(found.tensors), ours)
    assert found.updates == 3


# -------------------------------------------------------------------------------------------- settings


def test_a_published_config_is_refused_with_what_braid_lacks() -> None:
    with pytest.raises(ConfigError) as error:
        shape_of(family_of("deepseek_v4"), PUBLISHED)
    told = str(error.value).split("\n  ")
    assert told[0] == "this deepseek_v4 config.json cannot be expressed: 7 reasons"
    for setting, reason in (
        ("compress_ratios", "heavily_compressed_attention"),
        ("sliding_window = 128", "sinks"),
        ("num_key_value_heads = 1", "keys"),
        ("index_topk = 512", "indexer"),
        ("o_groups = 8", "output projection"),
        ("num_hash_layers = 3", "token ids"),
        ("expert_dtype = 'fp4'", "dequantise"),
    ):
        assert any(line.startswith(setting) and reason in line for line in told), setting


@pytest.mark.parametrize(
    ("settings", "reason"),
    [
        ({}, r"layer_types = 'none given'.*that of DeepSeek-V3"),
        ({"layer_types": ["sliding_attention"] * 2}, "layer_types = 'sliding_attention'"),
        ({"layer_types": [LATENT]}, "layer_types = '1 entries'"),
        ({"layer_types": [LATENT] * 2, "mlp_layer_types": ["hash_moe", "moe"]}, "mlp_layer_types"),
        ({"layer_types": [LATENT] * 2, "mlp_layer_types": ["moe"]}, "mlp_layer_types = '1 entries'"),
        ({"layer_types": [LATENT] * 2, "scoring_func": "softmax"}, "scoring_func"),
        ({"layer_types": [LATENT] * 2, "compress_rope_theta": 1e5}, "compress_rope_theta"),
    ],
)
def test_what_braid_does_not_have_is_refused(settings: dict[str, Any], reason: str) -> None:
    given = config_of(family_of("deepseek_v4"), MAIN)
    given = {name: value for name, value in given.items() if name != "layer_types"}
    with pytest.raises(ConfigError, match=reason):
        shape_of(family_of("deepseek_v4"), given | settings)


def test_the_recipe_that_is_like_it_is_written_and_read_back() -> None:
    shape, family = load("deepseek-v4-like").model, family_of("deepseek_v4")
    back = shape_of(family, config_of(family, shape), mtp_depths=1)
    assert config_of(family, back) == config_of(family, shape)
    assert (back.hyper, back.latent_attention) == (shape.hyper, shape.latent_attention)


def test_transformers_does_not_take_it_for_its_own(tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers")
    (tmp_path / "config.json").write_text(json.dumps(config_of(family_of("deepseek_v4"), SHAPE)))
    with pytest.raises(Exception, match=LATENT):
        transformers.AutoConfig.from_pretrained(tmp_path)


def test_a_model_that_is_none_is_refused_with_every_field() -> None:
    shape = replace(
        SHAPE,
        moe=replace(SHAPE.moe, score="softmax", selection_bias=False, shared_ffn=9),
        hyper=replace(SHAPE.hyper, exit="mean"),
    )
    with pytest.raises(ConfigError) as error:
        config_of(family_of("deepseek_v4"), shape)
    told = str(error.value).split("\n  ")
    assert told[0] == "this model is no deepseek_v4: 4 fields"
    assert [line.split(" =")[0] for line in told[1:-1]] == [
        "model.hyper.exit",
        "model.moe.score",
        "model.moe.selection_bias",
        "model.moe.shared_ffn",
    ]


# --------------------------------------------------------------------------------- plain, and several


PATTERNS = {
    **dict.fromkeys(("llama", "mistral", "qwen2", "qwen3", "bamba"), "[*-]"),
    **dict.fromkeys(("deepseek_v3", "kimi_k2", "kimi_k25"), "[+E]"),
    "mamba2": "MM",
    "nemotron_h": "M*E",
    "olmo_hybrid": "[*-]",
    "qwen3_5": "[*-]",
}
"""A pattern of each family; the others have attention and experts."""


@pytest.mark.parametrize("model_type", [f.model_type for f in FAMILIES if not f.hub.hyper])
def test_no_other_family_takes_hyper_connections(model_type: str) -> None:
    every = replace(load("tiny").model, latent_attention=SHAPE.latent_attention, hyper=SHAPE.hyper)
    shape = replace(every, pattern=PATTERNS.get(model_type, "[*E]"))
    with pytest.raises(ConfigError, match=f"^{model_type} has no names for hyper-connections.*\n  rule"):
        config_of(family_of(model_type), shape)


@pytest.mark.parametrize("form", ["indexed", "hybrid", "stacked"])
def test_nor_has_megatron_names_for_them(form: str) -> None:
    with pytest.raises(ConfigError, match=r"^megatron \(\w+\) has no names for hyper-connections"):
        list(links(adapter_for("megatron", form), MAIN))


def test_a_plain_model_is_no_deepseek_v4() -> None:
    with pytest.raises(ConfigError, match=r"around every layer, and model\.hyper is not set"):
        config_of(family_of("deepseek_v4"), PLAIN)


@pytest.mark.parametrize("form", FORMS)
def test_files_of_a_plain_model_lack_named_connections(form: str, tmp_path: Path) -> None:
    ours = weights(MAIN, FP32)
    to_hf(MAIN, ours, tmp_path, model_type="deepseek_v4", form=form)
    files = load_file(tmp_path / "model.safetensors")
    lost = hyper(files)
    save_file({n: t for n, t in files.items() if n not in lost}, tmp_path / "model.safetensors")
    with pytest.raises(CheckpointError) as error:
        from_hf(tmp_path)
    assert str(error.value).split("\n  ")[1:-1] == [f"missing  {name}" for name in sorted(lost)]


@pytest.mark.parametrize(("saved", "wanted", "word"), [(PLAIN, SHAPE, "missing"), (SHAPE, PLAIN, "extra")])
def test_weights_of_the_other_kind_of_model_are_refused(
    saved: Model, wanted: Model, word: str, tmp_path: Path
) -> None:
    ours = weights(saved, FP32)
    path = save(tmp_path, 0, (Piece.whole(name, tensor) for name, tensor in ours.items()), extra={})
    model = build(wanted.pattern, wanted, dtype=FP32)
    with pytest.raises(CheckpointError) as error:
        load_weights(path, model, model.tensors())
    differing = ours.keys() ^ model.canonical().keys()
    told = str(error.value)
    assert f"{path} and the model differ in {len(differing)} tensors" in told
    assert f"{word:<8} blocks.0.attention.connection.weight" in told
    assert f"{word:<8} blocks.0.moe.connection.alpha" in told
    assert " more of these" in told


# ---------------------------------------------------------------------------------------------- parity


def blended(x_BtC: Tensor) -> Tensor:
    """What stands in for attention: every token sees the mean of those before it."""
    count_t = torch.arange(1, x_BtC.shape[1] + 1, dtype=x_BtC.dtype)
    return torch.tanh(x_BtC.cumsum(1) / count_t[:, None]) * 1.3


class TheirBlend(nn.Module):
    def forward(self, hidden_states: Tensor, **unused: Any) -> tuple[Tensor, None]:
        return blended(hidden_states), None


class OurBlend(nn.Module):
    def forward(self, x_BtC: Tensor) -> Tensor:
        return blended(x_BtC)

    def canonical(self) -> dict[str, Any]:
        return {}


OURS_ALONE = (
    "architectures",
    "kv_lora_rank",
    "layer_types",
    "model_type",
    "qk_nope_head_dim",
    "qk_rope_head_dim",
    "rope_interleave",
    "rope_parameters",
    "v_head_dim",
)
"""Settings that describe latent attention, of which transformers has none here."""


def their_parts() -> tuple[nn.Module, nn.Module]:
    """A random model of transformers, and a depth of multi-token prediction, which transformers does not have:
    one of its layers, with what the release has before and after it."""
    transformers = pytest.importorskip("transformers")
    from transformers.models.deepseek_v4 import modeling_deepseek_v4 as theirs

    given = config_of(family_of("deepseek_v4"), MAIN)
    config = transformers.DeepseekV4Config(
        **{name: value for name, value in given.items() if name not in OURS_ALONE},
        layer_types=["sliding_attention"] * 2,
        head_dim=4,
        o_groups=1,
        o_lora_rank=2,
        experts_implementation="eager",
    )
    with widened(FP64):
        model = transformers.DeepseekV4ForCausalLM(config).to(FP64).eval()
        depth = theirs.DeepseekV4DecoderLayer(config, 0)
        for name in ("enorm", "hnorm", "norm"):
            setattr(depth, name, theirs.DeepseekV4RMSNorm(SHAPE.hidden, eps=SHAPE.norm_eps))
        for name in ("e_proj", "h_proj"):
            setattr(depth, name, nn.Linear(SHAPE.hidden, SHAPE.hidden, bias=False))
        depth.hc_head = theirs.DeepseekV4HyperHead(config)
        depth = depth.to(FP64).eval()
    for module in (model, depth):
        for name, tensor in module.state_dict().items():
            centre = 1.0 if name.endswith("norm.weight") else 0.0
            tensor.copy_(centre + 0.4 * torch.randn_like(tensor))
    return model, depth


def without_attention(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    return {name: tensor for name, tensor in tensors.items() if ".self_attn." not in name}


def named(model: nn.Module, depth: nn.Module, tensors: str) -> dict[str, Any]:
    """What a method of modules lists, of both, under the names that files have; without attention."""
    main, own = (dict(getattr(module, tensors)()) for module in (model, depth))
    told = {f"mtp.0.{name}".replace(".hc_head.hc_", ".hc_head_"): tensor for name, tensor in own.items()}
    return without_attention({**main, **told})


def our_side(model: nn.Module, depth: nn.Module) -> LanguageModel:
    """A model of braid with the same weights, through the table; attention is there, and then replaced."""
    adapter, drawn = adapter_for("deepseek_v4", "memory"), weights(SHAPE, FP64)
    unread = convert(drawn, adapter, SHAPE, "to_theirs")
    found = named(model, depth, "state_dict")
    assert without_attention(unread).keys() == found.keys()
    ours = our_model(SHAPE, convert({**unread, **found}, adapter, SHAPE, "to_ours"), FP64)
    for layer in (module for module in ours.modules() if isinstance(module, PreNorm)):
        if isinstance(layer.inner, latent_attention.LatentAttention):
            layer.inner = OurBlend()
    for layer in (*model.model.layers, depth):
        layer.self_attn = TheirBlend()
    return ours


def gradients(ours: LanguageModel) -> Mapping[str, Tensor]:
    """Of all our parameters, by their names; those of attention, which is replaced, are zero."""
    attention = {n: torch.zeros_like(t) for n, t in weights(SHAPE, FP64).items() if ".attention." in n}
    return convert(attention | canonical_grads(ours), adapter_for("deepseek_v4", "memory"), SHAPE, "to_theirs")


def test_a_layer_gives_what_transformers_gives() -> None:
    model, depth = their_parts()
    ours, theirs = our_side(model, depth), model.model.layers[1]
    streams_BtSC, toward_BtSC = torch.randn(2, 2, 9, SHAPE.hyper.streams, SHAPE.hidden, dtype=FP64)
    given_BtSC, same_BtSC = (streams_BtSC.clone().requires_grad_() for _ in range(2))
    out_BtSC = ours.stack.blocks["1"](given_BtSC, ours.prepare(batch([[9], [9]])))
    (out_BtSC * toward_BtSC).sum().backward()
    with widened(FP64):
        expected_BtSC = theirs(same_BtSC)
        (expected_BtSC * toward_BtSC).sum().backward()
    wanted = {f"model.layers.1.{name}": parameter.grad for name, parameter in theirs.named_parameters()}
    assert all(grad.norm() > 0 for grad in wanted.values())
    told = gradients(ours)
    assert_near(
        {"out": out_BtSC.detach(), "given": given_BtSC.grad, **{name: told[name] for name in wanted}},
        {"out": expected_BtSC.detach(), "given": same_BtSC.grad, **wanted},
        BOUNDS[FP64],
    )


def test_a_model_with_a_depth_gives_what_transformers_gives() -> None:
    model, depth = their_parts()
    ours, given = our_side(model, depth), batch([[9], [9]])
    losses = ours(given)
    losses.share(int(losses.token_count), [int(count) for _, count in losses.mtp]).backward()
    logits_BtV = ours.logits(ours.prepare(given)).detach()

    ahead, streams = targets(given, 0), []
    model.model.hc_head.register_forward_pre_hook(lambda _, args: streams.append(args[0]))
    mask_BT, further_BT = given.loss_mask_BT, ahead.loss_mask_BT
    with widened(FP64):
        expected_BtV = model(given.tokens_BT, use_cache=False).logits
        shown_BtC = depth.e_proj(depth.enorm(model.model.embed_tokens(ahead.tokens_BT)))
        streams_BtSC = depth(shown_BtC.unsqueeze(2) + depth.h_proj(depth.hnorm(streams[0])))
        further_BtV = model.lm_head(depth.norm(depth.hc_head(streams_BtSC)))
        loss = nn.functional.cross_entropy(expected_BtV[mask_BT], given.labels_BT[mask_BT])
        further = nn.functional.cross_entropy(further_BtV[further_BT], ahead.labels_BT[further_BT])
        (loss + SHAPE.mtp_loss * further).backward()
    wanted = {name: parameter.grad for name, parameter in named(model, depth, "named_parameters").items()}
    assert all(grad.norm() > 0 for grad in wanted.values())
    told = gradients(ours)
    assert_near(
        {"logits": logits_BtV, **{name: told[name] for name in wanted}},
        {"logits": expected_BtV.detach(), **wanted},
        BOUNDS[FP64],
    )


def test_transformers_reads_the_names_of_the_release(tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers")
    model, depth = their_parts()
    model.save_pretrained(tmp_path)
    memory, hub = (adapter_for("deepseek_v4", form) for form in ("memory", "hub"))
    mine = convert(weights(SHAPE, FP64), memory, SHAPE, "to_theirs")
    theirs = {**mine, **named(model, depth, "state_dict")}
    released = convert(convert(theirs, memory, SHAPE, "to_ours"), hub, SHAPE, "to_theirs")
    attention = {
        name.removeprefix("model."): tensor
        for name, tensor in load_file(tmp_path / "model.safetensors").items()
        if ".attn." in name
    }
    files = attention | {name: tensor for name, tensor in released.items() if ".attn." not in name}
    save_file({n: t.contiguous() for n, t in files.items()}, tmp_path / "model.safetensors", {"format": "pt"})
    load_model = transformers.DeepseekV4ForCausalLM.from_pretrained
    again, told = load_model(tmp_path, dtype=FP64, output_loading_info=True)
    assert not told["missing_keys"]
    assert not told["unexpected_keys"]
    for name, tensor in without_attention(model.state_dict()).items():
        assert torch.equal(again.state_dict()[name].to(FP64), tensor.to(again.state_dict()[name].dtype)), name
