"""Backwards that have no backward of their own, and say so."""

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch.autograd.function import once_differentiable


def first_derivative(backward: Callable[..., Any]) -> Callable[..., Any]:
    """torch's `once_differentiable` speaks up where the gradient that comes in has a history. One that has none, as of
    a plain sum, it lets pass, and the second derivative would be missing without a word."""
    once = once_differentiable(backward)

    @functools.wraps(backward)
    def checked(ctx: Any, *gradients: Any) -> Any:
        if torch.is_grad_enabled():  # in a backward: under create_graph alone
            raise RuntimeError(f"{backward.__qualname__}: create_graph: this op has no second derivative")
        return once(ctx, *gradients)

    return checked
