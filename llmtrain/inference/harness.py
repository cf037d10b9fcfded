"""A trained model for lm-evaluation-harness (extra `lm-eval`), which brings the tasks and counts the scores.

Contexts and continuations are split as the harness does it for all models, so that figures compare with those of
others; a document begins behind the end of another. Texts beyond the model's max_seq_len lose their beginning.
"""

from collections.abc import Sequence
from typing import Any

from lm_eval.api.model import TemplateLM

from llmtrain.corpus.tokenizer import Tokenizer
from llmtrain.inference.config import SamplingConfig
from llmtrain.inference.generate import stream
from llmtrain.model.likelihood import Row, likelihoods
from llmtrain.model.transformer import Transformer

MOST_NEW_TOKENS = 256
"""Where a task does not say how long an answer may be, as the harness has it for other models."""


class Harness(TemplateLM):
    """`tokens_at_once`: of a device batch, padding included."""

    def __init__(self, model: Transformer, tokenizer: Tokenizer, tokens_at_once: int = 8192) -> None:
        super().__init__()
        self.model, self.text, self.tokens_at_once = model, tokenizer, tokens_at_once

    @property
    def eot_token_id(self) -> int:
        return self.text.eos_id

    @property
    def tokenizer_name(self) -> str:
        """For the harness' caches."""
        return self.text.sha256

    def tok_encode(self, string: str, add_special_tokens: bool | None = None, **_: Any) -> list[int]:
        return self.text.encode_batch([string])[0]

    def _rows(self, requests: Sequence[tuple[Any, list[int], list[int]]]) -> list[Row]:
        longest = self.model.config.max_seq_len + 1  # the last is only a target
        rows = []
        for _, context, continuation in requests:
            ids = [*context, *continuation][-longest:]
            rows.append(Row(ids, min(len(continuation), len(ids) - 1)))
        return rows

    def _loglikelihood_tokens(
        self, requests: Sequence[tuple[Any, list[int], list[int]]], **_: Any
    ) -> list[tuple[float, bool]]:
        found = likelihoods(self.model, self._rows(requests), self.tokens_at_once)
        assert found is not None
        answers = [(-nats, greedy) for nats, greedy in zip(*found, strict=True)]
        for (text, *_rest), answer in zip(requests, answers, strict=True):
            if text is not None:
                self.cache_hook.add_partial("loglikelihood", text, answer)
        return answers

    def loglikelihood_rolling(self, requests: Sequence[Any], disable_tqdm: bool = False) -> list[float]:
        """Of whole texts, in windows of max_seq_len in which each token counts once."""
        rows: list[Row] = []
        of_text: list[int] = []
        longest = self.model.config.max_seq_len
        for number, request in enumerate(requests):
            ids = [self.text.eos_id, *self.tok_encode(request.args[0])]
            for begin in range(0, len(ids) - 1, longest):
                window = ids[begin : begin + longest + 1]
                rows.append(Row(window, len(window) - 1))
                of_text.append(number)
        found = likelihoods(self.model, rows, self.tokens_at_once)
        assert found is not None
        sums = [0.0] * len(requests)
        for number, nats in zip(of_text, found.nats, strict=True):
            sums[number] -= nats
        return sums

    def generate_until(self, requests: Sequence[Any], disable_tqdm: bool = False) -> list[str]:
        """Each text up to the first of its ends, which is left out."""
        return [self._generate(*request.args) for request in requests]

    def _generate(self, context: str, settings: dict[str, Any]) -> str:
        until = settings.get("until") or []
        until = [until] if isinstance(until, str) else until
        new = int(settings.get("max_gen_toks", MOST_NEW_TOKENS))
        room = max(1, self.model.config.max_seq_len + 1 - new)
        prompt = (self.tok_encode(context) or [self.text.eos_id])[-room:]
        samples = bool(settings.get("do_sample")) and float(settings.get("temperature", 1.0)) > 0
        sampling = SamplingConfig(
            max_new_tokens=new,
            temperature=float(settings.get("temperature", 1.0)) if samples else 0.0,
            top_k=int(settings.get("top_k", 0)),
            top_p=float(settings.get("top_p", 1.0)),
        )
        ids: list[int] = []
        text = ""
        for (token,) in stream(self.model, [prompt], sampling, self.text.eos_id):
            assert token is not None
            ids.append(token)
            text = self.text.decode(ids)
            if any(end in text for end in until):
                break
        for end in until:
            text = text.partition(end)[0]
        return text
