"""The loss of a trained model on token files and on text by kind, and how many questions it answers right."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor
from tqdm import tqdm

from llmtrain.corpus.batches import held_out_batches, no_targets
from llmtrain.corpus.choices import Choices, accuracies, right_answers
from llmtrain.corpus.kinds import HeldOutText, sums_by_kind
from llmtrain.corpus.order import SampleOrder, Source, parse_sources
from llmtrain.corpus.token_file import TokenFile
from llmtrain.corpus.tokenizer import Tokenizer, token_bytes
from llmtrain.model.config import ModelConfig
from llmtrain.model.evaluation import EvaluationSums, evaluate, total
from llmtrain.model.likelihood import Row, likelihoods
from llmtrain.model.transformer import Transformer
from llmtrain.storage.errors import ConfigMismatch, UsageError


@dataclass(frozen=True)
class Evaluation:
    """A model on one token file. Losses are means over the targets."""

    source: str
    windows: int
    """Windows that were read."""
    targets: int
    val_loss: float
    """Cross-entropy, in nats a target."""
    ppl: float
    """exp(val_loss)"""
    bits_per_byte: float | None
    """nats / (ln 2 * bytes of the target ids, EOS 0 bytes); None where no tokenizer is known."""


def open_sources(
    specs: Sequence[str],
    config: ModelConfig,
    seq_len: int,
    tokenizer: Tokenizer | None = None,
    eos_id: int | None = None,
    document_mask: bool = False,
) -> list[Source]:
    """Opens and checks the token files of `[NAME=]PATH`, all of them before any is evaluated.

    Raises UsageError for windows longer than the model's max_seq_len and, with a document mask, for a file whose
    documents' borders are not known; InputMissing, BadData (65) for one that is damaged or shorter than a window,
    ConfigMismatch (78) for one with ids beyond the vocabulary or from another tokenizer.
    """
    if seq_len > config.max_seq_len:
        raise UsageError(f"--seq-len {seq_len} is beyond the model's max_seq_len {config.max_seq_len}: lower it")
    sources = [
        Source(name, TokenFile.open(path, config.vocab_size, eos_id), weight)
        for name, path, weight, _ in parse_sources(specs)
    ]
    for source in sources:
        made_by = (source.file.manifest or {}).get("tokenizer", {}).get("sha256")
        if tokenizer is not None and made_by not in (None, tokenizer.sha256):
            raise ConfigMismatch(
                f"{source.file.path}: comes from another tokenizer than {tokenizer.file}: tokenize it with that one"
            )
        if document_mask and not source.file.has_borders:
            raise UsageError(
                f"{source.file.path}: does not say where documents end, and the model attends within them: make it "
                "with `llmtrain tokenize-corpus`"
            )
        SampleOrder([source], seq_len, seed=0)  # for its checks; they are no mixture, whatever the weights
    return sources


def evaluate_sources(
    model: Transformer,
    sources: Sequence[Source],
    *,
    seq_len: int,
    batch_size: int,
    max_windows: int = 0,
    tokenizer: Tokenizer | None = None,
    document_mask: bool = False,
) -> Iterator[Evaluation]:
    """Evaluates one source after the other on windows of `seq_len` tokens: `max_windows` of each, spread evenly over
    it, or all (0), with attention within documents or not, as the model was trained. A bar on a terminal's stderr shows
    how far it is. Raises BadData for one without a target."""
    device = model.head_weight.device
    table = None if tokenizer is None else _bytes_table(tokenizer, model.config.vocab_size).to(device)
    for source in sources:
        available = source.file.windows(seq_len)
        windows = min(max_windows or available, available)
        rows = min(batch_size, windows)
        batches = held_out_batches(source.file, seq_len, rows, windows, device, document_mask)
        bar = tqdm(batches, source.name, total=-(-windows // rows), unit="batch", leave=False, disable=None)
        sums = evaluate(model, bar, table)
        if not sums.targets:
            raise no_targets(source.file, windows, "--max-windows")
        yield Evaluation(
            source=source.name,
            windows=windows,
            targets=sums.targets,
            val_loss=sums.loss,
            ppl=sums.ppl,
            bits_per_byte=sums.bits_per_byte,
        )


def evaluate_text(
    model: Transformer, texts: Sequence[HeldOutText], *, seq_len: int, batch_size: int, max_windows: int = 0
) -> Iterator[Evaluation]:
    """Evaluates the documents of each text by themselves: a result for each kind, as NAME/KIND, and for the whole."""
    for text in texts:
        windows = text.spread(max_windows)
        found = likelihoods(model, [Row(one.ids, len(one.ids) - 1) for one in windows], batch_size * seq_len)
        assert found is not None
        sums = [EvaluationSums(n, int(t), int(b)) for n, t, b in sums_by_kind(len(text.kinds), windows, found.nats)]
        names = [f"{text.name}/{kind}" for kind in text.kinds]
        of_kinds = [sum(one.kind == kind for one in windows) for kind in range(len(names))]
        whole = (text.name, len(windows), total(sums))
        for name, count, of_kind in (*zip(names, of_kinds, sums, strict=False), whole):
            if of_kind.targets:
                yield Evaluation(name, count, of_kind.targets, of_kind.loss, of_kind.ppl, of_kind.bits_per_byte)


def answer(model: Transformer, choices: Choices, *, tokens_at_once: int) -> dict[str, float]:
    """How many of the questions are answered right, with standard errors, under the names of metrics.jsonl."""
    rows = [Row(*row) for question in choices.questions for row in question.rows]
    found = likelihoods(model, rows, tokens_at_once)
    assert found is not None
    return accuracies(len(choices.questions), *right_answers(choices.questions, found.nats))


def _bytes_table(tokenizer: Tokenizer, vocab_size: int) -> Tensor:
    """(vocab_size,) int64: bytes of text of each id of the model; it may have more than the tokenizer, or fewer."""
    known = token_bytes(tokenizer)[:vocab_size]
    return torch.from_numpy(np.pad(known, (0, vocab_size - len(known))).astype(np.int64))
