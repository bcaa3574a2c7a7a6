"""The data pipeline of a run: opens its sources, checks them against the model, and builds the data loaders."""

from __future__ import annotations

import shlex
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch

from braid import data
from braid.choices import MADE_UP
from braid.config import Run
from braid.data.batch import collate
from braid.data.digit_strips import PROMPT as STRIP_PROMPT
from braid.data.digit_strips import build_strips, example_strips
from braid.data.prompts import Prompt, stored_prompt
from braid.errors import DataError

VERIFIED_BYTES = 1 << 30
"""Sources up to this size are fully verified at startup, which takes about a second."""

VALIDATION_SHARE = 0.05
"""Fraction of the default corpus held out for validation."""

PROMPT_TOKENS = 8
PROMPT_SAMPLES = 16
"""Samples that are looked through for a prompt with images."""
CHUNK = 1 << 22
"""Tokens that are looked at together."""
SHOWN = 8
"""Special tokens that a message lists."""

PYTHON, DIGITS = "the source of Python's standard library", "strips of handwritten digits of scikit-learn"
"""What runs without sources train on."""
EXAMPLES = "example-strips"
"""Folder of strips to generate from."""

Progress = Callable[[int, int], None]


@dataclass(frozen=True, kw_only=True)
class DataPipeline:
    """The loaders and the tokenizer of a run."""

    train: data.Loader
    validation: data.Loader | None
    """None if there is no validation data or evaluation is off."""
    tokenizer: data.Tokenizer
    name: str
    """A short description for the run's header."""
    tokens: int
    """Number of training tokens."""
    prompt: str
    """Prompt for text generated after training."""
    images: tuple[Path, ...] = ()
    """Images before that prompt."""
    unigram_entropy: float
    """Loss of the unigram model (token frequencies alone), in nats per token: a baseline for the run's loss."""
    notes: tuple[str, ...] = ()
    """What a user should know before training, such as what is dropped."""

    def stored_prompt(self) -> Prompt | None:
        """A prompt of the data with its images, held out if there are such; None if they have none."""
        for loader in (self.validation, self.train):
            if loader is not None and loader.images:
                for sample in range(min(PROMPT_SAMPLES, loader.samples_per_epoch)):
                    if (found := stored_prompt(loader, sample)) is not None:
                        return found
        return None


def open_data_pipeline(run: Run, folder: Path, progress: Progress | None = None) -> DataPipeline:
    """Open the sources of a run. Without any, the default corpus is built in `folder` on first use."""
    tokenizer = load_tokenizer(run.data.tokenizer)
    if tokenizer.vocab > run.model.vocab:
        raise DataError(
            f"tokenizer {run.data.tokenizer!r} has {tokenizer.vocab} ids, model.vocab is {run.model.vocab}: "
            f"set model.vocab to {tokenizer.vocab} or more"
        )
    _check_placeholders(run, tokenizer)
    paths = run.data.sources or (str(_default_corpus(run, folder, tokenizer, progress)),)
    corpus = _corpus_name(run)
    splits = [data.open_splits(path, vocab=run.model.vocab) for path in paths]
    sources = tuple(split.train for split in splits)
    validation = _validation(run, splits)
    for source in (*sources, *validation):
        _check_tokenizer(source, tokenizer)
        _verify_if_small(source)
        _check_text(run, source, tokenizer)
    _check_images(run, sources)
    weights = run.data.weights or _tokens_of_each(run, sources)
    loader = _loader(run, sources, weights)
    notes = _truncations(loader)
    held_out = _validation_loader(run, validation, notes)
    return DataPipeline(
        train=loader,
        validation=held_out,
        tokenizer=tokenizer,
        prompt={PYTHON: "def ", DIGITS: STRIP_PROMPT}.get(corpus) or _prompt(run, loader, tokenizer),
        images=tuple(example_strips(folder / EXAMPLES)[:1]) if corpus == DIGITS else (),
        name=corpus or ", ".join(run.data.sources),
        tokens=sum(source.tokens for source in sources),
        unigram_entropy=data.unigram_entropy(validation[0] if validation else sources[0]),
        notes=tuple(notes),
    )


def load_tokenizer(name: str) -> data.Tokenizer:
    """The byte tokenizer for `bytes`, otherwise the one in a tokenizer.json."""
    return data.ByteTokenizer() if name == "bytes" else data.HfTokenizer.from_file(name)


def tokenizer_folder(name: str) -> Path | None:
    """The folder of a tokenizer.json, which may have a chat template; None for bytes."""
    if name == "bytes":
        return None
    return Path(name) if Path(name).is_dir() else Path(name).parent


def _default_corpus(run: Run, folder: Path, tokenizer: data.Tokenizer, progress: Progress | None) -> Path:
    name = {"python": "standard-library", "digits": "digit-strips"}[run.data.corpus]
    corpus = folder / f"{name}-{tokenizer.fingerprint[:8]}"
    if corpus.exists():
        return corpus
    folder.mkdir(parents=True, exist_ok=True)
    if run.data.corpus == "digits":
        build_strips(corpus, tokenizer, progress)
    else:
        files = data.standard_library_files()
        data.build(files, corpus, tokenizer, validation=VALIDATION_SHARE, progress=progress)
    return corpus


def _corpus_name(run: Run) -> str:
    """What a run without sources trains on; empty for one that has some."""
    return "" if run.data.sources else {"python": PYTHON, "digits": DIGITS}[run.data.corpus]


def _validation(run: Run, splits: Sequence[data.Splits]) -> tuple[data.Source, ...]:
    if run.train.eval_samples == 0:
        return ()
    if run.data.validation:
        return tuple(data.open_source(path, vocab=run.model.vocab) for path in run.data.validation)
    return tuple(split.validation for split in splits if split.validation is not None)


def _check_tokenizer(source: data.Source, tokenizer: data.Tokenizer) -> None:
    made_with = source.tokenizer_description
    if made_with is not None and made_with != tokenizer.description:
        raise DataError(
            f"{source.path} was built with another tokenizer than data.tokenizer: "
            "set data.tokenizer to the one it was built with, or rebuild the source"
        )


def _check_placeholders(run: Run, tokenizer: data.Tokenizer) -> None:
    """Text has no placeholders of items, whether a module has any or none. An id above the tokenizer's is safe;
    a special token of it, such as `<image>`, is one that only its own spelling makes, and text that has it is
    refused when it is read."""
    for name, module in run.modules.items():
        free = {n: text for n, text in tokenizer.special.items() if n != tokenizer.end_of_document}
        if module.token >= tokenizer.vocab or module.token in free:
            continue
        special = ", ".join(f"{number} {text}" for number, text in sorted(free.items())[:SHOWN])
        raise DataError(
            f"modules.{name}.token is {module.token}, which text may have: ids of tokenizer "
            f"{run.data.tokenizer!r} are 0 to {tokenizer.vocab - 1}; set modules.{name}.token to "
            f"{tokenizer.vocab} or more" + (f", or to a special token of it: {special}" if special else "")
        )


def _check_text(run: Run, source: data.Source, tokenizer: data.Tokenizer) -> None:
    """A small source spells no special token that is a placeholder; reading finds it in a large one."""
    tokens = {module.token: name for name, module in run.modules.items() if module.token < tokenizer.vocab}
    if not tokens or source.bytes > VERIFIED_BYTES:
        return
    for start in range(0, source.tokens, CHUNK):
        ids = source.read(start, min(start + CHUNK, source.tokens)).ids_S
        if len(found := np.flatnonzero(np.isin(ids, list(tokens)))):
            token, place, offsets = int(ids[found[0]]), start + int(found[0]), source.document_offsets()
            document = int(np.searchsorted(offsets, place, side="right")) - 1
            raise DataError(
                f"{source.path}: document {document}, offset {place - int(offsets[document])}: its text spells "
                f"{tokenizer.special[token]}, the placeholder of modules.{tokens[token]}; `braid data build "
                f"--reserved {shlex.quote(tokenizer.special[token])}` names file and line: remove it there"
            )


def _check_images(run: Run, sources: Sequence[data.Source]) -> None:
    """A module that waits for images has some. (That images have a module is checked by every loader.)"""
    for name, module in run.modules.items():
        if module.items == "image" and not any(source.media for source in sources):
            given = ", ".join(str(source.path) for source in sources)
            raise DataError(
                f"modules.{name}.items is image, and no source has images or videos ({given}): build one with "
                f"`braid data build` from rows with images, or leave modules.{name}.items empty"
            )


def _tokens_of_each(run: Run, sources: Sequence[data.Source]) -> tuple[float, ...]:
    """Tokens of every source, rows of images included."""
    return tuple(float(data.open_stream(source, _limits(run, "image")).tokens) for source in sources)


def _verify_if_small(source: data.Source) -> None:
    """Verify a small source; for a large one the user runs `braid data verify`."""
    if source.bytes <= VERIFIED_BYTES:
        data.verify(source)


def _validation_loader(run: Run, sources: tuple[data.Source, ...], notes: list[str]) -> data.Loader | None:
    """The validation data; None, and a note, if what was held out of the sources is too little."""
    if not sources:
        return None
    try:
        return _loader(run, sources, _tokens_of_each(run, sources))
    except DataError as error:
        if run.data.validation:
            raise
        notes.append(f"no validation loss: {error} (data.sequence_tokens), or hold out more documents")
        return None


def _prompt(run: Run, loader: data.Loader, tokenizer: data.Tokenizer) -> str:
    """The first tokens of a training document: the last one of its sample, because the first may be cut."""
    batch = collate(loader.read_text([0]), [0], loader.length)
    tokens = batch.tokens_BT[0, batch.documents_BT[0] == batch.documents_BT[0].max()]  # padding is -1
    placeholders = torch.tensor([module.token for module in run.modules.values()], dtype=tokens.dtype)
    tokens = tokens[~torch.isin(tokens, placeholders)]
    return tokenizer.decode(tokens[:PROMPT_TOKENS].tolist()) or " "


def _truncations(loader: data.Loader) -> list[str]:
    """What the samples of a run leave out."""
    notes = []
    for samples in loader.samples:
        if isinstance(samples, data.Packed) and samples.cut_documents:
            items = f" and {samples.cut_items:,} images or groups of frames" if samples.cut_items else ""
            limits = "".join(
                f", or have more images or groups of frames than modules.{name}.most_items ({each.most_items})"
                for name, each in loader.images.items()
            )
            notes.append(
                f"{samples.cut_documents:,} documents of {samples.source.path} are longer than "
                f"data.sequence_tokens ({loader.length}){limits}: their last {samples.cut_tokens:,} tokens"
                f"{items} are dropped"
            )
    return notes


def _loader(run: Run, sources: tuple[data.Source, ...], weights: Sequence[float]) -> data.Loader:
    mixture = data.Mixture(sources=sources, weights=tuple(weights))
    return data.Loader(
        mixture,
        run.data.sequence_tokens,
        run.train.seed,
        run.data.packing,
        synthetic=_limits(run, *MADE_UP),
        images=_limits(run, "image"),
    )


def _limits(run: Run, *kinds: str) -> dict[str, data.ItemLimits]:
    """The modules whose items are of these kinds."""
    return {
        name: data.ItemLimits(
            encoder=module.model,
            token=module.token,
            most_items=module.most_items,
            most_patches=module.most_patches,
            items=module.items,
        )
        for name, module in run.modules.items()
        if module.items in kinds
    }
