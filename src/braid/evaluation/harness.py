"""A braid model for lm-evaluation-harness (package `lm_eval`, extra `eval`):

    import lm_eval
    from braid.evaluation.harness import BraidLM

    lm_eval.simple_evaluate(model=BraidLM("runs/tiny"), tasks=["arc_easy"])

Importing this module also registers the model as `braid`.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from lm_eval.api.model import TemplateLM
from lm_eval.api.registry import register_model

from braid.data.prompts import Prompt
from braid.evaluation.scoring import Request, score, windows
from braid.model.generate import Sampling
from braid.train.device import DeviceName
from braid.train.load_model import load_models

MOST_NEW_TOKENS = 256
"""Of a generation, unless its task says how many."""


@register_model("braid")
class BraidLM(TemplateLM):
    """The model of a checkpoint, or of the newest one in a run's folder."""

    def __init__(
        self,
        checkpoint: str,
        device: DeviceName = "auto",
        length: int | None = None,
        batch_tokens: int = 8192,
        **_: Any,  # of the harness: batch_size, max_batch_size
    ) -> None:
        super().__init__()
        self._loaded = load_models(Path(checkpoint), device)
        self._tokens = self._loaded.tokenizer
        self._length = int(length or self._loaded.run.data.sequence_tokens)
        self._batch_tokens = int(batch_tokens)
        self._seed = self._loaded.run.train.seed

    @property
    def eot_token_id(self) -> int:
        return self._tokens.end_of_document

    @property
    def max_length(self) -> int:
        return self._length

    @property
    def tokenizer_name(self) -> str:
        return self._tokens.fingerprint

    def tok_encode(self, string: str, add_special_tokens: bool | None = None, **_: Any) -> list[int]:
        ids: list[int] = self._tokens.encode(string).tolist()
        return ids

    def _loglikelihood_tokens(self, requests: Sequence[Any], **_: Any) -> list[tuple[float, bool]]:
        asked = [Request(context=context, continuation=after) for _, context, after in requests]
        found = score(self._loaded.language, asked, length=self._length, batch_tokens=self._batch_tokens)
        return [(each.logprob, each.greedy) for each in found]

    def loglikelihood_rolling(self, requests: Sequence[Any], disable_tqdm: bool = False) -> list[float]:
        cut = [
            list(windows(self.tok_encode(request.args[0]), self.eot_token_id, self._length, 1))
            for request in requests
        ]
        every = [window for of_text in cut for window in of_text]
        scores = iter(score(self._loaded.language, every, length=self._length, batch_tokens=self._batch_tokens))
        return [sum(next(scores).logprob for _ in of_text) for of_text in cut]

    def generate_until(self, requests: Sequence[Any], disable_tqdm: bool = False) -> list[str]:
        return [self._generated(*request.args) for request in requests]

    def _generated(self, context: str, options: dict[str, Any]) -> str:
        until = options.get("until") or []
        stop = tuple(text for text in ([until] if isinstance(until, str) else until) if text)
        sampled = options.get("do_sample", float(options.get("temperature") or 0) > 0)
        tokens = int(options.get("max_gen_toks", MOST_NEW_TOKENS))
        sampling = Sampling(
            tokens=tokens,
            temperature=float(options.get("temperature", 1.0)) if sampled else 0.0,
            top_k=options.get("top_k") or None,
            top_p=options.get("top_p"),
            stop=stop,
            seed=self._seed,
        )
        ids = self.tok_encode(context)[-max(1, self._length - tokens) :] or [self.eot_token_id]
        return self._loaded.continuation(Prompt(ids=tuple(ids), items={}), sampling)
