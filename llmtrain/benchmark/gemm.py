"""The matrix products of a training step: forward, dX and dW as `kernels/linear.py` runs them, against the ceiling."""

import functools
from collections.abc import Callable

import torch
from torch import Tensor

from llmtrain.benchmark.ceilings import dtype_of_products
from llmtrain.benchmark.op import Arm, Budget, Case, Judgement, Timed, judge
from llmtrain.benchmark.peers import compiled_peers
from llmtrain.benchmark.timing import Work
from llmtrain.kernels.weight import deliver_product

BUDGET = {"product": Budget(relative_l2=4e-3)}
"""A bf16 rounding of every element is 1.7e-3."""
CHECKED_ROWS = 256
"""Of a product that is compared with FP64: more would take longer than the timing."""


def product(a: Tensor, b: Tensor) -> Tensor:
    return a @ b


def make_case(tokens: int, k: int, n: int, device: torch.device) -> Case:
    """y (tokens, n) = x (tokens, k) @ W.T, its dX = dy @ W and dW = dy.T @ x, which is added to an FP32 buffer."""
    dtype = dtype_of_products(device)

    def rows(compiled: bool) -> list[Timed]:
        generator = torch.Generator(device).manual_seed(0)
        sizes = ((tokens, k), (n, k), (tokens, n))
        x, w, dy = (torch.randn(*size, device=device, generator=generator).to(dtype) for size in sizes)
        weight = torch.nn.Parameter(torch.empty(n, k, device=device))
        weight.grad = torch.zeros_like(weight)

        def overwritten() -> Tensor:
            weight.grad_stale = True  # type: ignore[attr-defined]
            deliver_product(weight, dy, x)
            assert weight.grad is not None
            return weight.grad

        flops = 2 * tokens * k * n
        size = x.element_size()
        wide = {"forward": (x, w.T), "dX": (dy, w), "dW": (dy.T, x)}
        ours: dict[str, Callable[[], Tensor]] = {
            "forward": lambda: x @ w.T,
            "dX": lambda: dy @ w,
            "dW": overwritten,
        }
        made = []
        for what, run in ours.items():
            a, b = wide[what]
            nbytes = size * (a.numel() + b.numel()) + (4 if what == "dW" else size) * a.shape[0] * b.shape[1]
            arms = {"ours": Arm(work(run, a, b), judged(run(), a, b), ours=True)}
            if what == "dW":  # what autograd does: in the dtype of the operands
                arms["narrow"] = Arm(work(lambda: dy.T @ x, dy, x), judged(dy.T @ x, a, b))
            if compiled:
                tuned = compiled_peers(product)["compiled, tuned"]
                if tuned.function is not None:
                    build = work(functools.partial(tuned.function, a, b), a, b)
                    arms["compiled, tuned"] = Arm(build, judged(tuned.function(a, b), a, b), compiled=True)
            made.append(Timed(what, arms, nbytes, flops))
        return made

    def work(run: Callable[[], object], *read: Tensor) -> Callable[[], Work]:
        return lambda: Work(run, read)

    def judged(got: Tensor, a: Tensor, b: Tensor) -> Judgement:
        truth = a[:CHECKED_ROWS].double() @ b.double()
        return judge({"product": got[:CHECKED_ROWS]}, {"product": truth}, BUDGET)

    return Case("gemm", {"tokens": tokens, "k": k, "n": n}, rows)
