"""How check_kernels.py looks at a kernel: shapes, tiles to try, errors in units of their tolerance, the clock."""

import contextlib
import importlib
import statistics
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from unittest import mock

import torch
from checks import COPY_BYTES_PER_S, Report
from torch import Tensor

from llmtrain.benchmark.rmsnorm_candidates import backward_candidates, forward_candidates
from llmtrain.kernels import choice, embedding, rotary
from llmtrain.kernels.rmsnorm_routes import COLUMNS

# Modules that hold a function of their own name, which is what the package gives.
rmsnorm = importlib.import_module("llmtrain.kernels.rmsnorm")
swiglu = importlib.import_module("llmtrain.kernels.swiglu")

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

    def check(self, op: str, shape: str, **excesses: float) -> None:
        """Errors in units of their tolerance: at most 1 where all is well."""
        held = all(excess <= 1 for excess in excesses.values())  # False for NaN too
        self.report.check(f"{op} against FP64", held, shape=shape, **excesses)

    def check_ran(self, op: str, shape: str) -> None:
        ran = choice.ran[op]
        self.report.check(f"{op} by its kernel", ran == choice.TRITON, shape=shape, ran=ran)

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
