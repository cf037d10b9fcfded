"""One card against many: tokens a second by ranks, what a sum over them costs, and a model of larger clusters.

    python scripts/bench/parallel.py --ranks 2 [--rows weak-1 weak-8 strong] [--output docs/scaling.md]
    python scripts/bench/parallel.py --ranks 2 --checks      # the same losses on one and many; saved on many, gone on
    python scripts/bench/parallel.py --smoke                 # a tiny model over gloo on the CPU

Each measurement starts its ranks anew: one card, all ranks, one card again (what the two differ by is the floor). With
several ranks a step is timed with its sum over them and without, in turns. Rows measured before stay in the JSON, each
with the machine it was taken on.
"""

import argparse
import json
import os
import shutil
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch

from llmtrain.benchmark.config import Shape, TimingConfig
from llmtrain.benchmark.data import skewed_tokens
from llmtrain.benchmark.machine import describe, headline
from llmtrain.benchmark.scaling import (
    Cluster,
    Link,
    SumPoint,
    bubble,
    data_parallel_s,
    fit_link,
    fsdp_s,
    pipeline_s,
    ring,
)
from llmtrain.benchmark.step import RandomSteps, model_figures
from llmtrain.benchmark.tables import data_path, table, write_table
from llmtrain.benchmark.timing import burst, steps_for
from llmtrain.corpus.batches import micro_batches
from llmtrain.model.config import ModelConfig
from llmtrain.model.flops import parameter_counts
from llmtrain.model.transformer import Transformer
from llmtrain.storage.journal import JsonLines
from llmtrain.training import checkpoint
from llmtrain.training.config import OptimizerConfig, RunConfig
from llmtrain.training.devices import pick_device
from llmtrain.training.flat import FlatParameters
from llmtrain.training.optimizer import AdamW
from llmtrain.training.parallel import World, world_of
from llmtrain.training.replay import bit_hash

MODEL_102M = ModelConfig(
    vocab_size=32000, d_model=768, n_layers=16, n_heads=12, n_kv_heads=4, head_dim=64, d_ff=1408, max_seq_len=1024
)
MODEL_1B = ModelConfig(
    vocab_size=32000, d_model=2048, n_layers=16, n_heads=32, n_kv_heads=8, head_dim=64, d_ff=8192, max_seq_len=2048
)
MODEL_SMOKE = ModelConfig(
    vocab_size=512, d_model=64, n_layers=2, n_heads=2, n_kv_heads=1, head_dim=32, d_ff=128, max_seq_len=64
)
SUM_BYTES = (4 << 20, 32 << 20, 128 << 20, 408 << 20)
# Assumed of what is not here, and said so in the page: eight cards a box on NVLink, 400 Gb/s of network a card, and
# boxes without NVLink over PCIe 5.
FAR = Link(10e-6, 50e9)
PCIE = Link(10e-6, 25e9)
CARDS_OF_BOX = 8
SIZES = (8, 64, 1024)
STEPS = 200


@dataclass(frozen=True)
class Row:
    """A line of the table. strong: the step keeps its tokens, so each rank has its share of the batch."""

    name: str
    shape: Shape
    strong: bool = False
    target: str = ""

    def of_rank(self, ranks: int) -> Shape:
        return replace(self.shape, batch_size=max(1, self.shape.batch_size // ranks)) if self.strong else self.shape


def rows_of(smoke: bool) -> list[Row]:
    if smoke:
        shape = Shape(MODEL_SMOKE, 4, 64)
        return [
            Row("weak-1", shape), Row("weak-8", replace(shape, accumulate=8)), Row("strong", shape, strong=True),
        ]  # fmt: skip
    shape = Shape(MODEL_102M, 64, 1024)
    return [
        Row("weak-1", shape, target="1.93, goal 1.97 on two"),
        Row("weak-8", replace(shape, accumulate=8), target="1.98, goal 1.99 on two"),
        Row("strong", shape, strong=True),
        Row("strong-262144", replace(shape, accumulate=4), strong=True),
        Row("weak-1b", Shape(MODEL_1B, 8, 2048)),
    ]


# The ranks' side.


def time_sums(world: World, device: torch.device, sizes: tuple[int, ...]) -> list[dict[str, float]]:
    """Medians of sums over the ranks, of buffers of `sizes` bytes."""
    points, few = [], torch.zeros(3, dtype=torch.float64, device=device)
    for size in sizes:
        buffer = torch.zeros(size // 4, device=device)
        taken = []
        for _ in range(12):
            world.totals(device, 0.0)  # all begin together
            taken.append(burst(lambda buffer=buffer: world.add_gradients(buffer, few), 3, device).wall_s / 3)
        points.append({"ranks": world.size, "bytes": size, "seconds": statistics.median(taken[2:])})
    return points


def time_row(row: Row, world: World, device: torch.device, timing: TimingConfig) -> dict[str, Any]:
    """Bursts with the sum over the ranks and without, in turns; the time of each is that of the slowest rank."""
    shape = row.of_rank(world.size)
    steps = RandomSteps(shape, timing, device)
    arms = {"apart": None} if world.alone else {"apart": None, "together": world.add_gradients}
    count = world.least(steps_for(steps, timing.seconds, device, warmup=timing.warmup))
    taken: dict[str, list[float]] = {arm: [] for arm in arms}
    for turn in range(timing.bursts):
        for arm in sorted(arms, reverse=turn % 2 == 1):
            steps.step.add_up = arms[arm]
            world.totals(device, 0.0)
            wall = burst(steps, count, device).wall_s / count
            taken[arm].append(-world.least(-round(wall * 1e9)) / 1e9)
    return {"shape": asdict(shape), "ranks": world.size, "steps": count, "step_s": taken}


def hash_state(folder: Path, world: World, device: torch.device) -> list[int]:
    """Of the weights and moments that this rank has after a resume from the checkpoint."""
    _, config, _ = checkpoint.load_model(folder)
    model = Transformer(config, device="meta")
    flat = FlatParameters(model, device, torch.bfloat16)
    optimizer = AdamW(flat, OptimizerConfig())
    if world.first:
        checkpoint.load(folder, flat, optimizer)
    buffers = (flat.master, optimizer.exp_avg, optimizer.exp_avg_sq)
    world.copy_from_first(*buffers)
    return [int(bit_hash(buffer)) for buffer in buffers]


def work(args: argparse.Namespace) -> None:
    """A rank: rank 0 prints a JSON line for each thing it has measured."""
    known = {row.name: row for row in rows_of(args.smoke)}
    timing = TimingConfig(seconds=args.seconds, bursts=args.bursts, precision="fp32" if args.smoke else "bf16")
    with world_of(RunConfig(run_dir=Path(args.folder), device="cpu" if args.smoke else "auto"), pick_device) as (
        world,
        device,
    ):
        if args.hash:
            hashes = hash_state(Path(args.hash), world, device)
            same = not world.any(device, hashes != world.from_first(lambda: hashes))
            if world.first:
                print(json.dumps({"hashes": hashes, "same": same}), flush=True)
            return
        if not world.alone:
            sums = time_sums(world, device, tuple(s // 64 for s in SUM_BYTES) if args.smoke else SUM_BYTES)
            if world.first:
                print(json.dumps({"sums": sums}), flush=True)
        for name in args.rows:
            result = time_row(known[name], world, device, timing)
            if world.first:
                print(json.dumps({"row": name, **result}), flush=True)


# The side that starts them.


def environments(ranks: int) -> list[dict[str, str]]:
    """What torchrun sets for each rank of a box."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    shared = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "WORLD_SIZE": str(ranks)}
    return [{**os.environ, **shared, "RANK": str(i), "LOCAL_RANK": str(i)} for i in range(ranks)]


def on_ranks(ranks: int, command: list[str], quiet: bool = False) -> str:
    """Runs a command as so many ranks; what rank 0 prints. Raises RuntimeError where one fails."""
    processes = [
        subprocess.Popen(command, env=env, text=True, stdout=subprocess.DEVNULL if i or quiet else subprocess.PIPE)
        for i, env in enumerate(environments(ranks))
    ]
    out = processes[0].communicate()[0] or ""
    codes = [process.wait() for process in processes]
    if any(codes):
        raise RuntimeError(f"ranks ended with {codes}: {' '.join(command)}")
    return out


def measured(args: argparse.Namespace, ranks: int, folder: str, *more: str) -> list[dict[str, Any]]:
    command = [sys.executable, __file__, "--worker", "--folder", folder, "--seconds", str(args.seconds)]
    command += ["--bursts", str(args.bursts), *["--smoke"] * args.smoke, "--rows", *args.rows, *more]
    return [json.loads(line) for line in on_ranks(ranks, command).splitlines()]


def topology() -> str | None:
    program = shutil.which("nvidia-smi")
    if program is None:
        return None
    done = subprocess.run([program, "topo", "-m"], capture_output=True, text=True, timeout=30)
    return done.stdout if done.returncode == 0 else None


def measure_rows(args: argparse.Namespace, machine: dict, folder: str) -> tuple[list[dict], list[dict]]:
    """The table's rows, and the sums over ranks."""
    before = {r["row"]: r for r in measured(args, 1, folder)}
    many = measured(args, args.ranks, folder)
    after = {r["row"]: r for r in measured(args, 1, folder)}
    known = {row.name: row for row in rows_of(args.smoke)}
    rows = []
    for result in (r for r in many if "row" in r):
        name = result["row"]
        one = [statistics.median(r[name]["step_s"]["apart"]) for r in (before, after)]
        alone, row = statistics.mean(one), known[name]
        together = result["step_s"]["together"]
        tokens = Shape(**result["shape"] | {"model": row.shape.model}).tokens_per_step * args.ranks
        tokens_one = row.shape.tokens_per_step
        step = statistics.median(together)
        rows.append({
            "name": name, "strong": row.strong, "target": row.target, "ranks": args.ranks, "shape": result["shape"],
            "one_step_s": one, "one_shape": asdict(row.shape), "step_s": together, "median_s": step,
            "apart_s": statistics.median(result["step_s"]["apart"]), "mean_s": statistics.mean(together),
            "spread": (max(together) - min(together)) / step, "floor": abs(one[1] - one[0]) / alone,
            "tok_per_s": tokens / step, "times_one": tokens / step / (tokens_one / alone), "machine": machine,
            **model_figures(row.shape),
        })  # fmt: skip
        told = f"{name}: {rows[-1]['times_one']:.3f} times one on {args.ranks}, floor {rows[-1]['floor']:.2%}"
        print(told, flush=True)
    return rows, next(r["sums"] for r in many if "sums" in r)


def train(args: argparse.Namespace, ranks: int, run_dir: Path, tokens: Path, batch_size: int) -> dict[int, float]:
    """Losses by step."""
    model, seq_len = (MODEL_SMOKE, 64) if args.smoke else (MODEL_102M, 1024)
    names = ("vocab_size", "d_model", "n_layers", "n_heads", "n_kv_heads", "head_dim", "d_ff", "max_seq_len")
    command = [sys.executable, "-m", "llmtrain", "train", "--tokens", str(tokens), "--run-dir", str(run_dir)]
    command += [text for name in names for text in (f"--{name.replace('_', '-')}", str(getattr(model, name)))]
    command += ["--seq-len", str(seq_len), "--batch-size", str(batch_size), "--global-batch-size", str(args.sequences)]
    command += ["--total-steps", str(args.steps), "--warmup-steps", "20", "--log-every", "1", "--resume"]
    command += ["--checkpoint-every", str(args.steps // 4), "--keep-checkpoints", "9"]
    command += ["--device", "cpu", "--precision", "fp32"] if args.smoke else []
    on_ranks(ranks, command, quiet=True)
    lines = JsonLines.read(run_dir / "metrics.jsonl")
    return {line["step"]: line["lm_loss"] for line in lines if line["kind"] == "train"}


def go_on_from(run_dir: Path, step: int, copy: Path) -> Path:
    """A run directory as it was after the save of `step`."""
    (copy / "checkpoints").mkdir(parents=True)
    shutil.copy(run_dir / "config.toml", copy)
    shutil.copytree(checkpoint.folder_of(run_dir, step), checkpoint.folder_of(copy, step))
    return copy


def run_checks(args: argparse.Namespace, folder: Path) -> dict[str, Any]:
    """One card against many as runs: losses, data order, state."""
    tokens = folder / "random.u16"
    args.sequences, args.steps = (8, 40) if args.smoke else (64, STEPS)
    model, seq_len = (MODEL_SMOKE, 64) if args.smoke else (MODEL_102M, 1024)
    ids = skewed_tokens(model.vocab_size, (args.sequences * seq_len * args.steps // 2,), 0)
    ids.numpy().astype("uint16").tofile(tokens)
    share = args.sequences // args.ranks
    one = train(args, 1, folder / "one", tokens, share)
    other = train(args, 1, folder / "other", tokens, args.sequences)
    many = train(args, args.ranks, folder / "many", tokens, share)
    quarter = args.steps // 4

    def gap(a: dict[int, float], b: dict[int, float]) -> float:
        return max(abs(a[step] - b[step]) for step in a.keys() & b.keys())

    found: dict[str, Any] = {"steps": args.steps, "gap_many": gap(one, many), "gap_other_split": gap(one, other)}
    back = go_on_from(folder / "many", quarter, folder / "back")
    on_one = train(args, 1, back, tokens, share)
    again = go_on_from(back, 2 * quarter, folder / "again")
    on_many = train(args, args.ranks, again, tokens, share)
    found |= {"gap_resumed_on_one": gap(many, on_one), "gap_back_on_many": gap(many, on_many)}
    hashes = []
    for run_dir, step in ((folder / "many", quarter), (back, 2 * quarter)):
        where = str(checkpoint.folder_of(run_dir, step))
        (one_hash,), (many_hash,) = (measured(args, n, str(folder), "--hash", where) for n in (1, args.ranks))
        hashes.append(many_hash["same"] and one_hash["hashes"] == many_hash["hashes"])
    whole = dict(start=0, stop=997, sequences_per_step=args.sequences, batch_size=share)
    of_ranks = zip(*(micro_batches(**whole, rank=r, ranks=args.ranks) for r in range(args.ranks)), strict=True)
    order = [int(i) for groups in of_ranks for group in groups for i in group if i >= 0]
    scatter = max(found["gap_other_split"], 1e-6)
    found["checks"] = {
        f"losses on one and on {args.ranks} differ by at most {2 * scatter:.2g} over {args.steps} steps, twice what "
        "another split on one card does": found["gap_many"] <= 2 * scatter,
        f"saved on {args.ranks}, resumed on one, and back: losses within the same": max(
            found["gap_resumed_on_one"], found["gap_back_on_many"]
        ) <= 2 * scatter,
        "weights and moments have the same bits on every rank after each of these resumes": all(hashes),
        "the ranks' samples together are those of one rank, in order": order == list(range(997)),
    }  # fmt: skip
    return found


# What a page is made of.


def prediction(row: dict, link: Link) -> float:
    """The model's step: that of the ranks without their sum, and the sum."""
    size = 4 * row["parameters"]
    return row["apart_s"] + ring(row["ranks"], size, link)


def modelled(rows: list[dict], link: Link) -> list[list[str]]:
    """Lines of the table of clusters that there are not."""
    lines = []
    for row in rows:
        if row["strong"]:
            continue
        one = statistics.mean(row["one_step_s"])
        shape = Shape(**row["one_shape"] | {"model": ModelConfig(**row["one_shape"]["model"])})
        parameters = parameter_counts(shape.model).total
        for cards in SIZES:
            near = Cluster(cards, CARDS_OF_BOX, link, FAR)
            ddp = one / data_parallel_s(one, parameters, near)
            pcie = one / data_parallel_s(one, parameters, Cluster(cards, CARDS_OF_BOX, PCIE, FAR))
            fsdp = one / fsdp_s(one, parameters, shape.model.n_layers, shape.accumulate, near)
            stages = min(8, shape.model.n_layers)
            micro = 2 * stages
            pipe = one / stages / pipeline_s(one, stages, micro)
            lines.append([
                row["name"], str(cards), f"{ddp:.1%}", f"{pcie:.1%}", f"{fsdp:.1%}", f"{pipe:.1%}",
                f"{cards * ddp * shape.tokens_per_step / one:,.0f}",
            ])  # fmt: skip
    return lines


def markdown(data: dict, source: str) -> str:
    """docs/scaling.md."""
    rows, points = data["rows"], [SumPoint(**p) for p in data["sums"]]
    link = fit_link(points)
    lines = [
        "# One card and many", "",
        "**A tiny model over gloo on a CPU: what stands here shows that the script works.**\n" * data["smoke"],
        f"Made by `scripts/bench/parallel.py` from [{source}]({source}). {headline(data['machine'])}", "",
        "Each rank has the whole model and its part of every step; between the last micro-batch and the update the "
        "FP32 gradients are summed over the ranks. `times one` compares tokens a second with one rank's. `floor` is "
        "what one rank, measured before and after, differs by.", "",
    ]  # fmt: skip
    cells = []
    for row in rows:
        shape, predicted = row["shape"], prediction(row, link)
        cells.append([
            row["name"], "strong" if row["strong"] else "weak", str(row["ranks"]),
            f"{shape['batch_size']} x {shape['seq_len']} x {shape['accumulate']}", f"{row['parameters'] / 1e6:,.1f}M",
            f"{1e3 * statistics.mean(row['one_step_s']):.2f}", f"{1e3 * row['mean_s']:.2f}", f"{row['spread']:.1%}",
            f"{row['tok_per_s']:,.0f}", f"{row['times_one']:.3f}", f"{row['floor']:.2%}", row["target"],
            f"{1e3 * predicted:.2f}", f"{predicted / row['median_s'] - 1:+.1%}",
        ])  # fmt: skip
    header = (
        "row", "scaling", "ranks", "of a rank", "parameters", "one, ms", "mean, ms", "spread", "tok/s", "times one",
        "floor", "must", "model, ms", "model off",
    )  # fmt: skip
    lines += table(header, cells)
    lines += ["", "A sum over the ranks alone:", ""]
    lines += table(
        ("ranks", "MB", "ms", "GB/s a rank sends", "model, ms"),
        [
            [
                str(p.ranks), f"{p.bytes / 1e6:,.1f}", f"{1e3 * p.seconds:.3f}",
                f"{2 * (p.ranks - 1) / p.ranks * p.bytes / p.seconds / 1e9:.1f}",
                f"{1e3 * ring(p.ranks, p.bytes, link):.3f}",
            ]
            for p in points
        ],
        numbers_from=0,
    )  # fmt: skip
    lines += [
        "", "## The model", "",
        "A step of data parallel is the step of one card and the sum, which hides behind nothing: of S bytes over n "
        "cards of a box it takes 2 (n - 1) (latency + S / n / bandwidth). Between boxes each card sums its share of "
        "the box's result: 2 (b - 1) / b of it over its network, and a tree's latency. FSDP moves, for each "
        "micro-batch, 8 bytes a parameter beside the computation, so it takes the longer of the two. A pipeline of p "
        "stages takes (p - 1) / m longer with m micro-batches.", "",
        f"Fitted here: latency {1e6 * link.latency_s:.0f} us, {link.bytes_per_s / 1e9:.1f} GB/s. Assumed: boxes of "
        f"{CARDS_OF_BOX}, a network of {FAR.bytes_per_s / 1e9:.0f} GB/s a card with {1e6 * FAR.latency_s:.0f} us, PCIe "
        f"at {PCIE.bytes_per_s / 1e9:.0f} GB/s. Shares of a perfect n times one card, each card with the batch of the "
        "row:", "",
    ]  # fmt: skip
    lines += table(
        ("row", "cards", "data parallel", "without NVLink", "FSDP", "pipeline of 8, 16 micro-batches", "tok/s"),
        modelled(rows, link),
    )
    lines += [
        "", f"A pipeline's bubble with 8 stages and 16 micro-batches: 1F1B {bubble(8, 16, '1f1b'):.1%}, interleaved "
        f"by 2 {bubble(8, 16, 'interleaved'):.1%}, zero-bubble {bubble(8, 16, 'zero-bubble'):.1%}.", "",
    ]  # fmt: skip
    if checks := data.get("checks"):
        lines += [f"## Runs on one and on {data['check_ranks']}", ""]
        lines += table(("check", "holds"), [[k, "yes" if v else "**no**"] for k, v in checks["checks"].items()])
        lines += [""]
    if data.get("topology"):
        lines += ["## Topology", "", "```", data["topology"].rstrip(), "```", ""]
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--rows", nargs="+", help="default: weak-1 weak-8 strong")
    parser.add_argument("--seconds", type=float, default=1.0, help="length of a burst")
    parser.add_argument("--bursts", type=int, default=5)
    parser.add_argument("--checks", action="store_true", help="runs on one and on many instead of rows")
    parser.add_argument("--output", type=Path, help="Markdown; its JSON goes to data/ beside it")
    parser.add_argument("--smoke", action="store_true")
    parser.add_argument("--worker", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("--folder", help=argparse.SUPPRESS)
    parser.add_argument("--hash", help=argparse.SUPPRESS)
    args = parser.parse_args()
    args.rows = args.rows or ["weak-1", "weak-8", "strong"]
    if unknown := set(args.rows) - {row.name for row in rows_of(args.smoke)}:
        parser.error(f"no such rows: {', '.join(sorted(unknown))}")
    if args.worker:
        return work(args)
    since = time.perf_counter()
    machine = describe(torch.cuda.is_available() and not args.smoke)
    data: dict[str, Any] = {"rows": [], "sums": []}
    if args.output and data_path(args.output).exists():
        data = json.loads(data_path(args.output).read_text())
    if data.get("smoke", args.smoke) != args.smoke:
        data = {"rows": [], "sums": []}
    data |= {"smoke": args.smoke, "machine": machine, "topology": topology() or data.get("topology")}
    holds = True
    with tempfile.TemporaryDirectory() as folder:
        if args.checks:
            data["checks"], data["check_ranks"] = run_checks(args, Path(folder)), args.ranks
            for check, ok in data["checks"]["checks"].items():
                print("ok  " if ok else "FAIL", check)
                holds &= ok
        else:
            rows, sums = measure_rows(args, machine, folder)
            taken = {(row["name"], row["ranks"]) for row in rows}
            data["rows"] = [r for r in data["rows"] if (r["name"], r["ranks"]) not in taken] + rows
            data["sums"] = [p for p in data["sums"] if p["ranks"] != args.ranks] + sums
    print(f"took {time.perf_counter() - since:.0f} s")
    if args.output and data["rows"]:
        write_table(args.output, data, markdown(data, f"data/{data_path(args.output).name}"))
    sys.exit(0 if holds else 1)


if __name__ == "__main__":
    main()
