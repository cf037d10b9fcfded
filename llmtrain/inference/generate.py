"""Continuations of prompts, a token at a time, with a cache of keys and values.

Prompts of different lengths share a batch: the shorter ones are padded on their left. Positions count from each row's
own first token and no token attends to the padding, so a row's text is the one that it has alone. Each row draws its
random numbers from the seed and its own number, for the same reason.
"""

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from llmtrain.inference.config import SamplingConfig
from llmtrain.model.transformer import KVCache, Transformer


def generate(
    model: Transformer, prompts: Sequence[Sequence[int]], config: SamplingConfig, eos_id: int | None = None
) -> list[list[int]]:
    """The ids that follow each prompt, up to its EOS (which is left out), max_new_tokens or the model's max_seq_len.

    Raises ValueError as `stream` does.
    """
    rows: list[list[int]] = [[] for _ in prompts]
    for ids in stream(model, prompts, config, eos_id):
        for row, token in zip(rows, ids, strict=True):
            if token is not None:
                row.append(token)
    return rows


@torch.no_grad()
def stream(
    model: Transformer, prompts: Sequence[Sequence[int]], config: SamplingConfig, eos_id: int | None = None
) -> Iterator[list[int | None]]:
    """Yields the next id of every row, None where the row has ended; ends with the last row.

    Raises ValueError for an empty prompt and for one longer than the model's max_seq_len. The device is waited for
    once a token, to hand that token over.
    """
    lengths = [len(prompt) for prompt in prompts]
    if not lengths or min(lengths) == 0:
        raise ValueError("a prompt needs at least one token")
    longest, limit = max(lengths), model.config.max_seq_len
    if longest > limit:
        raise ValueError(f"a prompt has {longest} tokens, but the model's max_seq_len is {limit}")
    device = model.head_weight.device
    # The last token is not read again, so it needs no position.
    steps = min(config.max_new_tokens, limit - longest + 1)
    cache = KVCache(model.config, len(prompts), longest + steps - 1, model.compute_dtype, device)
    uniform = _uniform(config.seed, len(prompts), steps).to(device)

    padded = [[0] * (longest - len(prompt)) + list(prompt) for prompt in prompts]
    ids = torch.tensor(padded, dtype=torch.int64, device=device)  # (B, longest), then (B, 1)
    padding = None
    if min(lengths) < longest:
        padding = torch.tensor([longest - length for length in lengths], device=device)[:, None]  # (B, 1)
    ended = [False] * len(prompts)
    for step in range(steps):
        positions = doc_start = None
        if padding is not None:
            column = torch.arange(cache.length, cache.length + ids.shape[1], device=device)
            positions = (column - padding).clamp_min(0)
            # A padding token sees itself, because a softmax over nothing would be NaN, and NaN survives every mask.
            doc_start = torch.minimum(column, padding).int()
        hidden = model(ids, positions=positions, doc_start=doc_start, cache=cache)
        ids = choose(model.logits(hidden[:, -1]), config, uniform[:, step])[:, None]
        tokens: list[int | None] = []
        for row, token in enumerate(ids[:, 0].tolist()):
            ended[row] = ended[row] or token == eos_id
            tokens.append(None if ended[row] else token)
        if all(ended):
            return
        yield tokens


def _uniform(seed: int, rows: int, steps: int) -> Tensor:
    """(rows, steps) FP32 numbers in [0, 1). Row 0 has the seed's own stream; drawn on the CPU, so that every device
    sees the same."""
    streams = [torch.Generator().manual_seed((seed + row * 0x9E3779B97F4A7C15) % (1 << 63)) for row in range(rows)]
    return torch.stack([torch.rand(steps, generator=stream) for stream in streams])


def choose(logits: Tensor, config: SamplingConfig, uniform: Tensor) -> Tensor:
    """One id a row: logits (B, V), uniform (B,) in [0, 1) -> (B,) int64, by the inverse of the cumulative distribution.

    The top_k likeliest are kept first; of their renormalised probabilities, the fewest that reach top_p
    (Holtzman et al. 2020). An id of probability 0 is never chosen.
    """
    if config.temperature == 0:
        return logits.argmax(-1)
    order = None
    if 0 < config.top_k < logits.shape[-1]:
        logits, order = logits.topk(config.top_k)
    elif config.top_p < 1:
        logits, order = logits.sort(-1, descending=True)
    # FP64: the running sum of a large vocabulary would round small probabilities away.
    wide = logits.double()
    # The maximum first: a tiny temperature would make two infinities of two large logits.
    probabilities = ((wide - wide.amax(-1, keepdim=True)) / config.temperature).softmax(-1)
    cumulative = probabilities.cumsum(-1)
    total = cumulative[:, -1:]
    if config.top_p < 1:
        kept = ((cumulative - probabilities) < config.top_p * total).sum(-1, keepdim=True)
        total = cumulative.gather(-1, kept - 1)
    # uniform < 1, so the first entry beyond uniform * total lies among those kept.
    chosen = torch.searchsorted(cumulative, uniform.double()[:, None] * total, right=True)
    return (chosen if order is None else order.gather(-1, chosen))[:, 0]
