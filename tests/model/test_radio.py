"""Encoders of images are RADIO as transformers has it: features and gradients of every parameter, for images of
one size and of many, and the pixel shuffle and projector of Nemotron-H-Omni behind it."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from braid.encoders import Encoder, Projector
from tests.interchange.widened import widened
from tests.model.cases import assert_near
from tests.model.encoder_cases import gradients, probe
from tests.model.radio_reference import (
    beside,
    encoder_of,
    gradients_of,
    images,
    items_of,
    order,
    radio,
    row_by_row,
)

BOUND = 1e-10
GRIDS = {
    "as the table": [(5, 5)],
    "one size": [(4, 4), (4, 4)],
    "a row and a column": [(1, 7), (3, 1), (1, 1)],
    "smaller, larger, not square": [(3, 2), (7, 5), (2, 6), (5, 5), (9, 11)],
}
KINDS: dict[str, dict[str, Any]] = {
    "erf": {},
    "tanh": {"hidden_act": "gelu_pytorch_tanh"},
    "swiglu": {"use_swiglu_ffn": True, "mlp_ratio": 3.0},
}


def assert_equal_gradients(found: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    """The gradient of a key bias is zero: softmax does not see it."""
    zero = {name for name in expected if name.endswith(".k.bias")}
    assert all(float(found[name].norm()) < 1e-12 for name in zero)
    assert_near(*({n: g for n, g in each.items() if n not in zero} for each in (found, expected)), bound=BOUND)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("grids", GRIDS.values(), ids=list(GRIDS))
def test_features_and_gradients_are_those_of_transformers(grids: list[tuple[int, int]], kind: str) -> None:
    theirs, pictures = radio(**KINDS[kind]), images(grids)
    ours = beside(theirs, encoder_of(theirs.config))
    with widened(torch.float64):
        packed = torch.cat([row_by_row(image) for image in pictures])
        expected = theirs(packed, image_grid_hw=torch.tensor(grids)).features
    found = ours(items_of(ours.shape, pictures))
    assert_near({"features": found.detach()}, {"features": expected.detach()}, BOUND)
    seen = probe(*expected.shape)
    (found * seen).sum().backward()
    with widened(torch.float64):
        (expected * seen).sum().backward()
    learned = {name: grad for name, grad in gradients(ours).items() if not name.startswith("projector")}
    assert_equal_gradients(learned, gradients_of(theirs))


@pytest.mark.parametrize("grid", [(4, 4), (6, 3)])
def test_a_batch_of_whole_images_is_a_pack_of_them(grid: tuple[int, int]) -> None:
    """transformers' path for images of one size."""
    theirs, pictures = radio(), images([grid] * 3)
    ours = beside(theirs, encoder_of(theirs.config))
    with widened(torch.float64):
        expected = theirs(torch.stack(pictures)).features.flatten(0, 1)
    found = ours(items_of(ours.shape, pictures))
    assert_near({"features": found.detach()}, {"features": expected.detach()}, BOUND)


# ------------------------------------------------------------------------------ pixel shuffle, projector


def nemotron_omni() -> Any:
    from transformers.models.nemotron_h_omni import modeling_nemotron_h_omni

    return modeling_nemotron_h_omni


SHUFFLED = [(2, 4), (6, 2), (4, 4)]


def omni_rows(theirs: Any, projector: Any, pictures: list[Tensor]) -> Tensor:
    """Rows as Nemotron-H-Omni makes them of features, one image after the other."""
    omni = nemotron_omni().NemotronH_Omni_Reasoning_V3
    grids = [(image.shape[1] // 2, image.shape[2] // 2) for image in pictures]
    packed = torch.cat([row_by_row(image) for image in pictures])
    features = theirs(packed, image_grid_hw=torch.tensor(grids)).features
    parts = features.split([rows * columns for rows, columns in grids])
    shuffled = [
        omni.pixel_shuffle(None, part.view(1, *grid, -1)).flatten(0, 2)
        for part, grid in zip(parts, grids, strict=True)
    ]
    return projector(torch.cat(shuffled))  # type: ignore[no-any-return]


def test_pixel_shuffle_and_projector_are_those_of_nemotron_omni() -> None:
    theirs, pictures = radio(), images(SHUFFLED)
    shape = Projector(width=7, ffn=11, activation="relu2", bias=False, norm="rms")
    ours = beside(theirs, encoder_of(theirs.config, group=4, projector=shape))
    projector = nemotron_omni().NemotronH_Omni_Reasoning_V3MultiModalProjector(48, 11, 7).double()
    places, tensors = ours.canonical(), ours.tensors()
    names = {"norm": "layer_norm", "up": "linear_1", "out": "linear_2"}
    for name, module in names.items():
        place, weight = places[f"projector.{name}.weight"], projector.get_submodule(module).weight
        torch.nn.init.normal_(weight, float(weight.ndim == 1), 0.4)  # type: ignore[arg-type]
        place.write(tensors[place.parameter], weight.detach())  # type: ignore[operator]
    with widened(torch.float64):
        expected = omni_rows(theirs, projector, pictures)
    found = ours(items_of(ours.shape, pictures))
    assert_near({"rows": found.detach()}, {"rows": expected.detach()}, BOUND)
    seen = probe(*expected.shape)
    (found * seen).sum().backward()
    with widened(torch.float64):
        (expected * seen).sum().backward()
    wanted = gradients_of(theirs)
    wanted |= {f"projector.{n}.weight": projector.get_submodule(m).weight.grad for n, m in names.items()}  # type: ignore[misc]
    assert_equal_gradients(gradients(ours), wanted)


@pytest.mark.parametrize(("rows", "columns", "block"), [(2, 4, 2), (6, 3, 3), (1, 5, 1), (4, 6, 2)])
def test_neighbours_in_a_pack_are_squares_of_the_image(rows: int, columns: int, block: int) -> None:
    """By brute force: each square row by row, squares row by row."""
    squares = [(y, x) for y in range(0, rows, block) for x in range(0, columns, block)]
    expected = [(y + dy) * columns + x + dx for y, x in squares for dy in range(block) for dx in range(block)]
    assert order((rows, columns), block).tolist() == expected


def test_rows_of_published_encoders() -> None:
    from braid.recipes.vision import radio_g, radio_g_gelu, radio_h

    for build, layers, hidden in ((radio_h, 32, 1280), (radio_g, 40, 1536), (radio_g_gelu, 40, 1536)):
        shape: Encoder = build(width=2688)
        assert list(shape.problems("model")) == []
        assert (shape.pattern, shape.hidden) == ("[*-]" * layers, hidden)
        assert shape.rows(32 * 32) == 256
