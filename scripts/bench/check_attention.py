"""Attention's backends on a card: right against FP64, and their times, with v strided and contiguous.

    python scripts/bench/check_attention.py [--only results] [--output docs/data/attention.json]
    python scripts/bench/check_attention.py --smoke    # small shapes on the CPU, whose only backend is the reference

Times are medians of CUDA-graph replays behind a cold L2. Which backend has to run is what the rule of
kernels/attention.py says of this machine. Exits 1 where that or a result is wrong.
"""

import argparse
import sys
from functools import partial
from pathlib import Path

import torch
from checks import Report
from places import place
from torch import Tensor

from llmtrain.benchmark.machine import describe
from llmtrain.benchmark.timing import milliseconds
from llmtrain.kernels import choice
from llmtrain.kernels.attention import CUDNN, EFFICIENT, FLASH, attention, training_backend

# (B, T, H, Hkv, D)
SHAPES = (
    (64, 1024, 12, 4, 64), (16, 2048, 32, 8, 64), (32, 1024, 15, 5, 64), (4, 1024, 12, 4, 64), (64, 1024, 6, 2, 128),
)  # fmt: skip
DOCUMENTS = ((64, 1024, 12, 4, 64), (16, 2048, 32, 8, 64), (64, 1024, 6, 2, 128))

took = partial(milliseconds, device=torch.device("cuda"), samples=11)


def packed_heads(
    b: int, t: int, h: int, h_kv: int, d: int, dtype: torch.dtype, device: torch.device | str = "cuda"
) -> tuple[Tensor, Tensor, Tensor]:
    """q and k as rotary leaves them, v as a view of a packed qkv."""
    qkv = torch.randn(b, t, h + 2 * h_kv, d, device=device).to(dtype)
    q, k, v = qkv.split([h, h_kv, h_kv], 2)
    return q.contiguous(), k.contiguous(), v


def exact(q: Tensor, k: Tensor, v: Tensor, dy: Tensor, seen: Tensor) -> list[Tensor]:
    """out, dq, dk, dv in FP64 from whole score matrices; seen: (B or 1, 1, T, T) bool."""
    leaves = [x.detach().double().requires_grad_() for x in (q, k, v)]
    group = q.shape[2] // k.shape[2]
    wide_k, wide_v = (x.repeat_interleave(group, 2) for x in leaves[1:])
    scores = torch.einsum("bihd,bjhd->bhij", leaves[0], wide_k) / q.shape[3] ** 0.5
    out = torch.einsum("bhij,bjhd->bihd", scores.masked_fill(~seen, float("-inf")).softmax(-1), wide_v)
    return [out.detach(), *torch.autograd.grad(out, leaves, dy.double())]


def both(q: Tensor, k: Tensor, v: Tensor, dy: Tensor, doc_start: Tensor | None = None) -> list[Tensor]:
    """Forward and backward: out, dq, dk, dv."""
    leaves = [x.detach().requires_grad_() for x in (q, k, v)]
    out = attention(*leaves, doc_start=doc_start)
    return [out, *torch.autograd.grad(out, leaves, dy)]


def forward(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    with torch.no_grad():
        return attention(q, k, v)


def within(report: Report, got: list[Tensor], wanted: list[Tensor], tolerance: float, **fields) -> None:
    errors = {
        name: ((ours.double() - theirs).norm() / theirs.norm()).item()
        for name, ours, theirs in zip(("out", "dq", "dk", "dv"), got, wanted, strict=True)
    }
    held = all(error <= tolerance for error in errors.values())  # False for NaN too
    report.check("against FP64", held, **fields, **errors)


def check_ran(report: Report, expected: str, **fields) -> None:
    ran = choice.ran["attention"]
    report.check("the backend that has to run", ran == expected, ran=ran, expected=expected, **fields)


def check_equal(report: Report, first: list[Tensor], second: list[Tensor], **fields) -> None:
    differ = [
        name for name, a, b in zip(("out", "dq", "dk", "dv"), first, second, strict=True) if not torch.equal(a, b)
    ]
    report.check("the same bits twice", not differ, backend=choice.ran["attention"], differ=differ, **fields)


def check_results(report: Report, device: torch.device, t: int) -> None:
    """Each backend on rows of `t`; then what `auto` takes in FP32, for documents and under deterministic algorithms."""
    on_card = device.type == "cuda"

    def rule(dtype: torch.dtype, d: int, masked: bool = False) -> str:
        """What `auto` has to take here, of what is installed and asked for."""
        return training_backend(choice.AUTO, dtype, d, t, device, masked).name

    causal = torch.ones(t, t, dtype=torch.bool, device=device).tril()[None, None]
    for d in (64, 128):
        q, k, v = packed_heads(2, t, 12, 4, d, torch.bfloat16, device)
        dy = torch.randn(q.shape, device=device).bfloat16()
        wanted = exact(q, k, v, dy, causal)
        for backend in (choice.AUTO, CUDNN, FLASH, EFFICIENT) if on_card else (choice.AUTO,):
            expected = rule(q.dtype, d) if backend == choice.AUTO else backend
            for layout, value in (("strided", v), ("contiguous", v.contiguous())):
                with choice.forced(backend, "attention"):
                    got = both(q, k, value, dy)
                check_ran(report, expected, asked=backend, d=d, v=layout)
                if not all(x.is_contiguous() for x in got):
                    strides = str([tuple(x.stride()) for x in got])
                    report.add("gradients not (B, T, H, D) memory", backend=expected, v=layout, strides=strides)
                within(report, got, wanted, 1e-2, d=d, backend=expected, v=layout)

    q, k, v = packed_heads(2, t, 6, 2, 64, torch.float32, device)
    dy = torch.randn(q.shape, device=device)
    within(report, both(q, k, v, dy), exact(q, k, v, dy, causal), 1e-5, dtype="fp32")
    check_ran(report, rule(q.dtype, 64), dtype="fp32")

    q, k, v = packed_heads(2, t, 12, 4, 64, torch.bfloat16, device)
    dy = torch.randn(q.shape, device=device).bfloat16()
    doc_start = (torch.arange(t, device=device, dtype=torch.int32) // 100 * 100).expand(2, -1)
    seen = causal & (torch.arange(t, device=device) >= doc_start[:, None, :, None])
    first, second = both(q, k, v, dy, doc_start), both(q, k, v, dy, doc_start)
    within(report, first, exact(q, k, v, dy, seen), 1e-2, documents=100)
    check_ran(report, rule(q.dtype, 64, masked=True), documents=100)
    check_equal(report, first, second, documents=100)

    wanted = exact(q, k, v, dy, causal)
    torch.use_deterministic_algorithms(True)
    first, second = both(q, k, v, dy), both(q, k, v, dy)
    within(report, first, wanted, 1e-2, deterministic=True)
    check_ran(report, rule(q.dtype, 64), deterministic=True)
    check_equal(report, first, second, deterministic=True)
    torch.use_deterministic_algorithms(False)


def time_backends(report: Report) -> None:
    for b, t, h, h_kv, d in SHAPES:
        q, k, v = packed_heads(b, t, h, h_kv, d, torch.bfloat16)
        dy = torch.randn(q.shape, device="cuda").bfloat16()
        flops = 4 * b * h * d * t * (t + 1) / 2
        for backend in (CUDNN, FLASH):
            for layout, value in (("strided", v), ("contiguous", v.contiguous())):
                with choice.forced(backend, "attention"):
                    one = took(partial(forward, q, k, value))
                    two = took(partial(both, q, k, value, dy))
                report.add(
                    "time", shape=(b, t, h, h_kv, d), backend=backend, v=layout, forward_ms=one, both_ms=two,
                    backward_ms=two - one, forward_tflops=flops / one / 1e9,
                    backward_tflops=2.5 * flops / (two - one) / 1e9,
                )  # fmt: skip
    torch.use_deterministic_algorithms(True)
    torch.utils.deterministic.fill_uninitialized_memory = False
    b, t, h, h_kv, d = SHAPES[0]
    q, k, v = packed_heads(b, t, h, h_kv, d, torch.bfloat16)
    dy = torch.randn(q.shape, device="cuda").bfloat16()
    report.add("time, deterministic", shape=SHAPES[0], both_ms=took(partial(both, q, k, v, dy)))
    torch.use_deterministic_algorithms(False)


def time_documents(report: Report) -> None:
    for b, t, h, h_kv, d in DOCUMENTS:
        q, k, v = packed_heads(b, t, h, h_kv, d, torch.bfloat16)
        dy = torch.randn(q.shape, device="cuda").bfloat16()
        for length in (t, 256):
            column = torch.arange(t, device="cuda", dtype=torch.int32)
            doc_start = (column // length * length).expand(b, -1).contiguous()
            flops = 4 * b * h * d * t * (length + 1) / 2
            with torch.no_grad():
                one = took(partial(attention, q, k, v, doc_start=doc_start))
            two = took(partial(both, q, k, v, dy, doc_start))
            report.add(
                "time, documents", shape=(b, t, h, h_kv, d), length=length, backend=choice.ran["attention"],
                forward_ms=one, both_ms=two, forward_tflops=flops / one / 1e9,
                backward_tflops=2.5 * flops / (two - one) / 1e9,
            )  # fmt: skip


PARTS = ("results", "times")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path, help="JSON; default: docs/data/attention.json")
    parser.add_argument("--only", choices=PARTS, action="append", help="this part; may be repeated")
    parser.add_argument("--smoke", action="store_true", help="results alone")
    arguments = parser.parse_args()
    torch.manual_seed(0)
    device = torch.device("cpu" if arguments.smoke else "cuda")
    output = place(arguments.output, "docs/data/attention.json", arguments.smoke)
    report = Report(describe(not arguments.smoke), output)
    for part in ("results",) if arguments.smoke else arguments.only or PARTS:
        report.begin(part)
        if part == "results":
            check_results(report, device, 256 if arguments.smoke else 1024)
            torch.cuda.empty_cache()
        else:
            time_backends(report)
            time_documents(report)
    return report.end()


if __name__ == "__main__":
    sys.exit(main())
