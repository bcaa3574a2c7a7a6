"""Settings of a config.json, read strictly: a setting that is overlooked may change what the model computes.

An adapter takes each setting by name and says which values braid can express. Whatever is left becomes a reason
to refuse the file, and all reasons are reported at once. Three groups of settings are accepted without effect:

    HARMLESS     keys of transformers' base class, of text generation and of training
    neutral      keys that switch a feature off (`use_sliding_window: false`): accepted with that value only
    repeats      keys that say again what a sibling says: accepted where both agree

`ignore` drops keys by name: the user's escape, which an import records. Keys of an object within, such as
`text_config`, are checked and named like the others: `text_config.NAME`.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from types import MappingProxyType
from typing import Any

from braid.errors import ConfigError

BASE_CLASS = (
    "_attn_implementation_autoset",
    "_name_or_path",
    "architectures",
    "attn_implementation",
    "auto_map",
    "dtype",
    "finetuning_task",
    "id2label",
    "label2id",
    "max_position_embeddings",
    "model_type",
    "name_or_path",
    "num_labels",
    "output_attentions",
    "output_hidden_states",
    "output_router_logits",
    "prefix",
    "pretraining_tp",
    "problem_type",
    "return_dict",
    "task_specific_params",
    "tf_legacy_loss",
    "tie_encoder_decoder",
    "tokenizer_class",
    "torch_dtype",
    "torchscript",
    "transformers_version",
    "use_bfloat16",
    "use_cache",
)
GENERATION = (
    "bad_words_ids",
    "begin_suppress_tokens",
    "bos_token_id",
    "decoder_start_token_id",
    "diversity_penalty",
    "do_sample",
    "early_stopping",
    "encoder_no_repeat_ngram_size",
    "eos_token_id",
    "exponential_decay_length_penalty",
    "forced_bos_token_id",
    "forced_eos_token_id",
    "length_penalty",
    "max_length",
    "max_new_tokens",
    "min_length",
    "no_repeat_ngram_size",
    "num_beam_groups",
    "num_beams",
    "num_return_sequences",
    "output_scores",
    "pad_token_id",
    "remove_invalid_values",
    "repetition_penalty",
    "return_dict_in_generate",
    "sep_token_id",
    "suppress_tokens",
    "temperature",
    "top_k",
    "top_p",
    "typical_p",
)
TRAINING = ("router_aux_loss_coef",)
HARMLESS = frozenset({*BASE_CLASS, *GENERATION, *TRAINING})
"""Settings that do not change what a model computes from tokens to logits."""

NEUTRAL: Mapping[str, tuple[Any, ...]] = MappingProxyType(
    {
        "add_cross_attention": (False, None),
        "chunk_size_feed_forward": (0, None),
        "cross_attention_hidden_size": (None,),
        "is_decoder": (False, True, None),
        "is_encoder_decoder": (False, None),
        "pruned_heads": ({}, None),
    }
)
"""Settings of the base class that would change the model, with the values that do not."""

OFF = (False, None, 0, 0.0)
"""Values that say that a feature is not used."""

LARGEST = 2**31 - 1
"""The largest whole number that a setting may have: sizes of tensors overflow beyond."""
MOST_LAYERS = 10_000
"""A file with more would fill the memory with its own pattern."""

SHOWN = 120
"""Characters of a value that a message quotes."""


class Missing:
    """Stands for the default of a setting that has none."""


MISSING = Missing()


class Settings:
    """The settings of one file, and the reasons to refuse it."""

    def __init__(self, values: Mapping[str, Any], *, ignore: Collection[str] = ()) -> None:
        unknown = sorted(name for name in ignore if not _held(values, name))
        if unknown:
            raise ConfigError(f"--ignore {' '.join(unknown)}: config.json has no such setting, leave it out")
        self._ignore = ignore
        self._values = {name: value for name, value in values.items() if name not in ignore}
        self._taken = set(HARMLESS)
        self._reasons: list[str] = []
        self._within: dict[str, Settings] = {}
        self.notes: list[str] = []
        """What a user should know about a file that is accepted."""
        for name, allowed in NEUTRAL.items():
            self.neutral(name, *allowed)

    def __contains__(self, name: str) -> bool:
        return name in self._values

    def integer(self, name: str, default: int | Missing = MISSING) -> int:
        value = self._take(name, default, int)
        most = MOST_LAYERS if name == "num_hidden_layers" else LARGEST
        if type(value) is int and abs(value) > most:
            self.refuse(name, value, f"must be {most} or less")
            return 1
        return value if type(value) is int else 1

    def number(self, name: str, default: float | Missing = MISSING) -> float:
        value = self._take(name, default, int, float)
        return float(value) if type(value) in (int, float) else 1.0

    def flag(self, name: str, default: bool) -> bool:
        return self._take(name, default, bool) is True

    def maybe_integer(self, name: str, default: int | None = None) -> int | None:
        value = self._take(name, default, int, type(None))
        return value if type(value) is int else None

    def table(self, name: str) -> Mapping[str, Any]:
        """An object; empty where it is absent or null."""
        value = self._take(name, None, dict, type(None))
        held = value if isinstance(value, dict) else {}
        return {inner: each for inner, each in held.items() if f"{name}.{inner}" not in self._ignore}

    def names(self, name: str) -> list[str] | None:
        """A list of words, or None where it is absent or null."""
        value = self._take(name, None, list, type(None))
        return [str(word) for word in value] if isinstance(value, list) else None

    def integers(self, name: str) -> list[int]:
        """A list of numbers; empty where it is absent or null."""
        value = self._take(name, None, list, type(None))
        return [number for number in value if type(number) is int] if isinstance(value, list) else []

    def numbers(self, name: str, default: Sequence[float]) -> list[float]:
        """A list of numbers, whole or not."""
        value = self._take(name, list(default), list)
        if isinstance(value, list) and any(type(each) not in (int, float) for each in value):
            self.refuse(name, value, "must be a list of numbers")
            return list(default)
        return [float(each) for each in value] if isinstance(value, list) else list(default)

    def pair(self, name: str, default: tuple[float, float]) -> list[Any]:
        """A list of two values."""
        value = self._take(name, list(default), list)
        if isinstance(value, list) and len(value) != 2:
            self.refuse(name, value, "must have two entries")
        return value if isinstance(value, list) and len(value) == 2 else list(default)

    def is_auto(self, name: str) -> bool:
        """Whether a setting is left to the family, as "auto" or null."""
        return self._values.get(name) in (None, "auto")

    def maybe_text(self, name: str) -> str | None:
        value = self._take(name, None, str, type(None))
        return value if isinstance(value, str) else None

    def only(self, name: str, *allowed: Any, default: Any) -> Any:
        """A setting of which braid has some values; the first of them stands in for any other."""
        self._taken.add(name)
        value = self._values.get(name, default)
        if _among(value, allowed):
            return value
        self.refuse(name, value, f"braid has {' or '.join(map(repr, allowed))}")
        return allowed[0]

    def neutral(self, name: str, *allowed: Any, why: str = "") -> None:
        """Accept a setting with values that change nothing, by default those that mean off; refuse others."""
        self._taken.add(name)
        allowed = allowed or OFF
        if name in self._values and not _among(self._values[name], allowed):
            rule = f"braid accepts {' or '.join(map(repr, allowed[:2]))}, which changes nothing"
            self.refuse(name, self._values[name], f"{rule}: {why}" if why else rule)

    def repeats(self, name: str, value: Any, sibling: str) -> None:
        """A setting that must have the value of a sibling."""
        self._taken.add(name)
        if name in self._values and self._values[name] != value:
            self.refuse(name, self._values[name], f"contradicts {sibling} = {_quoted(value)}")

    def only_type(self, model_type: str) -> None:
        """Refuse settings that say that they are those of another family."""
        given = self._values.get("model_type", model_type)
        if given != model_type:
            self.refuse("model_type", given, f"braid has {model_type!r} here")

    def unused(self, *names: str) -> None:
        """Settings that say nothing about this model."""
        self._taken.update(names)

    def within(self, name: str) -> Settings:
        """The settings of an object, which are checked together with these."""
        self._within[name] = Settings(self.table(name))
        return self._within[name]

    def scopes(self) -> Iterator[Settings]:
        """These settings, and those of the objects within that have been asked for."""
        yield self
        for inner in self._within.values():
            yield from inner.scopes()

    def refuse(self, name: str, value: Any, rule: str) -> None:
        self._add(f"{name} = {_quoted(value)}: {rule}")

    def _add(self, reason: str) -> None:
        if reason not in self._reasons:  # a setting may be read twice
            self._reasons.append(reason)

    def note(self, text: str) -> None:
        self.notes.append(text)

    def close(self, family: str) -> None:
        """Raise if there is a reason to refuse the file, or a setting that nothing has taken."""
        left = self._left()
        unknown = [
            f"{name} = {_quoted(value)}: braid does not know this setting" for name, value in left.items()
        ]
        reasons = self._refusals() + unknown
        if reasons:
            count = "1 reason" if len(reasons) == 1 else f"{len(reasons)} reasons"
            lines = [f"this {family} config.json cannot be expressed: {count}", *reasons]
            if unknown:
                they = "it changes" if len(left) == 1 else "they change"
                lines.append(f"set   --ignore {' '.join(left)} if {they} nothing in this model")
            raise ConfigError("\n  ".join(lines))

    def _refusals(self) -> list[str]:
        inner = [f"{at}.{reason}" for at, each in self._within.items() for reason in each._refusals()]
        return self._reasons + inner

    def _left(self) -> dict[str, Any]:
        """What nothing has taken."""
        left = {name: self._values[name] for name in sorted(self._values.keys() - self._taken)}
        for at, each in self._within.items():
            left |= {f"{at}.{name}": value for name, value in each._left().items()}
        return left

    def _take(self, name: str, default: Any, *kinds: type) -> Any:
        self._taken.add(name)
        value = self._values.get(name, default)
        if isinstance(value, Missing):
            self._add(f"{name} is missing: a model of this type has it")
        elif type(value) not in kinds:
            wanted = " or ".join("null" if kind is type(None) else kind.__name__ for kind in kinds)
            self.refuse(name, value, f"must be of type {wanted}")
        else:
            return value
        return None


def _held(values: Mapping[str, Any], name: str) -> bool:
    """Whether there is a setting of this name, or of an object within: OBJECT.NAME."""
    outer, _, inner = name.partition(".")
    return name in values or (isinstance(values.get(outer), dict) and inner in values[outer])


def _among(value: Any, allowed: Collection[Any]) -> bool:
    """Whether a value is one of these: true is not 1, and false is not 0."""
    return any(value == each and isinstance(value, bool) == isinstance(each, bool) for each in allowed)


def _quoted(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= SHOWN else f"{text[:SHOWN]}... ({len(text)} characters)"
