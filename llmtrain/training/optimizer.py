"""AdamW on the flat buffers: the one division of the rule of sums, clipping and the update, all on the device."""

import torch
from torch import Tensor

from llmtrain.kernels.adamw import adamw_step
from llmtrain.training.config import OptimizerConfig
from llmtrain.training.flat import FlatParameters

MOMENTS = ("exp_avg", "exp_avg_sq")


class AdamW:
    """Moments are flat FP32 buffers beside the masters; `count` is the number of updates that were applied.

    A step whose gradient is not finite is passed over on the device: nothing but the step number moves.
    """

    def __init__(self, flat: FlatParameters, config: OptimizerConfig) -> None:
        assert flat.grad is not None
        self.flat = flat
        self.config = config
        self.exp_avg = torch.zeros_like(flat.master)
        self.exp_avg_sq = torch.zeros_like(flat.master)
        device = flat.master.device
        self.count = torch.zeros((), dtype=torch.int64, device=device)
        self.skipped = torch.zeros((), dtype=torch.int64, device=device)
        # FP64: 1 - beta^count loses its digits in FP32 while beta^count is near 1.
        self.lr = torch.zeros((), dtype=torch.float64, device=device)

    def reset(self) -> None:
        """As before the first step."""
        for buffer in (self.exp_avg, self.exp_avg_sq, self.count, self.skipped):
            buffer.zero_()

    def update(self, n_targets: Tensor) -> Tensor:
        """Applies the gradient sums, divided by n_targets (0-d FP64), at rate self.lr. Returns the norm of the mean
        gradient before clipping (0-d FP64)."""
        c, flat = self.config, self.flat
        assert flat.grad is not None
        norm = torch.linalg.vector_norm(flat.grad).double() / n_targets
        finite = torch.isfinite(norm)
        scale = 1.0 / n_targets
        if c.grad_clip > 0:
            scale = scale * (c.grad_clip / (norm + 1e-6)).clamp(max=1.0)
        self.count.add_(finite)
        self.skipped.add_(~finite)
        correction2 = 1 - torch.pow(torch.full_like(norm, c.beta2), self.count)
        correction1 = 1 - torch.pow(torch.full_like(norm, c.beta1), self.count)
        scalars = torch.stack([self.lr, scale, correction1, correction2, finite.double()])
        adamw_step(
            flat.master,
            flat.grad,
            self.exp_avg,
            self.exp_avg_sq,
            flat.narrow,
            n_decayed=flat.n_decayed,
            scalars=scalars.to(flat.master.dtype),
            beta1=c.beta1,
            beta2=c.beta2,
            eps=c.adam_eps,
            weight_decay=c.weight_decay,
        )
        return norm
