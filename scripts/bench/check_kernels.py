"""The elementwise and norm kernels: right against FP64 at real shapes, and how far from what their bytes need.

    python scripts/bench/check_kernels.py [--only OP] [--tune] [--cpu] [--output docs/data/kernels.json]

Times are medians of CUDA-graph replays; each call in a graph has tensors of its own, several times the L2 together, so
that nothing is found there. What the file holds of other ops stays. --tune also times other tiles than the committed
ones. --cpu runs everything but the clock at tiny shapes under Triton's interpreter. Exits 1 where a result is outside
its tolerance.
"""

import argparse
import contextlib
import os
import sys
import time
from collections.abc import Callable
from pathlib import Path

if "--cpu" in sys.argv:
    os.environ["TRITON_INTERPRET"] = "1"  # before triton is first imported

import torch
from checks import Report
from kernel_bench import EPS, SHAPES, TINY, Bench, Shape, deterministic, poisoned, rmsnorm, rounding, summing, swiglu
from places import place
from torch import Tensor

from llmtrain.benchmark.machine import describe
from llmtrain.kernels import choice, embedding, rotary


def wide(*tensors: Tensor | None) -> list[Tensor | None]:
    return [None if x is None else x.detach().double().requires_grad_() for x in tensors]


def check_rmsnorm(bench: Bench, s: Shape) -> None:
    n, width = s.n, s.d_model
    shape = f"{n}x{width}"
    for dtype in (torch.bfloat16, torch.float32):
        x, residual, dy, dh = (bench.randn(n, width, dtype=dtype) for _ in range(4))
        x.requires_grad_()
        weight = bench.weight(width)
        with poisoned():
            y, h = rmsnorm.rmsnorm(x, weight, EPS, residual)
            torch.autograd.backward([y, h], [dy, dh])
        bench.check_ran("rmsnorm", shape)
        assert x.grad is not None
        h64, w64 = wide(h, weight)
        with choice.forced(choice.REFERENCE):
            y64 = rmsnorm.rmsnorm(h64, w64, EPS)
            y64.backward(dy.double())
        bench.check(
            f"rmsnorm {dtype}", shape, h=rounding(h, x.detach().double() + residual.double()), y=rounding(y, y64),
            dx=rounding(x.grad, h64.grad + dh.double()), dw=summing(weight.grad, w64.grad),
        )  # fmt: skip
        first = weight.grad.clone()
        weight.grad_stale = True  # type: ignore[attr-defined]
        y, h = rmsnorm.rmsnorm(x, weight, EPS, residual)
        torch.autograd.backward([y, h], [dy, dh])
        bench.check(f"rmsnorm {dtype} twice", shape, dw=float(not torch.equal(first, weight.grad)) * 2)
        stream = h.detach().clone().requires_grad_()
        weight.grad_stale = True  # type: ignore[attr-defined]
        with poisoned():
            y, copy = rmsnorm.rmsnorm_fork(stream, weight, EPS)
            torch.autograd.backward([y, copy], [dy, dh])
        assert stream.grad is not None
        bench.check(
            f"rmsnorm {dtype} fork", shape, copy=float(not torch.equal(copy, stream)) * 2, y=rounding(y, y64),
            dx=rounding(stream.grad, h64.grad + dh.double()), dw=summing(weight.grad, w64.grad),
        )  # fmt: skip
        del x, residual, dy, dh, h64, y64

    def forward(with_residual: bool, fork: bool = False) -> Callable[[], object]:
        x, weight = bench.randn(n, width), bench.weight(width).detach()
        residual = bench.randn(n, width) if with_residual else None
        return lambda: rmsnorm._forward(x, residual, weight, EPS, fork)

    def backward(with_dh: bool) -> Callable[[], object]:
        dy, h, weight = bench.randn(n, width), bench.randn(n, width), bench.weight(width)
        dh = bench.randn(n, width) if with_dh else None
        rstd = torch.rsqrt(h.float().square().mean(-1) + EPS)

        def run() -> object:
            route = rmsnorm.backward_route(n, width, True)
            return rmsnorm._backward(dy, dh, h, weight.detach(), rstd, weight.grad, False, route)

        return run

    rows = 2 * n * width
    bench.time("rmsnorm forward, fork", shape, 3 * rows + 4 * n, lambda: forward(False, True), "rmsnorm forward")
    bench.time("rmsnorm forward, residual", shape, 4 * rows + 4 * n, lambda: forward(True))
    bench.time("rmsnorm forward", shape, 2 * rows + 4 * n, lambda: forward(False))
    bench.time("rmsnorm backward, residual", shape, 4 * rows + 4 * n, lambda: backward(True), "rmsnorm backward")
    bench.time("rmsnorm backward", shape, 3 * rows + 4 * n, lambda: backward(False))


def check_swiglu(bench: Bench, s: Shape) -> None:
    n, width = s.n, s.d_ff
    shape = f"{n}x{width}"
    rows = min(n, 8192)  # FP64 of more would fill the time, not the holes
    for dtype in (torch.bfloat16, torch.float32):
        gate_up, dy = bench.randn(n, 2 * width, dtype=dtype) * 2, bench.randn(n, width, dtype=dtype)
        gate_up.requires_grad_()
        with poisoned():
            y = swiglu.swiglu(gate_up)
            y.backward(dy)
        bench.check_ran("swiglu", shape)
        assert gate_up.grad is not None
        for part in (slice(0, rows), slice(n - rows, n)):
            (gate_up64,) = wide(gate_up[part])
            with choice.forced(choice.REFERENCE):
                y64 = swiglu.swiglu(gate_up64)
                y64.backward(dy[part].double())
            bench.check(
                f"swiglu {dtype}", shape, y=rounding(y[part], y64), d=rounding(gate_up.grad[part], gate_up64.grad),
                written=2.0 * float(y.isnan().any() | gate_up.grad.isnan().any()),
            )  # fmt: skip

    def forward() -> Callable[[], object]:
        gate_up = bench.randn(n, 2 * width)
        return lambda: swiglu._forward(gate_up)

    def backward() -> Callable[[], object]:
        gate_up, dy = bench.randn(n, 2 * width), bench.randn(n, width)
        return lambda: swiglu._backward(dy, gate_up)

    bench.time("swiglu forward", shape, 3 * 2 * n * width, forward, "swiglu")
    bench.time("swiglu backward", shape, 5 * 2 * n * width, backward, "swiglu")


def check_rotary(bench: Bench, s: Shape) -> None:
    heads = s.n_heads + 2 * s.n_kv_heads
    shape = f"{s.b}x{s.t} heads {s.n_heads}+{s.n_kv_heads} of {s.head_dim}"
    cos, sin = rotary.rotary_tables(s.t, s.head_dim, 10000.0, bench.device)
    few = min(s.b, 4)

    def norms(normed: bool) -> list[torch.nn.Parameter] | list[None]:
        return [bench.weight(s.head_dim), bench.weight(s.head_dim)] if normed else [None, None]

    def gradients(dtype: torch.dtype, b: int) -> list[Tensor]:
        return [bench.randn(b, s.t, m, s.head_dim, dtype=dtype) for m in (s.n_heads, s.n_kv_heads, s.n_kv_heads)]

    for normed in (False, True):
        for dtype in (torch.bfloat16, torch.float32):
            qkv = bench.randn(few, s.t, heads * s.head_dim, dtype=dtype).requires_grad_()
            weights, dparts = norms(normed), gradients(dtype, few)
            with poisoned():
                parts = rotary.rotary_qkv(qkv, cos, sin, s.n_heads, s.n_kv_heads, *weights, EPS)
                torch.autograd.backward(parts, dparts)
            bench.check_ran("rotary", shape)
            assert qkv.grad is not None
            qkv64, *weights64 = wide(qkv, *weights)
            with choice.forced(choice.REFERENCE):
                parts64 = rotary.rotary_qkv(qkv64, cos, sin, s.n_heads, s.n_kv_heads, *weights64, EPS)
                torch.autograd.backward(parts64, [d.double() for d in dparts])
            errors = {"d": rounding(qkv.grad, qkv64.grad)}
            errors |= {name: rounding(a, b) for name, a, b in zip("qkv", parts, parts64, strict=True)}
            if normed:
                errors |= {f"dw{i}": summing(weights[i].grad, weights64[i].grad) for i in (0, 1)}
            bench.check(f"rotary {'normed ' if normed else ''}{dtype}", shape, **errors)

    def forward(normed: bool) -> Callable[[], object]:
        qkv, weights = bench.randn(s.b, s.t, heads * s.head_dim), norms(normed)
        return lambda: rotary.rotary_qkv(qkv, cos, sin, s.n_heads, s.n_kv_heads, *weights, EPS)

    def backward(normed: bool) -> Callable[[], object]:
        qkv = bench.randn(s.b, s.t, heads * s.head_dim).requires_grad_()
        weights, dparts = norms(normed), gradients(torch.bfloat16, s.b)
        q, k, v = rotary.rotary_qkv(qkv, cos, sin, s.n_heads, s.n_kv_heads, *weights, EPS)
        function = q.grad_fn
        assert function is not None

        def run(alive: object = (q, k, v)) -> object:  # torch frees what a node saved with the last of its outputs
            for w in weights:
                if w is not None:
                    w.grad_stale = True  # type: ignore[attr-defined]
            return rotary._RotaryQKV.backward(function, *dparts)

        return run

    token = 2 * s.head_dim * s.n
    turned = token * (s.n_heads + s.n_kv_heads)
    tables = 2 * cos.numel() * 4
    bench.time("rotary forward", shape, 2 * turned + tables, lambda: forward(False), "rotary")
    bench.time("rotary backward", shape, 2 * token * heads + tables, lambda: backward(False), "rotary")
    bench.time("rotary forward, normed", shape, 2 * turned + tables, lambda: forward(True), "rotary")
    nbytes = 2 * token * heads + turned + tables
    bench.time("rotary backward, normed", shape, nbytes, lambda: backward(True), "rotary")


def zipf(bench: Bench, n: int, v: int) -> Tensor:
    """Ids as frequent as words are: the most frequent of them make long queues of equal rows."""
    frequency = 1.0 / torch.arange(1, v + 1, device=bench.device)
    ids = torch.multinomial(frequency, n, replacement=True)
    return torch.randperm(v, device=bench.device)[ids]


def check_embedding(bench: Bench, s: Shape) -> None:
    n, width, v = s.n, s.d_model, s.vocab_size
    shape = f"{n}x{width} of {v}"
    ids = zipf(bench, n, v)
    distinct = len(ids.unique())
    for mode in (contextlib.nullcontext, deterministic):
        for dtype in (torch.bfloat16, torch.float32):
            weight, dy = bench.weight(v, width), bench.randn(n, width, dtype=dtype)
            y, grads = None, []
            for _ in range(2):
                weight.grad_stale = True  # type: ignore[attr-defined]
                with poisoned(), mode():
                    y = embedding.embedding(ids, weight, dtype)
                    y.backward(dy)
                grads.append(weight.grad.clone())
            bench.check_ran("embedding", shape)
            assert y is not None
            dw64 = torch.zeros(v, width, dtype=torch.float64, device=bench.device).index_add_(0, ids, dy.double())
            same = torch.equal(*grads) or mode is not deterministic
            bench.check(
                f"embedding {'in order ' if mode is deterministic else ''}{dtype}", shape,
                y=2.0 * float(not torch.equal(y, weight.detach().to(dtype)[ids])),
                dw=summing(grads[1], dw64), twice=2.0 * float(not same),
            )  # fmt: skip

    def forward() -> Callable[[], object]:
        ids, narrow = zipf(bench, n, v), bench.randn(v, width)
        return lambda: embedding._lookup(ids, narrow)

    def backward(add: Callable[[Tensor, Tensor, Tensor], None]) -> Callable[[], object]:
        ids, dy, buffer = zipf(bench, n, v), bench.randn(n, width), torch.zeros(v, width, device=bench.device)
        return lambda: add(dy, ids, buffer)

    rows, read_and_written = 2 * n * width, 2 * 4 * distinct * width
    bench.time("embedding lookup", shape, rows + 2 * distinct * width + 8 * n, forward, "embedding")
    nbytes = rows + read_and_written + 8 * n
    bench.time("embedding sum", shape, nbytes, lambda: backward(embedding._add_atomically), "embedding")
    bench.time("embedding sum in order", shape, nbytes, lambda: backward(embedding._add_in_order), "embedding")


OPS = {"rmsnorm": check_rmsnorm, "swiglu": check_swiglu, "rotary": check_rotary, "embedding": check_embedding}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--output", type=Path, help="JSON; default: docs/data/kernels.json")
    parser.add_argument("--only", choices=OPS, action="append", help="this op; may be repeated")
    parser.add_argument("--tune", action="store_true", help="time other tiles too")
    parser.add_argument("--cpu", action="store_true", help="tiny shapes under the interpreter, untimed")
    arguments = parser.parse_args()
    torch.manual_seed(0)
    begin = time.perf_counter()
    device = torch.device("cpu" if arguments.cpu else "cuda")
    output = place(arguments.output, "docs/data/kernels.json", arguments.cpu)
    report = Report(describe(not arguments.cpu), output)
    bench = Bench(report, device, arguments.tune)
    with choice.forced(choice.TRITON) if arguments.cpu else contextlib.nullcontext():
        for op in arguments.only or OPS:
            report.begin(op)
            for shape in TINY if arguments.cpu else SHAPES:
                OPS[op](bench, shape)
                if not arguments.cpu:
                    torch.cuda.empty_cache()
    print(f"{time.perf_counter() - begin:.0f} s")
    return report.end()


if __name__ == "__main__":
    sys.exit(main())
