"""A whole training step as `train` runs it, its batches on the device: what `sweep`, `bench step` and the peers' table
time."""

import resource
import sys
import time
from collections.abc import Callable
from dataclasses import asdict
from statistics import median
from typing import Any

import torch

from llmtrain.benchmark.config import Shape, TimingConfig
from llmtrain.benchmark.data import corpus_batches, corpus_read, random_batches
from llmtrain.benchmark.statistics import Times
from llmtrain.benchmark.timing import burst, steps_for
from llmtrain.corpus.order import SampleOrder
from llmtrain.kernels import choice
from llmtrain.model.config import CheckpointActivations
from llmtrain.model.flops import (
    classic_flops_per_token,
    flops_per_token,
    parameter_counts,
    peak_flops,
    rerun_flops_per_token,
)
from llmtrain.model.memory import training_memory
from llmtrain.training.config import OptimizerConfig, eight_bit
from llmtrain.training.devices import check_precision, device_name, pick_attention, pick_device
from llmtrain.training.step import TrainStep

GIB = 2**30
DISTINCT_BATCHES = 256
"""Micro-batches, at most, that are held on the device and taken in turn. A model that has learned its few batches by
heart has small gradients, and a card at its power limit multiplies those faster: a run would not see that rate."""
LEARNING_RATE = 1e-4
"""Without a warmup 4e-4 makes a spike of the second step, from which rounding alone leads into different valleys:
losses of one arm, its weights moved within their bf16 rounding, then differ by up to 0.2 after 12 steps of 4 x 1024."""


def distinct_steps(accumulate: int) -> int:
    """Steps whose batches differ."""
    return max(4, min(64, DISTINCT_BATCHES // accumulate))


class TimedSteps:
    """A TrainStep and batches for it; a call is one step, and does not wait for the device."""

    def __init__(
        self, shape: Shape, timing: TimingConfig, device: torch.device, seed: int = 0,
        build: Callable[..., TrainStep] = TrainStep.build, order: SampleOrder | None = None,
    ) -> None:  # fmt: skip
        """order: of the samples that the batches hold; None: random tokens."""
        self.shape = shape
        self.attention = timing.attention
        check_precision(timing.precision, timing.fp8_scaling, shape.seq_len, device, routed=shape.model.moe)
        self.backend = pick_attention(timing.attention, timing.precision, shape.model, shape.seq_len, device)
        self.memory = training_memory(
            shape.model,
            shape.batch_size,
            shape.seq_len,
            precision=timing.precision,
            fp8_scaling=timing.fp8_scaling,
            checkpoint_activations=timing.checkpoint_activations,
            attention=self.backend.name,
            device=device,
        )
        self.step = build(
            shape.model,
            OptimizerConfig(),
            batch_size=shape.batch_size,
            seq_len=shape.seq_len,
            precision=timing.precision,
            fp8_scaling=timing.fp8_scaling,
            device=device,
            seed=seed,
            checkpoint_activations=timing.checkpoint_activations,
        )
        count = distinct_steps(shape.accumulate) * shape.accumulate
        self.batches = (
            random_batches(shape.model.vocab_size, count, shape.batch_size, shape.seq_len, device, seed)
            if order is None
            else corpus_batches(order, count, shape.batch_size, device)
        )
        self.read = {"corpus": corpus_read(order) if order else None, "distinct_batches": count}
        self.taken = 0

    def __call__(self) -> None:
        with choice.forced(self.attention, "attention"):
            for i in range(self.shape.accumulate):
                ids, targets = self.batches[self.taken % len(self.batches)]
                self.step.micro_step(ids, targets, first=i == 0)
                self.taken += 1
            self.step.optimizer_step(LEARNING_RATE)


def model_figures(shape: Shape, checkpoint_activations: CheckpointActivations = "none") -> dict[str, Any]:
    """What a shape costs by arithmetic alone."""
    counts = parameter_counts(shape.model)
    return {
        "parameters": counts.total,
        "active_parameters": counts.active,
        "flops_per_token": flops_per_token(shape.model, shape.seq_len),
        "rerun_flops_per_token": rerun_flops_per_token(shape.model, shape.seq_len, checkpoint_activations),
        "classic_flops_per_token": classic_flops_per_token(shape.model, shape.seq_len),
        "tokens_per_step": shape.tokens_per_step,
    }


def throughput(tok_per_s: float, figures: dict[str, Any], device: torch.device) -> dict[str, float | None]:
    """Achieved TFLOP/s and MFU by both counts, and HFU; shares are None on a device whose peak is not known."""
    peak = peak_flops(device_name(device))
    rates = {
        "": tok_per_s * figures["flops_per_token"],
        "classic_": tok_per_s * figures["classic_flops_per_token"],
    }
    tflops: dict[str, float | None] = {f"{kind}tflops": rate / 1e12 for kind, rate in rates.items()}
    shares = {f"{kind}mfu": rate / peak if peak else None for kind, rate in rates.items()}
    executed = tok_per_s * (figures["flops_per_token"] + figures["rerun_flops_per_token"])
    return tflops | shares | {"hfu": executed / peak if peak else None}


def peak_memory(device: torch.device) -> dict[str, float | None]:
    """Peaks of this process in GiB: what tensors took, what the allocator held, what the card lost, and the host's RSS.

    The allocator keeps what it ever took, so the card's use at the end is its peak; it includes the context, graphs and
    whatever other processes hold.
    """
    scale = 1024 if sys.platform != "darwin" else 1  # Linux counts in KiB
    memory: dict[str, float | None] = {
        "allocated_gib": None,
        "reserved_gib": None,
        "device_used_gib": None,
        "host_rss_gib": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * scale / GIB,
    }
    if device.type == "cuda":
        free, total = torch.cuda.mem_get_info(device)
        memory |= {
            "allocated_gib": torch.cuda.max_memory_allocated(device) / GIB,
            "reserved_gib": torch.cuda.max_memory_reserved(device) / GIB,
            "device_used_gib": (total - free) / GIB,
        }
    return memory


def measure_step(
    shape: Shape, timing: TimingConfig, tell: Callable[[str], None] | None = None, order: SampleOrder | None = None
) -> dict[str, Any]:
    """Build, warm up and time a training step; raises torch.OutOfMemoryError where it does not fit.

    `tell` gets a line once the first step is done: the others may take minutes. `order`: as of `TimedSteps`.
    """
    device = pick_device(timing.device)
    begin = time.perf_counter()
    steps = TimedSteps(shape, timing, device, order=order)
    steps()
    first_loss = steps.step.metrics()["lm_loss"]
    first_step_s = time.perf_counter() - begin
    if tell is not None:
        tell(f"first step after {first_step_s:.1f} s; {2 * timing.warmup + timing.bursts} or more to go")
    count = steps_for(steps, timing.seconds, device, warmup=timing.warmup)
    # Alone on an idle device: within a burst the step waits for the one before the last.
    issue = median(burst(steps, 1, device).issue_s for _ in range(timing.warmup))
    bursts = [burst(steps, count, device) for _ in range(timing.bursts)]
    wall = Times(tuple((b.wall_s / b.steps,) for b in bursts))
    on_device = [b.device_s / b.steps for b in bursts if b.device_s is not None]
    figures = model_figures(shape, timing.checkpoint_activations)
    tok_per_s = shape.tokens_per_step / wall.pooled
    return {
        "shape": asdict(shape),
        **steps.read,
        "device": str(device),
        "precision": timing.precision,
        "fp8_scaling": eight_bit(timing),
        "attention": steps.backend.label(choice.ran),
        "not_captured": steps.step.why_not_captured,
        "checkpoint_activations": timing.checkpoint_activations,
        "steps": count * timing.bursts,
        "step_ms": wall.pooled * 1e3,
        "burst_step_ms": [m * 1e3 for m in wall.medians],
        "device_step_ms": median(on_device) * 1e3 if on_device else None,
        "issue_step_ms": issue * 1e3 if on_device else None,
        "spread": wall.spread,
        "tok_per_s": tok_per_s,
        "first_step_s": first_step_s,
        "first_loss": first_loss,
        "last_loss": steps.step.metrics()["lm_loss"],
        **figures,
        **throughput(tok_per_s, figures, device),
        **peak_memory(device),
        "predicted_gib": steps.memory.peak / GIB if device.type == "cuda" else None,
    }
