"""Newton-Schulz and whole updates of Muon: ours against torch.optim.Muon's, and their share of a training step.

    python scripts/bench/newton_schulz.py --config configs/102m.toml --batch-size 16 --config configs/1b.toml \\
        --batch-size 4 [--output docs/data/newton-schulz.json]

For each model: the same matrices (q, k, v, gate and up taken apart) made orthogonal one at a time by torch's function,
launched as its optimizer does and as a CUDA graph, and by our stacks, captured as in a run; arms take turns, the figure
is the median. Then the update of a run, and of how long a step of --tokens tokens it is. cuBLAS' workspace is for each
model that of its own run. What the file holds of other models stays. On a CPU, where the update runs in FP32, it is a
trial of the script. About 60 s of device time for the two models.
"""

import argparse
import gc
import json
import os
import statistics
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import torch
from checks import add_groups
from places import place
from torch import Tensor
from torch.optim._muon import _zeropower_via_newtonschulz as torchs

from llmtrain.benchmark.data import random_batches
from llmtrain.benchmark.machine import describe
from llmtrain.benchmark.timing import DeviceTimer, captured
from llmtrain.cli.options import build
from llmtrain.cli.train import read_tables
from llmtrain.kernels.newton_schulz import POLYNOMIALS, orthogonalise
from llmtrain.model.config import ModelConfig
from llmtrain.training.config import OptimizerConfig
from llmtrain.training.muon import Muon, Stack
from llmtrain.training.step import WORKSPACE, TrainStep

TORCHS = ((3.4445, -4.775, 2.0315), 5, 1e-7)
"""torch.optim.Muon's defaults: coefficients, steps, the smallest norm."""


def flops(stack: Stack) -> int:
    """Of five iterations, as every arm does them."""
    short, long = stack.sides
    return len(POLYNOMIALS) * stack.count * (4 * short * short * long + 2 * short**3)


def one_at_a_time(stacks: list[Stack], flat: Tensor) -> Callable[[], object]:
    """As torch.optim.Muon has them: a tensor each."""
    matrices = [matrix.contiguous() for stack in stacks for matrix in stack.of(flat)]
    return lambda: [torchs(matrix, *TORCHS) for matrix in matrices]


def ours(batches: list[list[Stack]], flat: Tensor, dtype: torch.dtype) -> Callable[[], object]:
    """What `Muon` does of it: the copies into stacks, and the iteration."""

    def run() -> None:
        for batch in batches:
            x = torch.cat([stack.of(flat).to(dtype) for stack in batch])
            orthogonalise(x)

    return run


def milliseconds(arms: dict[str, Callable[[], object]], device: torch.device, rounds: int) -> dict[str, float]:
    """The median of each arm; they take turns."""
    timer = DeviceTimer(device, cold_l2=True) if device.type == "cuda" else None
    times: dict[str, list[float]] = {name: [] for name in arms}
    for turn in range(rounds + 1):  # the first warms up
        for name, run in arms.items():
            if timer is not None:
                took = timer.sample(run)
            else:
                since = time.perf_counter()
                run()
                took = 1e3 * (time.perf_counter() - since)
            if turn:
                times[name].append(took)
    return {name: statistics.median(of_arm) for name, of_arm in times.items()}


def singular_values(x: Tensor) -> Tensor:
    """By the FP64 Gram matrix of the shorter side: on a card `svdvals` takes seconds for each matrix. It squares the
    condition, so below some 1e-8 of the largest they are not right; what is asked about lies around 1."""
    wide = x.double() if x.shape[0] <= x.shape[1] else x.double().T
    return torch.linalg.eigvalsh(wide @ wide.T).clamp_min(0).sqrt()


def worst_singular_values(batches: list[list[Stack]], flat: Tensor, dtype: torch.dtype) -> list[float]:
    """The smallest and the largest singular value of our results, of one matrix of each stack."""
    values = [
        singular_values(orthogonalise(stack.of(flat)[:1].to(dtype).clone())[0]) for batch in batches for stack in batch
    ]
    return [min(float(v.min()) for v in values), max(float(v.max()) for v in values)]


@contextmanager
def own_workspace() -> Iterator[None]:
    """A small model's step has cuBLAS do without a workspace, for the whole process; the next model's would too, which
    has one in a run of its own."""
    before = os.environ.get(WORKSPACE)
    try:
        yield
    finally:
        os.environ.pop(WORKSPACE, None)
        if before is not None:
            os.environ[WORKSPACE] = before
        gc.collect()  # graphs that hold the old ones
        if torch.cuda.is_initialized():
            torch._C._cuda_clearCublasWorkspaces()  # torch reads the variable only where a stream has none yet


def measure(model: ModelConfig, batch_size: int, seq_len: int, tokens: int, rounds: int, device: torch.device) -> dict:
    config = OptimizerConfig(optimizer="muon", learning_rate=1e-4, muon_lr=1e-3)
    precision = "bf16" if device.type == "cuda" else "fp32"
    step = TrainStep.build(model, config, batch_size=batch_size, seq_len=seq_len, precision=precision, device=device)
    optimizer = step.optimizer
    assert isinstance(optimizer, Muon)
    stacks = [stack for batch in optimizer.batches for stack in batch]
    flat, dtype = torch.randn_like(step.flat.master), optimizer.work_dtype
    eager = one_at_a_time(stacks, flat)
    arms = {"torch": eager, "ours": ours(optimizer.batches, flat, dtype)}
    if device.type == "cuda":
        arms |= {"torch, captured": captured(eager, device), "ours": captured(arms["ours"], device)}
    of_arms = milliseconds(arms, device, rounds)
    values = worst_singular_values(optimizer.batches, flat, dtype)
    del flat, eager, arms
    (ids, targets), *_ = random_batches(model.vocab_size, 1, batch_size, seq_len, device)
    for first in (True, False):
        step.micro_step(ids, targets, first)
    step.optimizer_step(1e-4)
    of_step = milliseconds(
        {"micro-step": lambda: step.micro_step(ids, targets, False), "update": lambda: step.optimizer_step(1e-4)},
        device, rounds,
    )  # fmt: skip
    micro_steps = tokens / (batch_size * seq_len)
    return {
        "matrices": sum(stack.count for stack in stacks),
        "stacks": len(stacks),
        "ms": of_arms,
        "tflops": {name: sum(map(flops, stacks)) / ms / 1e9 for name, ms in of_arms.items()},
        "torch_over_ours": of_arms["torch"] / of_arms["ours"],
        "singular_values": values,
        "step_ms": of_step,
        "captured": bool(step.graphs),
        "share_of_step": of_step["update"] / (of_step["update"] + micro_steps * of_step["micro-step"]),
        "batch_size": batch_size,
        "seq_len": seq_len,
        "tokens": tokens,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--config", type=Path, action="append", required=True, help="preset; repeat it for several")
    parser.add_argument("--batch-size", type=int, action="append", required=True, help="micro-batch of each")
    parser.add_argument("--seq-len", type=int, default=1024)
    parser.add_argument("--tokens", type=int, default=1 << 19, help="of the step that the share is of")
    parser.add_argument("--vocab-size", type=int, default=32000)
    parser.add_argument("--rounds", type=int, default=21)
    parser.add_argument("--output", type=Path, help="JSON; default: docs/data/newton-schulz.json")
    args = parser.parse_args()
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    args.output = place(args.output, "docs/data/newton-schulz.json", device.type == "cpu")
    machine = describe(device.type == "cuda")
    for path, batch_size in zip(args.config, args.batch_size, strict=True):
        table = {"vocab_size": args.vocab_size, "max_seq_len": args.seq_len, **read_tables(path)["model"]}
        model = build(ModelConfig, {}, table, f"{path} [model]")
        with own_workspace():
            found = measure(model, batch_size, args.seq_len, args.tokens, args.rounds, device)
        print(f"{path.stem}: {json.dumps(found)}", flush=True)
        add_groups(args.output, {path.stem: {"machine": machine, "rounds": args.rounds, **found}})


if __name__ == "__main__":
    main()
