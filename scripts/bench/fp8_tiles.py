"""Which tiles the kernels that make eight-bit operands should take: each candidate by itself, at shapes of two models.

    python scripts/bench/fp8_tiles.py [--output docs/data/fp8-tiles.json]
    python scripts/bench/fp8_tiles.py --smoke       # tiny, under the interpreter: does the script work

Every candidate must have the bits of the chosen tile's. `ratio` is the time over that of the bytes, read and written,
at a copy's rate. What is fastest at both models belongs into llmtrain/kernels/fp8.py and feed_forward.py. Half a minute
on one H200. Exits 1 where bits differ.
"""

import argparse
import os
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from unittest import mock

if "--smoke" in sys.argv:
    os.environ["TRITON_INTERPRET"] = "1"  # before triton is first imported

import torch
from checks import COPY_BYTES_PER_S, Report
from places import place
from torch import Tensor

from llmtrain.benchmark.machine import describe
from llmtrain.benchmark.timing import milliseconds
from llmtrain.kernels import choice, feed_forward, fp8
from llmtrain.kernels.fp8 import E4M3, E5M2, Scaling

TILES = ((64, 64, 8), (64, 64, 4), (32, 128, 4), (64, 128, 8), (128, 64, 8), (128, 128, 8), (128, 128, 16))
"""(rows, columns, warps)."""
SHAPES = {"102M": (65536, 1408), "1B": (32768, 8192)}
"""(tokens, width of the feed-forward)."""
SAMPLES = 21

Outcome = tuple[Tensor | None, ...]


def kernels(n: int, width: int, device: torch.device) -> dict[str, tuple[Callable[[], Outcome], int]]:
    """What makes operands: (a call, bytes that it has to move)."""
    generator = torch.Generator(device).manual_seed(0)
    hidden = torch.randn(n, 2 * width, generator=generator, device=device).bfloat16()
    dy = torch.randn(n, width, generator=generator, device=device).bfloat16()
    of_x, of_dy, _ = Scaling(1, device).of(0)
    size = n * width
    return {
        "quantise, E4M3": (partial(fp8.quantise, dy, of_x, E4M3, record=True), 4 * size),
        "quantise, E5M2": (partial(fp8.quantise, dy, of_dy, E5M2, record=True), 4 * size),
        "SwiGLU": (
            partial(feed_forward.quantise_swiglu, hidden, of_x, row_major=True, transposed=True, record=True),
            6 * size,
        ),
        "SwiGLU's gradient": (
            partial(feed_forward.quantise_swiglu_gradient, dy, hidden, of_dy, transposed=True), 10 * size,
        ),
    }  # fmt: skip


def same(ours: Outcome, theirs: Outcome) -> bool:
    return all(
        a is not None and b is not None and torch.equal(a.view(torch.uint8), b.view(torch.uint8))
        for a, b in zip(ours, theirs, strict=True)
    )


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path, help="JSON; default: docs/data/fp8-tiles.json")
    parser.add_argument("--smoke", action="store_true")
    args = parser.parse_args()
    device = torch.device("cpu" if args.smoke else "cuda")
    report = Report(describe(not args.smoke), place(args.output, "docs/data/fp8-tiles.json", args.smoke))
    for model, (n, width) in ({"tiny": (80, 48)} if args.smoke else SHAPES).items():
        report.begin(model)
        for kernel, (make, n_bytes) in kernels(n, width, device).items():
            module = feed_forward if kernel.startswith("SwiGLU") else fp8
            chosen = (module.ROWS, module.COLS, module.WARPS)
            with choice.forced(choice.TRITON):
                wanted = make()
                for rows, columns, warps in TILES:
                    with mock.patch.multiple(module, ROWS=rows, COLS=columns, WARPS=warps):
                        held, ms = same(make(), wanted), milliseconds(make, device, 1 if args.smoke else SAMPLES)
                    report.check(f"bits of {kernel}", held, tile=[rows, columns], warps=warps)
                    report.add(
                        kernel, tile=[rows, columns], warps=warps, chosen=(rows, columns, warps) == chosen, ms=ms,
                        ratio=ms / 1e3 / (n_bytes / COPY_BYTES_PER_S),
                    )  # fmt: skip
    return report.end()


if __name__ == "__main__":
    sys.exit(main())
