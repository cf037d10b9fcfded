"""How likely a model finds the ends of given texts: what multiple choice and the losses of single documents rest on."""

from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from llmtrain.model.transformer import Transformer

PADDED_TO = 32
"""Lengths of batches are multiples of it, so that there are few shapes, and such as every matmul takes."""
LOGITS = 1 << 26
"""FP32 logits that are made at once."""


class Row(NamedTuple):
    """A text in ids, of which the last are judged."""

    ids: Sequence[int]
    """One more than the model reads; at least two."""
    n_targets: int
    """How many at the end count, each given all before it; at least one and fewer than there are."""


class Likelihoods(NamedTuple):
    """Of rows, in their order."""

    nats: list[float]
    """Minus the logarithm of the probability of the targets together."""
    greedy: list[bool]
    """Whether each target is the likeliest id there."""


@torch.no_grad()
def likelihoods(
    model: Transformer,
    rows: Sequence[Row],
    tokens_at_once: int,
    goes_on: Callable[[], bool] = lambda: True,
    turns: Callable[[int], int] = lambda batches: batches,
) -> Likelihoods | None:
    """None where `goes_on`, asked before each batch, said no. Rows of about one length share a batch of at most
    `tokens_at_once` tokens, padding included, but for one row at least; a row's result is the one that it has alone, up
    to rounding. Draws no random number and writes no weight; waits for the device once, at the end. turns: how often
    the model runs, given how many batches there are: with others who run it together and have more, as often as they.

    Raises ValueError for a row that is longer than the model's max_seq_len.
    """
    device = model.head_weight.device
    nats = torch.zeros(len(rows), dtype=torch.float64, device=device)
    missed = torch.zeros(len(rows), dtype=torch.int64, device=device)
    mine = batches(rows, tokens_at_once, model.config.max_seq_len)
    for batch in mine + [[]] * (turns(len(mine)) - len(mine)):
        if not goes_on():
            return None
        if not batch:
            _judge(model, [Row((0, 0), 1)])
            continue
        index, loss, wrong = _judge(model, [rows[i] for i in batch])
        at = torch.tensor(batch, device=device)[index]
        nats.index_add_(0, at, loss)
        missed.index_add_(0, at, wrong)
    return Likelihoods(nats.tolist(), (missed == 0).tolist())


def batches(rows: Sequence[Row], tokens_at_once: int, max_seq_len: int) -> list[list[int]]:
    """The numbers of the rows of each batch, longest first, so that what does not fit the memory shows at once."""
    found: list[list[int]] = []
    room = 0
    for i in sorted(range(len(rows)), key=lambda i: -len(rows[i].ids)):
        if not room:
            found.append([])
            room = max(1, tokens_at_once // _padded(len(rows[i].ids) - 1, max_seq_len))
        found[-1].append(i)
        room -= 1
    return found


def _padded(length: int, max_seq_len: int) -> int:
    if length > max_seq_len:
        raise ValueError(f"a text of {length} tokens is longer than the model's max_seq_len of {max_seq_len}")
    return min(-(-length // PADDED_TO) * PADDED_TO, max_seq_len)


def _judge(model: Transformer, rows: Sequence[Row]) -> tuple[Tensor, Tensor, Tensor]:
    """Of each target of a batch, all (M,): the row it is of, int64; its nats, FP64; whether another id is likelier,
    int64."""
    device = model.head_weight.device
    width = _padded(max(len(row.ids) for row in rows) - 1, model.config.max_seq_len)
    # Behind a row's end comes padding, which nothing before it sees.
    ids = torch.tensor([[*row.ids[:-1], *[0] * (width - len(row.ids) + 1)] for row in rows], device=device)
    counts = torch.tensor([row.n_targets for row in rows], device=device)
    index = torch.repeat_interleave(torch.arange(len(rows), device=device), counts)
    columns = [c for row in rows for c in range(len(row.ids) - 1 - row.n_targets, len(row.ids) - 1)]
    targets = torch.tensor([i for row in rows for i in row.ids[len(row.ids) - row.n_targets :]], device=device)
    hidden = model(ids)[index, torch.tensor(columns, device=device)]  # (B, T, d_model) -> (M, d_model)
    nats, wrong = [], []
    at_once = max(1, LOGITS // model.config.vocab_size)
    for rows_of, wanted in zip(hidden.split(at_once), targets.split(at_once), strict=True):
        logits = model.logits(rows_of).float()  # (m, V)
        nats.append(torch.nn.functional.cross_entropy(logits, wanted, reduction="none").double())
        wrong.append((logits.argmax(-1) != wanted).long())
    return index, torch.cat(nats), torch.cat(wrong)
