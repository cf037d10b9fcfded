"""bf16 against eight bits over the dense and the routed ladder, each at its own best micro-batch.

    python scripts/bench/precision.py [--only 1b --only moe-1b] [--arm bf16 --arm fp8] [--quick] [--add]
    python scripts/bench/precision.py --page        # docs/precision.md anew from its JSON, and nothing measured

Each run is a process of its own on random tokens. An arm begins with the rung's preset micro-batch and goes to twice
that, or else to half of it, while that is faster, or to half until it fits; `--quick` takes the preset's alone, for a
moment. Where the preset runs blocks again in the backward, or its micro-batch does not fit without, each way of that is
taken. What is predicted not to fit is not tried. torchao's arm is the compiled plain model of peers.py (dense rungs
alone); it is the only one that imports torchao, and without that package it is absent, which the page says. `--smoke`
runs a small model on the CPU, in FP32 and bf16, and torchao's arm emulated.
"""

import argparse
import dataclasses
import os
import sys
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from statistics import median
from typing import Any, get_args

import torch

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE))

from peer_arm import NEEDS, TORCHAO_ARM  # noqa: E402
from peer_process import ArmEnded, ArmProcess, Settings  # noqa: E402
from places import place  # noqa: E402
from precision_page import NARROW, TORCHAO, WIDE, best, draw, page, read  # noqa: E402

from llmtrain.benchmark.config import Shape, SweepRow, TimingConfig  # noqa: E402
from llmtrain.benchmark.machine import card_before_a_run, card_state, contention, describe  # noqa: E402
from llmtrain.benchmark.step import GIB, model_figures, throughput  # noqa: E402
from llmtrain.benchmark.sweep import run_row  # noqa: E402
from llmtrain.benchmark.tables import data_path, figure, write_table  # noqa: E402
from llmtrain.cli.bench import what_to_run  # noqa: E402
from llmtrain.model.config import CheckpointActivations  # noqa: E402
from llmtrain.model.flops import parameter_counts  # noqa: E402
from llmtrain.model.memory import training_memory  # noqa: E402
from llmtrain.storage.atomic import write_bytes  # noqa: E402

LADDERS = ("200m", "500m", "1b", "1.5b", "moe-1b", "moe-2b", "moe-3b", "moe-5b", "moe-8b")
TIMEOUT = 240.0
LOSS = HERE.parent / "experiments" / "fp8-102m" / "result.json"
MODES = get_args(CheckpointActivations)
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


@dataclass(frozen=True)
class Arm:
    name: str
    precision: str = "fp8"
    fp8_scaling: str = "tensorwise"
    peer: bool = False
    routed: bool = True
    """Taken of routed rungs where nobody says which arms."""


ARMS = (
    Arm(WIDE, "bf16"),
    Arm(NARROW),
    Arm("fp8 rowwise", fp8_scaling="rowwise", routed=False),
    Arm("fp8 block", fp8_scaling="block", routed=False),
    Arm(TORCHAO, "bf16", peer=True, routed=False),
)
ON_CPU = (Arm("fp32", "fp32"), Arm(WIDE, "bf16"), Arm(TORCHAO, "fp32", peer=True))


def at(shape: Shape, batch_size: int) -> Shape:
    """One micro-batch of that size: what is measured is the step's rate, to which further ones add nothing new."""
    return dataclasses.replace(shape, batch_size=batch_size, accumulate=1)


def peer_row(shape: Shape, timing: TimingConfig, caches: Path) -> dict[str, Any]:
    """torchao's arm, in the form of `run_row`."""
    if find_spec(NEEDS[TORCHAO_ARM]) is None:
        return {"status": "absent", "reason": f"{NEEDS[TORCHAO_ARM]} is not installed"}
    on_card = timing.device != "cpu"
    settings = Settings(timing.seconds, timing.bursts, "cuda" if on_card else "cpu", timing.precision, caches)
    process = ArmProcess(TORCHAO_ARM, shape, 3, settings)
    try:
        ready = process.answer()
        if ready["event"] == "oom":
            return {"status": "oom", "reason": ready["reason"]}
        bursts = []
        for _ in range(timing.bursts):
            process.tell("burst")
            bursts.append(process.answer())
    except ArmEnded as ended:
        return {"status": "failed", "reason": str(ended)}
    finally:
        process.stop()
    tok_per_s = shape.tokens_per_step / median(b["wall_s"] / b["steps"] for b in bursts)
    figures = model_figures(shape)
    rates = throughput(tok_per_s, figures, torch.device("cuda" if on_card else "cpu"))
    return {"status": "ok", "tok_per_s": tok_per_s, **ready, **figures, **rates}


def lacks(shape: Shape, arm: Arm, timing: TimingConfig) -> str | None:
    """Why a run is not tried: its memory by prediction, where it is more than the card has."""
    card = card_state()
    if arm.peer or card is None:
        return None
    plan = training_memory(
        shape.model, shape.batch_size, shape.seq_len, precision=arm.precision, fp8_scaling=arm.fp8_scaling,
        checkpoint_activations=timing.checkpoint_activations,
    )  # fmt: skip
    needed, there = plan.peak / GIB, card["memory_total_mib"] / 1024
    return f"not tried: predicted to take {needed:.1f} GiB of {there:.1f}" if needed > there else None


def measure(name: str, arm: Arm, shape: Shape, timing: TimingConfig, caches: Path) -> dict[str, Any]:
    busy = contention(card_before_a_run()) if torch.cuda.is_available() else []
    timing = dataclasses.replace(timing, precision=arm.precision, fp8_scaling=arm.fp8_scaling)
    if why := lacks(shape, arm, timing):
        row: dict[str, Any] = {"status": "oom", "reason": why}
    elif arm.peer:
        row = peer_row(shape, timing, caches)
    else:
        row = run_row(SweepRow(name, shape), timing, TIMEOUT)
        if why := row.get("not_captured"):  # it would count as the rate of a precision
            row = {"status": "failed", "reason": f"not captured in CUDA graphs: {why}"}
    counts = parameter_counts(shape.model)
    record = {
        **row, "name": name, "arm": arm.name, "precision": arm.precision, "batch_size": shape.batch_size,
        "seq_len": shape.seq_len, "checkpoint_activations": timing.checkpoint_activations,
        "parameters": counts.total, "active": counts.active, "contended": busy,
    }  # fmt: skip
    ok = row["status"] == "ok"
    said = f"{row['tok_per_s']:,.0f} tok/s, {figure(row['allocated_gib'], '.1f')} GiB" if ok else row["reason"]
    print(f"{name} {arm.name} {shape} {timing.checkpoint_activations}: {said}", flush=True)
    return record


def climb(first: int, take: Callable[[int], dict[str, Any]], quick: bool) -> list[dict[str, Any]]:
    """Records of micro-batches from the first on, in the direction that is faster."""
    records = [take(first)]
    if quick or records[0]["status"] == "absent":
        return records
    fits = records[0]["status"] == "ok"
    for factor in (2, 0.5) if fits else (0.5,):
        size, fastest = int(first * factor), best(records)
        while size >= 1:
            records.append(take(size))
            now = best(records)
            if now is not fastest or not any(r["status"] == "ok" for r in records):
                fastest, size = now, int(size * factor)
            else:
                break
        if fits and best(records) is not records[0]:
            break  # faster that way, so not the other
    return records


def run_rung(
    name: str, arm: Arm, shape: Shape, timing: TimingConfig, caches: Path, quick: bool,
    keep: Callable[[dict[str, Any]], None],
) -> None:  # fmt: skip
    """One rung and arm, each record kept at once: without running anything again first, and the other ways where that
    is needed."""
    preset = timing.checkpoint_activations

    def taken(mode: CheckpointActivations) -> list[dict[str, Any]]:
        as_said = dataclasses.replace(timing, checkpoint_activations=mode)

        def take(size: int) -> dict[str, Any]:
            record = measure(name, arm, at(shape, size), as_said, caches)
            keep(record)
            return record

        return climb(shape.batch_size, take, quick)

    if arm.peer:
        taken("none")
        return
    for mode in [preset] if quick else MODES:
        records = taken(mode)
        if mode == "none" and preset == "none" and records[0]["status"] != "oom":
            return


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path, help="Default: docs/precision.md.")
    parser.add_argument("--only", action="append", choices=LADDERS, help="A rung; repeat it. Default: all.")
    parser.add_argument("--arm", action="append", choices=[arm.name for arm in ARMS], help="An arm; repeat it.")
    parser.add_argument("--quick", action="store_true", help="The preset's micro-batch alone, for a moment.")
    parser.add_argument("--add", action="store_true", help="Keep what --output's JSON holds of other rungs and arms.")
    parser.add_argument("--page", action="store_true", help="Measure nothing.")
    parser.add_argument("--smoke", action="store_true")
    args = parser.parse_args()
    args.output = place(args.output, "docs/precision.md", args.smoke)
    source = data_path(args.output)
    picture = args.output.with_suffix(".png")

    def write(data: dict[str, Any] | None, drawn: bool = False) -> None:
        shown = draw(data, picture) if data and drawn else None
        text = page(data, read(LOSS), os.path.relpath(source, args.output.parent), shown)
        if data is None or args.page:  # the JSON may be that of a run, which goes on
            write_bytes(args.output, text.encode())
        else:
            write_table(args.output, data, text)

    before = read(source)
    if args.page:
        write(before, drawn=True)
        return 0
    on_card = torch.cuda.is_available()
    if not on_card and not args.smoke:
        parser.error("there is no card here; --smoke runs a small model on the CPU, --page writes the page")
    arms = [arm for arm in (ON_CPU if args.smoke else ARMS) if not args.arm or arm.name in args.arm]
    names, picked = list(args.only or LADDERS), {arm.name for arm in arms}
    machine, taken = describe(on_card), []
    data: dict[str, Any] = {"arms": [arm.name for arm in arms], "missing": [] if args.smoke else [*names], "runs": []}
    if args.add and before:
        data["missing"] += [name for name in before.get("missing", []) if name not in names]
        data["runs"] = [r for r in before["runs"] if r["name"] not in names or r["arm"] not in picked]
        there = picked | {r["arm"] for r in data["runs"]}
        data["arms"] = [arm.name for arm in ARMS if arm.name in there]

    def keep(record: dict[str, Any]) -> None:
        taken.append(record | {"machine": machine})
        data["runs"].append(taken[-1])
        write(data)

    with tempfile.TemporaryDirectory(prefix="precision-") as folder:
        if args.smoke:
            smoke = Path(folder) / "smoke.toml"
            smoke.write_text(SMOKE)
            names = [str(smoke)]
        for name in names:
            shape, timing, _ = what_to_run({}, name, None, None, None)
            timing = dataclasses.replace(timing, seconds=0.4, bursts=3, warmup=3)
            if args.quick:
                timing = dataclasses.replace(timing, seconds=0.15, bursts=2, warmup=2)
            if args.smoke:
                timing = dataclasses.replace(timing, seconds=0.02, bursts=2, warmup=1, device="cpu")
            for arm in arms:
                # torchao has no experts, and what scales linears differently moves a routed rung by little.
                if shape.model.moe and (arm.peer or not (arm.routed or args.arm)):
                    continue
                short = Path(name).stem if args.smoke else name
                run_rung(short, arm, shape, timing, Path(folder), args.quick or args.smoke, keep)
            data["missing"] = [other for other in data["missing"] if other != name]
    write(data, drawn=True)
    failed = [f"{r['name']} {r['arm']}: {r['reason']}" for r in taken if r["status"] == "failed"]
    print(f"FAILED: {'; '.join(failed)}" if failed else f"{len(taken)} runs")
    return int(bool(failed))


if __name__ == "__main__":
    sys.exit(main())
