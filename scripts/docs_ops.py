"""Writes docs/ops.md: what the ops promise, how they are timed, and the tables of docs/data/ops-*.json.

`make docs` runs it, and so does scripts/bench/card.py. What has no JSON yet is said to be not measured.
"""

import json
from pathlib import Path
from typing import Any

from llmtrain.benchmark.op_tables import LEGEND
from llmtrain.benchmark.ops import section_lines
from llmtrain.benchmark.rmsnorm import BUDGET, ROUNDING, SEEDS, SMALL_ROWS
from llmtrain.benchmark.tables import table
from llmtrain.kernels.rmsnorm_routes import FOLD, LONGEST_SUM
from llmtrain.storage.atomic import write_bytes

DOCS = Path(__file__).parents[1] / "docs"

HEAD = f"""# The ops by themselves

    from llmtrain.kernels import rmsnorm, rmsnorm_forward, rmsnorm_backward, swiglu, rotary_tables, rotary_qkv
    from llmtrain.kernels import packed_attention, linear_cross_entropy

Plain tensors under torch's own autograd; an argument that does not fit is a ValueError that names it. Each op has a
reference in plain torch (any device, FP64 too) and a Triton kernel, which runs on a card. `train` uses the same
functions; there they write weight gradients in place (`kernels/weight.py`). Attention and the head have pages of their
own.

`make docs` writes this page; the tables come from `scripts/bench/ops.py`, and `llmtrain bench rmsnorm|swiglu|gemm`
makes one by itself at other shapes.

## What RMSNorm promises

    y = rmsnorm(x, weight, eps=1e-6)                            # x (..., H), weight (H,)
    y, h = rmsnorm(x, weight, eps=1e-6, residual=u)             # h = x + u, rounded once
    y, h, rstd = rmsnorm_forward(x, weight, residual=u)         # without autograd: rstd in FP32,
    dx, dw = rmsnorm_backward(dy, h, weight, rstd, dh)          # and dw in FP32 whatever the weight is

Rows in bf16, FP16 or FP32 of any strides (heads (T, heads, D) of a packed qkv are read where they lie), the weight in
its own dtype, any number of rows. Statistics and sums are FP32. Under autograd dw is rounded to the weight's dtype.

| against FP64 | tolerance |
|---|---|
| y, h, dx | {BUDGET["dx"].atol:g} + {BUDGET["dx"].rtol:g} of the element |
| dw, in FP32 | {BUDGET["dw"].atol:g} + {BUDGET["dw"].rtol:g} of the element |
| rstd | 1e-5, relative L2 |

dw is summed in blocks: at most {FOLD} rows in one running FP32 sum, at most {LONGEST_SUM // FOLD} of those in a second,
and the programs' sums in FP64. Sums are kept times a power of two so small that rows near the largest FP32 do not
overflow before their signs meet (the reference, which runs elsewhere than on a card, has neither). Of few rows dw is
summed by programs of their own in the launch that computes dx, which saves a launch. How work is shared out follows
from the shape alone, so `deterministic=True` (the default) gives the same bits on every run and on cards with any
number of processors. `deterministic=False` may add the programs' sums up by atomic additions, in windows where that was
measured to be faster, and at widths that are not measured; those sums have no such room. Rows whose squares FP32 cannot
add up (beyond 2^63) are outside the budget, and so is dx where dy is near the largest FP32.

Which program runs at (H, T) is a table, `kernels/rmsnorm_table.py`, which `scripts/bench/rmsnorm_routes.py` writes from
measurements: accuracy first, time second. A program qualifies for a window of T where its dw holds the budget and is no
worse than FP32 eager's, by the worst and by the median element, at both ends (in the long run: at every 64th T too).
Where none qualifies, which the table says, the fastest of the most accurate runs: of inputs whose sums cancel FP32
cannot hold the budget, nor does eager. Widths that are not in the table have the defaults of the next wider one. The
tests hold dw, of inputs whose size is that of training, at both ends of every window and one row beyond.

## SwiGLU and the rotation of q and k

    y = swiglu(gate_up)                                         # (..., 2F), the gate first -> (..., F)
    cos, sin = rotary_tables(max_seq_len, head_dim, 1e4, device)
    q, k, v = rotary_qkv(qkv, cos[:T], sin[:T], n_heads, n_kv_heads)  # (B, T, (n_heads + 2 n_kv_heads) * head_dim)

Both are computed in FP32 and rounded once. In their tables errors are over one unit in bf16's last place, and y0, y1
and y2 are q, k and v.

## How it is timed

`llmtrain/benchmark/timing.py` and `op.py`, and nothing else:

- Device time of one replay of a CUDA graph behind a cold L2. What belongs to an arm (casts, copies, reductions, set-up)
  is inside. The host's time to issue the call is a figure of its own.
- All arms in one process, in turns whose order rotates; sessions in which every arm is built anew, every other one in
  reverse order. The figure is the median of all sessions' samples.
- A second copy of ours is an arm too. What it differs by is the floor: a ratio is a win or a loss only beyond it in
  every session.
- Peers compete only with the outputs of ours and inside the budget, by the worst of {SEEDS} inputs (2 of the largest).
- A backward by itself runs on a forward that was prepared; forward and backward together are one graph. Weights are
  FP32, as in training, so that dw is FP32 in every arm that can.
- Fewer than {SMALL_ROWS} rows are timed twice: before anything in the process was compiled, and after.
- `compiled, tuned` is torch.compile with max-autotune, `narrow` our own product whose result is rounded to 16 bits.
- Ceilings (a copy, a square matrix product) are measured in the same run.

{LEGEND}
"""

SECTIONS = (
    ("RMSNorm", "ops-rmsnorm.json", "The shapes of models, residual streams, and heads of a packed qkv."),
    ("RMSNorm by number of rows", "ops-crossover.json", "Where arms cross: width 1280, forward and backward together."),
    ("SwiGLU and the rotation of q and k", "ops-swiglu.json", "Errors are in ULPs of bf16."),
    ("Products of matrices", "ops-gemm.json", "Layers of the presets, as `kernels/linear.py` runs them."),
)


def why_not(window: dict[str, Any], ours: dict[str, Any]) -> str:
    """Which of the three conditions a route fails that runs all the same, for want of a better one."""
    eager = window["eager"]
    failed = {
        "budget": any(at["worst"] > 1 for at in ours.values()),
        "worst": any(at["worst"] > max(eager[rows]["worst"], ROUNDING) for rows, at in ours.items()),
        "median": any(at["median"] > max(eager[rows]["median"], ROUNDING / 4) for rows, at in ours.items()),
    }
    return "no: " + ", ".join(name for name, is_so in failed.items() if is_so)


def routes_lines(folder: Path) -> list[str]:
    """What scripts/bench/rmsnorm_routes.py found."""
    source = folder / "rmsnorm-routes.json"
    if not source.exists():
        return ["Not measured yet: the table holds its defaults (`python scripts/bench/rmsnorm_routes.py`).", ""]
    data = json.loads(source.read_text())
    cells = []
    for of_width in data["widths"]:
        for window in of_width["windows"]:
            chosen = window["deterministic"]
            ours = window["routes"][chosen["name"]]
            cells.append([
                str(of_width["width"]),
                f"{window['first']} to {window['last'] or 'all'}",
                chosen["route"]["program"],
                f"{max(at['worst'] for at in ours.values()):.3f}",
                f"{max(at['worst'] for at in window['eager'].values()):.3f}",
                "yes" if chosen["qualified"] else why_not(window, ours),
                window["any order"]["route"]["program"],
            ])  # fmt: skip
    header = ["H", "T", "program", "worst dw / tolerance", "FP32 eager's", "qualifies", "any order"]
    counts = [n for of_width in data["widths"] for window in of_width["windows"] for n in window["inputs"].values()]
    some = f"{max(counts)} inputs of each of three families, {min(counts)} where they are largest"
    inputs = some if len(set(counts)) > 1 else f"{counts[0]} inputs of each of three families"
    inputs += ", at every 64th T too" if data["every_64th"] else ""
    card = (data["machine"]["card"] or {}).get("name", "a CPU")
    return [f"From [data/{source.name}](data/{source.name}), {card}: {inputs}.", "", *table(header, cells, 3), ""]


def page(folder: Path) -> str:
    lines = [HEAD, "## Routes of RMSNorm", "", *routes_lines(folder)]
    for title, name, text in SECTIONS:
        lines += [f"## {title}", "", text]
        source = folder / name
        if source.exists():
            lines[-1] += f" From [data/{name}](data/{name})."
            lines += ["", *section_lines(json.loads(source.read_text()))]
        else:
            lines += ["", f"Not measured yet (`python scripts/bench/ops.py --only {name[4:-5]}`).", ""]
    return "\n".join(lines).rstrip("\n") + "\n"


if __name__ == "__main__":
    write_bytes(DOCS / "ops.md", page(DOCS / "data").encode())
