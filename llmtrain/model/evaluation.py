"""The loss of a model on held-out batches, as sums."""

import math
from collections.abc import Iterable
from dataclasses import dataclass

import torch
from torch import Tensor

from llmtrain.kernels.cross_entropy import IGNORED
from llmtrain.model.transformer import Transformer


@dataclass(frozen=True)
class EvaluationSums:
    """What an evaluation adds up; divide at the end."""

    nats: float
    """Cross-entropy over all targets."""
    targets: int
    """Targets that counted."""
    bytes: int
    """Bytes of text of those targets; 0 where no table was given."""

    @property
    def loss(self) -> float:
        """Nats a target."""
        return self.nats / self.targets

    @property
    def ppl(self) -> float:
        """exp(loss); past the largest float it stays there, because JSON knows no infinity."""
        return math.exp(min(self.loss, 709.0))

    @property
    def bits_per_byte(self) -> float | None:
        """nats / (ln 2 * bytes); None where no bytes are known."""
        return self.nats / (math.log(2) * self.bytes) if self.bytes else None


@torch.no_grad()
def evaluate(
    model: Transformer, batches: Iterable[tuple[Tensor, Tensor, Tensor | None]], token_bytes: Tensor | None = None
) -> EvaluationSums:
    """Sums over `batches` of (ids, targets, doc_start) on the model's device: each (B, T), the first two int64, the
    third as in `Transformer.forward`, or None.

    token_bytes: (vocab_size,) int64, bytes of text of each id. Draws no random number and writes no weight; waits for
    the device once, at the end.
    """
    device = model.head_weight.device
    nats = torch.zeros((), dtype=torch.float64, device=device)
    counts = torch.zeros(2, dtype=torch.int64, device=device)
    for ids, targets, doc_start in batches:
        loss = model.loss(ids, targets, doc_start)
        nats += loss.lm
        counts[0] += loss.n_targets
        if token_bytes is not None:
            counted = targets != IGNORED
            counts[1] += (token_bytes[targets.clamp_min(0)] * counted).sum()
    n_targets, n_bytes = counts.tolist()
    return EvaluationSums(nats=float(nats), targets=n_targets, bytes=n_bytes)


def total(parts: Iterable[EvaluationSums]) -> EvaluationSums:
    """Of parts, what they are together."""
    parts = list(parts)
    return EvaluationSums(sum(p.nats for p in parts), sum(p.targets for p in parts), sum(p.bytes for p in parts))
