"""The learning rate, a pure function of the step."""

import math

from llmtrain.training.config import OptimizerConfig, ScheduleConfig


def learning_rate(step: int, total: int, optimizer: OptimizerConfig, schedule: ScheduleConfig) -> float:
    """The rate of update number `step` (from 0) of `total`: linear warmup, then cosine decay to the floor.

    peak * (step + 1) / warmup, then peak * (floor + (1 - floor) * (1 + cos(pi p)) / 2) with p the share of the decay
    that has passed (Loshchilov and Hutter 2017); the peak where the run ends within its warmup.
    """
    peak, warmup, floor = optimizer.learning_rate, schedule.warmup_steps, schedule.min_lr_ratio
    if step < warmup:
        return peak * (step + 1) / warmup
    if total <= warmup:
        return peak
    progress = min(1.0, (step - warmup) / (total - warmup))
    return peak * (floor + (1 - floor) * (1 + math.cos(math.pi * progress)) / 2)
