"""Tiny random models of transformers with images, and what they and braid compute from the same weights.

Both sides read the same tokens, placeholders included, and the same images. transformers reads rows of text one
by one, each with its images as patches in reading order; braid packs the images of all rows.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from braid import kernels, pattern
from braid.encoders import Encoder
from braid.interchange import adapter_for
from braid.interchange.composite import LANGUAGE, OMNI_MEMORY, Composite, language_of, read_composite, to_ours
from braid.interchange.convert import together
from braid.interchange.radio import MEMORY
from braid.interchange.tables import beneath, links
from braid.model.context import MicroBatch
from braid.model.encoder import EncoderModel
from braid.model.multimodal import mask_placeholders
from tests.interchange.models import CONFIGS, FLOOR, Parity, error, gradient, our_model
from tests.interchange.widened import widened
from tests.model.cases import batch, canonical_grads
from tests.model.encoder_cases import gradients, probe
from tests.model.radio_reference import SMALL, images, items_of, row_by_row

TOKEN, TEXT = 15, 15
"""The placeholder, of a vocabulary of 17; ids below are those of text."""
PATCH = 2
TOWER: Mapping[str, Any] = {**SMALL, "model_type": "radio", "video_temporal_patch_size": 2}
OMNI: Mapping[str, Mapping[str, Any]] = {
    "nemotron_h_omni": {},
    "nemotron_h_omni, final norm, tanh, no biases": {
        "text_config": {"num_nextn_predict_layers": 1},
        "vision_config": {"hidden_act": "gelu_pytorch_tanh", "qkv_bias": False, "num_cls_tokens": 4},
    },
    "nemotron_h_omni, swiglu, no class tokens": {
        "vision_config": {
            "use_swiglu_ffn": True,
            "mlp_ratio": 3.0,
            "num_cls_tokens": 0,
            "num_registers": 0,
            "summary_idxs": [],
        },
    },
}
"""Name of a case -> what differs from the first."""
Grids = Sequence[Sequence[tuple[int, int]]]
IMAGES: Mapping[str, Grids] = {
    "one image": [[(4, 2)]],
    "several of all sizes, and a row of text": [[(2, 4), (6, 2), (2, 2)], [], [(4, 10)]],
    "text alone": [[], []],
}
"""For every row of text, the rows and columns of patches of its images. The table of positions has 5 x 5
entries: some are larger."""
RADIO: Mapping[str, Sequence[tuple[int, int]]] = {
    "radio, images of one size": [(4, 3), (4, 3), (4, 3)],
    "radio, images of many sizes": [(3, 2), (7, 5), (1, 6), (5, 5), (9, 11)],
}


# --------------------------------------------------------------------------------------------- their side


def their_omni(case: str, dtype: torch.dtype = torch.float64, **changes: Any) -> Any:
    """A random model of transformers, every weight drawn."""
    from transformers.models.nemotron_h_omni import modeling_nemotron_h_omni as modeling

    given = {**OMNI[case], **changes}
    text = {**CONFIGS["nemotron_h"][1], "model_type": "nemotron_h", **given.get("text_config", {})}
    vision = {**TOWER, **given.get("vision_config", {})}
    fields = {
        "downsample_ratio": 0.5,
        "projector_hidden_size": 11,
        "vision_hidden_size": SMALL["hidden_size"],
        "image_token_id": TOKEN,
        **{name: value for name, value in given.items() if name not in ("text_config", "vision_config")},
    }
    with widened(dtype), torch.random.fork_rng():
        torch.manual_seed(3)
        kind = modeling.NemotronH_Omni_Reasoning_V3
        config = kind.config_class(text_config=text, vision_config=vision, **fields)
        config.text_config._attn_implementation = "sdpa"
        config.text_config._experts_implementation = "eager"
        model = kind(config).to(dtype).eval()
    model.vision_model.config.dtype = dtype
    return drawn(model)


def their_radio(dtype: torch.dtype = torch.float64, **changes: Any) -> Any:
    from transformers import RadioConfig, RadioModel

    return drawn(RadioModel(RadioConfig(**SMALL | changes)).to(dtype).eval())


def drawn(model: nn.Module) -> nn.Module:
    """The model with noise on every weight, also on those that start as ones or zeros."""
    generator = torch.Generator().manual_seed(5)
    biases = [b for name, b in model.named_buffers() if name.endswith("e_score_correction_bias")]
    for tensor in [*model.parameters(), *biases]:
        noise = torch.randn(tensor.shape, generator=generator, dtype=torch.float64)
        tensor.data.add_(0.2 * noise.to(tensor.dtype))
    return model


def prepare(shape: Encoder, pictures: Sequence[Tensor], dtype: torch.dtype) -> dict[str, Tensor]:
    """Images as the processor of transformers passes them on: normed patches in reading order, and sizes."""
    if not pictures:
        return {}
    assert shape.pixels is not None
    mean, std = (torch.tensor(each).double().view(3, 1, 1) for each in (shape.pixels.mean, shape.pixels.std))
    patches = torch.cat([row_by_row((image - mean) / std, PATCH) for image in pictures])
    sizes = [(image.shape[1] // PATCH, image.shape[2] // PATCH) for image in pictures]
    return {"pixel_values": patches.to(dtype), "image_grid_hw": torch.tensor(sizes)}


# ----------------------------------------------------------------------------------------------- our side


def composite_of(theirs: nn.Module) -> Composite:
    """What braid makes of the configuration, as it would be in config.json."""
    config = theirs.config.to_diff_dict()
    config["model_type"] = theirs.config.model_type
    if "text_config" in config:  # transformers ignores it, and braid does not
        config["text_config"].pop("time_step_limit", None)
    return read_composite(config, theirs.state_dict().keys(), {})


def encoder_with(shape: Encoder, weights: Mapping[str, Tensor], dtype: torch.dtype) -> EncoderModel:
    layout = pattern.joined(pattern.parse(shape.pattern))
    chosen = kernels.choose(shape, layout.kinds(), torch.device("cpu"), dtype)
    model = EncoderModel(shape, layout, chosen, dtype=dtype)
    model.initialize(1)
    parameters = model.tensors()
    for name, tensor in model.canonical().items():
        if name in weights:
            tensor.write(parameters[tensor.parameter], weights[name])
    return model


def of_module(tensors: Mapping[str, Tensor], module: str = "modules.vision.") -> dict[str, Tensor]:
    return {name.removeprefix(module): tensors[name] for name in tensors if name.startswith(module)}


def rows_with(grids: Grids) -> MicroBatch:
    """Rows of text with the placeholders of their images. An image begins a row, others are between words."""
    given = batch([[37]] * len(grids))
    tokens = given.tokens_BT % TEXT
    for row, images_of in enumerate(grids):
        start = 0
        for rows, columns in images_of:
            count = rows * columns // 4
            tokens[row, start : start + count] = TOKEN
            start += count + 2
    labels = torch.cat([tokens[:, 1:], tokens[:, :1]], 1)
    return mask_placeholders(replace(given, tokens_BT=tokens, labels_BT=labels), {"vision": TOKEN})


# --------------------------------------------------------------------------------------------- comparison


def compare_omni(case: str, grids: Grids, dtype: torch.dtype = torch.float64) -> Parity:
    """Logits and the gradient of every parameter, from the same weights, tokens and images."""
    theirs = their_omni(case, dtype)
    read = composite_of(theirs)
    weights = to_ours(theirs.state_dict(), theirs.state_dict(), read)
    language = our_model(language_of(read), {n: weights[n] for n in weights if "modules." not in n}, dtype)
    encoder = encoder_with(read.shape, of_module(weights), dtype)

    given = rows_with(grids)
    pictures = [images(row, PATCH, seed=number) for number, row in enumerate(grids)]
    flat = [image for row in pictures for image in row]
    rows = {"vision": encoder(items_of(read.shape, flat)) if flat else torch.zeros(0, 30, dtype=dtype)}
    context = language.prepare(given, modules={"vision": TOKEN})
    hidden = language._forward_segments(language.segments, None, context, rows)
    logits = language.head_logits(language.apply_final_norm(hidden))
    losses = language.losses(language.prepare(given, modules={"vision": TOKEN}), rows)
    losses.share(int(losses.token_count)).backward()
    prepared = [prepare(read.shape, row, dtype) for row in pictures]
    with widened(dtype):
        texts = zip(given.tokens_BT, prepared, strict=True)
        expected = torch.stack(
            [theirs(tokens_T[None], use_cache=False, **each).logits[0] for tokens_T, each in texts]
        )
        labels = given.labels_BT.where(given.loss_mask_BT, -100)
        nn.functional.cross_entropy(expected.flatten(0, 1), labels.flatten()).backward()
    text = beneath(adapter_for("nemotron_h", "memory"), LANGUAGE)
    found = dict(together(canonical_grads(language), list(links(text, language.shape))))
    found |= dict(
        together(gradients(encoder) if flat else zeros(encoder), list(links(OMNI_MEMORY, read.shape)))
    )
    return parity(logits, expected, found, theirs)


def zeros(model: EncoderModel) -> dict[str, Tensor]:
    return {name: torch.zeros(tensor.shape, dtype=model.dtype) for name, tensor in model.canonical().items()}


def compare_radio(
    grids: Sequence[tuple[int, int]], dtype: torch.dtype = torch.float64, **changes: Any
) -> Parity:
    """Features and the gradient of every parameter. The projector of an encoder by itself is the identity."""
    theirs = their_radio(dtype, **changes)
    read = composite_of(theirs)
    held = of_module(to_ours(theirs.state_dict(), theirs.state_dict(), read))
    held["projector.out.weight"] = torch.eye(read.shape.hidden, dtype=dtype)
    ours, pictures = encoder_with(read.shape, held, dtype), images(grids)
    found = ours(items_of(read.shape, pictures))
    with widened(dtype):
        if len(set(grids)) == 1:
            expected = theirs(torch.stack(pictures).to(dtype)).features.flatten(0, 1)
        else:
            packed = torch.cat([row_by_row(image) for image in pictures]).to(dtype)
            expected = theirs(packed, image_grid_hw=torch.tensor(grids)).features
        seen = probe(*expected.shape).to(dtype)
        (expected * seen).sum().backward()
    (found * seen).sum().backward()
    own = {name: grad for name, grad in gradients(ours).items() if not name.startswith("projector.")}
    return parity(found, expected, dict(together(own, list(links(MEMORY, read.shape)))), theirs)


def parity(logits: Tensor, expected: Tensor, grads: Mapping[str, Tensor], theirs: nn.Module) -> Parity:
    """The path of videos is not compared, nor is what has no entries, such as no prefix tokens."""
    used = {n: weight for n, weight in theirs.named_parameters() if "video_patch" not in n and weight.numel()}
    wanted = {name: gradient(weight) for name, weight in used.items()}
    biases = {name for name, _ in theirs.named_buffers()}
    assert grads.keys() - biases == wanted.keys()
    floor = FLOOR * max(float(each.norm()) for each in wanted.values())
    errors = {name: error(grads[name], each, floor) for name, each in wanted.items()}
    worst = max(errors, key=errors.__getitem__)
    return Parity(logits=error(logits, expected), gradients=errors[worst], worst=worst)
