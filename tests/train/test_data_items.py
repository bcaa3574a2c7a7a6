"""Items in the data of a run: made up or stored, for its modules, in training and validation."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from braid.config import Mesh, Run
from braid.data import ByteTokenizer, HfTokenizer, build
from braid.encoders import Pixels
from braid.errors import ConfigError, DataError
from braid.planning.plan import plan
from braid.train.data_pipeline import open_data_pipeline
from braid.train.trainer import Trainer
from tests.data.pictures import png, write_rows
from tests.planning.modules import TOKEN, encoder, run_with


def run_on(corpus: Path, **changes: object) -> Run:
    """Two modules; the text of the corpus is bytes."""
    run = run_with({"vision": Mesh(), "audio": Mesh()}, **changes)
    return replace(run, data=replace(run.data, sources=(str(corpus),), sequence_tokens=64))


def test_modules_have_items_in_training_and_validation(corpus: Path, tmp_path: Path) -> None:
    run = run_on(corpus, items="synthetic")
    pipeline = open_data_pipeline(run, tmp_path)
    assert pipeline.validation is not None
    for loader in (pipeline.train, pipeline.validation):
        tokens_BT = loader.batch(range(12)).tokens_BT
        assert int(tokens_BT.max()) < run.model.vocab
        for name, module in run.modules.items():
            sizes = loader.items[name].sizes(range(12))
            rows = [sum(map(module.model.rows, each)) for each in sizes]
            assert (tokens_BT == module.token).sum(1).tolist() == rows
            assert sum(rows) > 0
            first = next(sample for sample, each in enumerate(sizes) if each)
            assert loader.items[name].read([(first, 0)]).patches_NI.shape == (
                sizes[first][0],
                module.model.input,
            )
    plain = open_data_pipeline(run_on(corpus), tmp_path)
    assert pipeline.prompt == plain.prompt, "the prompt is text"
    assert pipeline.train.fingerprint != plain.train.fingerprint


def test_modules_without_items_leave_the_data_as_it_is(corpus: Path, tmp_path: Path) -> None:
    run = run_on(corpus)
    with_modules, without = (
        open_data_pipeline(run, tmp_path).train,
        open_data_pipeline(replace(run, modules={}), tmp_path).train,
    )
    assert with_modules.items == {}
    assert with_modules.fingerprint == without.fingerprint
    assert torch.equal(with_modules.batch(range(8)).tokens_BT, without.batch(range(8)).tokens_BT)


def test_only_modules_with_items_have_them(corpus: Path, tmp_path: Path) -> None:
    run = run_on(corpus)
    modules = {**run.modules, "audio": replace(run.modules["audio"], items="synthetic")}
    loader = open_data_pipeline(replace(run, modules=modules), tmp_path).train
    assert list(loader.items) == ["audio"]
    assert not (loader.batch(range(12)).tokens_BT == TOKEN).any()


@pytest.mark.parametrize("items", ["synthetic", ""])
def test_a_placeholder_that_text_may_have_is_refused(corpus: Path, tmp_path: Path, items: str) -> None:
    with pytest.raises(DataError, match=r"modules\.vision\.token is 256.*set modules\.vision\.token to 257"):
        open_data_pipeline(run_on(corpus, items=items, token=256), tmp_path)


def test_a_run_with_a_module_more_or_less_says_which(
    corpus: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = run_on(corpus)
    run = replace(run, train=replace(run.train, steps=20, eval_samples=0))
    fewer = replace(run, modules={"vision": run.modules["vision"]})
    with Trainer(plan(fewer, 1), out=tmp_path, device="cpu", quiet=True) as trainer:
        trainer.save()
    capsys.readouterr()
    with pytest.raises(ConfigError, match=r"modules\.audio was added since"):
        Trainer(plan(run, 1), out=tmp_path, device="cpu", quiet=True)
    said = [line for line in capsys.readouterr().err.splitlines() if "modules." in line]
    assert said == ["braid:   modules.audio: added"]
    with pytest.raises(ConfigError, match=r"modules\.vision was removed since"):
        Trainer(plan(replace(run, modules={}), 1), out=tmp_path, device="cpu", quiet=True)


# --------------------------------------------------------------------------------------------- images


@pytest.fixture
def pictures(tmp_path: Path) -> Path:
    """Documents with an image each, some held out; in the first, it comes first."""
    files = {f"{number}.png": png(8, 4 + number % 9, seed=number) for number in range(40)}
    rows = [{"content": [{"image": name}, {"text": f"is {name}"}]} for name in files]
    build(write_rows(tmp_path / "in", files, rows), tmp_path / "pictures", ByteTokenizer(), validation=0.2)
    return tmp_path / "pictures"


def seeing(*sources: Path, packing: str = "concatenate", **changes: object) -> Run:
    """`vision` reads images: patches of 2 x 2 pixels, four in a row; `audio` has made-up items."""
    run = run_with({"vision": Mesh(), "audio": Mesh()}, items="synthetic")
    shape = encoder(run.model.hidden, input=12, group=4, pixels=Pixels(patch=2))
    vision = replace(run.modules["vision"], **{"model": shape, "items": "image", **changes})  # type: ignore[arg-type]
    data = replace(run.data, sources=tuple(map(str, sources)), sequence_tokens=64, packing=packing)  # type: ignore[arg-type]
    return replace(run, modules={**run.modules, "vision": vision}, data=data)


@pytest.mark.parametrize("packing", ["concatenate", "documents"])
def test_images_text_and_made_up_items_in_one_run(
    pictures: Path, corpus: Path, tmp_path: Path, packing: str
) -> None:
    run = seeing(pictures, corpus, packing=packing)
    pipeline = open_data_pipeline(run, tmp_path)
    assert pipeline.validation is not None
    for loader in (pipeline.train, pipeline.validation):
        tokens_BT, found = loader.batch(range(40)).tokens_BT, {}
        for name, module in run.modules.items():
            sizes = loader.items[name].sizes(range(40))
            found[name] = [sum(map(module.model.rows, each)) for each in sizes]
            assert (tokens_BT == module.token).sum(1).tolist() == found[name]
            assert max(map(len, sizes)) <= module.most_items
            assert max(map(sum, sizes)) <= module.most_patches
        assert 0 < sum(rows > 0 for rows in found["vision"]) < 40, "the other source has none"
        assert sum(found["audio"]) > 0


def test_sources_count_by_their_tokens_with_rows(pictures: Path, corpus: Path, tmp_path: Path) -> None:
    """As many samples of each as it has tokens, if no weights are given."""
    loader = open_data_pipeline(seeing(pictures, corpus), tmp_path).train
    images, text = loader.samples
    shares = loader.identity["shares"]
    assert shares[0] / shares[1] == pytest.approx(images.source.tokens / text.source.tokens, rel=1e-3)
    assert images.source.tokens > images.source.source.tokens  # type: ignore[union-attr]


def test_the_prompt_is_the_text_of_a_document(pictures: Path, tmp_path: Path) -> None:
    assert "is " in open_data_pipeline(seeing(pictures), tmp_path).prompt


def test_images_without_a_module_and_a_module_without_images_are_refused(
    pictures: Path, corpus: Path, tmp_path: Path
) -> None:
    run = seeing(pictures)
    for modules in ({}, {"audio": run.modules["audio"]}):
        with pytest.raises(DataError, match=r"pictures/train has \d+ images, and no module reads them"):
            open_data_pipeline(replace(run, modules=modules), tmp_path)
    with pytest.raises(DataError, match=r"modules\.vision\.items is image, and no source has images or videos"):
        open_data_pipeline(seeing(corpus), tmp_path)


def test_what_does_not_fit_into_samples_is_said(pictures: Path, tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"most_patches is 400, so an image may have 100 rows"):
        open_data_pipeline(seeing(pictures, most_patches=400), tmp_path)
    rows = [{"content": [*[{"text": "a"}, {"image": "0.png"}] * 5, {"text": "b"}]}] * 2 + [{"text": "c"}]
    build(write_rows(tmp_path / "many", {"0.png": png(4, 4)}, rows), tmp_path / "out", ByteTokenizer())
    run = seeing(tmp_path / "out", packing="documents")
    (note,) = open_data_pipeline(run, tmp_path).notes
    assert note.startswith("2 documents of")
    most = run.modules["vision"].most_items
    assert f"more images or groups of frames than modules.vision.most_items ({most}): their last" in note
    assert note.endswith("tokens and 6 images or groups of frames are dropped")


def test_a_placeholder_of_images_that_text_may_have_is_refused(pictures: Path, tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"modules\.vision\.token is 97, which text may have"):
        open_data_pipeline(seeing(pictures, token=97), tmp_path)


def special_tokenizer(folder: Path) -> HfTokenizer:
    """Letters, and special tokens, 4 of which stands for images."""
    tokenizers = pytest.importorskip("tokenizers")
    from tokenizers.models import WordLevel

    words = {"?": 0, "a": 1, "b": 2, "</s>": 3, "<image>": 4}
    made = tokenizers.Tokenizer(WordLevel(words, unk_token="?"))
    made.pre_tokenizer = tokenizers.pre_tokenizers.Split("", "isolated")
    made.add_special_tokens(["</s>", "<image>"])
    folder.mkdir(exist_ok=True)
    made.save(str(folder / "tokenizer.json"))
    return HfTokenizer.from_file(folder)


def test_a_special_token_of_the_tokenizer_may_be_the_placeholder(tmp_path: Path) -> None:
    """As in imported models. Text that spells it is refused, by the build with file and line."""
    tokenizer = special_tokenizer(tmp_path / "words")
    rows = [{"content": [{"text": "ab"}, {"image": "0.png"}, {"text": "ba" * 40}]}] * 4
    file = write_rows(tmp_path / "rows", {"0.png": png(4, 4)}, rows)
    build(file, tmp_path / "good", tokenizer, reserved=["<image>"])
    run = seeing(tmp_path / "good", token=4)
    named = replace(run.data, tokenizer=str(tmp_path / "words" / "tokenizer.json"))
    run = replace(run, data=named)
    opened = open_data_pipeline(run, tmp_path)
    ids = opened.train.batch(range(8)).tokens_BT
    assert int((ids == 4).sum()) > 0
    assert "<image>" not in opened.prompt
    for token, rule in ((1, "which text may have.*or to a special token of it: 4 <image>"), (3, "may have")):
        other = replace(run.modules["vision"], token=token)
        with pytest.raises(DataError, match=rule):
            open_data_pipeline(replace(run, modules={**run.modules, "vision": other}), tmp_path)

    spelled = write_rows(tmp_path / "spelled", {"0.png": png(4, 4)}, [*rows, {"text": "ab<image>b" + "a" * 80}])
    with pytest.raises(DataError, match=r"rows\.jsonl, line 5: its text spells <image>, which is reserved"):
        build(spelled, tmp_path / "refused", tokenizer, reserved=["<image>"])
    assert not (tmp_path / "refused").exists()
    with pytest.raises(DataError, match=r"reserved <video>: no special token of the tokenizer; .*<image>"):
        build(spelled, tmp_path / "refused", tokenizer, reserved=["<video>"])
    build(spelled, tmp_path / "bad", tokenizer)
    bad = replace(run, data=replace(named, sources=(str(tmp_path / "bad"),)))
    with pytest.raises(DataError, match="document 4, offset 2: its text spells <image>, the placeholder of"):
        open_data_pipeline(bad, tmp_path)


def test_a_run_continues_only_with_the_same_images(pictures: Path, tmp_path: Path) -> None:
    prints = {
        open_data_pipeline(seeing(pictures, **change), tmp_path).train.fingerprint
        for change in ({}, {}, {"most_patches": 12}, {"most_items": 1}, {"token": 299})
    }
    assert len(prints) == 4
