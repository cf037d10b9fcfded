"""Do the same steps give the same bits, again and again, alone on the card and with others on it?

    python scripts/bench/same_bits.py [--processes 4] [--repeats 4] [--steps 20] [--output docs/data/same-bits.json]
    python scripts/bench/same_bits.py --smoke      # a small model, on the CPU too

Processes with --deterministic arithmetic train the 102M model at 64 x 1024 from the same weights on the same batches,
over and over: one by itself, then several at once, which take turns on the card in the middle of whatever each is
doing. After every step each parameter's gradient and the weights are hashed on the device. All hashes must be equal;
where one is not, the first step that shows it is said, with the parameters whose gradients differ there: what went
wrong lies in the backward of the last of them, or in the update where none does. Exits 1 then.
"""

import argparse
import json
import subprocess
import sys
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from models import MODEL_102M

from llmtrain.benchmark.config import Shape, TimingConfig
from llmtrain.benchmark.machine import describe
from llmtrain.benchmark.step import TimedSteps
from llmtrain.model.config import ModelConfig
from llmtrain.storage.atomic import write_json
from llmtrain.training.devices import pick_device
from llmtrain.training.replay import bit_hash
from llmtrain.training.step import make_deterministic

SMALL = ModelConfig(
    vocab_size=512, d_model=64, n_layers=2, n_heads=4, n_kv_heads=2, head_dim=16, d_ff=128, max_seq_len=32
)
SHOWN = 8
"""Parameters named of those that differ."""


class Steps:
    """Steps from the beginning, as often as wanted."""

    def __init__(self, shape: Shape, precision: str, device: torch.device) -> None:
        self.timed = TimedSteps(shape, TimingConfig(precision=precision), device)
        flat = self.timed.step.flat
        self.weights = flat.master.clone()
        self.names = [*flat.spans, "weights after the update"]

    def run(self, count: int) -> tuple[torch.Tensor, list[float]]:
        """(count, parameters + 1) int64 hashes of gradients and, last, of all weights; the loss of each step."""
        step = self.timed.step
        flat = step.flat
        assert flat.grad is not None
        flat.master.copy_(self.weights)
        flat.refresh_narrow()
        step.optimizer.reset()
        self.timed.taken = 0
        hashes, losses = [], []
        for _ in range(count):
            self.timed()
            of_gradients = [bit_hash(flat.view(flat.grad, name)) for name in flat.spans]
            hashes.append(torch.stack([*of_gradients, bit_hash(flat.master)]))
            losses.append(step.metrics()["lm_loss"])
        return torch.stack(hashes).cpu(), losses


def first_difference(expected: list[list[int]], found: list[list[int]], names: list[str]) -> dict[str, Any] | None:
    """The first step whose hashes differ, and what they are of; None where all are equal."""
    for number, (ours, theirs) in enumerate(zip(expected, found, strict=True), 1):
        different = [name for name, a, b in zip(names, ours, theirs, strict=True) if a != b]
        if different:
            return {"step": number, "of": len(different), "different": different[-SHOWN:]}
    return None


def work(args: argparse.Namespace) -> None:
    """A process: a line of JSON for each repeat."""
    make_deterministic()
    device = pick_device("cpu" if args.smoke and not torch.cuda.is_available() else "auto")
    shape = Shape(SMALL, 2, 32) if args.smoke else Shape(MODEL_102M, args.batch_size, 1024)
    steps = Steps(shape, "fp32" if device.type == "cpu" else "bf16", device)
    for _ in range(args.repeats):
        hashes, losses = steps.run(args.steps)
        print(json.dumps({"names": steps.names, "hashes": hashes.tolist(), "losses": losses}), flush=True)


def at_once(args: argparse.Namespace, processes: int) -> list[list[dict[str, Any]]]:
    """The repeats of each of so many processes."""
    command = [sys.executable, __file__, "--worker", "--steps", str(args.steps), "--repeats", str(args.repeats)]
    command += ["--batch-size", str(args.batch_size), *["--smoke"] * args.smoke]
    started = [subprocess.Popen(command, stdout=subprocess.PIPE, text=True) for _ in range(processes)]
    outputs = [process.communicate()[0] for process in started]
    if codes := [process.returncode for process in started if process.returncode]:
        raise SystemExit(f"{len(codes)} of {processes} processes ended with {codes[0]}")
    return [[json.loads(line) for line in output.splitlines()] for output in outputs]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--processes", type=int, default=4, help="at once, after one alone")
    parser.add_argument("--repeats", type=int, default=4, help="of each process, from the same weights")
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--batch-size", type=int, default=64)
    parser.add_argument("--output", type=Path, help="JSON")
    parser.add_argument("--smoke", action="store_true")
    parser.add_argument("--worker", action="store_true", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.worker:
        return work(args)
    machine = describe(torch.cuda.is_available())
    alone, together = at_once(args, 1), at_once(args, args.processes)
    expected = alone[0][0]
    runs = []
    for company, processes in ((0, alone), (args.processes - 1, together)):
        for process, repeats in enumerate(processes):
            for repeat, found in enumerate(repeats):
                difference = first_difference(expected["hashes"], found["hashes"], expected["names"])
                runs.append({"beside": company, "process": process, "repeat": repeat, "difference": difference})
                if difference:
                    print(f"process {process} beside {company}, repeat {repeat}: {json.dumps(difference)}", flush=True)
    wrong = sum(run["difference"] is not None for run in runs)
    steps = args.steps * len(runs)
    print(f"{len(runs)} runs of {args.steps} steps, {steps} in all: {wrong} differ from the first")
    if args.output:
        settings = {key: value for key, value in vars(args).items() if key in ("processes", "repeats", "steps")}
        shape = asdict(Shape(SMALL, 2, 32) if args.smoke else Shape(MODEL_102M, args.batch_size, 1024))
        write_json(
            args.output, {"machine": machine, **settings, "shape": shape, "losses": expected["losses"], "runs": runs}
        )
    sys.exit(1 if wrong else 0)


if __name__ == "__main__":
    main()
