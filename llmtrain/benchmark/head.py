"""The language-model head: loss and both gradients, by ours and by whoever else computes it without whole logits, with
the memory that each takes."""

import functools
import gc
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from llmtrain.benchmark.ceilings import dtype_of_products
from llmtrain.benchmark.op import Arm, Budget, Case, Judgement, Timed, judge, reason
from llmtrain.benchmark.peers import Peer, imported
from llmtrain.benchmark.timing import Work
from llmtrain.kernels.head import linear_cross_entropy

BUDGET = {"loss": Budget(rtol=2e-6), "dx": Budget(relative_l2=1e-2), "dw": Budget(relative_l2=1e-2)}
"""Against FP64 of the same bf16 inputs. A loss in bf16 is off by up to 4e-3."""
JUDGED_ROWS = 2048
"""Rows of logits in FP64 at a time."""

Function = Callable[[Tensor, Tensor, Tensor], Tensor]
"""x, weight, targets -> the mean loss."""


@dataclass(frozen=True)
class Shape:
    tokens: int
    width: int
    vocabulary: int

    @property
    def flops(self) -> int:
        """Three products: logits, dX, dW."""
        return 6 * self.tokens * self.width * self.vocabulary


def inputs(shape: Shape, device: torch.device, seed: int) -> tuple[Tensor, Tensor, Tensor]:
    """x and the weight under autograd, in bf16 on a card; logits of a scale that an initial model has."""
    generator = torch.Generator(device).manual_seed(seed)
    dtype = dtype_of_products(device)
    x = torch.randn(shape.tokens, shape.width, device=device, generator=generator).to(dtype).requires_grad_()
    weight = torch.randn(shape.vocabulary, shape.width, device=device, generator=generator)
    weight = (weight * shape.width**-0.5).to(dtype).requires_grad_()
    # Never id 0: a few targets could all be that, and zeros are not timed.
    return x, weight, torch.randint(1, shape.vocabulary, (shape.tokens,), device=device, generator=generator)


def materialised(x: Tensor, weight: Tensor, targets: Tensor) -> Tensor:
    return F.cross_entropy((x @ weight.T).float(), targets)


def chunked_by_torch(options: Any, x: Tensor, weight: Tensor, targets: Tensor) -> Tensor:
    # Reduced by hand: the mean it returns has x's dtype.
    losses = F.linear_cross_entropy(x, weight, targets, reduction="none", options=options)  # type: ignore[attr-defined]
    return losses.float().mean()


def liger(module: Any) -> Function:
    def loss(x: Tensor, weight: Tensor, targets: Tensor) -> Tensor:
        return module.LigerFusedLinearCrossEntropyFunction.apply(x, weight, targets)[0]

    return loss


def auto_chunked(x: Tensor, weight: Tensor, targets: Tensor) -> Tensor:
    return compiled_with({"auto_chunker.enable": True})(x, weight, targets)


@functools.cache
def _compiled(options: tuple[tuple[str, Any], ...]) -> Function:
    return torch.compile(materialised, dynamic=False, options=dict(options))


def compiled_with(options: dict[str, Any]) -> Function:
    return _compiled(tuple(options.items()))


def peers(compiled: bool) -> dict[str, Peer]:
    found = {"linear_cross_entropy": Peer(linear_cross_entropy), "materialised": Peer(materialised)}
    if hasattr(F, "linear_cross_entropy"):
        explicit = torch.nn.LinearCrossEntropyOptions()
        found["F.linear_cross_entropy"] = Peer(functools.partial(chunked_by_torch, None))
        found["F.linear_cross_entropy, options"] = Peer(functools.partial(chunked_by_torch, explicit))
    else:
        found["F.linear_cross_entropy"] = Peer(absent=f"torch 2.13 has it, this is {torch.__version__}")
    found["Liger"] = imported("liger_kernel.ops.fused_linear_cross_entropy", liger)
    if compiled:
        found["compiled"] = Peer(compiled_with({}))
        found["compiled, auto-chunker"] = Peer(auto_chunked)
    return found


def both(function: Function, given: tuple[Tensor, Tensor, Tensor]) -> tuple[Tensor, Tensor, Tensor]:
    """(loss, dx, dw), fresh gradients every time."""
    loss = function(*given)
    dx, dw = torch.autograd.grad(loss, given[:2])
    return loss, dx, dw


def exact(given: tuple[Tensor, Tensor, Tensor]) -> dict[str, Tensor]:
    """In FP64, some rows at a time."""
    x, weight, targets = (t.detach() for t in given)
    wide = weight.double()
    loss = torch.zeros((), dtype=torch.float64, device=x.device)
    dx, dw = torch.empty(x.shape, dtype=torch.float64, device=x.device), torch.zeros_like(wide)
    for begin in range(0, len(x), JUDGED_ROWS):
        part = slice(begin, begin + JUDGED_ROWS)
        rows = x[part].double()
        logits = rows @ wide.T
        loss += F.cross_entropy(logits, targets[part], reduction="sum")
        gradient = logits.softmax(-1)
        gradient[torch.arange(len(rows), device=x.device), targets[part]] -= 1
        dx[part] = gradient @ wide / len(x)
        dw += gradient.T @ rows / len(x)
    return {"loss": loss / len(x), "dx": dx, "dw": dw}


def peak_gib(run: Callable[[], object], device: torch.device) -> float | None:
    """What a call takes at its peak above what was there: gradients too."""
    if device.type != "cuda":
        return None
    run()
    gc.collect()
    torch.cuda.synchronize(device)
    before = torch.cuda.memory_allocated(device)
    torch.cuda.reset_peak_memory_stats(device)
    run()
    torch.cuda.synchronize(device)
    return (torch.cuda.max_memory_allocated(device) - before) / 2**30


def make_case(shape: Shape, device: torch.device) -> Case:
    """Loss and both gradients at one shape."""

    def rows(compiled: bool) -> list[Timed]:
        given = inputs(shape, device, 0)
        truth = exact(given)
        arms = {}
        for name, peer in peers(compiled).items():
            ours = name == "linear_cross_entropy"
            if peer.function is None:
                arms[name] = Arm(lambda: Work(lambda: None), absent=peer.absent)
                continue
            run = functools.partial(both, peer.function, given)
            try:
                got = dict(zip(truth, (t.detach() for t in run()), strict=True))
                judgement = judge(got, truth, BUDGET)
                del got
                peak = peak_gib(run, device)
            except Exception as error:  # a peer may fail in any way
                judgement, peak = Judgement(lacks=(f"failed: {reason(error)}",)), None
            compiles = name.startswith("compiled")
            arms[name] = Arm(work(run, given), judgement, ours=ours, compiled=compiles, peak_gib=peak)
        del truth
        return [Timed("forward + backward", arms, 0, shape.flops)]

    def work(run: Callable[[], object], given: tuple[Tensor, ...]) -> Callable[[], Work]:
        return lambda: Work(run, given)

    columns = {"tokens": shape.tokens, "width": shape.width, "vocabulary": shape.vocabulary}
    return Case("head", columns, rows)
