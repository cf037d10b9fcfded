"""The elementwise and norm kernels: right against FP64 at real shapes, and how far from what their bytes need.

    python scripts/bench/check_kernels.py [--out FILE] [--only OP] [--tune] [--cpu]

Times are medians of CUDA-graph replays; each call in a graph has tensors of its own, several times the L2 together, so
that nothing is found there. --tune also times other tiles than the committed ones. --cpu runs everything but the clock
at tiny shapes under Triton's interpreter. Exits 1 where a result is outside its tolerance.
"""

import argparse
import contextlib
import importlib
import json
import os
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from unittest import mock

if "--cpu" in sys.argv:
    os.environ["TRITON_INTERPRET"] = "1"  # before triton is first imported

import torch
from torch import Tensor

from llmtrain.benchmark.rmsnorm_candidates import backward_candidates, forward_candidates
from llmtrain.kernels import choice, embedding, rotary
from llmtrain.kernels.rmsnorm_routes import COLUMNS

# Modules that hold a function of their own name, which is what the package gives.
rmsnorm = importlib.import_module("llmtrain.kernels.rmsnorm")
swiglu = importlib.import_module("llmtrain.kernels.swiglu")

COPY_BYTES_PER_S = 4.3e12
"""A device copy on one H200, reads and writes counted: the floor of what only moves memory."""
COLD_BYTES = 256 << 20
"""Of the tensors that calls in one graph take turns with."""
CALLS = 12
"""At least, in one graph."""
EPS = 1e-6


@dataclass(frozen=True)
class Shape:
    """Of one model's training step."""

    b: int
    t: int
    d_model: int
    d_ff: int
    n_heads: int
    n_kv_heads: int
    head_dim: int
    vocab_size: int

    @property
    def n(self) -> int:
        return self.b * self.t


SHAPES = (
    Shape(64, 1024, 768, 1408, 12, 4, 64, 32000),
    Shape(32, 1024, 960, 2560, 15, 5, 64, 49152),
    Shape(16, 2048, 2048, 8192, 32, 8, 64, 32000),
    Shape(4, 1024, 768, 1408, 12, 4, 64, 32000),
)
TINY = (Shape(2, 9, 48, 40, 4, 2, 16, 50), Shape(1, 5, 33, 96, 3, 1, 32, 20))

# Other tiles, as what to patch in a module for a while.
TILES: dict[str, list[tuple[object, dict[str, object]]]] = {
    "rmsnorm forward": [
        (rmsnorm, {"forward_route": lambda n, width, i=i: nth(forward_candidates(width), i)}) for i in range(5)
    ],
    "rmsnorm backward": [(rmsnorm, {"backward_route": lambda n, width, d, i=i: walking(width, i)}) for i in range(5)],
    "swiglu": [
        (swiglu, {"BLOCK": b, "LONGEST_RUN": r, "WARPS": w})
        for b, r, w in ((1024, 128, 4), (2048, 128, 4), (4096, 128, 8), (2048, 256, 8), (4096, 256, 16), (8192, 256, 8))
    ],
    "rotary": [
        (rotary, {"PAIRS": pairs, "NORMED_BACKWARD_PAIRS": pairs, "HEADS": heads, "FEW_TOKENS": few})
        for pairs, heads, few in ((4, 4, 16384), (8, 4, 1 << 30), (8, 4, 0), (8, 2, 16384))
    ],
    "embedding": [
        (embedding, {"TILE": tile, "ATOMIC_TILE": atomic, "WARPS": warps, "RUN": run, "COLS": cols})
        for tile, atomic, warps, run, cols in (
            (2048, 2048, 4, 16, 256), (8192, 4096, 8, 64, 256), (4096, 1024, 8, 32, 512), (1024, 1024, 2, 32, 128),
        )
    ],
}  # fmt: skip


def nth(candidates: list, i: int):
    return candidates[min(i, len(candidates) - 1)]


def walking(width: int, i: int):
    """Of the backward's candidates those for any number of rows."""
    return nth([c for c in backward_candidates(width, True) if c.program != COLUMNS], i)


class Report:
    """Lines on stdout, the same as records for a file, and whether everything held."""

    def __init__(self) -> None:
        self.records: list[dict] = []
        self.failed = False

    def add(self, op: str, **fields) -> None:
        self.records.append({"op": op} | fields)
        shown = " ".join(f"{k}={v:.4g}" if isinstance(v, float) else f"{k}={v}" for k, v in fields.items())
        print(f"{op}: {shown}", flush=True)

    def check(self, op: str, shape: str, **excesses: float) -> None:
        """Errors in units of their tolerance: at most 1 where all is well."""
        held = all(excess <= 1 for excess in excesses.values())  # False for NaN too
        self.failed |= not held
        self.add(f"{op} against FP64", shape=shape, verdict="ok" if held else "WRONG", **excesses)


def rounding(got: Tensor, exact: Tensor) -> float:
    """The largest error in units of a bf16 ulp (FP32: 8 ulps) plus FP32's rounding of the largest value beside it."""
    ulp = 2.0**-8 if got.dtype == torch.bfloat16 else 2.0**-20
    if not got.is_cuda:
        ulp *= 2  # the interpreter cuts off to bf16 where a card rounds
    tolerance = ulp * exact.abs() + 2e-6 * exact.abs().max()
    return ((got.double() - exact).abs() / tolerance).max().item()


def summing(got: Tensor, exact: Tensor) -> float:
    """The same for an FP32 sum over rows: in units of 1e-5 of the largest element."""
    return ((got.double() - exact).abs().max() / (1e-5 * exact.abs().max())).item()


@contextlib.contextmanager
def poisoned() -> Iterator[None]:
    """What torch hands out unwritten is NaN."""

    def poison(allocate: Callable[..., Tensor]) -> Callable[..., Tensor]:
        def allocated(*args, **kwargs) -> Tensor:
            tensor = allocate(*args, **kwargs)
            return tensor.fill_(float("nan")) if tensor.is_floating_point() else tensor

        return allocated

    with mock.patch.multiple(torch, empty=poison(torch.empty), empty_like=poison(torch.empty_like)):
        yield


@contextlib.contextmanager
def deterministic() -> Iterator[None]:
    with mock.patch.object(torch, "are_deterministic_algorithms_enabled", lambda: True):
        yield


def seconds(calls: list[Callable[[], object]]) -> float:
    """Device time of one of `calls`, each of which has tensors of its own."""
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        calls[0]()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        kept = [call() for call in calls]  # so that no call writes where the one before did
    start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    times = []
    for _ in range(6):
        torch.cuda.synchronize()
        torch.cuda._sleep(100_000)  # the host launches behind it
        start.record()
        graph.replay()
        end.record()
        end.synchronize()
        times.append(start.elapsed_time(end) / 1e3 / len(calls))
    del kept
    return statistics.median(times[1:])


class Bench:
    """Times cases on a card; on a CPU only calls them."""

    def __init__(self, report: Report, device: torch.device, tune: bool) -> None:
        self.report, self.device, self.tune = report, device, tune

    def time(self, op: str, shape: str, nbytes: int, build: Callable[[], Callable], tiles: str = "") -> None:
        """`build` makes a call with fresh random inputs; `nbytes` is what one call must read and write."""
        n_sets = max(2, -(-COLD_BYTES // nbytes))
        sets = [build() for _ in range(n_sets if self.device.type == "cuda" else 1)]
        floor = nbytes / COPY_BYTES_PER_S
        arms: list[tuple[str, object, dict[str, object]]] = [("committed", None, {})]
        if self.tune and tiles:
            arms += [(f"tile {i}", module, patch) for i, (module, patch) in enumerate(TILES[tiles])]
        taken = {}
        for name, module, patch in arms:
            with mock.patch.multiple(module, **patch) if module else contextlib.nullcontext():
                if self.device.type != "cuda":
                    sets[0]()
                    continue
                taken[name] = seconds([sets[i % n_sets] for i in range(max(CALLS, n_sets))])
        if not taken:
            self.report.add(op, shape=shape, bytes=nbytes, called=len(arms))
            return
        t = taken.pop("committed")
        others = {name: f"{other / floor:.2f}" for name, other in sorted(taken.items(), key=lambda item: item[1])}
        self.report.add(
            op, shape=shape, ms=t * 1e3, bytes=nbytes, gb_per_s=nbytes / t / 1e9, ratio=t / floor,
            **({"others": others} if others else {}),
        )  # fmt: skip

    def randn(self, *shape: int, dtype: torch.dtype = torch.bfloat16) -> Tensor:
        return torch.randn(*shape, device=self.device).to(dtype)

    def weight(self, *shape: int, scale: float = 0.3, shift: float = 1.0) -> torch.nn.Parameter:
        weight = torch.nn.Parameter(torch.randn(*shape, device=self.device) * scale + shift)
        weight.grad = torch.full_like(weight, float("nan"))
        weight.grad_stale = True  # type: ignore[attr-defined]
        return weight


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
        assert choice.ran["rmsnorm"] == choice.TRITON and x.grad is not None
        h64, w64 = wide(h, weight)
        with choice.forced(choice.REFERENCE):
            y64 = rmsnorm.rmsnorm(h64, w64, EPS)
            y64.backward(dy.double())
        bench.report.check(
            f"rmsnorm {dtype}", shape, h=rounding(h, x.detach().double() + residual.double()), y=rounding(y, y64),
            dx=rounding(x.grad, h64.grad + dh.double()), dw=summing(weight.grad, w64.grad),
        )  # fmt: skip
        first = weight.grad.clone()
        weight.grad_stale = True  # type: ignore[attr-defined]
        y, h = rmsnorm.rmsnorm(x, weight, EPS, residual)
        torch.autograd.backward([y, h], [dy, dh])
        bench.report.check(f"rmsnorm {dtype} twice", shape, dw=float(not torch.equal(first, weight.grad)) * 2)
        stream = h.detach().clone().requires_grad_()
        weight.grad_stale = True  # type: ignore[attr-defined]
        with poisoned():
            y, copy = rmsnorm.rmsnorm_fork(stream, weight, EPS)
            torch.autograd.backward([y, copy], [dy, dh])
        assert stream.grad is not None
        bench.report.check(
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
        assert choice.ran["swiglu"] == choice.TRITON and gate_up.grad is not None
        for part in (slice(0, rows), slice(n - rows, n)):
            (gate_up64,) = wide(gate_up[part])
            with choice.forced(choice.REFERENCE):
                y64 = swiglu.swiglu(gate_up64)
                y64.backward(dy[part].double())
            bench.report.check(
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
            assert choice.ran["rotary"] == choice.TRITON and qkv.grad is not None
            qkv64, *weights64 = wide(qkv, *weights)
            with choice.forced(choice.REFERENCE):
                parts64 = rotary.rotary_qkv(qkv64, cos, sin, s.n_heads, s.n_kv_heads, *weights64, EPS)
                torch.autograd.backward(parts64, [d.double() for d in dparts])
            errors = {"d": rounding(qkv.grad, qkv64.grad)}
            errors |= {name: rounding(a, b) for name, a, b in zip("qkv", parts, parts64, strict=True)}
            if normed:
                errors |= {f"dw{i}": summing(weights[i].grad, weights64[i].grad) for i in (0, 1)}
            bench.report.check(f"rotary {'normed ' if normed else ''}{dtype}", shape, **errors)

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
            assert choice.ran["embedding"] == choice.TRITON and y is not None
            dw64 = torch.zeros(v, width, dtype=torch.float64, device=bench.device).index_add_(0, ids, dy.double())
            same = torch.equal(*grads) or mode is not deterministic
            bench.report.check(
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
    parser.add_argument("--out", type=Path, help="write the records here too")
    parser.add_argument("--only", choices=OPS, action="append", help="this op; may be repeated")
    parser.add_argument("--tune", action="store_true", help="time other tiles too")
    parser.add_argument("--cpu", action="store_true", help="tiny shapes under the interpreter, untimed")
    arguments = parser.parse_args()
    torch.manual_seed(0)
    begin = time.perf_counter()
    device = torch.device("cpu" if arguments.cpu else "cuda")
    report = Report()
    bench = Bench(report, device, arguments.tune)
    with choice.forced(choice.TRITON) if arguments.cpu else contextlib.nullcontext():
        for op in arguments.only or OPS:
            for shape in TINY if arguments.cpu else SHAPES:
                OPS[op](bench, shape)
                if not arguments.cpu:
                    torch.cuda.empty_cache()
    if arguments.out:
        arguments.out.write_text(json.dumps(report.records, indent=1) + "\n")
    print(f"{'WRONG: see above' if report.failed else 'all within tolerance'}, {time.perf_counter() - begin:.0f} s")
    return int(report.failed)


if __name__ == "__main__":
    sys.exit(main())
