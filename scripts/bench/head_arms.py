"""The language-model head by everyone who computes it: docs/head.md and its JSON, time, memory and error.

    python scripts/bench/head_arms.py [--quick] [--no-compile] [--page] [--output docs/head.md]

About 60 s on one H200, of which compiling takes a third. With a torch of 2.13 or more in the environment its
F.linear_cross_entropy takes part, with Liger-Kernel that one. Exits 1 where a bar is missed.
"""

import argparse
import json
import sys
from pathlib import Path
from typing import Any

import torch
from places import place

from llmtrain.benchmark.config import OpTimingConfig
from llmtrain.benchmark.head import Shape, make_case
from llmtrain.benchmark.op_tables import LEGEND
from llmtrain.benchmark.ops import measure_op, section_lines
from llmtrain.benchmark.tables import table
from llmtrain.storage.atomic import make_parent, write_bytes, write_json

SHAPE = Shape(tokens=16384, width=1280, vocabulary=65536)

TEXT = """# The head

`from llmtrain.kernels import linear_cross_entropy`:

    loss = linear_cross_entropy(x, weight, targets, *, reduction="mean", z_loss=0.0, chunk=None)

x (N, d) and weight (V, d) are plain tensors, targets (N,) int64 with -100 where nothing is to be predicted. Logits are
never whole: each chunk of rows becomes its own gradient in place, and dX and dW are formed at once in the forward, so
that nothing is kept for the backward or computed again in it. What is upstream of the loss scales both gradients on
the device. The loss comes in FP32 (FP64 for FP64 x); dW is summed in FP32 and rounded once (on a CPU 16-bit products
are rounded before they are summed). By default a chunk of rows, on a card, is as large as keeps logits, dX and dW under
960 MiB, but 2048 rows at least: vocabularies of 100,000 and more take more. On a card nobody looks whether targets are
below V, which would wait for it.

Budget at the shape below, against FP64 of the same bf16 inputs: loss 2e-6, relative; dX and dW 1e-2, relative L2.
Logits are rounded to bf16, so a single row's loss is off by some 2^-9 of its logits, which averages out over many rows:
few rows, or logits far from 0, are outside. Errors in the table are multiples of the budget. F.linear_cross_entropy is
asked for single losses, which are then reduced in FP32, because the mean that it returns has the dtype of x; without
options it computes whole logits.

`train` uses the same kernel on FP32 master weights, whose gradients are written in place. `llmtrain bench head` times
other shapes.
"""


def bar_rows(row: dict[str, Any]) -> list[list[str]]:
    """What must hold of ours, and what does."""
    arms = {arm["name"]: arm for arm in row["arms"]}
    ours, whole = arms["linear_cross_entropy"], arms.get("materialised")
    if ours["status"] != "ok":
        return [["it runs", "", ours["reason"], "NO"]]
    error = 2e-6 * ours["errors"]["loss"]
    rows = [["relative error of the loss", "2e-06", f"{error:.1e}", "yes" if error < 2e-6 else "NO"]]
    if "peak_gib" in ours:
        held = "yes" if ours["peak_gib"] < 1 else "NO"
        rows.append(["GiB at the peak above the inputs", "1", f"{ours['peak_gib']:.2f}", held])
    if whole and whole["status"] == "ok":
        times = ours["ms"] / whole["ms"]
        rows.append(["time / materialised", "1.1", f"{times:.2f}", "yes" if times <= 1.1 else "NO"])
    return rows


def page(data: dict[str, Any] | None) -> str:
    if data is None:
        return TEXT
    bars = table(["of ours", "at most", "measured", "held"], bar_rows(data["rows"][-1]), 1)
    return "\n".join([TEXT, "## What must hold", "", *bars, "", LEGEND, "", *section_lines(data)]).rstrip() + "\n"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="one session of two short rounds")
    parser.add_argument("--no-compile", action="store_true", help="without the arms of torch.compile")
    parser.add_argument("--page", action="store_true", help="make the page from its JSON, measure nothing")
    parser.add_argument("--output", type=Path, help="default: docs/head.md")
    arguments = parser.parse_args()
    on_card = torch.cuda.is_available()
    arguments.output = place(arguments.output, "docs/head.md", not (on_card or arguments.page))
    where = arguments.output.parent / "data" / f"{arguments.output.stem}-arms.json"
    data = json.loads(where.read_text()) if where.exists() else None
    if not arguments.page:
        sizes = dict(sessions=1, rounds=2, samples=11) if arguments.quick else {}
        timing = OpTimingConfig(**sizes, device="cuda" if on_card else "cpu",
                                compile=not arguments.no_compile)  # fmt: skip
        cases = [make_case(SHAPE, torch.device(timing.device))]
        data = measure_op("head", cases, timing, tell=lambda line: print(line, flush=True))
        make_parent(where)
        write_json(where, data)
    write_bytes(arguments.output, page(data).encode())
    missed = [" ".join(row) for row in bar_rows(data["rows"][-1]) if row[-1] == "NO"] if data else []
    for line in missed:
        print(f"BAR MISSED: {line}")
    return int(bool(missed))


if __name__ == "__main__":
    sys.exit(main())
