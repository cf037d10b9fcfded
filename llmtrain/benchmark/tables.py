"""Markdown out of the JSON that a benchmark wrote: the only way a figure gets into docs/."""

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from llmtrain.benchmark.machine import headline
from llmtrain.benchmark.statistics import NOISY_SPREAD
from llmtrain.model.config import OF_EXPERTS
from llmtrain.storage.atomic import make_parent, make_place, write_bytes, write_json

NONE = "n/a"


def table(header: Sequence[str], rows: Sequence[Sequence[str]], numbers_from: int = 1) -> list[str]:
    """Lines of a Markdown table; columns from `numbers_from` on are aligned to the right."""
    rule = ["---" if i < numbers_from else "---:" for i in range(len(header))]
    return [f"| {' | '.join(cells)} |" for cells in (header, rule, *rows)]


def figure(value: float | None, form: str, scale: float = 1.0) -> str:
    """`value * scale` in `form`, or n/a."""
    return NONE if value is None else format(value * scale, form)


def percent(value: float | None) -> str:
    return NONE if value is None else f"{value:.1%}"


def data_path(output: Path) -> Path:
    """Where the JSON of a Markdown table lies: docs/X.md is made from docs/data/X.json."""
    return output.parent / "data" / output.with_suffix(".json").name


def make_places(output: Path | None) -> None:
    """Tries whether `write_table` can write there, before anything is measured for it. Raises CannotCreate,
    StorageFailure."""
    if output is not None:
        make_place(output)
        make_place(data_path(output))


def write_table(output: Path, data: dict[str, Any], markdown: str) -> None:
    """Write both, JSON first: a table never stands without what it was made from. Raises as storage.atomic does."""
    source = data_path(output)
    make_parent(source)
    write_json(source, data)
    write_bytes(output, markdown.encode())


def write_page(output: Path, data: dict[str, Any], markdown: Callable[[dict[str, Any], str], str]) -> None:
    """Write the data and what `markdown` makes of them, given the name of their file as the page links to it."""
    write_table(output, data, markdown(data, data_path(output).relative_to(output.parent).as_posix()))


def read_data(output: Path | None) -> dict[str, Any]:
    """What a page was made from before; nothing where there is no page or no name of one."""
    source = output and data_path(output)
    return json.loads(source.read_text()) if source and source.exists() else {}


def marks(row: dict[str, Any]) -> str:
    """What has to be known beside a figure: `~` where it scattered, `c` where others used the machine."""
    noisy = "~" if row.get("spread", 0) > NOISY_SPREAD else ""
    return noisy + ("c" if row["contended"] else "")


SWEEP_HEADER = (
    "row", "tok/s", "spread", "step ms", "MFLOP/token exact", "classic", "TFLOP/s", "MFU", "classic MFU",
    "allocator GiB", "device GiB", "host GiB", "parameters", "active", "sparsity", "first step s", "",
)  # fmt: skip


def sweep_cells(row: dict[str, Any]) -> list[str]:
    costs = [figure(row["flops_per_token"], ".1f", 1e-6), figure(row["classic_flops_per_token"], ".1f", 1e-6)]
    total, active = row["parameters"], row["active_parameters"]
    sizes = [f"{total / 1e6:.2f}M", f"{active / 1e6:.2f}M", f"{total / active:.2f}x"]
    if row["status"] != "ok":
        word = {"oom": "out of memory", "failed": "failed"}[row["status"]]
        return [row["name"], word, "", "", *costs, *[""] * 6, *sizes, "", marks(row)]
    return [
        row["name"],
        f"{row['tok_per_s']:,.0f}",
        percent(row["spread"]),
        f"{row['step_ms']:.2f}",
        *costs,
        f"{row['tflops']:.3g}",
        percent(row["mfu"]),
        percent(row["classic_mfu"]),
        figure(row["allocated_gib"], ".2f"),
        figure(row.get("device_peak_gib"), ".2f"),
        figure(row["host_rss_gib"], ".2f"),
        *sizes,
        f"{row['first_step_s']:.1f}",
        marks(row),
    ]


def dense_against_routed(rows: Sequence[dict[str, Any]]) -> list[str]:
    """A line for each routed row whose shape there is a dense row of: the same but for the experts."""

    def dense_shape(row: dict[str, Any]) -> dict[str, Any]:
        model = {name: value for name, value in row["shape"]["model"].items() if name not in ("moe", *OF_EXPERTS)}
        return {**row["shape"], "model": model}

    measured = [row for row in rows if row["status"] == "ok"]
    lines = []
    for routed in measured:
        if not routed["shape"]["model"].get("moe"):
            continue
        for dense in measured:
            if not dense["shape"]["model"].get("moe") and dense_shape(dense) == dense_shape(routed):
                lines.append(
                    f"- Dense against routed: {dense['name']} over {routed['name']} is {dense['tok_per_s']:,.0f} / "
                    f"{routed['tok_per_s']:,.0f} = {dense['tok_per_s'] / routed['tok_per_s']:.3f}, with "
                    f"{dense['active_parameters'] / 1e6:.2f}M against {routed['active_parameters'] / 1e6:.2f}M active "
                    f"parameters, {dense['parameters'] / 1e6:.2f}M against {routed['parameters'] / 1e6:.2f}M in all."
                )
    return lines


def without_against_with(rows: Sequence[dict[str, Any]]) -> list[str]:
    """Where a shape was measured with other ways of keeping activations too: a table of what they cost and save."""
    shapes: list[dict[str, Any]] = []
    for row in rows:
        if row["shape"] not in shapes:
            shapes.append(row["shape"])
    cells = []
    for shape in shapes:
        ways = [row for row in rows if row["shape"] == shape]
        if len({row.get("checkpoint_activations") for row in ways}) < 2:
            continue
        whole = next((w for w in ways if w["checkpoint_activations"] == "none" and w["status"] == "ok"), None)
        for way in (way for way in ways if way["status"] == "ok"):
            peak, planned = way["allocated_gib"], way["predicted_gib"]
            cells.append([
                way["name"], way["checkpoint_activations"], f"{way['tok_per_s']:,.0f}",
                f"{way['tok_per_s'] / whole['tok_per_s']:.3f}" if whole else "",
                figure(peak, ".2f"), f"{peak / whole['allocated_gib']:.3f}" if whole and peak else "",
                figure(planned, ".2f"), f"{peak / planned - 1:+.1%}" if peak and planned else "",
            ])  # fmt: skip
    if not cells:
        return []
    header = (
        "row", "`--checkpoint-activations`", "tok/s", "of `none`", "peak GiB", "of `none`", "predicted GiB", "off",
    )  # fmt: skip
    return ["## What activations cost", "", *table(header, cells, 2), "", "## All figures", ""]


def sweep_markdown(data: dict[str, Any], source: str) -> str:
    """docs/baseline.md out of what `run_sweep` returned; `source` names the JSON file."""
    rows, replicate, timing = data["rows"], data["replicate"], data["timing"]
    compared = without_against_with(rows)
    lines = [
        "# Activations: kept, or made again" if compared else "# Training throughput by shape",
        "",
        f"Made by `llmtrain sweep` from [{source}]({source}); each row ran in a process of its own.",
        "",
        headline(data["machine"]),
        "",
        f"Whole steps (forward, backward, AdamW) in {timing['precision']}, batches on the device: the median of "
        f"{timing['bursts']} bursts of {timing['seconds']:g} s after {timing['warmup']} steps; spread is their range.",
        "",
    ]
    if len(rows) < data["planned"]:
        lines += [f"**Unfinished**: {len(rows)} of {data['planned']} rows.", ""]
    lines += compared
    lines += table(SWEEP_HEADER, [sweep_cells(row) for row in rows])
    lines.append("")
    if replicate is not None and replicate["status"] == "ok":
        first = next(row for row in rows if row["name"] == replicate["name"])
        lines += [
            f"Floor: {replicate['name']}, taken again at the end, gave {replicate['tok_per_s']:,.0f} tok/s, "
            f"{abs(replicate['tok_per_s'] / first['tok_per_s'] - 1):.1%} from its first figure.",
            "",
        ]
    lines += dense_against_routed(rows)
    lines += [f"- {row['name']}: {row['reason']}." for row in rows if row["status"] != "ok"]
    lines += [f"- {row['name']}: contended: {'; '.join(row['contended'])}." for row in rows if row["contended"]]
    if lines[-1]:
        lines.append("")
    lines += [
        "MFU is exact FLOPs (6 an active matmul parameter, causal pairs only) over the card's dense bf16 peak; classic "
        "counts 6 an active parameter and attention in full; sparsity is all parameters over the active. Allocator "
        "is what tensors took at the peak, device what the card lost to the process, context and graphs included. `~`: "
        "bursts spread over 5%. `c`: the machine was not idle.",
        "",
    ]
    return "\n".join(lines)
