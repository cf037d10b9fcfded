"""Whether every kind of step is captured in CUDA graphs on this card, and is then the same step, in seconds.

    python scripts/bench/check_capture.py [--output docs/data/check-capture.json]
    python scripts/bench/check_capture.py --smoke    # on the CPU, where nothing is captured: does the script work

Steps that cannot be captured run all the same, slower, and say why where nobody looks. Of each kind three steps are
made with deterministic sums, captured and not, on the same tokens: the weights must have the same bits. And what the
step does as a whole must be near what it does in bf16: a product of the wrong rows shows in the loss, if in nothing
else. Exits 1 where something does not hold.
"""

import argparse
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from checks import Report
from places import place

from llmtrain.benchmark.machine import describe
from llmtrain.benchmark.op import reason
from llmtrain.model.config import ModelConfig
from llmtrain.training.config import OptimizerConfig
from llmtrain.training.step import TrainStep

DENSE = ModelConfig(
    vocab_size=512, d_model=256, n_layers=2, n_heads=4, n_kv_heads=2, head_dim=64, d_ff=512, max_seq_len=256
)
ROUTED = replace(DENSE, moe=True, n_experts=8, experts_per_token=2, moe_d_ff=128)
KINDS: dict[str, tuple[ModelConfig, dict[str, Any]]] = {
    "dense bf16": (DENSE, {}),
    "dense bf16, muon": (DENSE, {"optimizer": "muon"}),
    "dense fp8 tensorwise": (DENSE, {"precision": "fp8"}),
    "dense fp8 rowwise": (DENSE, {"precision": "fp8", "fp8_scaling": "rowwise"}),
    "dense fp8 block": (DENSE, {"precision": "fp8", "fp8_scaling": "block"}),
    "dense fp8, activations selective": (DENSE, {"precision": "fp8", "checkpoint_activations": "selective"}),
    "dense mxfp8": (DENSE, {"precision": "mxfp8"}),
    "routed bf16": (ROUTED, {}),
    "routed bf16, muon": (ROUTED, {"optimizer": "muon"}),
    "routed fp8": (ROUTED, {"precision": "fp8"}),
}
SMALL = {"d_model": 128, "n_layers": 1, "n_heads": 2, "n_kv_heads": 1, "d_ff": 128}
"""For a CPU."""
BATCH, SEQ_LEN, STEPS = 4, 256, 3
NEAR = 0.02
"""Of the last loss, relative: of steps in fewer bits against those in bf16."""


def trained(
    model: ModelConfig, settings: dict[str, Any], device: str, capture: bool, seq_len: int
) -> tuple[TrainStep, float]:
    """A step after STEPS of two micro-batches each, and its last loss."""
    others = dict(settings)
    optimizer = OptimizerConfig(optimizer=others.pop("optimizer", "adamw"))
    step = TrainStep.build(
        model, optimizer, batch_size=BATCH, seq_len=seq_len, device=device, deterministic=True, capture=capture,
        **{"precision": "bf16", **others},
    )  # fmt: skip
    generator = torch.Generator().manual_seed(0)
    for _ in range(STEPS):
        for first in (True, False):
            ids = torch.randint(0, model.vocab_size, (BATCH, seq_len + 1), generator=generator).to(device)
            step.micro_step(ids[:, :-1], ids[:, 1:], first=first)
        step.optimizer_step(1e-3)
    return step, step.metrics()["lm_loss"]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path, help="JSON; default: docs/data/check-capture.json")
    parser.add_argument("--smoke", action="store_true")
    args = parser.parse_args()
    device = "cpu" if args.smoke else "cuda"
    report = Report(describe(not args.smoke), place(args.output, "docs/data/check-capture.json", args.smoke))
    report.begin("steps")
    in_bf16: dict[bool, float] = {}
    for kind, (model, settings) in KINDS.items():
        model = replace(model, **SMALL) if args.smoke else model
        seq_len = SEQ_LEN // 8 if args.smoke else SEQ_LEN
        try:
            (captured, loss), (eager, loss_eager) = (
                trained(model, settings, device, capture, seq_len) for capture in (not args.smoke, False)
            )
        except Exception as error:  # the others are looked at all the same
            report.check(f"{kind}: runs", False, error=reason(error))
            continue
        why = captured.why_not_captured
        report.check(f"{kind}: captured", why is None, **({} if why is None else {"why": why}))
        same = torch.equal(captured.flat.master, eager.flat.master)
        report.check(f"{kind}: the same bits as uncaptured", same, loss=loss, uncaptured=loss_eager)
        if not settings:
            in_bf16[model.moe] = loss
        elif "precision" in settings:
            report.check(f"{kind}: near bf16", abs(loss / in_bf16[model.moe] - 1) <= NEAR, loss=loss)
        del captured, eager
    return report.end()


if __name__ == "__main__":
    sys.exit(main())
