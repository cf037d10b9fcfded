"""Whether sums in half precision pay on this card: rate and error of bf16 and fp16 products, forward only.

    python scripts/bench/half_accumulate.py [--output docs/data/half-accumulate.json] [--quick]

4096 x 4096 at depth 16384: cuBLAS in bf16 and fp16 (sums in FP32), a Triton kernel in fp16 with sums in FP32 and in
fp16, the latter with the depth cut in 1, 4 and 8 parts whose results are added in FP32. Error is relative to FP64, in
norm. The file is written after each of them, with those that are missing yet. `--smoke` multiplies small matrices on
the CPU, under Triton's interpreter.
"""

import argparse
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import triton
import triton.language as tl
from places import place
from torch import Tensor

from llmtrain.benchmark.machine import describe
from llmtrain.benchmark.op import reason
from llmtrain.benchmark.timing import milliseconds
from llmtrain.storage.atomic import make_parent, write_json

SIDE, DEPTH = 4096, 16384
TILES = ((128, 128, 64, 4, 4), (128, 256, 64, 8, 3), (256, 128, 64, 8, 3))
"""(rows, columns, depth, warps, stages): the fastest of them counts, for each kind of sum."""
CUBLAS, FULL, HALF = "FP32, cuBLAS", "FP32, Triton", "fp16, Triton"
PLANNED = [
    (torch.bfloat16, CUBLAS, 1), (torch.float16, CUBLAS, 1), (torch.float16, FULL, 1),
    *((torch.float16, HALF, parts) for parts in (1, 4, 8)),
]  # fmt: skip
"""Numbers, sums, parts of the depth."""


@triton.jit
def _matmul_kernel(
    a, b, out, M, N, K, PART, HALF: tl.constexpr, ROWS: tl.constexpr, COLS: tl.constexpr, DEPTH: tl.constexpr,
    GROUP: tl.constexpr,
):  # fmt: skip
    # Blocks of GROUP rows of tiles, so that what is in work at a time shares its operands in L2.
    pid, n_cols = tl.program_id(0), tl.cdiv(N, COLS)
    group = pid // (GROUP * n_cols)
    height = tl.minimum(tl.cdiv(M, ROWS) - group * GROUP, GROUP)
    row = (group * GROUP + pid % (GROUP * n_cols) % height) * ROWS + tl.arange(0, ROWS)
    col = pid % (GROUP * n_cols) // height * COLS + tl.arange(0, COLS)
    part = tl.program_id(1)
    at = part * PART + tl.arange(0, DEPTH)
    left, right = a + row[:, None] * K + at[None, :], b + at[:, None] * N + col[None, :]
    if HALF:
        total = tl.zeros((ROWS, COLS), tl.float16)
    else:
        total = tl.zeros((ROWS, COLS), tl.float32)
    for _ in range(0, PART, DEPTH):
        if HALF:
            total = tl.dot(tl.load(left), tl.load(right), total, out_dtype=tl.float16)
        else:
            total = tl.dot(tl.load(left), tl.load(right), total)
        left += DEPTH
        right += DEPTH * N
    to = out + part.to(tl.int64) * M * N + row[:, None] * N + col[None, :]
    tl.store(to, total.to(out.dtype.element_ty))


def by_triton(a: Tensor, b: Tensor, half: bool, parts: int, tile: tuple[int, ...]) -> Callable[[], Tensor]:
    rows, cols, depth, warps, stages = tile
    m, n, k = len(a), b.shape[1], len(b)
    out = torch.empty(m, n, dtype=a.dtype, device=a.device)
    partial = torch.empty(parts, m, n, dtype=torch.float16 if half else torch.float32, device=a.device)

    def run() -> Tensor:
        grid = (triton.cdiv(m, rows) * triton.cdiv(n, cols), parts)
        to = out if parts == 1 else partial
        _matmul_kernel[grid](
            a, b, to, m, n, k, k // parts, half, rows, cols, depth, 8, num_warps=warps, num_stages=stages
        )
        return out if parts == 1 else partial.sum(0, dtype=torch.float32).to(out.dtype)

    return run


def products(a: Tensor, b: Tensor, sums: str, parts: int, tiles: tuple[tuple[int, ...], ...]
             ) -> list[Callable[[], Tensor]]:  # fmt: skip
    """Of which the fastest counts."""
    return [lambda: a @ b] if sums == CUBLAS else [by_triton(a, b, sums == HALF, parts, tile) for tile in tiles]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path, help="JSON; default: docs/data/half-accumulate.json")
    parser.add_argument("--quick", action="store_true", help="Few samples.")
    parser.add_argument("--smoke", action="store_true")
    args = parser.parse_args()
    args.output = place(args.output, "docs/data/half-accumulate.json", args.smoke)
    samples = 1 if args.smoke else 5 if args.quick else 25
    device = "cpu" if args.smoke else "cuda"
    side, length = (128, 512) if args.smoke else (SIDE, DEPTH)
    tiles = TILES[:1] if args.smoke else TILES
    torch.manual_seed(0)
    wide = [torch.randn(shape, device=device) for shape in ((side, length), (length, side))]
    data: dict[str, Any] = {"machine": describe(not args.smoke), "side": side, "depth": length, "rows": []}
    torch.backends.cuda.matmul.allow_fp16_reduced_precision_reduction = False
    exact = wide[0].double() @ wide[1].double()  # of the numbers before they are rounded to the operands
    make_parent(args.output)
    for taken, (dtype, sums, parts) in enumerate(PLANNED, 1):
        record: dict[str, Any] = {"dtype": str(dtype).removeprefix("torch."), "sums": sums, "parts": parts}
        try:
            a, b = (x.to(dtype) for x in wide)
            runs = products(a, b, sums, parts, tiles)
            ms = min(milliseconds(run, a.device, samples) for run in runs)
            error = ((runs[0]().double() - exact).norm() / exact.norm()).item()
            record |= {"ms": ms, "tflops": 2 * side * side * length / ms / 1e9, "error": error}
        except Exception as failure:  # the other rows are measured all the same
            record |= {"reason": reason(failure)}
        data["rows"].append(record)
        data["missing"] = [f"{dtype}, {sums}, {parts}" for dtype, sums, parts in PLANNED[taken:]]
        write_json(args.output, data)
        print(record, flush=True)
    failed = [
        f"{r['dtype']}, sums in {r['sums']}, {r['parts']} parts: {r['reason']}" for r in data["rows"] if "reason" in r
    ]
    print(f"FAILED: {'; '.join(failed)}" if failed else f"{len(data['rows'])} products")
    return int(bool(failed))


if __name__ == "__main__":
    sys.exit(main())
