"""A weight as the ops see it: an FP32 master, a narrow operand, an FP32 gradient buffer.

The optimizer's side preallocates `weight.grad` (a view of a flat buffer), keeps `weight.operand_cache` (a copy in the
compute dtype, rebuilt after every write of the master) and, at the start of a step, sets `weight.grad_stale`. The
first op that delivers a gradient then overwrites the buffer, later ones add: no memset, and no read of what is about
to be replaced. A weight without `grad_stale` works too: its gradient goes back through autograd as usual, whatever its
`grad` holds.

A pipeline may want the products that are weights' gradients later than the gradients of activations: inside `put_off`
they are kept as calls instead of made.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch
from torch import Tensor

_waiting: list[Callable[[], object]] | None = None


@contextmanager
def put_off() -> Iterator[list[Callable[[], object]]]:
    """A list that the products for weights' gradients come into while a backward runs inside the block, for `make_up`
    after it. Each holds until then the tensors that it multiplies."""
    global _waiting
    assert _waiting is None
    waiting: list[Callable[[], object]] = []
    _waiting = waiting  # not by thread: the backward on a card runs in another
    try:
        yield waiting
    finally:
        _waiting = None


@torch.no_grad()
def make_up(products: list[Callable[[], object]]) -> None:
    """Makes what was put off, in order; the list is empty then."""
    while products:
        products.pop(0)()


def waits(weight: Tensor, deliver: Callable[[], object]) -> bool:
    """Whether `deliver`, which puts a product into the gradient buffer of `weight`, was kept for later. Its operands
    must stay as they are."""
    if _waiting is None or weight.grad is None or getattr(weight, "grad_stale", None) is None:
        return False
    _waiting.append(deliver)
    return True


def version(x: Tensor) -> int | None:
    """Counts writes in place; of a tensor of inference mode, which no backward will see, None."""
    return None if x.is_inference() else x._version


def operand(weight: Tensor, dtype: torch.dtype) -> Tensor:
    """The weight in `dtype`: itself, its cached narrow copy, or a fresh cast. Same shape as the weight."""
    if weight.dtype == dtype:
        return weight.detach()
    narrow = getattr(weight, "operand_cache", None)
    if narrow is not None and narrow.dtype == dtype:
        return narrow
    return weight.detach().to(dtype)


def gradient_dtype(weight: Tensor) -> torch.dtype:
    """What a gradient that goes back through autograd comes in: a narrow copy may want it wider than it is itself."""
    wanted: torch.dtype | None = getattr(weight, "grad_dtype", None) if weight.is_leaf else None
    return wanted or weight.dtype


def gradient_buffer(weight: Tensor) -> tuple[Tensor | None, bool]:
    """(preallocated gradient buffer or None, whether the caller must overwrite it). Asking claims the buffer."""
    stale = getattr(weight, "grad_stale", None)
    if stale is None or weight.grad is None:
        return None, False
    weight.grad_stale = False  # type: ignore[attr-defined]
    return weight.grad, stale


def gradient_target(weight: Tensor) -> tuple[Tensor, bool]:
    """(where the gradient is written, whether it is added to what is there): the preallocated buffer, which is then
    claimed, or a new FP32 tensor for autograd to have."""
    buffer, overwrite = gradient_buffer(weight)
    if buffer is None:
        return torch.empty(weight.shape, dtype=torch.float32, device=weight.device), False
    return buffer, not overwrite


def is_in_place(weight: Tensor, target: Tensor) -> bool:
    """Whether what `gradient_target` gave is the preallocated buffer, which autograd does not ask for."""
    return getattr(weight, "grad_stale", None) is not None and target is weight.grad


def delivered(weight: Tensor, target: Tensor) -> Tensor | None:
    """What autograd should get of a gradient that was written to what `gradient_target` gave."""
    return None if is_in_place(weight, target) else target.to(gradient_dtype(weight))


def deliver_gradient(weight: Tensor, gradient: Tensor) -> Tensor | None:
    """Puts `gradient` (the weight's shape, any float dtype) where it belongs; returns what autograd should get."""
    buffer, overwrite = gradient_buffer(weight)
    if buffer is None:
        return gradient.to(gradient_dtype(weight))
    if overwrite:
        buffer.copy_(gradient)
    else:
        buffer.add_(gradient)
    return None


def deliver_product(weight: Tensor, dy: Tensor, x: Tensor) -> Tensor | None:
    """The gradient `dy.T @ x` of an (out, in) weight, accumulated in the buffer's own precision.

    dy: (N, out), x: (N, in), both of one dtype. On CUDA the product leaves the matmul in FP32, so that micro-batches
    add up unrounded; CPU matmuls have no such epilogue, there one product is rounded to the compute dtype.
    """
    if waits(weight, lambda: deliver_product(weight, dy, x)):
        return None
    buffer, overwrite = gradient_buffer(weight)
    if buffer is None:
        dtype = gradient_dtype(weight)
        if dy.is_cuda and dy.itemsize == 2 and dtype == torch.float32:
            return torch.mm(dy.T, x, out_dtype=dtype)
        return (dy.T @ x).to(dtype)
    if buffer.dtype == dy.dtype:
        if overwrite:
            torch.mm(dy.T, x, out=buffer)
        else:
            buffer.addmm_(dy.T, x)
    elif buffer.is_cuda:
        if overwrite:
            torch.mm(dy.T, x, out_dtype=buffer.dtype, out=buffer)
        else:
            torch.addmm(buffer, dy.T, x, out_dtype=buffer.dtype, out=buffer)
    elif overwrite:
        buffer.copy_(dy.T @ x)
    else:
        buffer.add_(dy.T @ x)
    return None
