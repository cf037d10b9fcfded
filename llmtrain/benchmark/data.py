"""Tokens for benchmarks: of a corpus, or random ones, which are never zeros, skewed as text is, and the same for
everyone with the same seed."""

from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from llmtrain.corpus.batches import assemble
from llmtrain.corpus.order import SampleOrder
from llmtrain.training.run_corpus import corpus_identity


def skewed_tokens(vocab_size: int, shape: tuple[int, ...], seed: int) -> Tensor:
    """Random ids of `shape` (int64, on the CPU) whose frequency falls with the id as 1 / (id + 1), roughly Zipf's law.

    Uniform ids would leave a model nothing to learn, and losses that agree whatever the step does; on these the loss
    falls within a few steps.
    """
    generator = torch.Generator().manual_seed(seed)
    # The inverse of the cumulative share log(1 + id) / log(1 + vocab_size); FP64, or the last ids are never drawn.
    uniform = torch.rand(shape, generator=generator, dtype=torch.float64)
    return ((vocab_size + 1.0) ** uniform - 1).long().clamp_(0, vocab_size - 1)


def write_random_tokens(path: Path, vocab_size: int, count: int, seed: int = 0) -> None:
    """A token file of `count` such ids, without a manifest."""
    skewed_tokens(vocab_size, (count,), seed).numpy().astype("<u2").tofile(path)


def random_batches(
    vocab_size: int, count: int, batch_size: int, seq_len: int, device: torch.device, seed: int = 0
) -> list[tuple[Tensor, Tensor]]:
    """`count` micro-batches (ids, targets), each (B, T) int64 on `device`, targets the ids one place on."""
    windows = skewed_tokens(vocab_size, (count, batch_size, seq_len + 1), seed)
    return [(w[:, :-1].contiguous().to(device), w[:, 1:].contiguous().to(device)) for w in windows]


def corpus_batches(
    order: SampleOrder, count: int, batch_size: int, device: torch.device
) -> list[tuple[Tensor, Tensor]]:
    """The first `count` micro-batches that a run reads of `order`, as `random_batches` has them; a target that does not
    count in the loss is ignored. Raises BadData for an id beyond the vocabulary."""
    samples = np.arange(count * batch_size).reshape(count, batch_size)
    batches = (assemble(order, numbers) for numbers in samples)
    return [(batch.ids.to(device), batch.targets.to(device)) for batch in batches]


def corpus_read(order: SampleOrder) -> list[dict[str, Any]]:
    """Each token file that batches come from: its name, and what tells its content from another's."""
    identities = corpus_identity(list(order.sources))
    return [{"file": source.file.path.name, **of} for source, of in zip(order.sources, identities, strict=True)]
