"""Which steps are spikes: a rule on the loss and the gradient norm, kept and applied on the device."""

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

WINDOW = 128
"""Applied steps that the mean and the deviation are taken over."""
SMALLEST = 1e-3
"""Deviation that is assumed at least, as a share of the mean: below it a change is no spike, however even the steps
before were, and no rounding decides."""
ROW = 8
"""Spikes skipped in a row. Skipping leaves the weights as they are; if 8 other batches after another stand out as well,
it is not the data: the level has changed, and the window is filled anew from there."""


class SpikeRule:
    """A step is a spike where its lm_loss or its gradient norm x is more than `z` deviations above the mean of the
    window:

        x > m + z * max(s, SMALLEST * |m|)

    with m the mean and s the sample standard deviation (divisor n - 1) of the last WINDOW values of x that were
    applied, in FP64. The rule acts once the window is full. A spike is skipped and does not enter the window. After ROW
    spikes in a row the next step is applied whatever its figures, and the window begins empty, so that a lasting change
    of level costs ROW steps and is then what is usual. A step that is not finite is no spike, and neither ends nor
    lengthens a row.
    """

    def __init__(self, z: float, device: torch.device, window: int = WINDOW, row: int = ROW) -> None:
        self.z, self.row = z, row
        # FP64 (2, window): the ring of lm_losses and of gradient norms. Its next place is `entered` modulo its length.
        self.window = torch.zeros(2, window, dtype=torch.float64, device=device)
        self.places = torch.arange(window, device=device)
        # int64: values entered since the window was empty; spikes in a row; spikes in all.
        self.tally = torch.zeros(3, dtype=torch.int64, device=device)
        self.entered, self.in_a_row, self.total = self.tally.unbind()

    @property
    def small(self) -> list[Tensor]:
        """All that a step changes."""
        return [self.window, self.tally]

    def judge(self, values: Tensor, may_apply: Tensor) -> Tensor:
        """Whether to apply the step of these values, (2,) FP64: lm_loss and gradient norm; a 0-d bool. Where
        `may_apply` (0-d bool) is false it is not applied anyway, and its values may be anything."""
        mean = self.window.mean(1)
        deviation = torch.maximum(self.window.std(1), SMALLEST * mean.abs())
        far = (values > mean + self.z * deviation).any() & (self.entered >= len(self.places)) & may_apply
        another_level = far & (self.in_a_row >= self.row)
        spike = far ^ another_level
        apply = may_apply ^ spike
        self.total.add_(spike)
        self.in_a_row.add_(spike).mul_(~apply)
        self.entered.mul_(~another_level)
        here = (self.places == self.entered % len(self.places)) & apply
        torch.where(here, values.view(2, 1), self.window, out=self.window)
        self.entered.add_(apply)
        return apply

    def counts(self, small: Sequence[Tensor]) -> dict[str, Any]:
        """`small`, or a copy of it, as JSON takes it, to the bit. Waits for the device."""
        window, tally = small
        entered, in_a_row, total = tally.tolist()
        lines = [" ".join(map(repr, values)) for values in window.tolist()]  # a line each, not a line a number
        return {"entered": entered, "in_a_row": in_a_row, "total": total, "window": lines}

    def set_counts(self, counts: Mapping[str, Any] | None) -> None:
        """Puts back what `counts` gave; None: as before the first step."""
        for buffer in self.small:
            buffer.zero_()
        if counts is not None:
            window = [list(map(float, values.split())) for values in counts["window"]]
            self.window.copy_(torch.tensor(window, dtype=torch.float64))
            self.tally.copy_(torch.tensor([counts[name] for name in ("entered", "in_a_row", "total")]))
