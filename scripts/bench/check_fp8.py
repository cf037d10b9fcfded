"""Eight-bit operands and products on this card, by every scale, against their definitions: what is wrong, in seconds.

    python scripts/bench/check_fp8.py [--quick] [--output docs/data/fp8-check.json]

Of each linear: the kernels' bits are the reference's, both ways round; y, dX and dW are the products of the quantised
numbers (by FP64 matmuls of rows all over them), and the same bits a second time; and what each costs beside bf16. Then
experts, of which some get nothing, by all of their rows, both ways round. What the file holds of other shapes stays.
Exits 1 where anything is wrong. `--smoke` does it with small shapes on the CPU, whose products are emulated.
"""

import argparse
import json
import sys
from collections.abc import Callable
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
from checks import add_groups
from places import place
from torch import Tensor

from llmtrain.benchmark.machine import describe
from llmtrain.benchmark.op import reason
from llmtrain.benchmark.timing import milliseconds
from llmtrain.kernels import choice
from llmtrain.kernels.fp8 import Fp8Weight, Operand, Scaling
from llmtrain.kernels.fp8_fine import BLOCK, TILES, FineWeight, dequantised
from llmtrain.kernels.fp8_grouped import Fp8Experts, quantise_rows

SHAPES = {
    "gate and up of 102M": (16384, 768, 2816), "down of 102M": (16384, 1408, 768),
    "gate and up of 1B": (32768, 2048, 16384), "down of 1B": (32768, 8192, 2048),
}  # fmt: skip
"""(tokens, in, out): sums over 6, 11 and more blocks, so that padded rows of scales are among them."""
SMALL = {"small": (128, 384, 256)}
SCALINGS = ("tensorwise", "rowwise", "block")
WITHIN = {torch.bfloat16: 1e-2, torch.float32: 2e-3}
"""Relative, in norm, of a product and of each row of it by itself: its rounding, and sums that keep fewer bits than
FP32's; of y and dX the quick ones. A scale in the wrong place is off by tens of percent."""
SOME = 256
"""Rows of a linear's product that are compared with FP64's: one of every tile of 128, where there are 32,768."""


def weight_of(scaling: str, w: Tensor, x: Tensor, dy: Tensor) -> Fp8Weight | FineWeight:
    """With operands made, and scales of x and dy where those have a history."""
    if scaling != "tensorwise":
        fine = FineWeight(w, scaling)
        fine.refresh(w)
        return fine
    scales = Scaling(1, w.device)
    eight = Fp8Weight(w, scales, 0)
    scales.quantise_weights([(w, eight)])
    scales.calibrate(eight.x, x, torch.float8_e4m3fn)
    scales.calibrate(eight.dy, dy, torch.float8_e5m2)
    return eight


def wide(eight: Fp8Weight | FineWeight, operand: Operand, which: str) -> Tensor:
    """What an operand stands for, FP64; which: x, dy or own."""
    if isinstance(eight, Fp8Weight):
        return operand[0].double() * getattr(eight, which).inverse.double()
    return dequantised(operand, TILES if eight.by == BLOCK and which == "own" else eight.by).double()


def spread_over(n: int, device: torch.device) -> Tensor:
    """Indices of rows from the first of n to the last: what goes wrong may do so in the last tile alone."""
    return torch.linspace(0, n - 1, min(n, SOME), dtype=torch.float64, device=device).round().long()


def errors(y: Tensor, exact: Tensor) -> tuple[float, float]:
    """Of the whole, and of the worst row: one that is missing would be lost among thousands."""
    off = y.double() - exact
    of_rows = off.norm(dim=1) / exact.norm(dim=1).clamp_min(torch.finfo(exact.dtype).tiny)
    return (off.norm() / exact.norm()).item(), of_rows.max().item()


def both(operands: tuple[Operand | None, Operand | None]) -> list[Tensor]:
    return [x.view(torch.uint8) if x.dtype.itemsize == 1 else x for operand in operands for x in operand or ()]


def linear_record(name: str, scaling: str, shape: tuple[int, int, int], device: torch.device, samples: int
                  ) -> dict[str, Any]:  # fmt: skip
    n, n_in, n_out = shape
    generator = torch.Generator(device).manual_seed(0)

    def randn(*size: int) -> Tensor:
        rows = torch.randn(size[0], 1, generator=generator, device=device).exp2()  # rows of different sizes
        return (torch.randn(size, generator=generator, device=device) * rows).bfloat16()

    x, dy, w = randn(n, n_in), randn(n, n_out), randn(n_out, n_in)
    eight = weight_of(scaling, w, x, dy)

    def inputs() -> tuple[Operand | None, Operand | None]:
        return eight.quantise_input(x, row_major=True, transposed=True)

    def gradients() -> tuple[Operand | None, Operand | None]:
        return eight.quantise_gradient(dy, transposed=True)

    (x8, x8_t), (dy8, dy8_t) = inputs(), gradients()
    assert x8 and x8_t and dy8 and dy8_t
    with choice.forced(choice.REFERENCE, "fp8"):
        references = [*both(inputs()), *both(gradients())]
    made = [*both((x8, x8_t)), *both((dy8, dy8_t))]
    wrong = [] if all(map(torch.equal, made, references)) else ["the quantisers' bits"]
    own = eight.rows if isinstance(eight, FineWeight) else (eight.rows,)
    turned = eight.columns if isinstance(eight, FineWeight) else (eight.columns,)
    out = torch.empty(n_out, n_in, device=device)
    products: dict[str, tuple[Callable[[], Tensor], Tensor, Tensor, Callable[[], Tensor]]] = {
        "y": (lambda: eight.multiply(x8, torch.bfloat16), wide(eight, x8, "x"), wide(eight, own, "own"),
              lambda: x @ w.T),
        "dX": (lambda: eight.input_gradient(dy8, torch.bfloat16), wide(eight, dy8, "dy"), wide(eight, turned, "own"),
               lambda: dy @ w),
        "dW": (lambda: eight.weight_gradient(dy8_t, x8_t, out), wide(eight, dy8_t, "dy"), wide(eight, x8_t, "x"),
               lambda: dy.T @ x),
    }  # fmt: skip
    record: dict[str, Any] = {"case": name, "scaling": scaling}
    for product, (run, a, b, in_bf16) in products.items():
        y = run().clone()
        some = spread_over(len(y), device)
        error, worst_row = errors(y[some], a[some] @ b.T)
        if not (error <= WITHIN[y.dtype] and worst_row <= WITHIN[y.dtype]):  # NaN too
            wrong.append(f"{product}, off by {error:.2g}, a row by {worst_row:.2g}")
        if not torch.equal(run(), y):
            wrong.append(f"{product} twice")
        ms, of_bf16 = milliseconds(run, device, samples), milliseconds(in_bf16, device, samples)
        record[product] = {
            "error": error, "worst_row": worst_row, "ms": ms, "bf16_ms": of_bf16,
            "tflops": 2 * n * n_in * n_out / ms / 1e9,
        }  # fmt: skip
    record["quantise_ms"] = {"x": milliseconds(inputs, device, samples), "dy": milliseconds(gradients, device, samples)}
    return record | {"wrong": wrong}


def experts_record(device: torch.device, tokens: int, d: int, f: int, n_experts: int) -> dict[str, Any]:
    """Products of experts of which every third gets nothing, and all tokens on one."""
    generator, wrong = torch.Generator(device).manual_seed(0), []
    w = torch.randn(n_experts, f, d, generator=generator, device=device).bfloat16()
    experts = Fp8Experts(w)
    experts.refresh(w)
    some = torch.arange(n_experts, device=device) % 3 != 2
    spread = (some.cumsum(0) * tokens // some.sum()).int()
    all_on_one = torch.where(torch.arange(n_experts, device=device) < n_experts // 2, 0, tokens).int()
    record: dict[str, Any] = {"case": f"{n_experts} experts", "scaling": "a row"}
    for way, width, matrices, scales in (
        ("", d, experts.rows, experts.rows_inverse), (", transposed", f, experts.columns, experts.columns_inverse),
    ):  # fmt: skip
        x8, inverse = quantise_rows(torch.randn(tokens, width, generator=generator, device=device).bfloat16())
        rows = x8.double() * inverse.double()[:, None]
        for name, ends in ((f"spread{way}", spread), (f"all on one{way}", all_on_one)):
            multiply = partial(experts.multiply, x8, inverse, ends, transposed=bool(way))
            y, bounds = multiply(), [0, *ends.tolist()]
            exact = torch.cat([
                rows[begin:end] @ (matrices[e].double() * scales[e].double()[:, None]).T
                for e, (begin, end) in enumerate(pairwise(bounds))
            ])  # fmt: skip
            error, worst_row = errors(y, exact)
            if not (error <= WITHIN[y.dtype] and worst_row <= WITHIN[y.dtype]):
                wrong.append(f"{name}, off by {error:.2g}, a row by {worst_row:.2g}")
            if not torch.equal(multiply(), y):
                wrong.append(f"{name} twice")
            record[name] = {"error": error, "worst_row": worst_row}
    return record | {"wrong": wrong}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="The 102M model's shapes alone, few samples.")
    parser.add_argument("--output", type=Path, help="JSON; default: docs/data/fp8-check.json.")
    parser.add_argument("--smoke", action="store_true")
    args = parser.parse_args()
    args.output = place(args.output, "docs/data/fp8-check.json", args.smoke)
    device = torch.device("cpu" if args.smoke else "cuda")
    shapes = SMALL if args.smoke else dict(list(SHAPES.items())[: 2 if args.quick else None])
    machine, records = describe(not args.smoke), []

    def taken(name: str, scaling: str, look: Callable[[], dict[str, Any]]) -> dict[str, Any]:
        try:
            record = look()
        except Exception as error:  # the others are looked at all the same
            record = {"case": name, "scaling": scaling, "wrong": [reason(error)]}
        records.append(record)
        print(json.dumps(record), flush=True)
        return record

    samples = 3 if args.quick or args.smoke else 11
    for name, shape in shapes.items():
        of_case = [
            taken(name, scaling, partial(linear_record, name, scaling, shape, device, samples)) for scaling in SCALINGS
        ]
        add_groups(args.output, {name: {"machine": machine, "records": of_case}})
    size = (256, 64, 32, 4) if args.smoke else (16384, 1024, 640, 64)
    name = f"{size[-1]} experts"
    of_experts = taken(name, "a row", partial(experts_record, device, *size))
    add_groups(args.output, {name: {"machine": machine, "records": [of_experts]}})
    wrong = [f"{r['case']}, {r['scaling']}: {', '.join(r['wrong'])}" for r in records if r["wrong"]]
    print("WRONG: " + "; ".join(wrong) if wrong else "all as it should be")
    return int(bool(wrong))


if __name__ == "__main__":
    sys.exit(main())
