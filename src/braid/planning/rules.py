"""Rules between the parts of a run that need neither ranks nor a model: each yields what it finds wrong."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from braid.choices import BYTE_VOCAB
from braid.config import Run
from braid.errors import ConfigError, Problem
from braid.pattern import Kind, PatternError, parse


@contextmanager
def addressable_tensors(where: str) -> Iterator[None]:
    """While a model is built: refuse a tensor of more bytes than 64 bits count."""
    try:
        yield
    except (RuntimeError, TypeError) as error:
        if "verflow" not in str(error):
            raise
        raise ConfigError(
            f"{where}: a tensor of these sizes has more bytes than a machine can address: {error}\n"
            "  set   lower sizes, such as hidden, vocab or ffn"
        ) from error


def vocab(run: Run) -> Iterator[Problem]:
    if run.data.tokenizer == "bytes" and run.model.vocab < BYTE_VOCAB:
        yield Problem(
            field="model.vocab",
            value=run.model.vocab,
            rule=f"the tokenizer `bytes` has {BYTE_VOCAB} ids: 256 bytes and the end-of-document token",
            remedy=f"{BYTE_VOCAB} or more",
        )


def steps(run: Run) -> Iterator[Problem]:
    decay = run.optim.decay_steps if run.optim.schedule == "wsd" else 0
    used = run.optim.warmup_steps + decay
    if used > run.train.steps >= 1:
        yield Problem(
            field="optim.warmup_steps",
            value=run.optim.warmup_steps,
            rule=f"warm-up and decay take {used} steps, more than train.steps ({run.train.steps})",
            remedy=f"at most {max(0, run.train.steps - decay)}, or train.steps to {used} or more",
        )


def recompute(run: Run) -> Iterator[Problem]:
    # DeepEP does not order received tokens deterministically, so a second dispatch may not match the first.
    block_level = {"block", "full"} & set(run.train.recompute)
    if block_level and run.mesh.dispatcher == "deep_ep" and run.mesh.ep * run.mesh.etp > 1:
        rule = "DeepEP may receive tokens in another order when they are dispatched again for a recompute"
        remedy = (
            f"train.recompute without {' and '.join(sorted(block_level))}, or mesh.dispatcher to all_to_all"
        )
        yield Problem(field="train.recompute", value=run.train.recompute, rule=rule, remedy=remedy)
    yield from _offload(run)
    if "hyper" in run.train.recompute and run.model.hyper is None:
        rule = "the model has no hyper-connections to recompute: model.hyper is None"
        others = " ".join(name for name in run.train.recompute if name != "hyper") or "()"
        remedy = f"{others}, or set model.hyper in the recipe"
        yield Problem(field="train.recompute", value=run.train.recompute, rule=rule, remedy=remedy)


def _offload(run: Run) -> Iterator[Problem]:
    """How much `core` of these mixers saves beside what its recompute would drop is not worked out. Times are
    those of all blocks or of none."""
    if "core" not in run.train.offload_regions and not run.train.offload_times:
        return
    try:
        layout = parse(run.model.pattern)
    except PatternError:  # reported with the layers
        return
    unknown = {kind for kind in layout.kinds() if kind.is_mixer and kind is not Kind.ATTENTION}
    if unknown and "core" in run.train.offload_regions:
        letters = ", ".join(sorted(kind.value for kind in unknown))
        yield Problem(
            field="train.offload_regions",
            value=run.train.offload_regions,
            rule=f"core is offloaded of softmax attention alone, but the pattern has {letters}",
            remedy="regions without core, or none, to offload whole blocks",
        )
    named = {word.partition("=")[0] for word in run.train.offload_times}
    missing = [kind for kind in dict.fromkeys(map(str, layout.blocks)) if kind not in named]
    if run.train.offload_times and (missing or run.modules):
        what = f"must have every kind of block, but {' '.join(missing)} is not there"
        yield Problem(
            field="train.offload_times",
            value=run.train.offload_times,
            rule="are for runs without modules" if run.modules else what,
            remedy="the words of `braid plan --cluster NAME`, or none",
        )
