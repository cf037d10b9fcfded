"""Random tokens for benchmarks: never zeros, skewed as text is, the same for everyone with the same seed."""

from pathlib import Path

import torch
from torch import Tensor


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
