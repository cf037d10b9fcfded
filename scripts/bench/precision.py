"""bf16 against eight bits over the dense and the routed ladder, each at its own best micro-batch.

    python scripts/bench/precision.py [--output docs/precision.md] [--only 1b --only moe-1b] [--quick]

Each run is a process of its own on random tokens. A rung begins with its preset's micro-batch and goes to twice that,
or else to half of it, while that is faster, or to half until it fits; `--quick` takes the preset's alone. A rung whose
preset runs blocks again in the backward does so here. Speed-ups are FP8's against our own bf16, both at their best.
`--smoke` runs a small model on the CPU, in bf16 and FP32.
"""

import argparse
import dataclasses
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch

from llmtrain.benchmark.config import Shape, SweepRow, TimingConfig
from llmtrain.benchmark.machine import card_state, contention, describe, headline
from llmtrain.benchmark.sweep import run_row
from llmtrain.benchmark.tables import figure, percent, read_data, table, write_page
from llmtrain.cli.bench import what_to_run
from llmtrain.model.flops import parameter_counts

LADDERS = ("200m", "500m", "1b", "1.5b", "moe-1b", "moe-2b", "moe-3b", "moe-5b", "moe-8b")
TIMEOUT = 240.0
PEAK_FP8 = 1979e12
"""Dense FP8 FLOP/s of an H100 or H200 by the vendor's datasheet."""
SMOKE = """[model]
vocab_size = 256
d_model = 32
n_layers = 2
n_heads = 2
n_kv_heads = 1
head_dim = 16
d_ff = 64
[data]
seq_len = 16
[run]
batch_size = 2
"""


def at(shape: Shape, batch_size: int) -> Shape:
    """One micro-batch of that size: what is measured is the step's rate, to which further ones add nothing new."""
    return dataclasses.replace(shape, batch_size=batch_size, accumulate=1)


def measure(name: str, shape: Shape, timing: TimingConfig) -> dict[str, Any]:
    busy = contention(card_state()) if torch.cuda.is_available() else []
    row = run_row(SweepRow(name, shape), timing, TIMEOUT)
    counts = parameter_counts(shape.model)
    record = {
        "name": name, "precision": timing.precision, "batch_size": shape.batch_size, "seq_len": shape.seq_len,
        "checkpoint_activations": timing.checkpoint_activations, "parameters": counts.total, "active": counts.active,
        "contended": busy, **row,
    }  # fmt: skip
    ok = row["status"] == "ok"
    said = f"{row['tok_per_s']:,.0f} tok/s, {figure(row['allocated_gib'], '.1f')} GiB" if ok else row["reason"]
    print(f"{name} {timing.precision} {shape}: {said}", flush=True)
    return record


def best(records: list[dict[str, Any]]) -> dict[str, Any] | None:
    return max((r for r in records if r["status"] == "ok"), key=lambda r: r["tok_per_s"], default=None)


def climb(name: str, shape: Shape, timing: TimingConfig, quick: bool) -> list[dict[str, Any]]:
    """Micro-batches from the preset's on, in the direction that is faster."""
    first = shape.batch_size
    records = [measure(name, at(shape, first), timing)]
    if quick:
        return records
    fits = records[0]["status"] == "ok"
    for factor in (2, 0.5) if fits else (0.5,):
        size, fastest = int(first * factor), best(records)
        while size >= 1:
            records.append(measure(name, at(shape, size), timing))
            now = best(records)
            if now is not fastest or not any(r["status"] == "ok" for r in records):
                fastest, size = now, int(size * factor)
            else:
                break
        if fits and best(records) is not records[0]:
            break  # faster that way, so not the other
    return records


def markdown(data: dict[str, Any], source: str) -> str:
    wide, narrow = data["precisions"]
    lines = [
        "# Eight bits against bf16",
        "",
        f"Made by `scripts/bench/precision.py` from [{source}]({source}): whole training steps of one micro-batch on "
        "random tokens, each in a process of its own, each precision at its own fastest micro-batch.",
        "",
        headline(data["machine"]),
        "",
    ]
    rows, notes = [], []
    for name in dict.fromkeys(r["name"] for r in data["runs"]):
        runs = [r for r in data["runs"] if r["name"] == name]
        a, b = (best([r for r in runs if r["precision"] == precision]) for precision in (wide, narrow))
        any_run = runs[0]
        cells = [name, f"{any_run['parameters'] / 1e6:,.0f}M", f"{any_run['active'] / 1e6:,.0f}M"]
        for r in (a, b):
            if r is None:
                cells += ["none fits", "", ""]
            else:
                rate = f"{r['tok_per_s']:,.0f}" + (" c" if r["contended"] else "")
                cells += [rate, f"{r['batch_size']} x {r['seq_len']}", figure(r["allocated_gib"], ".1f")]
        cells.append(f"{b['tok_per_s'] / a['tok_per_s']:.3f}" if a and b else "")
        of_peak = b and b["tok_per_s"] * b["flops_per_token"] / PEAK_FP8
        cells += [percent(a["mfu"]) if a else "", f"{percent(b['mfu'])}, {percent(of_peak)}" if b else ""]
        cells.append(any_run["checkpoint_activations"])
        rows.append(cells)
        notes += [f"- {name}, {r['precision']}, {r['batch_size']} x {r['seq_len']}: {r['reason']}."
                  for r in runs if r["status"] != "ok"]  # fmt: skip
    header = (
        "rung", "parameters", "active", f"{wide} tok/s", "micro-batch", "GiB", f"{narrow} tok/s", "micro-batch", "GiB",
        "speed-up", f"MFU {wide}", f"MFU {narrow}, of the bf16 and of the FP8 peak", "run again",
    )  # fmt: skip
    lines += [*table(header, rows), "", "GiB is what tensors took at the peak. `c`: the machine was not idle.", ""]
    for pair in (("moe-1b", "200m"), ("moe-3b", "500m")):
        of_wide = [r for r in data["runs"] if r["precision"] == wide]
        routed, dense = (best([r for r in of_wide if r["name"] == name]) for name in pair)
        if routed and dense:
            notes.append(
                f"- {pair[0]} in {wide} trains at {routed['tok_per_s'] / dense['tok_per_s']:.3f} of the rate of "
                f"{pair[1]}, the dense model of about its active size."
            )
    lines += notes
    return "\n".join([*lines, ""])


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path, default=Path("docs/precision.md"))
    parser.add_argument("--only", action="append", choices=LADDERS, help="A rung; repeat it. Default: all.")
    parser.add_argument("--quick", action="store_true", help="The preset's micro-batch alone.")
    parser.add_argument("--add", action="store_true", help="Keep what --output's JSON holds of other rungs.")
    parser.add_argument("--smoke", action="store_true")
    args = parser.parse_args()
    on_card = torch.cuda.is_available()
    if not on_card and not args.smoke:
        parser.error("there is no card here; --smoke runs a small model on the CPU")
    precisions = ("bf16", "fp8") if on_card else ("fp32", "bf16")
    data: dict[str, Any] = {"machine": describe(on_card), "precisions": precisions, "runs": []}
    names = list(args.only or LADDERS)
    if args.add:
        data["runs"] = [r for r in read_data(args.output).get("runs", []) if r["name"] not in names]
    with tempfile.TemporaryDirectory() as folder:
        if args.smoke:
            smoke = Path(folder) / "smoke.toml"
            smoke.write_text(SMOKE)
            names = [str(smoke)]
        for name in names:
            shape, timing = what_to_run({}, name, None, None, None)
            timing = dataclasses.replace(timing, seconds=0.4, bursts=3, warmup=3)
            if args.smoke:
                timing = dataclasses.replace(timing, seconds=0.02, bursts=2, warmup=1, device="cpu")
            for precision in precisions:
                one = dataclasses.replace(timing, precision=precision)
                data["runs"] += climb(Path(name).stem if args.smoke else name, shape, one, args.quick)
                write_page(args.output, data, markdown)
    return 1 if any(r["status"] == "failed" for r in data["runs"]) else 0


if __name__ == "__main__":
    sys.exit(main())
