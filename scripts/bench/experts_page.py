"""docs/experts.md out of the JSON of kernel_ladder.py and of precision.py. Imports no torch and measures nothing."""

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from precision_page import NOT_MEASURED, Held, bar_table, experts_bar, ladder

from llmtrain.benchmark.machine import headline
from llmtrain.benchmark.tables import figure, table

LOOP, GROUPED, GROUPED_FP8 = "loop over experts, bf16", "grouped, bf16", "grouped, FP8"
FUSED, FUSED_FP8 = "grouped and fused, bf16", "grouped and fused, FP8"
AGAINST = {GROUPED: LOOP, GROUPED_FP8: GROUPED, FUSED: GROUPED, FUSED_FP8: FUSED}
"""What a rung's speed-up stands against: one change in each, and eight bits never against the loop."""
BOTH = "forward, dX and dW"
BY_LOOP, BY_OURS = "a loop over experts", "grouped"
MUST = {32: 9, 64: 19, 96: 26}
"""Times the loop, by the number of experts."""

INTRO = """\
`llmtrain train --moe` gives each token its `--experts-per-token` best of `--n-experts` feed-forwards. Rows are sorted
by expert on the device, multiplied by one grouped matmul, weighted within SwiGLU's pass and added up as they go back
into the residual stream; no token is dropped and the host waits for nothing. `configs/` has a ladder from `moe-1b` to
`moe-8b`, 8 active among 64 experts, beside dense models. [architecture.md](architecture.md) says how it works.
"""


def loop_bar(products: Sequence[dict[str, Any]]) -> list[Held]:
    """The products of gate and up, by the fewest tokens that were measured: what a loop costs is its launches."""
    lines = []
    for experts, must in MUST.items():
        found = {(r["tokens"], r["by"]): r["ms"] for r in products
                 if r["experts"] == experts and r["product"] == BOTH and "ms" in r}  # fmt: skip
        sizes = sorted({tokens for tokens, _ in found if {(tokens, BY_LOOP), (tokens, BY_OURS)} <= found.keys()})
        times = [found[tokens, BY_LOOP] / found[tokens, BY_OURS] for tokens in sizes]
        words = "; ".join(f"{x:.1f} times at {tokens:,} tokens" for x, tokens in zip(times, sizes, strict=True))
        what = f"grouped against a loop, {experts} experts, forward + backward"
        lines.append(Held(what, must, None, times[0] if times else None, words or NOT_MEASURED))
    return lines


def rung_rows(rungs: Sequence[dict[str, Any]]) -> list[list[str]]:
    by_name = {(r["tokens"], r["experts"], r["rung"]): r for r in rungs if r["status"] == "ok"}
    rows = []
    for r in rungs:
        place = [f"{r['tokens']:,}", str(r["experts"]), r["rung"]]
        if r["status"] != "ok":
            rows.append([*place, "failed", "", "", "", "", "", r["reason"]])
            continue
        before = by_name.get((r["tokens"], r["experts"], AGAINST.get(r["rung"], "")))
        gain = f"{before['ms'] / r['ms']:.2f} times {before['rung']}" if before else ""
        rows.append([
            *place, r["ran"], f"{r['forward_ms']:.3f}", f"{r['ms']:.3f}", figure(r["ulps"], ".1f"),
            figure(r["relative_error"], ".2e"), figure(max(r["gradients"].values()), ".2e"), gain,
        ])  # fmt: skip
    return rows


def page(data: dict[str, Any] | None, precision: dict[str, Any] | None, source: str, picture: str | None = None) -> str:
    products = data["products"] if data else []
    runs = precision["runs"] if precision else []
    lines = ["# Experts", "", INTRO, "## What they have to reach on one H200", ""]
    lines += [*bar_table([*loop_bar(products), *experts_bar(runs)]), ""]
    names = [n for n in dict.fromkeys(r["name"] for r in runs) if n.startswith("moe") or n == "200m"]
    if precision and names:
        lines += ["## Whole steps", "", "From [precision.md](precision.md), which says how they are measured.", ""]
        lines += [*ladder(precision, names), ""]
    lines += ["## One layer, rung by rung", ""]
    if data is None:
        return "\n".join([*lines, f"`scripts/bench/kernel_ladder.py` measures it; {NOT_MEASURED} yet.", ""])
    layer = data["layer"]
    lines += [
        f"Made by `scripts/bench/kernel_ladder.py` from [{source}]({source}). One layer: tokens of {layer['d_model']}, "
        f"each to {layer['k']} experts of {layer['width']}; forward and backward, router and losses included, medians "
        "of CUDA-graph replays with a cold L2 (of the loop, which waits for the device, of eager calls). Each rung is "
        "one change to the one that its speed-up stands against. ULP: the largest error of the output, in bf16's units "
        "in the last place. Of gradients: the largest relative error to the loop's, of x's, the router's and every "
        "expert's.",
        "",
        headline(data["machine"]),
        "",
    ]
    if picture:
        lines += [f"![Milliseconds by rung]({picture})", ""]
    header = (
        "tokens", "experts", "rung", "products by", "forward ms", "both ms", "ULP", "relative error", "of gradients",
        "speed-up",
    )  # fmt: skip
    lines += [*table(header, rung_rows(data["rungs"]), numbers_from=4), "", "## The products of gate and up", ""]
    rows = [
        [
            f"{r['tokens']:,}", str(r["experts"]), r["product"], r["by"], f"{r['ms']:.3f}", f"{r['tflops']:.0f}",
            f"{r['bits_of_the_loop']:.2%}" if "bits_of_the_loop" in r else "",
            figure(r["relative_error"], ".1e") if "relative_error" in r else "",
        ]
        for r in products if "ms" in r
    ]  # fmt: skip
    header = (
        "tokens", "experts", "product", "by", "ms", "TFLOP/s", "elements with the loop's bits", "relative error",
    )  # fmt: skip
    lines += [*table(header, rows, numbers_from=4), ""]
    failed = [r for r in products if "reason" in r]
    lines += [
        f"- {r['tokens']:,} tokens, {r['experts']} experts, {r['product']} by {r['by']}: {r['reason']}." for r in failed
    ]
    return "\n".join([*lines, ""])


def draw(data: dict[str, Any], path: Path) -> str | None:
    """Bars of each rung's milliseconds, by experts, for the most tokens; as precision_page's."""
    ok = [r for r in data["rungs"] if r["status"] == "ok"]
    try:
        from matplotlib.figure import Figure
    except ImportError:
        return None
    if not ok:
        return None
    tokens = max(r["tokens"] for r in ok)
    ok = [r for r in ok if r["tokens"] == tokens]
    experts, rungs = sorted({r["experts"] for r in ok}), list(dict.fromkeys(r["rung"] for r in ok))
    figure = Figure(figsize=(10, 4), layout="constrained")
    axes = figure.subplots()
    for i, rung in enumerate(rungs):
        mine = {r["experts"]: r["ms"] for r in ok if r["rung"] == rung}
        places = [experts.index(n) + i * 0.8 / len(rungs) for n in mine]
        axes.bar(places, list(mine.values()), 0.8 / len(rungs), label=rung)
    axes.set(
        xlabel="experts", ylabel="ms, forward and backward", yscale="log", title=f"{tokens:,} tokens",
        xticks=range(len(experts)), xticklabels=[str(n) for n in experts],
    )  # fmt: skip
    axes.legend(fontsize="small")
    os.makedirs(path.parent, exist_ok=True)
    figure.savefig(path, dpi=110)
    return path.name
