"""One card against many: tokens a second by ranks, what a sum over them costs, and a model of larger clusters.

    python scripts/bench/parallel.py --ranks 2 [--rows weak-1 weak-8 strong] [--output docs/scaling.md]
    python scripts/bench/parallel.py --ranks 2 --rows fsdp-1b fsdp-1b-kept
    python scripts/bench/parallel.py --ranks 2 --rows ddp-1b pipeline-1b interleaved-1b zero-bubble-1b
    python scripts/bench/parallel.py --ranks 2 --rows ddp-1b-full pipeline-1b-full ddp-1b-full-fp8 pipeline-1b-full-fp8
    python scripts/bench/parallel.py --ranks 2 --checks      # the same losses on one and many; saved on many, gone on
    python scripts/bench/parallel.py --smoke                 # a tiny model over gloo on the CPU

Each measurement starts its ranks anew: one card, all ranks, one card again (what the two differ by is the floor). With
several ranks a step of data parallel is timed with its sum over them and without, in turns. Rows measured before stay
in the JSON, each with the machine it was taken on. Where the ranks fail in a row, those before it count; exits 1 then,
and where a check does not hold.
"""

import argparse
import functools
import json
import os
import shutil
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, Literal

import torch

from llmtrain.benchmark.config import Shape, TimingConfig
from llmtrain.benchmark.data import skewed_tokens
from llmtrain.benchmark.machine import describe
from llmtrain.benchmark.scaling_tables import markdown
from llmtrain.benchmark.step import TimedSteps, model_figures
from llmtrain.benchmark.tables import data_path, write_table
from llmtrain.benchmark.timing import burst, steps_for
from llmtrain.corpus.batches import micro_batches
from llmtrain.model.config import CheckpointActivations, ModelConfig
from llmtrain.model.transformer import Transformer
from llmtrain.storage.atomic import make_parent, write_json
from llmtrain.storage.journal import JsonLines
from llmtrain.training import checkpoint
from llmtrain.training.config import OptimizerConfig, PipelineSchedule, Precision, RunConfig
from llmtrain.training.devices import pick_device
from llmtrain.training.flat import FlatParameters
from llmtrain.training.grid import Grid
from llmtrain.training.muon import optimizer_of
from llmtrain.training.optimizer import AdamW
from llmtrain.training.parallel import World, world_of
from llmtrain.training.replay import bit_hash
from llmtrain.training.step import COMPUTE_DTYPES, TrainStep

MODEL_102M = ModelConfig(
    vocab_size=32000, d_model=768, n_layers=16, n_heads=12, n_kv_heads=4, head_dim=64, d_ff=1408, max_seq_len=1024
)
MODEL_1B = ModelConfig(
    vocab_size=32000, d_model=2048, n_layers=16, n_heads=32, n_kv_heads=8, head_dim=64, d_ff=8192, max_seq_len=2048
)
MODEL_SMOKE = ModelConfig(
    vocab_size=512, d_model=64, n_layers=4, n_heads=2, n_kv_heads=1, head_dim=32, d_ff=128, max_seq_len=64
)
SUM_BYTES = (4 << 20, 32 << 20, 128 << 20, 408 << 20)
STEPS = 200
KINDS: dict[str, tuple[str, PipelineSchedule]] = {
    "ddp": ("ddp", "1f1b"), "pipeline": ("pipeline", "1f1b"), "interleaved": ("pipeline", "interleaved"),
    "zero-bubble": ("pipeline", "zero-bubble"),
}  # fmt: skip


@dataclass(frozen=True)
class Row:
    """A line of the table. strong: the step keeps its tokens, so each rank has its share of the micro-batches, or of
    the one that there is; in a pipeline all of them."""

    name: str
    shape: Shape
    strong: bool = False
    target: str = ""
    parallel: Literal["ddp", "fsdp", "pipeline"] = "ddp"
    schedule: PipelineSchedule = "1f1b"
    precision: Precision = "bf16"
    checkpoint_activations: CheckpointActivations = "none"
    reshard_after_forward: bool = True

    def of_rank(self, ranks: int) -> Shape:
        if not self.strong or self.parallel == "pipeline":
            return self.shape
        if self.shape.accumulate % ranks == 0:
            return replace(self.shape, accumulate=self.shape.accumulate // ranks)
        return replace(self.shape, batch_size=max(1, self.shape.batch_size // ranks))

    def tokens(self, ranks: int) -> int:
        """Of a step of all ranks."""
        return self.shape.tokens_per_step * (1 if self.strong else ranks)

    @property
    def alone(self) -> "Row":
        """What one rank runs to compare with."""
        same = {"parallel": "ddp", "schedule": "1f1b", "reshard_after_forward": True}
        return replace(self, name="", target="", strong=False, **same)


def of_kinds(shape: Shape, suffix: str = "", **more: Any) -> list[Row]:
    """The same step by every way to share it."""
    goals = {"pipeline-1b": "goal 1.8 on two"}
    return [
        Row(f"{name}{suffix}", shape, True, goals.get(name + suffix, ""), parallel, schedule, **more)
        for name, (parallel, schedule) in KINDS.items()
    ]


def rows_of(smoke: bool) -> list[Row]:
    if smoke:
        shape = Shape(MODEL_SMOKE, 4, 64)
        rows = [
            Row("weak-1", shape), Row("weak-8", replace(shape, accumulate=8)), Row("strong", shape, strong=True),
            Row("fsdp", shape, parallel="fsdp"),
            Row("fsdp-kept", shape, parallel="fsdp", reshard_after_forward=False),
            *of_kinds(replace(shape, accumulate=4)),
            *of_kinds(replace(shape, accumulate=4), "-full", checkpoint_activations="full"),
        ]  # fmt: skip
        return [replace(row, precision="fp32") for row in rows]
    step_1b = Shape(MODEL_1B, 8, 2048, accumulate=16)
    shape = Shape(MODEL_102M, 64, 1024)
    return [
        Row("weak-1", shape, target="1.93, goal 1.97 on two"),
        Row("weak-8", replace(shape, accumulate=8), target="1.98, goal 1.99 on two"),
        Row("strong", shape, strong=True),
        Row("strong-262144", replace(shape, accumulate=4), strong=True),
        Row("weak-1b", Shape(MODEL_1B, 8, 2048)),
        Row("fsdp-1b", Shape(MODEL_1B, 8, 2048), parallel="fsdp", target="1.9, goal 1.96 on two"),
        Row("fsdp-1b-kept", Shape(MODEL_1B, 8, 2048), parallel="fsdp", reshard_after_forward=False),
        *of_kinds(step_1b, "-1b"),
        *of_kinds(step_1b, "-1b-fp8", precision="fp8"),
        *of_kinds(step_1b, "-1b-full", checkpoint_activations="full"),
        *of_kinds(step_1b, "-1b-full-fp8", checkpoint_activations="full", precision="fp8"),
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


def build_on(row: Row, world: World, device: torch.device) -> Callable[..., TrainStep]:
    """What makes the step of a rank, as `TrainStep.build` does alone."""
    if world.alone:
        return TrainStep.build
    if row.parallel == "pipeline":
        from llmtrain.training.pipeline import build_step  # seconds, which one rank need not wait

        world.arrange(Grid(stages=world.size), device)
        return functools.partial(build_step, world, row.schedule, row.shape.accumulate)
    world.arrange(Grid(shards=world.size) if row.parallel == "fsdp" else Grid(copies=world.size), device)

    def build(model_config: ModelConfig, optimizer_config: OptimizerConfig, **named: Any) -> TrainStep:
        if row.parallel == "fsdp":
            step = sharded_step(world, row.reshard_after_forward, model_config, optimizer_config, **named)
        else:
            step = TrainStep.build(model_config, optimizer_config, **named)
        step.add_up = functools.partial(world.add_gradients, sharded=step.flat.n_sharded)
        step.take_highest = world.take_highest
        return step

    return build


def sharded_step(
    world: World, reshard_after_forward: bool, model_config: ModelConfig, optimizer_config: OptimizerConfig, *,
    batch_size: int, seq_len: int, precision: str, fp8_scaling: str, device: torch.device, seed: int,
    checkpoint_activations: CheckpointActivations,
) -> TrainStep:  # fmt: skip
    """As `TrainStep.build`, of this rank's shard; fp8 it does not do."""
    from llmtrain.training.sharded import ShardedParameters

    assert precision != "fp8", fp8_scaling
    assert world.mesh is not None
    model = Transformer(model_config, device="meta")
    model.checkpoint_activations = checkpoint_activations
    flat = ShardedParameters(
        model, device, COMPUTE_DTYPES[precision], world.mesh["shard"], reshard_after_forward=reshard_after_forward
    )
    flat.init_weights(model, seed)
    flat.refresh_narrow()
    return TrainStep(model, flat, optimizer_of(flat, optimizer_config, model_config), batch_size, seq_len)


def time_row(row: Row, world: World, device: torch.device, timing: TimingConfig) -> dict[str, Any]:
    """Bursts, of data parallel with the sum over the ranks and without, in turns, and single steps; the time of each is
    that of the slowest rank."""
    shape = row.of_rank(world.size)
    steps = TimedSteps(shape, timing, device, build=build_on(row, world, device))
    together = steps.step.add_up
    arms = {"apart": None} if world.alone else {"together": together}
    if row.parallel == "ddp":
        arms["apart"] = None
    count = world.least(steps_for(steps, timing.seconds, device, warmup=timing.warmup))

    def seconds(number: int) -> float:
        world.totals(device, 0.0)
        return -world.least(-round(burst(steps, number, device).wall_s / number * 1e9)) / 1e9

    taken: dict[str, list[float]] = {arm: [] for arm in arms}
    for turn in range(timing.bursts):
        for arm in sorted(arms, reverse=turn % 2 == 1):
            steps.step.add_up = arms[arm]
            taken[arm].append(seconds(count))
    steps.step.add_up = together
    # What a step scatters by is asked of several ranks only: a large step alone takes seconds.
    single = [] if world.alone else [seconds(1) for _ in range(4 * timing.bursts)]
    return {"shape": asdict(shape), "ranks": world.size, "steps": count, "step_s": taken, "single_s": single}


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
    timing = TimingConfig(seconds=args.seconds, bursts=args.bursts, warmup=2 if args.smoke else 5)
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
        alone: dict[Row, dict[str, Any]] = {}  # rows may share what one rank runs
        for row in (known[name] for name in args.rows):
            timing = replace(timing, precision=row.precision, checkpoint_activations=row.checkpoint_activations)
            if world.alone and row.alone in alone:
                result = alone[row.alone]
            else:
                result = time_row(row.alone if world.alone else row, world, device, timing)
                alone[row.alone] = result
                if device.type == "cuda":
                    torch.cuda.empty_cache()
            if world.first:
                print(json.dumps({"row": row.name, **result}), flush=True)


# The side that starts them.


def environments(ranks: int) -> list[dict[str, str]]:
    """What torchrun sets for each rank of a box: one thread, which one rank alone has here too, or it would be compared
    with the same cores. More threads than cores wait for each other by turning in circles."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    shared = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "WORLD_SIZE": str(ranks)}
    shared["OMP_NUM_THREADS"] = os.environ.get("OMP_NUM_THREADS", "1")
    return [{**os.environ, **shared, "RANK": str(i), "LOCAL_RANK": str(i)} for i in range(ranks)]


class RanksEnded(RuntimeError):
    """Ranks that failed; `out` is what rank 0 had printed."""

    def __init__(self, text: str, out: str) -> None:
        super().__init__(text)
        self.out = out


def on_ranks(ranks: int, command: list[str], quiet: bool = False) -> str:
    """Runs a command as so many ranks; what rank 0 prints. Raises RanksEnded where one fails."""
    processes = [
        subprocess.Popen(command, env=env, text=True, stdout=subprocess.DEVNULL if i or quiet else subprocess.PIPE)
        for i, env in enumerate(environments(ranks))
    ]
    out = processes[0].communicate()[0] or ""
    codes = [process.wait() for process in processes]
    if any(codes):
        raise RanksEnded(f"ranks ended with {codes}: {' '.join(command)}", out)
    return out


def measured(
    args: argparse.Namespace, ranks: int, folder: str, rows: list[str], *more: str, partly: bool = False
) -> list[dict[str, Any]]:
    """What rank 0 measures; `partly`: up to where a rank fails, if that is behind a row."""
    command = [sys.executable, __file__, "--worker", "--folder", folder, "--seconds", str(args.seconds)]
    command += ["--bursts", str(args.bursts), *["--smoke"] * args.smoke, "--rows", *rows, *more]
    try:
        out = on_ranks(ranks, command)
    except RanksEnded as ended:
        if not (partly and '"row"' in ended.out):
            raise
        print(ended, flush=True)
        out = ended.out[: ended.out.rindex("\n")]  # but for a line that was cut off
    return [json.loads(line) for line in out.splitlines()]


def topology() -> str | None:
    program = shutil.which("nvidia-smi")
    if program is None:
        return None
    done = subprocess.run([program, "topo", "-m"], capture_output=True, text=True, timeout=30)
    return done.stdout if done.returncode == 0 else None


def measure_rows(args: argparse.Namespace, machine: dict, folder: str) -> tuple[list[dict], list[dict]]:
    """The table's rows, and the sums over ranks."""
    before = {r["row"]: r for r in measured(args, 1, folder, args.rows, partly=True)}
    many = measured(args, args.ranks, folder, [*before], partly=True)
    after = {r["row"]: r for r in measured(args, 1, folder, [r["row"] for r in many if "row" in r])}
    known = {row.name: row for row in rows_of(args.smoke)}
    rows = []
    for result in (r for r in many if "row" in r):
        name = result["row"]
        one = [statistics.median(r[name]["step_s"]["apart"]) for r in (before, after)]
        alone, row = statistics.mean(one), known[name]
        together = result["step_s"]["together"]
        tokens, tokens_one = row.tokens(args.ranks), row.shape.tokens_per_step
        step, single = statistics.median(together), result["single_s"]
        apart = result["step_s"].get("apart")
        rows.append({
            "name": name, "strong": row.strong, "target": row.target, "ranks": args.ranks, "shape": result["shape"],
            "parallel": row.parallel, "schedule": row.schedule, "precision": row.precision,
            "checkpoint_activations": row.checkpoint_activations,
            "reshard_after_forward": row.reshard_after_forward, "single_s": single,
            "step_spread": (max(single) - min(single)) / statistics.median(single),
            "one_step_s": one, "one_shape": asdict(row.shape), "step_s": together, "median_s": step,
            "apart_s": statistics.median(apart) if apart else None, "mean_s": statistics.mean(together),
            "spread": (max(together) - min(together)) / step, "floor": abs(one[1] - one[0]) / alone,
            "tok_per_s": tokens / step, "times_one": tokens / step / (tokens_one / alone), "machine": machine,
            **model_figures(row.shape, row.checkpoint_activations),
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
        (one_hash,), (many_hash,) = (
            measured(args, ranks, str(folder), args.rows, "--hash", where) for ranks in (1, args.ranks)
        )
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
            if failed := [name for name in args.rows if (name, args.ranks) not in taken]:
                print(f"FAILED: {', '.join(failed)}")
                holds = False
    print(f"took {time.perf_counter() - since:.0f} s")
    if args.output and data["rows"]:
        write_table(args.output, data, markdown(data, f"data/{data_path(args.output).name}"))
    elif args.output:  # checks alone make no page yet
        make_parent(data_path(args.output))
        write_json(data_path(args.output), data)
    sys.exit(0 if holds else 1)


if __name__ == "__main__":
    main()
