"""AdamW on the flat buffers, and what all optimizers share: the one division of the rule of sums, clipping, and whether
the update is applied, all on the device.

Whether an update is applied is decided on the device too: the host learns of it at the next log line.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from llmtrain.kernels.adamw import adamw_step
from llmtrain.training.config import OptimizerConfig
from llmtrain.training.flat import FlatParameters, Stretch
from llmtrain.training.spikes import SpikeRule


class AdamW:
    """Moments are flat FP32 buffers beside the masters; for the parameters from flat index `first` on.

    A step whose losses or gradient are not finite, or that is a spike where `skip_spikes` asks for it (`SpikeRule`), is
    skipped: weights, moments and Adam's count stay, and it is counted. After more than `max_bad_steps` of them in a row
    nothing is applied any more, so that what the run ends with does not depend on when the host looks.
    """

    def __init__(self, flat: FlatParameters, config: OptimizerConfig, first: int = 0) -> None:
        assert flat.grad is not None
        self.flat = flat
        self.config = config
        self.first = first
        self.exp_avg = torch.zeros_like(flat.master[first:])
        self.exp_avg_sq = torch.zeros_like(self.exp_avg)
        self.large = {
            "weight": Stretch(0, flat.master),
            "exp_avg": Stretch(first, self.exp_avg),
            "exp_avg_sq": Stretch(first, self.exp_avg_sq),
        }
        """Weights, moments and the weights' average, by name: all that an update changes and a checkpoint holds."""
        self.average = torch.zeros_like(flat.master) if config.ema_decay else None
        if self.average is not None:
            self.large["ema"] = Stretch(0, self.average)
        device = flat.master.device
        # int64: updates applied, which is Adam's t; skipped; skipped in a row up to now. The first two are the step.
        self.tally = torch.zeros(3, dtype=torch.int64, device=device)
        self.count, self.skipped, self.in_a_row = self.tally.unbind()
        # FP64: number, lm_loss, aux_loss and gradient norm of the step that the last row of skipped ones began with.
        self.bad = torch.zeros(4, dtype=torch.float64, device=device)
        self.spikes = SpikeRule(config.skip_spikes, device) if config.skip_spikes else None
        # FP64: 1 - beta^count loses its digits in FP32 while beta^count is near 1.
        self.lr = torch.zeros((), dtype=torch.float64, device=device)

    @property
    def small(self) -> list[Tensor]:
        """What an update changes beside what is `large`."""
        of_scales = [] if self.flat.scaling is None else [self.flat.scaling.history]
        return [self.tally, self.bad, *(self.spikes.small if self.spikes else []), *of_scales]

    def reset(self) -> None:
        """As before the first step; the weights stay, and are their own average."""
        large = [stretch.buffer for name, stretch in self.large.items() if name != "weight"]
        for buffer in (*large, *self.small):
            buffer.zero_()
        self.begin_average()

    def begin_average(self) -> None:
        """The average begins at the weights."""
        if self.average is not None:
            self.average.copy_(self.flat.master)

    def counts(self, small: Sequence[Tensor] | None = None) -> dict[str, Any]:
        """What a checkpoint holds of `small`, or of a copy of it, as JSON takes it. Waits for the device."""
        tally, _, *of_spikes = small or self.small
        magnitudes = {"magnitudes": of_spikes.pop().tolist()} if self.flat.scaling else {}
        if not self.flat.of_all_layers:
            magnitudes = {}
        count, skipped, in_a_row = tally.tolist()
        counts = {"count": count, "skipped": skipped, "skipped_in_a_row": in_a_row, **magnitudes}
        return counts | ({"spikes": self.spikes.counts(of_spikes)} if self.spikes else {})

    def set_counts(self, counts: Mapping[str, Any]) -> None:
        """Puts back what `counts` gave."""
        for buffer in self.small:
            buffer.zero_()
        self.count.fill_(counts["count"])
        self.skipped.fill_(counts["skipped"])
        self.in_a_row.fill_(counts.get("skipped_in_a_row", 0))
        if self.spikes:
            self.spikes.set_counts(counts.get("spikes"))
        # A branch of a run in another precision has none, nor has a pipeline, whose ranks would each have others: there
        # scales begin anew.
        if self.flat.scaling and self.flat.of_all_layers and "magnitudes" in counts:
            self.flat.scaling.history.copy_(torch.tensor(counts["magnitudes"]))

    def update(self, sums: Tensor) -> Tensor:
        """Applies the gradient sums at rate self.lr, divided by the number of targets, if they are sound.

        sums: (3,) FP64, of lm_loss, aux_loss and targets. Returns (4,) FP64: the two losses as means, the norm of the
        mean gradient before clipping, and the number of targets.
        """
        c, flat = self.config, self.flat
        n_targets = sums[2]
        norm = flat.grad_norm() / n_targets
        means = sums[:2] / n_targets
        figures = torch.stack([means[0], means[1], norm, n_targets])
        apply = self._judge(figures)
        scale = 1.0 / n_targets
        if c.grad_clip > 0:
            scale = scale * (c.grad_clip / (norm + 1e-6)).clamp(max=1.0)
        self._apply(scale, apply)
        if self.average is not None:
            t = self.count.double()
            share = 1 - ((1 + t) / (10 + t)).clamp(max=c.ema_decay)
            self.average.lerp_(flat.master, (share * apply).to(flat.master.dtype))
        return figures

    def _apply(self, scale: Tensor, apply: Tensor) -> None:
        """The update by the gradient times `scale` (0-d FP64), where `apply` (0-d bool)."""
        c, flat, first = self.config, self.flat, self.first
        assert flat.grad is not None
        correction2 = 1 - torch.pow(torch.full_like(scale, c.beta2), self.count)
        correction1 = 1 - torch.pow(torch.full_like(scale, c.beta1), self.count)
        scalars = torch.stack([self.lr, scale, correction1, correction2, apply.double()])
        adamw_step(
            flat.master[first:],
            flat.grad[first:],
            self.exp_avg,
            self.exp_avg_sq,
            None if flat.narrow is None else flat.narrow[first:],
            n_decayed=flat.n_decayed - first,
            scalars=scalars.to(flat.master.dtype),
            beta1=c.beta1,
            beta2=c.beta2,
            eps=c.adam_eps,
            weight_decay=c.weight_decay,
        )

    def _judge(self, figures: Tensor) -> Tensor:
        """Whether the step of these figures is applied (0-d bool), which is counted."""
        apply = torch.isfinite(figures.sum()) & (self.in_a_row <= self.config.max_bad_steps)
        if self.spikes:
            apply = self.spikes.judge(figures[0:3:2], apply)
        skip = ~apply
        number = (self.count + self.skipped + 1).double()
        # Number 0: this process has seen none yet, which may have been resumed in the middle of a row.
        first = skip & ((self.in_a_row == 0) | (self.bad[0] == 0))
        torch.where(first, torch.cat([number.view(1), figures[:3]]), self.bad, out=self.bad)
        self.count.add_(apply)
        self.skipped.add_(skip)
        self.in_a_row.add_(1).mul_(skip)
        return apply
