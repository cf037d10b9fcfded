"""The head and AdamW on a card: right against FP64 at real shapes, and how far from the memory's and matmuls' limits.

    python scripts/bench/check_head.py [--only PART] [--output docs/data/head.json]

Times are medians of CUDA-graph replays behind a cold L2. What the file holds of other parts stays. Exits 1 where a
result is outside its tolerance.
"""

import argparse
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path

import torch
import torch.nn.functional as F
from checks import COPY_BYTES_PER_S, Report

from llmtrain.benchmark.machine import describe
from llmtrain.benchmark.timing import milliseconds
from llmtrain.kernels import choice
from llmtrain.kernels.adamw import adamw_step
from llmtrain.kernels.cross_entropy import (
    IGNORED,
    chunk_rows,
    configuration,
    cross_entropy_in_place,
    cross_entropy_triton,
    head_loss,
)
from llmtrain.kernels.update_scalars import update_scalars

HEADS = ((65536, 768, 32000), (32768, 960, 49152), (32768, 2048, 32000), (4096, 768, 32000))
CHUNKS = (5632, 8192, 16384)
# (block, warps)
CONFIGURATIONS = ((4096, 4), (8192, 8), (8192, 16), (16384, 16))

took = partial(milliseconds, device=torch.device("cuda"), samples=11)


def within(report: Report, op: str, error: float, tolerance: float, **fields) -> None:
    report.check(op, error <= tolerance, **fields, error=error, tolerance=tolerance)  # False for NaN too


def check_ran(report: Report, op: str, **fields) -> None:
    ran = choice.ran[op]
    report.check(f"{op} by its kernel", ran == choice.TRITON, **fields, ran=ran)


def excess(got: torch.Tensor, exact: torch.Tensor, rtol: float, atol: float) -> float:
    """The largest error in units of the tolerance atol + rtol * |exact|: at most 1 where all is well."""
    return ((got.double() - exact).abs() / (atol + rtol * exact.abs())).max().item()


def some_targets(n: int, v: int) -> torch.Tensor:
    targets = torch.randint(0, v, (n,), device="cuda")
    targets[::7] = IGNORED
    targets[1], targets[2] = 0, v - 1
    return targets


def check_cross_entropy(report: Report) -> None:
    z_loss = 1e-3
    for v in (65, 500, 1000, 16384, 32000, 49152, 50257):
        for dtype in (torch.bfloat16, torch.float32):
            n = 1024
            stride = -(-v // 64) * 64
            logits = torch.full((n, stride), float("nan"), device="cuda", dtype=dtype)[:, :v]
            logits.copy_(torch.randn(n, v, device="cuda") * 3)
            targets = some_targets(n, v)
            wide = logits.double().requires_grad_()
            losses64 = F.cross_entropy(wide, targets, ignore_index=IGNORED, reduction="none")
            z64 = torch.where(targets != IGNORED, z_loss * wide.logsumexp(-1).square(), 0.0)
            (losses64.sum() + z64.sum()).backward()
            assert wide.grad is not None
            losses, zs = torch.full((2, n), float("nan"), device="cuda")
            cross_entropy_in_place(logits, targets, losses, zs, z_loss, True)
            check_ran(report, "cross_entropy", v=v, dtype=str(dtype))
            half_ulp = 2**-8 * 1.02 if dtype == torch.bfloat16 else 5e-6
            worst = max(
                excess(losses, losses64.detach(), 2e-6, 2e-6),
                excess(zs, z64.detach(), 2e-6, 2e-6),
                excess(logits, wide.grad, half_ulp, 1e-7),
            )
            within(report, "cross_entropy against FP64", worst, 1.0, v=v, dtype=str(dtype))

    n = 16384
    for v in (16384, 32000, 49152, 50257):
        stride = -(-v // 64) * 64
        logits = (torch.randn(n, stride, device="cuda") * 3).bfloat16()[:, :v]
        targets = torch.randint(0, v, (n,), device="cuda")
        losses, zs = torch.empty(2, n, device="cuda")
        for gradient in (True, False):
            floor = n * v * 2 * (2 if gradient else 1) / COPY_BYTES_PER_S * 1e3
            for config in CONFIGURATIONS if gradient else (configuration(v),):
                run = partial(cross_entropy_triton, logits, targets, losses, zs, z_loss, gradient, config)
                ms = took(run)
                report.add(
                    "cross_entropy", n=n, v=v, gradient=gradient, block=config[0], warps=config[1],
                    chosen=config == configuration(v), ms=ms, floor_ms=floor, ratio=ms / floor,
                )  # fmt: skip


def a_head(n: int, d: int, v: int) -> tuple[torch.Tensor, torch.nn.Parameter, torch.Tensor]:
    x = torch.randn(n, d, device="cuda").bfloat16().requires_grad_()
    weight = torch.nn.Parameter(torch.randn(v, d, device="cuda") * 0.02)
    weight.operand_cache = weight.detach().bfloat16()  # type: ignore[attr-defined]
    weight.grad = torch.full_like(weight, float("nan"))
    return x, weight, some_targets(n, v)


def ours(x: torch.Tensor, weight: torch.nn.Parameter, targets: torch.Tensor, chunk: int | None) -> torch.Tensor:
    """Forward and backward; dx is left in x.grad, dW in weight.grad."""
    weight.grad_stale = True  # type: ignore[attr-defined]
    x.grad = None
    loss, z = head_loss(x, weight, targets, 0.0, chunk)
    (loss + z).backward()
    return loss


def materialised(x: torch.Tensor, weight: torch.nn.Parameter, targets: torch.Tensor) -> torch.Tensor:
    """The same by autograd on whole logits, dW in bf16."""
    narrow = weight.operand_cache.requires_grad_()  # type: ignore[attr-defined,operator]
    x.grad = narrow.grad = None
    loss = F.cross_entropy((x @ narrow.T).float(), targets, ignore_index=IGNORED, reduction="sum")
    loss.backward()
    return loss


def peak_mib(run: Callable[[], object]) -> float:
    """What `run` needs above what was there, gradients of x and W included."""
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    run()
    return (torch.cuda.max_memory_allocated() - before) / 2**20


def check_head(report: Report) -> None:
    x, weight, targets = a_head(4096, 768, 32000)
    x64 = x.detach().double().requires_grad_()
    w64 = weight.operand_cache.double().requires_grad_()  # type: ignore[attr-defined,operator]
    loss64 = F.cross_entropy(x64 @ w64.T, targets, ignore_index=IGNORED, reduction="sum")
    loss64.backward()
    for chunk in (None, 1000):
        loss = ours(x, weight, targets, chunk)
        assert x.grad is not None and x64.grad is not None and w64.grad is not None and weight.grad is not None
        within(report, "head's loss against FP64", abs(loss.item() / loss64.item() - 1), 1e-4, chunk=str(chunk))
        for name, got, exact in (("dx", x.grad, x64.grad), ("dw", weight.grad, w64.grad)):
            error = ((got.double() - exact).norm() / exact.norm()).item()
            within(report, f"head's {name} against FP64", error, 1e-2, chunk=str(chunk))
    del x64, w64, loss64

    for n, d, v in HEADS:
        x, weight, targets = a_head(n, d, v)
        chosen = chunk_rows(n, v, torch.bfloat16, x.device)
        for chunk in sorted({c for c in CHUNKS if c < n} | {n, chosen}):
            run = partial(ours, x, weight, targets, chunk)
            peak = peak_mib(run)
            ms = took(run)
            report.add(
                "head", n=n, d=d, v=v, chunk=chunk, chosen=chunk == chosen, ms=ms, tflops=6 * n * d * v / ms / 1e9,
                peak_mib=peak,
            )  # fmt: skip
        run = partial(materialised, x, weight, targets)
        peak = peak_mib(run)
        report.add("head materialised", n=n, d=d, v=v, ms=took(run, samples=5), peak_mib=peak)
        x.grad = None
        torch.cuda.empty_cache()
        report.add("head's matmuls, TFLOP/s", d=d, v=v, chunk=chosen, **matmul_rates(chosen, d, v))


def matmul_rates(chunk: int, d: int, v: int) -> dict[str, float]:
    """TFLOP/s of a chunk's three matmuls, one by one: which of them is the slow one."""
    x, w = torch.randn(chunk, d, device="cuda").bfloat16(), torch.randn(v, d, device="cuda").bfloat16()
    logits = torch.randn(chunk, v, device="cuda").bfloat16()
    dx, dw = torch.empty_like(x), torch.zeros(v, d, device="cuda")
    matmuls = {
        "dx": lambda: torch.mm(logits, w, out=dx),
        "dw": lambda: torch.addmm(dw, logits.T, x, out_dtype=torch.float32, out=dw),
        "logits": lambda: torch.mm(x, w.T, out=logits),
    }
    return {name: 2 * chunk * d * v / took(run, samples=7) / 1e9 for name, run in matmuls.items()}


def check_adamw(report: Report) -> None:
    n, n_decayed = 101_700_096, 101_600_000
    master, grad, m, v = (torch.randn(n, device="cuda") * s for s in (1.0, 1e-2, 1e-3, 1e-3))
    v.abs_().add_(1e-5)
    narrow = master.bfloat16()
    scalars = torch.tensor([1e-3, 0.5, 0.3, 0.2, 1.0], device="cuda")
    beta1, beta2, eps, decay = 0.9, 0.95, 1e-8, 0.1

    part = slice(n_decayed - 100_000, n)
    exact = [t[part].double() for t in (master, grad, m, v)]
    g64 = exact[1] * 0.5
    lr, scale, c1, c2, _ = scalars.double().tolist()
    m64 = beta1 * exact[2] + (1 - beta1) * g64
    v64 = beta2 * exact[3] + (1 - beta2) * g64 * g64
    decayed = torch.arange(part.start, n, device="cuda") < n_decayed
    update = lr * (m64 / c1) / ((v64 / c2).sqrt() + eps)
    p64 = exact[0] * torch.where(decayed, 1 - lr * decay, 1.0) - update

    def step(copy: torch.Tensor | None) -> None:
        adamw_step(
            master, grad, m, v, copy, n_decayed=n_decayed, scalars=scalars, beta1=beta1, beta2=beta2, eps=eps,
            weight_decay=decay,
        )  # fmt: skip

    step(narrow)
    check_ran(report, "adamw")
    worst_p = ((master[part] - p64).abs() / (3e-7 * p64.abs() + 2e-6 * update.abs() + 1e-9)).max().item()
    worst = max(worst_p, excess(m[part], m64, 1e-6, 1e-9), excess(v[part], v64, 1e-6, 1e-12))
    within(report, "adamw against FP64", worst, 1.0)
    within(report, "adamw's narrow copy", (narrow != master.bfloat16()).sum().item(), 0)
    scalars[4] = 0.0
    grad[5] = float("nan")
    before = [t.clone() for t in (master, m, v, narrow)]
    step(narrow)
    changed = sum(int((a != b).sum()) for a, b in zip(before, (master, m, v, narrow), strict=True))
    within(report, "adamw not applied", changed, 0)
    del before, exact
    scalars[4] = 1.0
    grad[5] = 0.0
    for copy, size in ((narrow, 30), (None, 28)):
        ms = took(partial(step, copy))
        floor = n * size / COPY_BYTES_PER_S * 1e3
        report.add("adamw", n=n, bytes_each=size, ms=ms, floor_ms=floor, ratio=ms / floor)
    check_update_scalars(report)


def check_update_scalars(report: Report) -> None:
    """Of three updates, the second not finite, against the reference on the CPU."""
    options = {"grad_clip": 1.0, "max_bad_steps": 20, "beta1": 0.9, "beta2": 0.999}
    found: dict[str, list[torch.Tensor]] = {}
    for device in ("cuda", "cpu"):
        tally, bad = (
            torch.zeros(3, dtype=torch.int64, device=device),
            torch.zeros(4, dtype=torch.float64, device=device),
        )
        numbers = partial(torch.tensor, dtype=torch.float64, device=device)
        made = []
        for lm_loss, norm in ((17.5, 11.0), (float("nan"), 1.0), (3.0, 0.5)):
            given = (torch.zeros(8, device=device), numbers([lm_loss, 0.25, 3.0]), numbers(norm))
            made += update_scalars(*given, tally, bad, numbers(1e-3), **options)
            if device == "cuda":
                check_ran(report, "update_scalars")
        found[device] = [torch.cat([*made, bad]).cpu(), tally.cpu()]
    (got, counts), (wanted, wanted_counts) = found["cuda"], found["cpu"]
    same = torch.allclose(got, wanted, rtol=1e-12, atol=0, equal_nan=True) and torch.equal(counts, wanted_counts)
    report.check(
        "update_scalars and its reference", same, error=((got - wanted) / wanted).abs().nan_to_num().max().item()
    )


PARTS = {"adamw": check_adamw, "cross_entropy": check_cross_entropy, "head": check_head}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--output", type=Path, default=Path("docs/data/head.json"), help="JSON")
    parser.add_argument("--only", choices=PARTS, action="append", help="this part; may be repeated")
    arguments = parser.parse_args()
    torch.manual_seed(0)
    report = Report(describe(True), arguments.output)
    for part in arguments.only or PARTS:
        report.begin(part)
        PARTS[part](report)
        torch.cuda.empty_cache()
    return report.end()


if __name__ == "__main__":
    sys.exit(main())
