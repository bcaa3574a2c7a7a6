"""The data of a run: its sources opened, checked against the model, and dealt out as micro-batches."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from braid import data
from braid.config import Run
from braid.errors import DataError
from braid.model.context import MicroBatch

VALIDATION_SHARE = 0.05
"""Share of the default corpus that is held out."""

Progress = Callable[[int, int], None]


@dataclass(frozen=True, kw_only=True)
class Feed:
    """Everything a run reads."""

    train: data.Loader
    validation: data.Loader | None
    """None where there is nothing to evaluate on."""
    tokenizer: data.Tokenizer
    name: str
    """What it is, in a few words."""
    tokens: int
    """Tokens to train on."""
    unigram_entropy: float
    """Loss of the best guess that only knows how often each token occurs, in nats per token."""


def open_feed(run: Run, folder: Path, progress: Progress | None = None) -> Feed:
    """Open the sources of a run. The default corpus is built into `folder` the first time."""
    tokenizer = tokenizer_of(run.data.tokenizer)
    if tokenizer.vocab > run.model.vocab:
        raise DataError(
            f"tokenizer {run.data.tokenizer!r} has {tokenizer.vocab} ids, model.vocab is {run.model.vocab}: "
            f"set model.vocab to {tokenizer.vocab} or more"
        )
    paths = run.data.sources or (str(_default_corpus(folder, tokenizer, progress)),)
    splits = [data.open_splits(path, vocab=run.model.vocab) for path in paths]
    sources = tuple(split.train for split in splits)
    validation = _validation(run, splits)
    for source in (*sources, *validation):
        _check_tokenizer(source, tokenizer)
    weights = run.data.weights or tuple(float(source.tokens) for source in sources)
    return Feed(
        train=_loader(run, sources, weights),
        validation=_loader(run, validation, [float(s.tokens) for s in validation]) if validation else None,
        tokenizer=tokenizer,
        name=", ".join(run.data.sources) or "the source of Python's standard library",
        tokens=sum(source.tokens for source in sources),
        unigram_entropy=data.unigram_entropy(validation[0] if validation else sources[0]),
    )


def tokenizer_of(name: str) -> data.Tokenizer:
    """`bytes`, or the tokenizer of a tokenizer.json."""
    return data.ByteTokenizer() if name == "bytes" else data.HfTokenizer.from_file(name)


def _default_corpus(folder: Path, tokenizer: data.Tokenizer, progress: Progress | None) -> Path:
    corpus = folder / f"standard-library-{tokenizer.fingerprint[:8]}"
    if not corpus.exists():
        folder.mkdir(parents=True, exist_ok=True)
        files = data.standard_library_files()
        data.build(files, corpus, tokenizer, validation=VALIDATION_SHARE, progress=progress)
    return corpus


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
            f"{source.path} was built with another tokenizer than data.tokenizer names: "
            "set data.tokenizer to that one, or build the source again"
        )


def _loader(run: Run, sources: tuple[data.Source, ...], weights: Sequence[float]) -> data.Loader:
    mixture = data.Mixture(sources=sources, weights=tuple(weights))
    return data.Loader(mixture, run.data.sequence_tokens, run.train.seed, run.data.packing)


def micro_batch(
    loader: data.Loader, samples: Sequence[int], *, step: int, seed: int, training: bool
) -> MicroBatch:
    """The micro-batch of these global samples."""
    batch = loader.batch(samples)
    return MicroBatch(
        tokens_BT=batch.tokens_BT,
        labels_BT=batch.labels_BT,
        loss_mask_BT=batch.loss_mask_BT,
        positions_BT=batch.positions_BT,
        documents_BT=batch.documents_BT,
        sample_B=torch.tensor(list(samples), dtype=torch.int64),
        step=step,
        seed=seed,
        training=training,
    )
