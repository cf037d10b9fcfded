"""Checks of the training step on a card: against the CPU, captured against uncaptured, without a sync, and bit-equal.

    python scripts/bench/check_step.py --tokens data/corpus.u16 --output docs/step-checks.md

The curves come out of docs/data/step-checks.json by scripts/bench/plot_curves.py. Exits 1 where a bound does not hold.
`--render FILE` makes the page anew from an earlier JSON, judging its curves by today's bounds. `--smoke` runs the same
checks on a small model, on the CPU too.
"""

import argparse
import json
import math
import statistics
import subprocess
import sys
import time
import typing
from dataclasses import replace
from pathlib import Path

import numpy as np
import torch
from models import MODEL_102M

from llmtrain.benchmark.machine import describe, headline
from llmtrain.benchmark.tables import table, write_page
from llmtrain.corpus.batches import assemble
from llmtrain.corpus.order import SampleOrder, Source
from llmtrain.corpus.token_file import TokenFile
from llmtrain.model.config import CheckpointActivations, ModelConfig
from llmtrain.training.config import OptimizerConfig, ScheduleConfig
from llmtrain.training.schedule import learning_rate
from llmtrain.training.spikes import SpikeRule
from llmtrain.training.step import TrainStep

SMALL = ModelConfig(
    vocab_size=16384, d_model=256, n_layers=4, n_heads=4, n_kv_heads=2, head_dim=64, d_ff=704, max_seq_len=1024
)
ODD = ModelConfig(
    vocab_size=501, d_model=112, n_layers=2, n_heads=3, n_kv_heads=1, head_dim=32, d_ff=176, max_seq_len=1024,
    z_loss=1e-4,
)  # fmt: skip
"""Sizes that no kernel's blocks divide; ids are taken modulo its vocabulary."""
OPTIMIZER = OptimizerConfig(learning_rate=4e-4, weight_decay=0.1)
REPLICATES = 4
"""Runs of 200 steps in bf16, captured and not."""


def curve(
    order: SampleOrder, model: ModelConfig, *, device: str, precision: str, steps: int, batch: int, accumulate: int = 1,
    capture: bool | None = None, deterministic: bool = False, seed: int = 0, no_sync: bool = False,
    checkpoint_activations: CheckpointActivations = "none", skip_spikes: float = 0.0,
) -> tuple[list[float], TrainStep]:
    """Losses of `steps` steps on the same samples in the same order, and the step they ended in. skip_spikes: with the
    rule of --skip-spikes on a window that is full after 8 steps."""
    step = TrainStep.build(
        model, OPTIMIZER, batch_size=batch, seq_len=order.seq_len, precision=precision, device=device,
        deterministic=deterministic, seed=seed, capture=capture, checkpoint_activations=checkpoint_activations,
    )  # fmt: skip
    if skip_spikes:
        step.optimizer.spikes = SpikeRule(skip_spikes, step.flat.master.device, window=8, row=2)
    schedule = ScheduleConfig(warmup_steps=steps // 4)  # short warmups spike, and spikes scatter
    losses = torch.zeros(steps, dtype=torch.float64, device=device)
    for i in range(steps):
        batches = []
        for j in range(accumulate):
            at = (i * accumulate + j) * batch
            made = assemble(order, np.arange(at, at + batch))
            ids, targets = made.ids % model.vocab_size, made.targets.clone()
            targets[targets >= 0] %= model.vocab_size
            batches.append((ids.to(device), targets.to(device)))
        if no_sync and i == 2:
            torch.cuda.synchronize()
            torch.cuda.set_sync_debug_mode("error")
        for j, (ids, targets) in enumerate(batches):
            step.micro_step(ids, targets, first=j == 0)
        step.optimizer_step(learning_rate(i, steps, OPTIMIZER, schedule))
        losses[i] = step.last[0]
        if no_sync:
            torch.cuda.set_sync_debug_mode("default")
    if step.why_not_captured:
        print("not captured:", step.why_not_captured)
    return losses.tolist(), step


def gap(a: list[float], b: list[float]) -> float:
    """Largest relative difference of two curves."""
    return max(abs(x - y) / abs(y) for x, y in zip(a, b, strict=True))


def copies(arm: str) -> list[str]:
    """Names of an arm's runs, all of the same settings: atomics add in another order each time."""
    return [arm, *(f"{arm} {i}" for i in range(2, REPLICATES + 1))]


def tail(losses: list[float]) -> float:
    """Mean of the last tenth."""
    n = max(1, len(losses) // 10)
    return sum(losses[-n:]) / n


def in_scatters(apart: float, scatter: float) -> float:
    """On a CPU nothing scatters, and nothing may be apart."""
    return apart / scatter if scatter else apart and math.inf


def judge(curves: dict[str, list[float]]) -> dict[str, dict]:
    """The checks that rest on the loss curves alone."""
    ends = {name: tail(losses) for name, losses in curves.items()}
    steps = len(curves["fp32"])
    captured, uncaptured = ([ends[name] for name in copies(arm)] for arm in ("captured", "uncaptured"))
    # One run against another would differ by more than two others do in every third case, with nothing wrong.
    scatter = max(max(arm) - min(arm) for arm in (captured, uncaptured))
    mean = statistics.mean(captured)
    seeds = max(scatter, abs(mean - ends["seed"]))
    gaps = {
        "uncaptured": (abs(mean - statistics.mean(uncaptured)), scatter, 1.0),
        "fp32": (abs(mean - ends["fp32"]), seeds, 2.0),
    }  # fmt: skip
    return {
        f"bf16 against {name}, {steps} steps, in scatters": verdict(in_scatters(apart, of), bound)
        | {"scatter": of, "ends": ends}
        for name, (apart, of, bound) in gaps.items()
    }


def verdict(value: float, bound: float) -> dict:
    return {"value": value, "bound": bound, "holds": value <= bound}


def bits(step: TrainStep) -> str:
    import hashlib

    return hashlib.sha256(step.flat.master.cpu().numpy().tobytes()).hexdigest()


def state_of(step: TrainStep) -> list[torch.Tensor]:
    """All that an update that is not applied must leave as it is."""
    of_optimizer = step.optimizer
    narrow = [] if step.flat.narrow is None else [step.flat.narrow]
    return [step.flat.master, of_optimizer.exp_avg, of_optimizer.exp_avg_sq, of_optimizer.count, *narrow]


def changed_by_nan(step: TrainStep) -> int:
    """Tensors that a step changes whose gradient is not finite in one place, and counts that do not say so."""
    before = [tensor.clone() for tensor in state_of(step)]
    _, skipped, in_a_row = step.optimizer.tally.tolist()
    step.micro_step(step.ids.clone(), step.targets.clone(), first=True)
    step.flat.grad[7] = float("nan")
    step.optimizer_step(1e-3)
    changed = sum(not torch.equal(a, b) for a, b in zip(before, state_of(step), strict=True))
    return changed + (step.optimizer.tally.tolist()[1:] != [skipped + 1, in_a_row + 1])


def deterministic_child(order: SampleOrder, model: ModelConfig, device: str, steps: int, batch: int) -> None:
    weights, captured = {}, {}
    for mode in typing.get_args(CheckpointActivations):
        losses, step = curve(
            order, model, device=device, precision="bf16", steps=steps, batch=batch, accumulate=2, deterministic=True,
            checkpoint_activations=mode,
        )  # fmt: skip
        weights[mode], captured[mode] = bits(step), bool(step.graphs)
    print(json.dumps({"bits": weights, "loss": losses[-1], "captured": captured}))


def markdown(result: dict, source: str) -> str:
    """docs/step-checks.md."""
    rows = [
        [name, f"{check['value']:.3g}", f"{check['bound']:.3g}", "yes" if check["holds"] else "**no**"]
        for name, check in result["checks"].items()
    ]
    ends = ", ".join(f"{name} {tail(losses):.4f}" for name, losses in result["curves"].items())
    lines = [
        "# The training step, checked", "", f"Model: {result['model']}. {headline(result['machine'])}", "",
        f"Scatter is what {REPLICATES} runs of the same settings range over (atomics add in another order), captured "
        "or not, whichever is larger, by the mean loss of the last tenth of the steps; the means of either are "
        "compared. Against FP32 it is what another seed is apart from them, if that is more.", "",
        *table(["check", "value", "at most", "holds"], rows), "",
        f"Mean losses of the last tenth: {ends}.", "", "![loss curves](bf16-against-fp32.png)", "",
        f"Made by `scripts/bench/check_step.py` from [{source}]({source}).", "",
    ]  # fmt: skip
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", help="token file to read")
    parser.add_argument("--output", type=Path, help="Markdown; its JSON goes to data/ beside it")
    parser.add_argument("--render", type=Path, help="take no measurement, render this JSON")
    parser.add_argument("--smoke", action="store_true")
    parser.add_argument("--deterministic-child", action="store_true", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.render:
        artifact = json.loads(args.render.read_text())
        measured = {name: check for name, check in artifact["checks"].items() if "scatters" not in name}
        artifact["checks"] = measured | judge(artifact["curves"])
        write_page(args.output, artifact, markdown)
        return

    device = "cuda" if torch.cuda.is_available() else "cpu"
    order = SampleOrder([Source("corpus", TokenFile.open(args.tokens), 1.0)], 128 if args.smoke else 1024, seed=0)
    big = replace(SMALL, n_layers=2, d_model=128) if args.smoke else MODEL_102M
    small = replace(SMALL, n_layers=2, d_model=128) if args.smoke else SMALL
    long, batch = (20, 2) if args.smoke else (200, 16)
    if args.deterministic_child:
        deterministic_child(order, big, device, 10, batch)
        return

    results: dict[str, dict] = {}
    runs: dict[str, list[float]] = {}
    machine = describe(device == "cuda")

    def check(name: str, value: float, bound: float, **more: object) -> None:
        results[name] = verdict(value, bound) | more
        say(name)

    def say(name: str) -> None:
        one = results[name]
        mark = "ok  " if one["holds"] else "FAIL"
        print(f"{mark} {name}: {one['value']:.3g} (at most {one['bound']:.3g})", flush=True)
        if args.output and runs:  # after every check: a run that is cut short keeps what it found
            artifact = {"machine": machine, "model": "102M, 16 x 1024", "checks": results, "curves": runs}
            write_page(args.output, artifact, markdown)

    began = time.time()
    cpu, _ = curve(order, small, device="cpu", precision="fp32", steps=20, batch=4)
    gpu, step = curve(order, small, device=device, precision="fp32", steps=20, batch=4)
    check("fp32 on the card against the CPU, 20 steps", gap(gpu, cpu), 1e-3, captured=bool(step.graphs))

    cpu, _ = curve(order, ODD, device="cpu", precision="fp32", steps=10, batch=3)
    for precision, bound in (("fp32", 1e-3), ("bf16", 1e-2)):
        gpu, _ = curve(order, ODD, device=device, precision=precision, steps=10, batch=3)
        check(f"odd sizes in {precision} on the card against the CPU, 10 steps", gap(gpu, cpu), bound)

    eager, _ = curve(order, small, device=device, precision="fp32", steps=10, batch=4, accumulate=3, capture=False)
    captured, _ = curve(order, small, device=device, precision="fp32", steps=10, batch=4, accumulate=3)
    check("captured against uncaptured, fp32, 3 micro-steps", gap(captured, eager), 1e-5)
    whole, _ = curve(order, small, device=device, precision="fp32", steps=10, batch=12)
    check("3 micro-steps against one batch, fp32", gap(captured, whole), 1e-5)

    rule = {"precision": "fp32", "steps": 20, "batch": 4, "skip_spikes": 0.5 if args.smoke else 1.0}
    eager, one = curve(order, small, device=device, capture=False, **rule)
    captured, other = curve(order, small, device=device, **rule)
    tallies = [[s.optimizer.tally.tolist(), s.optimizer.spikes.tally.tolist()] for s in (one, other)]
    check("captured against uncaptured, skipping spikes", gap(captured, eager), 1e-4, tallies=tallies)
    # Without a single spike nothing was compared.
    told_apart = tallies[0] != tallies[1] or not tallies[0][1][2]
    check("counts of skipped steps that differ, or are 0", float(told_apart), 0.0)
    nan = float(changed_by_nan(other))
    check("what a captured step with a NaN gradient changes", nan, 0.0, captured=bool(other.graphs))

    arms = {name: {} for name in copies("captured")} | {name: {"capture": False} for name in copies("uncaptured")}
    for name, settings in (arms | {"seed": {"seed": 1}}).items():
        runs[name], step = curve(order, big, device=device, precision="bf16", steps=long, batch=batch, **settings)
    runs["fp32"], _ = curve(order, big, device=device, precision="fp32", steps=long, batch=batch)
    results |= judge(runs)
    for name in judge(runs):
        say(name)

    if device == "cuda":
        try:
            for z in (0.0, 6.0):
                curve(
                    order, big, device=device, precision="bf16", steps=6, batch=batch, accumulate=2, no_sync=True,
                    skip_spikes=z,
                )  # fmt: skip
            syncs, why = 0.0, ""
        except RuntimeError as error:
            syncs, why = 1.0, str(error)
        check("host syncs in four captured steps", syncs, 0.0, why=why)
    command = [sys.executable, __file__, "--tokens", args.tokens, "--deterministic-child"]
    children = []
    for _ in range(2):
        child = subprocess.run(command + ["--smoke"] * args.smoke, check=True, stdout=subprocess.PIPE, text=True)
        children.append(json.loads(child.stdout.splitlines()[-1]))
    same = children[0]["bits"] == children[1]["bits"]
    check("two deterministic processes differ", float(not same), 0.0, **children[0])
    kinds = len(set(children[0]["bits"].values()))
    check("weights that differ by --checkpoint-activations", float(kinds - 1), 0.0)

    losses, one = curve(
        order, big, device=device, precision="bf16", steps=10, batch=batch, accumulate=2, deterministic=True,
        capture=False,
    )  # fmt: skip
    check(
        "captured against uncaptured, deterministic, weights that differ",
        float(bits(one) != children[0]["bits"]["none"]), 0.0, captured=children[0]["captured"]["none"],
    )  # fmt: skip

    # What depends on when something ran shows in some of many small steps, or in a large one that fills the card.
    for words, size, times in (("small", 4, 8), ("large", 4 * batch, 4)):
        repeats = {
            bits(curve(order, big, device=device, precision="bf16", steps=20, batch=size, deterministic=True)[1])
            for _ in range(2 if args.smoke else times)
        }
        check(f"different weights after the same 20 {words} steps, repeated", float(len(repeats) - 1), 0.0)

    wrong = [name for name, one in results.items() if not one["holds"]]
    print(f"{time.time() - began:.0f} s")
    print(f"does not hold: {'; '.join(wrong)}" if wrong else "all hold")
    sys.exit(1 if wrong else 0)


if __name__ == "__main__":
    main()
