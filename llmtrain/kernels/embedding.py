"""Rows of the embedding matrix, and the sum of their gradients."""

from typing import Any

import torch
from torch import Tensor

from llmtrain.kernels.weight import gradient_buffer, operand


def embedding_backward_reference(dy: Tensor, ids: Tensor, buffer: Tensor) -> None:
    """Adds each row of dy (N, d) to buffer[ids] (V, d), in the buffer's precision."""
    buffer.index_add_(0, ids, dy.to(buffer.dtype))


class _Embedding(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, ids: Tensor, weight: Tensor, dtype: torch.dtype) -> Tensor:
        ctx.weight = weight
        ctx.save_for_backward(ids)
        return operand(weight, dtype)[ids]

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[None, Tensor | None, None]:
        (ids,) = ctx.saved_tensors
        buffer, overwrite = gradient_buffer(ctx.weight)
        target = torch.zeros_like(ctx.weight) if buffer is None else buffer
        if overwrite:
            target.zero_()
        embedding_backward_reference(dy.reshape(-1, dy.shape[-1]), ids.reshape(-1), target)
        return None, (target if buffer is None else None), None


def embedding(ids: Tensor, weight: Tensor, dtype: torch.dtype) -> Tensor:
    """ids: (B, T) int64, weight: (V, d) FP32 master -> (B, T, d) in `dtype`."""
    return _Embedding.apply(ids, weight, dtype)
