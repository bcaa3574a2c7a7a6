"""Generation from prompts with images: what is read, merged and cached, on one process and on several ranks."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from types import MappingProxyType

import pytest
import torch

from braid.cli import main
from braid.config import Run
from braid.data import ByteTokenizer, Loader, build, open_source
from braid.data.prompts import (
    Prompt,
    encode_prompt,
    parts_with_images,
    read_parts,
    stored_prompt,
    text_prompt,
)
from braid.errors import ConfigError, DataError
from braid.model.context import MicroBatch
from braid.model.generate import without
from braid.planning.plan import plan
from braid.prove.outcome import started
from braid.train.distributed_generation import generate_distributed
from braid.train.load_model import LoadedModel, encode, image_limits, load_models
from braid.train.trainer import Trainer
from tests.data.pictures import encoded, png, write_rows
from tests.ranks import run_ranks
from tests.topology.module_cases import RADIO, VISION, Placement, multimodal

STEP = {"samples": 8, "micro_batches": 4}
GREEDY = {"tokens": 7, "temperature": 0.0, "seed": 0}


def seeing(corpus: Path) -> Run:
    """A hybrid in float64 with a ViT: up to 3 images of 24 patches in all, 2 x 2 pixels each, four in a row."""
    run = multimodal("hybrid", corpus, {"vision": RADIO}, patches=24, **STEP)
    vision = replace(run.modules["vision"], most_items=3)
    return replace(run, modules={"vision": vision})


@pytest.fixture
def images(tmp_path: Path) -> list[Path]:
    """A wide one, a tall one and a square one; the second has 16 blocks, and is made smaller."""
    files = [tmp_path / f"{name}.png" for name in ("wide", "tall", "square")]
    for place, (file, size) in enumerate(zip(files, ((4, 8), (32, 8), (4, 4)), strict=True)):
        file.write_bytes(png(*size, seed=place))
    return files


@pytest.fixture
def checkpoint(corpus: Path, tmp_path: Path) -> Path:
    with Trainer(plan(seeing(corpus), 1), out=tmp_path / "run", device="cpu", quiet=True) as trainer:
        trainer.save()
    return tmp_path / "run"


def prompt_of(run: Run, images: Sequence[Path | str], text: str) -> Prompt:
    return encode_prompt(parts_with_images(images, text), ByteTokenizer(), image_limits(run), "the run")


def recomputed(loaded: LoadedModel, prompt: Prompt, count: int) -> list[int]:
    """The likeliest tokens, each from a forward over everything before it."""
    ids, modules = list(prompt.ids), {name: loaded.run.modules[name].token for name in prompt.items}
    for _ in range(count):
        rows = encode(loaded.encoders, prompt.items)
        context = loaded.language.prepare(MicroBatch.of_tokens(torch.tensor([ids])), modules=modules)
        with torch.no_grad():
            logits_BTV = loaded.language.logits(context, rows)
        ids.append(int(logits_BTV[0, -1, : loaded.tokenizer.vocab].argmax()))
        if ids[-1] == loaded.tokenizer.end_of_document:
            break
    return ids


@pytest.mark.parametrize("shown", [[0], [1], [2, 0], [0, 1, 2], []])
def test_the_continuation_is_that_without_caches(shown, checkpoint, images):
    """One image or several, of any shape, or text alone."""
    loaded = load_models(checkpoint, "cpu")
    assert loaded.language.dtype == torch.float64
    prompt = prompt_of(loaded.run, [images[place] for place in shown], "what is ")
    text = loaded.generate(prompt, **GREEDY)
    ids = recomputed(loaded, prompt, GREEDY["tokens"])
    assert text == loaded.tokenizer.decode([i for i in ids if i != loaded.run.modules["vision"].token])
    assert text.startswith("what is ")


def test_images_change_what_comes_next(checkpoint, images):
    """Each of them, and their order."""
    loaded = load_models(checkpoint, "cpu")
    logits = []
    for shown in ([images[0], images[2]], [images[2], images[0]], [images[0]]):
        prompt = prompt_of(loaded.run, shown, "a")
        context = loaded.language.prepare(
            MicroBatch.of_tokens(torch.tensor([prompt.ids])),
            modules={"vision": loaded.run.modules["vision"].token},
        )
        with torch.no_grad():
            logits.append(loaded.language.logits(context, encode(loaded.encoders, prompt.items))[0, -1])
    assert all(float((logits[0] - other).abs().max()) > 1e-3 for other in logits[1:])


def test_images_of_a_prompt_share_the_patches_of_a_sample(corpus, images):
    run = seeing(corpus)
    token = run.modules["vision"].token
    alone = prompt_of(run, [images[1]], "a")
    assert alone.items["vision"].patches.grids == [(8, 2)]  # 32 x 8 pixels have 64 patches, and may have 24
    assert alone.ids == (*[token] * 4, ord("a"))
    three = prompt_of(run, [images[0], images[1], images[2]], "")
    assert [rows * columns for rows, columns in three.items["vision"].patches.grids] == [8, 8, 4]
    assert three.ids == (token,) * 5


def test_parts_say_where_images_are(corpus, images, tmp_path):
    run = seeing(corpus)
    file = tmp_path / "prompt.json"
    file.write_text(json.dumps([{"text": "x"}, {"image": "square.png"}, {"text": "y"}, {"image": "wide.png"}]))
    prompt = encode_prompt(read_parts(file), ByteTokenizer(), image_limits(run), "the run")
    token = run.modules["vision"].token
    assert prompt.ids == (ord("x"), token, ord("y"), token, token)
    assert prompt.items["vision"].patches.grids == [(2, 2), (2, 4)]


def of_ranks(rank: int, world: int, run: Run, images: list[Path]) -> list[str]:
    state, feed = started(rank, world, run)
    prompts = [prompt_of(run, images, "abc"), text_prompt("abc", feed.tokenizer)]
    return [
        generate_distributed(state, run, feed.tokenizer, prompt, tokens=3, temperature=0.8, seed=3)
        for prompt in prompts
    ]


def test_ranks_generate_what_one_process_does(corpus, images):
    """Without caches, whatever ranks the encoder is on; data-parallel ranks have a copy of the prompt each."""
    run = seeing(corpus)
    expected = of_ranks(0, 1, run, images)
    placement = Placement(world=4, language="at0+2", modules={"vision": "at1+3"})
    assert run_ranks(4, of_ranks, placement.of(run), images) == [expected] * 4


@pytest.mark.long
@pytest.mark.parametrize(
    "placement",
    [
        Placement(world=4, language="at0+2 tp2", modules={"vision": "at2+2 tp2"}),
        Placement(world=4, language="pp2 cp2", modules={"vision": "pp2"}),
    ],
    ids=str,
)
def test_other_placements_generate_the_same(placement, corpus, images):
    run = seeing(corpus)
    expected = of_ranks(0, 1, run, images)
    assert run_ranks(4, of_ranks, placement.of(run), images) == [expected] * 4


def test_a_trainer_generates_from_images(corpus, images, tmp_path):
    with Trainer(plan(seeing(corpus), 1), out=tmp_path / "run", device="cpu", quiet=True) as trainer:
        text = trainer.generate("abc", images=images, **GREEDY)
        path = trainer.save()
    loaded = load_models(path, "cpu")
    assert text == loaded.generate(prompt_of(loaded.run, images, "abc"), **GREEDY)


@dataclass(frozen=True)
class Spelled(ByteTokenizer):
    """Bytes, of which z is the placeholder, as a special token of a tokenizer may be."""

    special = MappingProxyType({ord("z"): "z"})


def test_placeholders_among_the_ids_of_text_are_neither_sampled_nor_spelled(checkpoint, images, monkeypatch):
    loaded = load_models(checkpoint, "cpu")
    vision = replace(loaded.run.modules["vision"], token=ord("z"))
    loaded = replace(loaded, run=replace(loaded.run, modules={"vision": vision}), tokenizer=Spelled())
    head = torch.full((1, 257), -1.0)
    head[0, ord("z")] = 9.0
    assert int(without(head, [ord("z"), 300]).argmax()) != ord("z")
    monkeypatch.setattr(loaded.language, "head_logits", lambda hidden_BC: head)  # it is always likeliest
    for shown in (images[:1], []):
        prompt = encode_prompt(parts_with_images(shown, "ab"), Spelled(), image_limits(loaded.run), "the run")
        assert len(loaded.generate(prompt, **GREEDY)) == len("ab") + GREEDY["tokens"], "none is left out"
        with pytest.raises(DataError, match=r"has 'z', the placeholder of modules\.vision \(token 122\)"):
            encode_prompt(parts_with_images(shown, "abz"), Spelled(), image_limits(loaded.run), "the run")


# --------------------------------------------------------------------------------------------- errors


def test_the_command(checkpoint, images, capsys):
    words = ["generate", str(checkpoint), "--device", "cpu", "--tokens", "2"]
    assert main([*words, "--image", *map(str, images[:2]), "--prompt", "abc"]) == 0
    assert capsys.readouterr().out.startswith("abc")
    assert main([*words, "--image", str(images[0])]) == 0, "an image is a prompt"
    assert main([*words, "--image"]) == 2
    assert "--image has no file" in capsys.readouterr().err
    assert main([*words, "--prompt", ""]) == 2
    assert "prompt = ''" in capsys.readouterr().err
    assert main([*words, "--prompt", "a", "--prompt-parts", "x.json"]) == 2
    assert "leave --prompt and --image out" in capsys.readouterr().err


def test_image_may_be_given_once_or_several_times(checkpoint, images, capsys):
    """Four are one too many, however they are given: none is left out."""
    words, files = ["generate", str(checkpoint), "--device", "cpu", "--tokens", "2"], [*images, images[0]]
    each = [word for file in files for word in ("--image", str(file))]
    for given in (["--image", *map(str, files)], each, ["--image", *map(str, files[:3]), *each[-2:]]):
        assert main([*words, *given]) == 3
        assert "the prompt has 4 images" in capsys.readouterr().err


def test_links_in_a_circle_are_named(corpus, tmp_path):
    file = tmp_path / "circle.png"
    file.symlink_to(file)
    with pytest.raises(DataError, match=r"image .*circle\.png: .*cannot be read"):
        prompt_of(seeing(corpus), [file], "a")


@pytest.mark.parametrize(
    ("content", "told"),
    [
        (png(8, 8)[:60], r"image .*bad\.png: bad\.png: (is truncated|cannot be decoded)"),
        (b"no image", r"bad\.png: is neither PNG nor JPEG"),
        (None, r"image .*bad\.png: bad\.png: does not exist"),
    ],
)
def test_files_that_are_no_images_are_named(content, told, corpus, tmp_path):
    file = tmp_path / "bad.png"
    if content is not None:
        file.write_bytes(content)
    with pytest.raises(DataError, match=told):
        prompt_of(seeing(corpus), [file], "a")


def test_wrong_channels_and_sizes_are_named(corpus, tmp_path):
    from PIL import Image

    file = tmp_path / "cmyk.jpg"
    file.write_bytes(encoded(Image.new("CMYK", (8, 8)), "JPEG"))
    with pytest.raises(DataError, match=r"cmyk\.jpg: has CMYK pixels: convert it to grey or RGB"):
        prompt_of(seeing(corpus), [file], "a")
    large = bytearray(png(8, 8))
    large[16:24] = (60_000).to_bytes(4, "big") * 2
    file.write_bytes(bytes(large))
    with pytest.raises(DataError, match=r"cmyk\.jpg: is 60,000 x 60,000 pixels"):
        prompt_of(seeing(corpus), [file], "a")


def test_too_many_images_are_named(corpus, images):
    with pytest.raises(
        DataError, match=r"4 images or groups of frames, and modules\.vision\.most_items of the run is 3"
    ):
        prompt_of(seeing(corpus), [*images, images[0]], "a")


def test_models_that_read_no_images_say_so(corpus, images):
    run = multimodal("hybrid", corpus, {"vision": VISION}, **STEP)
    for blind in (run, replace(run, modules={})):
        with pytest.raises(DataError, match=r"the prompt has 2 images, and the run has no encoder of images"):
            prompt_of(blind, images[:2], "a")
    two = multimodal("hybrid", corpus, {"vision": RADIO, "other": RADIO}, **STEP)
    with pytest.raises(ConfigError, match=r"vision and other could read the images"):
        image_limits(two)
    chosen = replace(two, modules={**two.modules, "other": replace(two.modules["other"], items="image")})
    assert list(image_limits(chosen)) == ["other"]


# --------------------------------------------------------------------------------------- prompts of the data

PLAIN = {"text": "no image"}
ASKED = {
    "prompt": [{"text": "see "}, {"image": "tall.png"}, {"text": " or "}, {"image": "wide.png"}],
    "response": "it",
}
TOLD = {"content": [{"text": "a "}, {"image": "square.png"}, {"text": "b"}, {"image": "wide.png"}]}


@pytest.mark.parametrize("packing", ["documents", "concatenate"])
@pytest.mark.parametrize(
    ("rows", "parts", "asked"),
    [
        ((PLAIN, ASKED, TOLD), ASKED["prompt"], 4),
        # Behind its first image, text counts in the loss.
        ((PLAIN, TOLD, ASKED), TOLD["content"], 2),
    ],
)
def test_a_prompt_of_the_data_is_what_its_files_make(rows, parts, asked, packing, corpus, images, tmp_path):
    """The first document with images, up to its answer: the tokens and patches of a prompt of these parts."""
    limits = replace(image_limits(seeing(corpus))["vision"], most_items=4, most_patches=48)
    build(write_rows(tmp_path, {}, rows), tmp_path / "out", ByteTokenizer())
    found = stored_prompt(Loader(open_source(tmp_path / "out"), 100, 0, packing, images={"vision": limits}), 0)
    assert found is not None
    (tmp_path / "parts.json").write_text(json.dumps(parts))
    whole = encode_prompt(read_parts(tmp_path / "parts.json"), ByteTokenizer(), {"vision": limits}, "it")
    stored, expected = found.items["vision"].patches, whole.items["vision"].patches
    assert stored.grids == expected.grids[: sum("image" in part for part in parts[:asked])]
    assert torch.equal(stored.patches_NI, expected.patches_NI[: len(stored.patches_NI)])
    assert found.ids == whole.ids[: len(found.ids)]
    text = "".join(part.get("text", "") for part in parts[:asked])
    assert len(found.ids) == len(text) + sum(limits.encoder.rows(a * b) for a, b in stored.grids)


def test_images_of_a_document_that_began_before_are_no_part_of_the_prompt(corpus, images, tmp_path):
    limits = replace(image_limits(seeing(corpus))["vision"], most_items=2, most_patches=48)
    first = {"content": [{"image": "wide.png"}, {"text": "a"}] * 3}
    build(
        write_rows(tmp_path, {}, [first, {"content": TOLD["content"][:3]}]), tmp_path / "out", ByteTokenizer()
    )
    loader = Loader(open_source(tmp_path / "out"), 60, 0, "concatenate", images={"vision": limits})
    starts = loader.samples[0].starts.tolist()
    (shown,) = [
        found for n in range(len(starts) - 1) if (found := stored_prompt(loader, n)) and 97 in found.ids
    ]
    assert ByteTokenizer().decode([each for each in shown.ids if each < 256]) == "a "
    assert shown.items["vision"].patches.grids == [(2, 2)]


def test_data_without_images_have_no_prompt_with_any(corpus, tmp_path):
    build(write_rows(tmp_path, {}, [PLAIN] * 9), tmp_path / "out", ByteTokenizer())
    images = image_limits(seeing(corpus))
    assert stored_prompt(Loader(open_source(tmp_path / "out"), 60, 0, images=images), 0) is None


def test_a_run_ends_with_a_sample_of_its_own_images(images, tmp_path, capsys):
    rows = [{"prompt": [{"image": "wide.png"}, {"text": "What? "}], "response": "Wide."}] * 9
    build(write_rows(tmp_path, {}, rows), tmp_path / "data", ByteTokenizer())
    few = ["--train.steps", "1", "--optim.warmup-steps", "0", "--train.batch-samples", "1"]
    source = ["--data.sources", str(tmp_path / "data"), "--train.eval-samples", "0"]
    main(["train", "tiny-vlm", *few, *source, "--device", "cpu", "--out", str(tmp_path / "run")])
    said = capsys.readouterr().out
    assert "sample      [image] What? " in said
    assert f"generate {tmp_path / 'run'} --image FILE --prompt 'What? '" in said


def test_parts_that_are_none_are_named(tmp_path):
    file = tmp_path / "prompt.json"
    for content, told in (
        ("{", "is no JSON file that can be read"),
        ('{"text": "a"}', "a prompt is a list of parts"),
        ('[{"sound": "a"}]', r"parts\[0\]: is"),
    ):
        file.write_text(content)
        with pytest.raises(DataError, match=told):
            read_parts(file)
    with pytest.raises(DataError, match=r"prompt\.json: is no JSON file that can be read"):
        read_parts(tmp_path / "none" / "prompt.json")
