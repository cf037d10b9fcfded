"""Whether a run is still one: it must not go on, or be saved, on numbers that are none."""

import math

import torch

from llmtrain.storage.errors import Diverged
from llmtrain.training.optimizer import MOMENTS
from llmtrain.training.step import TrainStep

PATIENCE = 20
"""Steps in a row that may be passed over because their gradient is not finite."""


class Health:
    """Looks at a run whenever the device is waited for anyway."""

    def __init__(self, step: TrainStep, at_step: int, total_steps: int) -> None:
        self._step = step
        self._patience = min(PATIENCE, total_steps)
        self._applied, self._applied_at = int(step.optimizer.count), at_step

    def check(self, at_step: int, figures: dict[str, float], saved_at: int, weights: bool = False) -> None:
        """Raises Diverged where a loss, or with `weights` a weight or moment, is not finite, and where no update was
        applied for long. figures: those of `at_step`; saved_at: the last checkpoint, for the message."""
        optimizer = self._step.optimizer
        for name in ("lm_loss", "aux_loss"):
            if not math.isfinite(figures[name]):
                raise _diverged(f"{name} of step {at_step} is {figures[name]}", saved_at)
        applied = int(optimizer.count)
        if applied != self._applied:
            self._applied, self._applied_at = applied, at_step
        elif at_step - self._applied_at >= self._patience:
            last = f"since step {self._applied_at} no gradient was finite, so no update was applied"
            raise _diverged(last, saved_at)
        if weights:
            moments = {name: getattr(optimizer, name) for name in MOMENTS}
            for name, buffer in {"weight": self._step.flat.master, **moments}.items():
                # A norm makes no copy as isfinite would, and keeps NaN.
                if not math.isfinite(float(torch.linalg.vector_norm(buffer, math.inf))):
                    raise _diverged(f"after step {at_step} a {name} is not finite", saved_at)


def _diverged(what: str, saved_at: int) -> Diverged:
    kept = f"; the checkpoint of step {saved_at} is sound" if saved_at > 0 else ""
    return Diverged(f"{what}: lower --learning-rate or raise --warmup-steps and start in another --run-dir{kept}")
