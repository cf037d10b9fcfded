"""docs/precision.md out of the JSON of precision.py and of the loss experiment, and the bar of both ladders.

Imports no torch and measures nothing: what the JSON lacks is said to be not measured.
"""

import json
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from llmtrain.benchmark.machine import headline
from llmtrain.benchmark.tables import figure, percent, table

PEAK_FP8 = 1979e12
"""Dense FP8 FLOP/s of an H100 or H200 by the vendor's datasheet."""
NOT_MEASURED = "not measured"
WIDE, NARROW, TORCHAO = "bf16", "fp8", "torchao tensorwise"
Runs = Sequence[dict[str, Any]]

INTRO = """\
`llmtrain train --precision fp8` multiplies in eight bits where most of the time goes: in the linears of the blocks,
and in the experts. Attention, norms, routers, the head and the embedding stay in bf16, weights and gradients in FP32.

| `--fp8-scaling` | what shares a scale | where the scale comes from | formats |
|---|---|---|---|
| `tensorwise` | an operand | the largest magnitudes of the last 16 steps; of weights their own | E4M3, gradients E5M2 |
| `rowwise` | a row, along the side that is summed over | its own values | E4M3 |
| `block` | 128 numbers of a row, of weights 128 x 128 | its own values | E4M3 |

Experts have a scale a row in any case, and their dW stays in bf16. [architecture.md](architecture.md) says how it
works.
"""

MXFP8 = """\
## MXFP8

    llmtrain train --precision mxfp8

In MXFP8 (OCP Microscaling Formats v1.0) 32 numbers along the side that a matmul sums over are E4M3 and share one
power of two. Here that scale is rounded up, so that no number of the block saturates, and gradients are E4M3 as well,
as [Mishra et al. 2025](https://arxiv.org/abs/2506.08027) found to be needed. Each of the three products of a layer
(forward, the gradient of its input, that of its weight) sums over another side, so each operand is rounded along that
side anew; weights are rounded once an update, both ways. Attention, the head, the embedding, routers and experts stay
in bf16.

The arithmetic is emulated on every device: operands are rounded to MXFP8 and multiplied in bf16 with FP32 sums, which
is exact for such numbers. So `mxfp8` shows what the format does to a loss, and is slower than `bf16`; the plan says
so. Cards that multiply MXFP8 natively (compute capability 10.0 and later) are not used for it: there was none to test
that on.

The quantiser has the bits of the definition for all 65,536 numbers of bf16 under each of the 255 scales, and each
scale is the smallest that holds its block (tests/kernels/test_mxfp8.py). What it does to a loss is asked in
[scripts/experiments/mxfp8-31m](../scripts/experiments/README.md)."""


@dataclass(frozen=True)
class Held:
    """One line of the bar."""

    what: str
    must: float | None
    goal: float | None
    measured: float | None
    words: str
    """The measured, for a person."""
    form: str = "{:g} times"
    lower_is_better: bool = False

    def cells(self) -> list[str]:
        def said(value: float | None) -> str:
            return "" if value is None else self.form.format(value)

        def reached(value: float | None) -> bool:
            assert self.measured is not None
            return value is not None and (self.measured <= value if self.lower_is_better else self.measured >= value)

        verdict = ""
        if self.measured is not None:
            verdict = "goal reached" if reached(self.goal) else "holds" if reached(self.must) else "DOES NOT HOLD"
            if verdict != "goal reached" and self.must is None:
                verdict = "short of the goal"
        return [self.what, said(self.must), said(self.goal), self.words, verdict]


def bar_table(lines: Iterable[Held]) -> list[str]:
    return table(("what", "must", "goal", "measured", ""), [line.cells() for line in lines], numbers_from=5)


def best(records: Iterable[dict[str, Any]]) -> dict[str, Any] | None:
    return max((r for r in records if r["status"] == "ok"), key=lambda r: r["tok_per_s"], default=None)


def of(runs: Runs, name: str, arm: str, **same: Any) -> list[dict[str, Any]]:
    """The runs of a rung and an arm, and of some other fields."""
    return [r for r in runs if (r["name"], r["arm"]) == (name, arm) and all(r[k] == v for k, v in same.items())]


def ratio(what: str, must: float, goal: float, a: dict[str, Any] | None, b: dict[str, Any] | None) -> Held:
    """How much faster b is than a."""
    if a is None or b is None:
        return Held(what, must, goal, None, NOT_MEASURED)
    times = b["tok_per_s"] / a["tok_per_s"]
    words = f"{times:.3f} times: {b['tok_per_s']:,.0f} against {a['tok_per_s']:,.0f} tok/s"
    return Held(what, must, goal, times, words)


def precision_bar(runs: Runs, loss: dict[str, Any] | None) -> list[Held]:
    same = {"batch_size": 16, "seq_len": 2048, "checkpoint_activations": "none"}
    a, b, peer = (best(of(runs, "1b", arm, **same)) for arm in (WIDE, NARROW, TORCHAO))
    verdicts = [c for c in (loss or {}).get("comparisons", []) if c["arms"]["b"] == "fp8"]
    what = "loss of FP8 above bf16's after 2,000 steps of 16 x 1024 at 102M, in floors of the replicates"
    of_floors = {"form": "{:g} floors", "lower_is_better": True}
    gap = Held(what, 2, 1, None, NOT_MEASURED, **of_floors)
    if verdicts:
        found = verdicts[0]
        above = max(0.0, found["difference"])
        floors = above / found["floor"] if found["floor"] else math.inf if above else 0.0
        words = f"{found['difference']:+.4f} nats, {floors:.2f} floors of {found['floor']:.4f}"
        gap = Held(what, 2, 1, floors, words, **of_floors)
    tok_per_s = b and b["tok_per_s"]
    words = f"{tok_per_s:,.0f} tok/s" if tok_per_s else NOT_MEASURED
    rate = Held("FP8, 1.04B, 16 x 2048", None, 120_000, tok_per_s, words, form="{:,.0f} tok/s")
    return [
        ratio("FP8 against our bf16, 1.04B, 16 x 2048", 1.22, 1.3, a, b),
        rate,
        ratio("FP8 against torchao tensorwise, the same", 1.1, 1.2, peer, b),
        gap,
    ]


def experts_bar(runs: Runs) -> list[Held]:
    routed, dense = best(of(runs, "moe-1b", WIDE)), best(of(runs, "200m", WIDE))
    pair = best(of(runs, "moe-3b", WIDE)), best(of(runs, "moe-3b", NARROW))
    return [
        ratio("`moe-1b` against `200m`, the dense model of its active size, bf16", 0.85, 0.95, dense, routed),
        ratio("FP8 experts against bf16 experts, `moe-3b`", 1.3, 1.6, *pair),
    ]


def cells_of(run: dict[str, Any] | None, tried: Runs) -> list[str]:
    """Rate, micro-batch, memory and what runs again, of an arm at its best."""
    if run is None:
        reasons = {r["status"] for r in tried}
        word = NOT_MEASURED if not tried else "absent" if "absent" in reasons else "none fits"
        return ["failed" if "failed" in reasons else word, "", "", ""]
    rate = f"{run['tok_per_s']:,.0f}" + (" c" if run["contended"] else "")
    size = f"{run['batch_size']} x {run['seq_len']}"
    return [rate, size, figure(run["allocated_gib"], ".1f"), run["checkpoint_activations"]]


def ladder(data: dict[str, Any], names: Sequence[str]) -> list[str]:
    """Every rung and arm at its own best micro-batch."""
    rows = []
    for name in names:
        wide = best(of(data["runs"], name, data["arms"][0]))
        for arm in data["arms"]:
            runs = of(data["runs"], name, arm)
            if not runs:
                continue
            top = best(runs)
            against = f"{top['tok_per_s'] / wide['tok_per_s']:.3f}" if top and wide and top is not wide else ""
            mfu = percent(top["mfu"]) if top and top.get("mfu") else ""
            if mfu and top and top["precision"] == "fp8":
                mfu += f", {percent(top['tok_per_s'] * top['flops_per_token'] / PEAK_FP8)}"
            size = f"{runs[0]['parameters'] / 1e6:,.0f}M, {runs[0]['active'] / 1e6:,.0f}M"
            rows.append([name, size, arm, *cells_of(top, runs), against, mfu])
    header = (
        "rung", "parameters, active", "arm", "tok/s", "micro-batch", "GiB", "run again",
        f"times {data['arms'][0]}", "MFU, of the FP8 peak",
    )  # fmt: skip
    return table(header, rows, numbers_from=3)


def checkpointing(data: dict[str, Any]) -> list[str]:
    """Where more than one way of keeping activations was measured: each at its own best."""
    rows = []
    for name in dict.fromkeys(r["name"] for r in data["runs"]):
        for arm in data["arms"]:
            runs = of(data["runs"], name, arm)
            modes = dict.fromkeys(r["checkpoint_activations"] for r in runs)
            for mode in modes if len(modes) > 1 else ():
                tried = [r for r in runs if r["checkpoint_activations"] == mode]
                rows.append([name, arm, mode, *cells_of(best(tried), tried)[:3]])
    if not rows:
        return []
    header = "rung", "arm", "run again", "tok/s", "micro-batch", "GiB"
    return ["## With and without running blocks again", "", *table(header, rows, numbers_from=3), ""]


def machines(runs: Runs) -> list[str]:
    """What the runs were taken on: a line for each turn of the script, where there were several."""
    rungs: dict[str, list[str]] = {}
    for run in runs:
        names = rungs.setdefault(headline(run["machine"]), [])
        names += [run["name"]] if run["name"] not in names else []
    return list(rungs) if len(rungs) == 1 else [f"- {', '.join(names)}: {line}" for line, names in rungs.items()]


def page(data: dict[str, Any] | None, loss: dict[str, Any] | None, source: str, picture: str | None = None) -> str:
    runs = data["runs"] if data else []
    lines = ["# Eight-bit precision", "", INTRO, "## What it has to reach on one H200", ""]
    lines += [*bar_table(precision_bar(runs, loss)), ""]
    if loss is not None:
        result = "scripts/experiments/fp8-102m/result.json"
        lines += [f"The loss is that of [{result}](../{result}).", ""]
    lines += ["## Rates", ""]
    if data is None:
        lines += [f"`scripts/bench/precision.py` measures them; {NOT_MEASURED} yet.", ""]
    else:
        dense = list(dict.fromkeys(r["name"] for r in runs if r["parameters"] == r["active"]))
        routed = list(dict.fromkeys(r["name"] for r in runs if r["parameters"] != r["active"]))
        lines += [
            f"Made by `scripts/bench/precision.py` from [{source}]({source}): whole training steps of one micro-batch "
            "on random tokens, each in a process of its own, each arm at its own fastest micro-batch. GiB is what "
            "tensors took at the peak. `c`: the machine was not idle.",
            "",
            *machines(runs),
            "",
        ]
        if picture:
            lines += [f"![Rates by arm]({picture})", ""]
        for names in (dense, routed):
            lines += [*ladder(data, names), ""] if names else []
        lines += checkpointing(data)
        notes = [
            f"- {r['name']}, {r['arm']}, {r['batch_size']} x {r['seq_len']}, {r['checkpoint_activations']}: "
            f"{r['status']}: {r['reason']}."
            for r in runs if r["status"] != "ok"
        ]  # fmt: skip
        lines += ["What did not run:", "", *notes, ""] if notes else []
    return "\n".join([*lines, MXFP8, ""])


def draw(data: dict[str, Any], path: Path) -> str | None:
    """Bars of each arm at its best, by rung, relative to the first arm; the file's name, or None without matplotlib or
    anything to draw."""
    names = [n for n in dict.fromkeys(r["name"] for r in data["runs"]) if best(of(data["runs"], n, data["arms"][0]))]
    try:
        from matplotlib.figure import Figure
    except ImportError:
        return None
    if not names:
        return None
    figure_ = Figure(figsize=(10, 4), layout="constrained")
    axes = figure_.subplots()
    width = 0.8 / len(data["arms"])
    for i, arm in enumerate(data["arms"]):
        places, heights = [], []
        for place, name in enumerate(names):
            wide, top = best(of(data["runs"], name, data["arms"][0])), best(of(data["runs"], name, arm))
            if wide and top:
                places.append(place + i * width)
                heights.append(top["tok_per_s"] / wide["tok_per_s"])
        axes.bar(places, heights, width, label=arm)
    axes.set(ylabel=f"tok/s against {data['arms'][0]}", xticks=range(len(names)), xticklabels=names)
    axes.axhline(1, color="black", linewidth=0.8)
    axes.legend(fontsize="small")
    path.parent.mkdir(parents=True, exist_ok=True)
    figure_.savefig(path, dpi=110)
    return path.name


def read(path: Path) -> dict[str, Any] | None:
    return json.loads(path.read_text()) if path.exists() else None
