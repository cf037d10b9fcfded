"""Writes docs/kernels.md: what checks of single kernels on a card found, out of their JSON in docs/data.

`make docs` runs it, and so does scripts/bench/card.py. What has no JSON yet is said to be not measured.
"""

import itertools
import json
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

from llmtrain.benchmark.machine import headline
from llmtrain.benchmark.tables import figure, table
from llmtrain.storage.atomic import write_bytes

DOCS = Path(__file__).parents[1] / "docs"

HEAD = """# Kernels by themselves, on a card

Each section is what one script of `scripts/bench` found, group by group; a group keeps its machine, and a run of some
groups leaves the others as they are. Times are of CUDA graphs behind a cold L2. [ops.md](ops.md), [head.md](head.md)
and [attention.md](attention.md) compare with others' kernels instead. `scripts/docs_kernels.py` makes this page.
"""

Group = dict[str, Any]


def said(value: Any) -> str:
    """A cell."""
    if isinstance(value, list):
        return " x ".join(map(str, value))
    if isinstance(value, float) and abs(value) >= 100:
        return f"{value:,.0f}"
    return f"{value:.3g}" if isinstance(value, float) else str(value)


def checks(records: list[Group]) -> list[str]:
    """How often each check was made and whether it held, and in full what did not."""
    rows = []
    for op in dict.fromkeys(r["op"] for r in records):
        verdicts = [r["verdict"] == "ok" for r in records if r["op"] == op]
        rows.append([op, str(len(verdicts)), "yes" if all(verdicts) else f"**{verdicts.count(False)} not**"])
    wrong = [
        "- " + ", ".join(f"{key} {said(value)}" for key, value in record.items()) + "."
        for record in records if record["verdict"] != "ok"
    ]  # fmt: skip
    return [*table(("check", "cases", "held"), rows), "", *wrong, *([""] if wrong else [])]


def times(records: list[Group]) -> list[str]:
    """A table for each kind of record."""
    lines = []
    for keys, group in itertools.groupby(sorted(records, key=lambda r: list(r)), key=lambda r: tuple(r)):
        lines += [*table(keys, [[said(record[key]) for key in keys] for record in group]), ""]
    return lines


def of_report(group: Group) -> list[str]:
    """What scripts/bench/checks.py gathered."""
    judged = [record for record in group["records"] if "verdict" in record]
    others = [record for record in group["records"] if "verdict" not in record]
    return [*(checks(judged) if judged else []), *(times(others) if others else [])]


def of_fp8(group: Group) -> list[str]:
    """Of each scale the three products, and the passes that quantise."""
    rows, wrong = [], []
    for record in group["records"]:
        if record["wrong"]:
            wrong.append(f"- **wrong**, {record['scaling']}: {', '.join(record['wrong'])}.")
        for product in ("y", "dX", "dW"):
            if product in record:
                one = record[product]
                rows.append([
                    record["scaling"], product, figure(one["error"], ".1e"), f"{one['ms']:.3f}", f"{one['tflops']:.0f}",
                    f"{one['bf16_ms'] / one['ms']:.2f}",
                ])  # fmt: skip
        for what, ms in record.get("quantise_ms", {}).items():
            rows.append([record["scaling"], f"{what} quantised", "", f"{ms:.3f}", "", ""])
    header = ("scale", "product", "error", "ms", "TFLOP/s", "times bf16")
    lines = [*table(header, rows, 2), ""] if rows else []  # experts are only checked
    return [*lines, *(wrong or ["All as it should be."]), ""]


def of_blocks(group: Group) -> list[str]:
    """The tiles that were chosen, the fastest beside them, and what could not run."""
    rows = []
    for kernel in dict.fromkeys(row["kernel"] for row in group["rows"]):
        ran = sorted((r for r in group["rows"] if r["kernel"] == kernel and "ms" in r), key=lambda r: r["ms"])
        chosen = next(row for row in ran if row["chosen"])
        failed = sum(row["kernel"] == kernel and "failed" in row for row in group["rows"])
        better = f"{ran[0]['blocks']}, {ran[0]['ms']:.4f}" if ran[0]["faster"] else ""
        rows.append([kernel, chosen["blocks"], f"{chosen['ms']:.4f}", better, str(len(ran)), str(failed)])
    header = ("kernel", "tiles, warps and more", "ms", "faster beyond the floor, ms", "candidates", "that fail")
    return [*table(header, rows, 4), ""]


def of_newton_schulz(group: Group) -> list[str]:
    arms = [[name, f"{ms:.2f}", f"{group['tflops'][name]:.0f}"] for name, ms in group["ms"].items()]
    low, high = group["singular_values"]
    return [
        *table(("of the update's iterations", "ms", "TFLOP/s"), arms), "",
        f"{group['matrices']} matrices in {group['stacks']} stacks, {group['torch_over_ours']:.2f} times as fast as "
        f"torch.optim.Muon's; singular values from {low:.2f} to {high:.2f}. A whole update takes "
        f"{group['step_ms']['update']:.1f} ms, {group['share_of_step']:.1%} of a step of {group['tokens']:,} tokens.",
        "",
    ]  # fmt: skip


def of_half(data: Group) -> list[str]:
    rows = []
    for r in data["rows"]:
        result = [f"{r['tflops']:.0f}", f"{r['error']:.1e}"] if "ms" in r else ["failed", r["reason"]]
        rows.append([r["dtype"], r["sums"], str(r["parts"]), *result])
    return [*table(("numbers", "sums", "parts of the depth", "TFLOP/s", "error"), rows, 2), ""]


def of_sanitizer(data: Group) -> list[str]:
    """What each tool named, in ours and elsewhere, and whether it saw the fault that was planted for it."""
    rows, cases = [], data["records"][0]["cases"]
    for r in data["records"]:
        ours, elsewhere = (", ".join(f"{k} {n}" for k, n in r[where].items()) for where in ("in_ours", "elsewhere"))
        planted = "found" if r["planted_found"] else "**missed**"
        rows.append([r["tool"], planted, f"**{ours}**" if ours else "nothing", elsewhere or "nothing",
                     str(len(r["cases"])), "yes" if r["held"] else "**no**"])  # fmt: skip
    kernels = sorted({op for ran in cases.values() for op, chosen in ran.items() if chosen == "triton"})
    header = ("tool", "planted fault", "named in our kernels", "elsewhere", "cases run to the end", "held")
    return [*table(header, rows, 4), "", f"Cases: {', '.join(cases)}. Ops by our kernels: {', '.join(kernels)}.", ""]


SECTIONS: tuple[tuple[str, str, str, str, Callable[[Group], Iterable[str]]], ...] = (
    (
        "Norms, SwiGLU, rotation, embedding", "kernels", "check_kernels.py",
        "Right against FP64, outputs poisoned; `ratio` is the time over that of the bytes at 4.3 TB/s.", of_report,
    ),
    (
        "Attention", "attention", "check_attention.py",
        "Backends against FP64, and which of them runs where. Shapes are batch, length, heads, heads of keys, width.",
        of_report,
    ),
    (
        "Tiles of our attention", "attention-blocks", "attention_blocks.py",
        "Cases are the width of a head and the length of documents.", of_blocks,
    ),
    (
        "Head and AdamW", "head", "check_head.py",
        "Right against FP64; `chosen` is what a run takes, `ratio` is as above.", of_report,
    ),
    (
        "Eight bits", "fp8-check", "check_fp8.py",
        "Operands have the reference's bits, products are those of the quantised numbers and the same twice; `error` "
        "is relative, in norm.", of_fp8,
    ),
    (
        "Steps in CUDA graphs", "check-capture", "check_capture.py",
        "A small step of every kind, captured and not, with deterministic sums; those in eight bits against bf16's.",
        of_report,
    ),
    (
        "Tiles of eight-bit kernels", "fp8-tiles", "fp8_tiles.py",
        "Casts both ways round, magnitudes noted, of a feed-forward's width; `ratio` is as above.", of_report,
    ),
    (
        "Newton-Schulz", "newton-schulz", "newton_schulz.py",
        "Muon's iterations on a model's matrices; torch's are one at a time, ours in stacks.", of_newton_schulz,
    ),
    (
        "What compute-sanitizer finds", "sanitize", "sanitize.py",
        "Small steps of every kind of model, and the ops by themselves, at odd sizes, with an allocator that keeps "
        "nothing.", of_sanitizer,
    ),
    (
        "Sums in half precision", "half-accumulate", "half_accumulate.py",
        "One square product, forward, of random normal data; `error` against FP64, in norm.", of_half,
    ),
)  # fmt: skip
"""Heading, JSON, script, words, and what makes the lines of a group, or of a file that has none."""


def machine_line(machine: Group | None) -> str:
    return headline(machine) if machine else "One H200; its state was not kept."


def page(folder: Path) -> str:
    lines = [HEAD]
    for heading, name, script, words, lines_of in SECTIONS:
        lines += [f"## {heading}", ""]
        source = folder / f"{name}.json"
        if not source.exists():
            lines += [f"`scripts/bench/{script}`: {words} Not measured yet.", ""]
            continue
        lines += [f"Made by `scripts/bench/{script}` from [data/{name}.json](data/{name}.json). {words}", ""]
        data = json.loads(source.read_text())
        for title, group in data.get("groups", {"": data}).items():
            lines += [f"### {title}", ""] if title else []
            lines += [machine_line(group["machine"]), "", *lines_of(group)]
    return "\n".join(lines).rstrip("\n") + "\n"


if __name__ == "__main__":
    write_bytes(DOCS / "kernels.md", page(DOCS / "data").encode())
