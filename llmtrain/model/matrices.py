"""The matrices of the blocks, as an optimizer of matrices sees them: fused ones taken apart."""

import functools
from collections import Counter

import torch

from llmtrain.model.config import ModelConfig
from llmtrain.model.transformer import Transformer


def is_hidden(name: str, shape: torch.Size) -> bool:
    """Whether a parameter is a matrix (or a stack of them) between the embedding and the head. A router is a head: its
    rows are scores of experts."""
    return name.startswith("layers.") and len(shape) >= 2 and ".router." not in name


def rows_of(name: str, shape: torch.Size, config: ModelConfig) -> tuple[int, ...]:
    """The rows of each matrix that a hidden one of this name and shape (..., rows, columns) holds, from the top."""
    matrix = name.split(".")[-2]
    if matrix == "qkv":
        q, kv = config.n_heads * config.head_dim, config.n_kv_heads * config.head_dim
        return q, kv, kv
    if matrix == "gate_up":
        return shape[-2] // 2, shape[-2] // 2
    return (shape[-2],)


@functools.lru_cache(maxsize=16)
def hidden_shapes(config: ModelConfig) -> Counter[tuple[int, int]]:
    """(short side, long side) -> how many such matrices the blocks hold, the fused ones taken apart."""
    shapes: Counter[tuple[int, int]] = Counter()
    for name, parameter in Transformer(config, device="meta").named_parameters():
        if is_hidden(name, parameter.shape):
            stack = parameter.shape[:-2].numel()
            for rows in rows_of(name, parameter.shape, config):
                short, long = sorted((rows, parameter.shape[-1]))
                shapes[short, long] += stack
    return shapes
