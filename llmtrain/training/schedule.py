"""The learning rate, a pure function of the step."""

import math

from llmtrain.training.config import OptimizerConfig, ScheduleConfig


def learning_rate(step: int, total: int, optimizer: OptimizerConfig, schedule: ScheduleConfig) -> float:
    """The rate of update number `step` (from 0) of `total`: linear warmup, peak * (step + 1) / warmup, then

        peak * (floor + (1 - floor) * left)

    with p the share of the decay that has passed and `left` falling from 1 to 0: (1 + cos(pi p)) / 2 (Loshchilov and
    Hutter 2017), 1 - p, or, for wsd, 1 - sqrt(p) over the last `decay_share` of all steps and 1 before (Hagele et al.
    2024, arXiv 2405.18392, who found that shape to end lowest). The peak where the run ends within its warmup.
    """
    peak, warmup, floor = optimizer.learning_rate, schedule.warmup_steps, schedule.min_lr_ratio
    if step < warmup:
        return peak * (step + 1) / warmup
    begin = decay_begin(total, schedule)
    if total <= begin:
        return peak
    p = min(1.0, max(0.0, (step - begin) / (total - begin)))
    left = {"cosine": (1 + math.cos(math.pi * p)) / 2, "linear": 1 - p, "wsd": 1 - math.sqrt(p)}[schedule.schedule]
    return peak * (floor + (1 - floor) * left)


def decay_begin(total: int, schedule: ScheduleConfig) -> int:
    """The first of `total` updates in whose course the rate falls."""
    if schedule.schedule != "wsd":
        return schedule.warmup_steps
    return max(schedule.warmup_steps, total - round(schedule.decay_share * total))
