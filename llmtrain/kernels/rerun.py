"""A stretch of the model that keeps its input alone and runs again in the backward."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor


class _Rerun(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, body: Callable[[Tensor, bool], Tensor]) -> Tensor:
        ctx.body = body
        ctx.save_for_backward(x)
        return body(x, False)  # without a graph: autograd is off in here

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, None]:
        (x,) = ctx.saved_tensors
        x = x.detach().requires_grad_()
        with torch.enable_grad():
            y = ctx.body(x, True)
        # The weights' gradients are delivered here and nowhere else: the first run left no graph.
        y.backward(dy)
        return x.grad, None


def rerun(body: Callable[[Tensor, bool], Tensor], x: Tensor) -> Tensor:
    """body(x, False), of which only x is kept for the backward, where body(x, True) runs.

    x must require its gradient. `body` must do the same both times, and nothing on the host that differs between
    calls; told that it runs again, it may leave out what makes only its result, which nobody reads by then.
    """
    assert x.requires_grad or not torch.is_grad_enabled()
    return _Rerun.apply(x, body)
