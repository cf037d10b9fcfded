"""AdamW on the flat buffers, and what all optimizers share: the one division of the rule of sums, clipping, and whether
the update is applied, all on the device.

Whether an update is applied is decided on the device too: the host learns of it at the next log line.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from llmtrain.kernels.adamw import APPLY, adamw_step
from llmtrain.kernels.update_scalars import update_scalars
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
        figures, scalars = update_scalars(
            flat.master, sums, flat.grad_norm(), self.tally, self.bad, self.lr,
            grad_clip=c.grad_clip, max_bad_steps=c.max_bad_steps, beta1=c.beta1, beta2=c.beta2,
            veto=self.spikes.judge if self.spikes else None,
        )  # fmt: skip
        self._apply(scalars)
        if self.average is not None:
            t = self.count.double()
            share = 1 - ((1 + t) / (10 + t)).clamp(max=c.ema_decay)
            self.average.lerp_(flat.master, (share * scalars[APPLY]).to(flat.master.dtype))
        return figures

    def _apply(self, scalars: Tensor) -> None:
        """The update, as `update_scalars` says (5,)."""
        c, flat, first = self.config, self.flat, self.first
        assert flat.grad is not None
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
