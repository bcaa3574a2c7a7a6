"""Vision-language models on ranks: small ones of the shapes that are trained at scale, and the product of where
their modules lie, micro-batches, which samples have images, and what is frozen.

Language models:

    gpt       two layers of attention and experts, softmax scores, top 2
    nemotron  the same with squared ReLU, grouped queries, no positions, sigmoid scores, top 4, a selection bias
              and a shared expert
    mamba     `M*ME`, top 4 of as many experts

Encoders, all of stored images:

    plain     affine patches, one layer, 8 rows of an image
    radio     RADIO: a table of positions, 8 prefix tokens, images of 64 x 64 pixels in patches of 16, 16 rows
    tiles     RADIO with pixel shuffle and an MLP, positions with jitter, images of several sizes and shapes
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from itertools import product
from pathlib import Path
from types import MappingProxyType
from typing import Literal, NamedTuple

import numpy as np

from braid.architecture import Attention, Mamba2, Mlp, Model, Moe
from braid.config import Data, Module, Optim, Run, Train
from braid.data import ByteTokenizer, build
from braid.data.order import shuffled
from braid.encoders import Encoder, Pixels, PositionTable, Projector
from braid.planning.plan import check
from tests.data.pictures import png, write_rows
from tests.topology.cases import LEARNING_RATE, STEPS
from tests.topology.module_cases import Placement

TOKEN = 257
"""The placeholder, the first id that no text has."""

VOCAB = 260

SEED = 0

GPT = Model(
    pattern="[*E][*E]",
    hidden=64,
    vocab=VOCAB,
    tied=False,
    init_std=0.1,
    attention=Attention(heads=4, kv_heads=4, head_dim=16),
    moe=Moe(experts=4, top_k=2, ffn=128, activation="gelu", aux_loss=0.01),
)
NEMOTRON = replace(
    GPT,
    attention=Attention(heads=4, kv_heads=2, head_dim=16, positions="none"),
    # More experts than a token takes, so that the selection bias has something to decide.
    moe=Moe(
        experts=8,
        top_k=4,
        ffn=128,
        shared_ffn=128,
        activation="relu2",
        score="sigmoid",
        scale=2.5,
        selection_bias=True,
        selection_bias_rate=0.05,
        aux_loss=0.0,
        sequence_aux_loss=0.01,
    ),
)
MAMBA = Model(
    pattern="M*ME",
    hidden=128,
    vocab=VOCAB,
    tied=False,
    init_std=0.1,
    attention=Attention(heads=4, kv_heads=2, head_dim=64, positions="none"),
    mamba2=Mamba2(heads=2, head_dim=64, state=64, groups=1),
    moe=Moe(experts=4, top_k=4, ffn=128, activation="relu2", score="sigmoid", aux_loss=0.01),
)
LANGUAGES = MappingProxyType({"gpt": GPT, "nemotron": NEMOTRON, "mamba": MAMBA})

PLAIN = Encoder(
    pattern="[*-]",
    hidden=32,
    init_std=0.1,
    input=Pixels(patch=4).input,
    pixels=Pixels(patch=4),
    attention=Attention(heads=4, kv_heads=4, head_dim=8, positions="none"),
    mlp=Mlp(ffn=64, activation="gelu"),
    projector=Projector(width=64),
)
RADIO = Encoder(
    pattern="[*-][*-]",
    hidden=128,
    norm="layer",
    norm_eps=1e-6,
    init_std=0.1,
    input=Pixels(patch=16).input,
    input_bias=False,
    pixels=Pixels(patch=16),
    positions=PositionTable(rows=8, columns=8),
    prefix=8,
    attention=Attention(heads=4, kv_heads=4, head_dim=32, positions="none", bias=True),
    mlp=Mlp(ffn=128, activation="gelu_tanh", bias=True),
    projector=Projector(width=64),
)
TILES = replace(
    RADIO,
    positions=PositionTable(rows=8, columns=8, jitter=True),
    group=4,
    projector=Projector(width=64, ffn=96, activation="relu2", bias=False, norm="rms"),
)


class Seen(NamedTuple):
    """An encoder, and the images that it is given."""

    encoder: Encoder
    tokens: int
    """Of a sample: T."""
    sizes: tuple[tuple[int, int], ...]
    """Heights and widths of images, in turn."""
    most_patches: int


ENCODERS: Mapping[str, Seen] = MappingProxyType(
    {
        "plain": Seen(PLAIN, 32, ((8, 16),), 8),
        "radio": Seen(RADIO, 64, ((64, 64),), 32),
        "tiles": Seen(TILES, 64, ((32, 96), (96, 64), (64, 32), (70, 50), (32, 32)), 64),
    }
)

NO_GRADIENT = (".k.bias",)
"""Ends of the names of weights that no loss depends on: a bias of keys adds the same number to all scores of a
query, and softmax does not see it."""

# ------------------------------------------------------------------------------------------------ where

PLACES: Mapping[str, Placement] = MappingProxyType(
    {
        "together 2": Placement(world=2, language="ep2", modules={"vision": ""}),
        "apart 1+1": Placement(world=2, language="at1+1", modules={"vision": "at0+1"}),
        "overlap 3": Placement(world=3, language="at0+2 ep2", modules={"vision": "at1+2"}),
        "together 4": Placement(world=4, language="tp2 ep2", modules={"vision": "cp2"}),
        "apart 2+2": Placement(world=4, language="at2+2 ep2", modules={"vision": "at0+2"}),
        "overlap 4": Placement(world=4, language="at0+3 pp3", modules={"vision": "at2+2 tp2"}),
        "together 8": Placement(world=8, language="ep4", modules={"vision": ""}),
        "apart 4+4": Placement(world=8, language="at4+4 ep2", modules={"vision": "at0+4"}),
        "overlap 8": Placement(world=8, language="at4+4 ep4", modules={"vision": "at0+6"}),
        "fan out": Placement(world=8, language="tp2 ep2", modules={"vision": "tp4"}),
        "fan in": Placement(world=8, language="tp4 ep2", modules={"vision": "tp2"}),
    }
)

SAMPLES = MappingProxyType({"together 8": 8, "overlap 8": 8, "apart 4+4": 4, "fan out": 4, "fan in": 4})
"""Of a micro-batch, where the language model has more than two lanes or a lane several; elsewhere two."""

Images = Literal["all", "few", "none"]
"""Which samples have images: all of them; every eighth, so that one lane has images and whole micro-batches
have none; none that is read."""

Frozen = Literal["nothing", "encoder", "language", "all but projector"]

NOWHERE, DOCUMENTS = 64, 72
"""With images in none of them, how many samples come before the first image; and how many there are."""


class Point(NamedTuple):
    """One of the product."""

    place: str
    language: str
    encoder: str
    micro_batches: int
    images: Images
    frozen: Frozen

    @property
    def placement(self) -> Placement:
        return PLACES[self.place]

    @property
    def samples(self) -> int:
        """Of a micro-batch."""
        return SAMPLES.get(self.place, 2)

    def __str__(self) -> str:
        words = (self.place, self.language, self.encoder, self.images, f"frozen {self.frozen}")
        return "-".join((*words, str(self.micro_batches))).replace(" ", "_")


SMALL, LARGER = tuple(PLACES)[:3], tuple(PLACES)[3:6]
"""Places that `make test` looks at; places that samples are drawn from besides."""


def every(places: tuple[str, ...] = SMALL) -> list[Point]:
    """All points of some places. Their order has no meaning, so that covers take choices in turn; this one
    makes for a small cover."""
    images: tuple[Images, ...] = ("all", "few", "none")
    frozen: tuple[Frozen, ...] = ("nothing", "encoder", "language", "all but projector")
    points = sorted(Point(*each) for each in product(places, LANGUAGES, ENCODERS, (1, 4), images, frozen))
    return [points[place] for place in np.random.default_rng(24).permutation(len(points))]


def larger() -> list[Point]:
    return every((*SMALL, *LARGER))


def choices_of(point: Point) -> dict[str, str | int]:
    return {**point._asdict(), "place": point.place.split()[0]}


def cost_of(point: Point) -> float:
    """Grows with how long it takes, so slowly that a cover rather has fewer points than cheaper ones."""
    of_rank = (1 + 0.15 * point.micro_batches) * (1.5 if point.language == "mamba" else 1)
    return float((1 + point.placement.world * of_rank) ** 0.25)


def legal(point: Point) -> bool:
    return not check(point.placement.of(run_of(point, Path("images"))), point.placement.world)


# --------------------------------------------------------------------------------------------- the run


def run_of(point: Point, folder: Path) -> Run:
    """A point on one process; `folder` is where `build_images` put its images."""
    seen, samples = ENCODERS[point.encoder], point.samples * point.micro_batches
    language = LANGUAGES[point.language]
    frozen = point.frozen
    vision = Module(
        model=replace(seen.encoder, projector=replace(seen.encoder.projector, width=language.hidden)),
        token=TOKEN,
        most_items=2,
        most_patches=seen.most_patches,
        items="image",
        trained={"encoder": (), "all but projector": ("projector.*",)}.get(frozen, ("*",)),
    )
    return Run(
        model=language,
        modules={"vision": vision},
        trained=() if frozen in ("language", "all but projector") else ("*",),
        data=Data(
            sources=(str(folder / point.encoder / point.images),),
            validation=(str(folder / point.encoder / "validation"),),
            sequence_tokens=seen.tokens,
            packing="documents",
        ),
        optim=Optim(lr=LEARNING_RATE, clip=0.5),
        train=Train(
            steps=STEPS,
            batch_samples=samples,
            micro_batches=point.micro_batches,
            eval_samples=3,
            dtype="fp64",
            seed=SEED,
        ),
    )


def build_images(folder: Path) -> Path:
    """Sources of all encoders: by which samples have images, and those of validation."""
    for name, seen in ENCODERS.items():
        files = {f"{n}.png": png(*seen.sizes[n % len(seen.sizes)], seed=n) for n in range(10)}
        sources = {
            "all": range(DOCUMENTS),
            "few": range(0, DOCUMENTS, 8),
            "none": range(NOWHERE, DOCUMENTS),
            "validation": range(0, 8, 2),
        }
        for source, shown in sources.items():
            count = 8 if source == "validation" else DOCUMENTS
            # Sample i is the document that the order of the seed visits i-th.
            visits = shuffled(np.arange(count), count, seed=SEED).tolist()
            rows: list[dict[str, object]] = [{} for _ in range(count)]
            for sample, place in enumerate(visits):
                rows[place] = _document(sample, seen, images=sample in shown)
            written = write_rows(folder / name / f"{source}.in", files, rows)
            build(written, folder / name / source, ByteTokenizer())
    return folder


def _document(sample: int, seen: Seen, *, images: bool) -> dict[str, object]:
    """Text of half a sample, which leaves no room for another document, and one or two images in it."""
    letters = np.random.default_rng(sample).choice(list("abcdefgh "), seen.tokens // 2)
    text = "".join(letters)
    if not images:
        return {"text": text}
    count = min(1 + sample // 8 % 2, seen.most_patches // 16 or 1)
    content: list[dict[str, str]] = []
    for place in range(count):
        content += [{"text": text[4 * place :][:4]}, {"image": f"{(sample + place) % 10}.png"}]
    return {"content": [*content, {"text": text[4 * count :]}]}
