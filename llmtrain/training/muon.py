"""Muon for the matrices of the blocks, AdamW for the rest (Jordan et al. 2024, kellerjordan.github.io/posts/muon).

An update of a matrix is its momentum (Nesterov's) with all singular values brought to about 1, times the rate and
sqrt(max(1, rows / columns)), which makes what it does to a hidden vector the same for every shape. That is Jordan's
scaling, for which rates such as 0.02 are given; Moonlight's 0.2 * sqrt(max(rows, columns)) (arXiv 2502.16982) copies
AdamW's typical step instead, to share its rate. Decay is decoupled, as AdamW's: weight_decay times Muon's own rate.

q, k and v are matrices of their own, and so are gate and up, though they lie in one: a common update would couple what
the forward does not. Heads are not taken apart: so it was done wherever Muon's gain was measured.

Clipping scales a whole step's gradient, so here it bounds what one step adds to the momentum. It does not shorten the
update, whose length is the rate's alone.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from llmtrain.kernels.adamw import APPLY, GRAD_SCALE
from llmtrain.kernels.newton_schulz import batch_size, orthogonalise
from llmtrain.model.config import ModelConfig
from llmtrain.model.matrices import rows_of
from llmtrain.training.config import OptimizerConfig
from llmtrain.training.flat import FlatParameters, Span, Stretch
from llmtrain.training.optimizer import AdamW


@dataclass(frozen=True)
class Stack:
    """Matrices of one shape, at equal distances in the flat buffers."""

    begin: int
    distance: int
    count: int
    rows: int
    columns: int

    def of(self, flat: Tensor) -> Tensor:
        """Those of a flat buffer, as a view (count, short side, long side)."""
        shape = self.count, self.rows, self.columns
        view = flat.as_strided(shape, (self.distance, self.columns, 1), flat.storage_offset() + self.begin)
        return view if self.rows <= self.columns else view.mT

    @property
    def sides(self) -> tuple[int, int]:
        short, long = sorted((self.rows, self.columns))
        return short, long

    def cut(self, count: int) -> tuple["Stack", "Stack"]:
        """The first `count` matrices, and the others."""
        begin = self.begin + count * self.distance
        return (
            Stack(self.begin, self.distance, count, self.rows, self.columns),
            Stack(begin, self.distance, self.count - count, self.rows, self.columns),
        )


def stacks(spans: Mapping[str, Span], n_hidden: int, config: ModelConfig) -> list[Stack]:
    """The hidden matrices, which come before flat index `n_hidden`, in as few stacks as their places allow: one of a
    kind where the layers are alike."""
    places: dict[tuple[int, int, str], list[int]] = {}
    for name, span in spans.items():
        if span.begin >= n_hidden:
            break
        columns, of_one = span.shape[-1], span.shape[-2] * span.shape[-1]
        above = 0
        for rows in rows_of(name, span.shape, config):
            kind = f"{name.split('.', 2)[2]} {above}"
            for i in range(span.shape[:-2].numel()):
                places.setdefault((rows, columns, kind), []).append(span.begin + i * of_one + above * columns)
            above += rows
    found = []
    for (rows, columns, _), begins in places.items():
        begins.sort()
        while begins:
            distance = begins[1] - begins[0] if len(begins) > 1 else rows * columns
            count = 1
            while count < len(begins) and begins[count] == begins[0] + count * distance:
                count += 1
            found.append(Stack(begins[0], distance, count, rows, columns))
            begins = begins[count:]
    return found


def batches(of_model: list[Stack]) -> Iterator[list[Stack]]:
    """Stacks of one pair of sides, cut so that each list holds `batch_size` matrices, the last one of a pair fewer."""
    by_sides: dict[tuple[int, int], list[Stack]] = {}
    for stack in of_model:
        by_sides.setdefault(stack.sides, []).append(stack)
    for sides, left in by_sides.items():
        batch: list[Stack] = []
        room = most = batch_size(*sides)
        while left:
            stack = left.pop(0)
            if stack.count > room:
                stack, rest = stack.cut(room)
                left.insert(0, rest)
            batch.append(stack)
            room -= stack.count
            if not room:
                yield batch
                batch, room = [], most
        if batch:
            yield batch


class Muon(AdamW):
    """`momentum` is a flat FP32 buffer for the hidden matrices, which come first in `flat`; behind them AdamW's two."""

    def __init__(self, flat: FlatParameters, config: OptimizerConfig, model: ModelConfig) -> None:
        super().__init__(flat, config, first=flat.n_hidden)
        self.momentum = torch.zeros_like(flat.master[: flat.n_hidden])
        self.large = {"weight": self.large["weight"], "momentum": Stretch(0, self.momentum), **self.large}
        self.model = model
        self.batches = self._batches()
        self.work_dtype = torch.bfloat16 if flat.master.is_cuda else flat.master.dtype

    def _apply(self, scalars: Tensor) -> None:
        super()._apply(scalars)
        c, flat = self.config, self.flat
        assert flat.grad is not None
        dtype = flat.master.dtype
        # The gradient has served: what is made of it takes its place, and the next step's overwrites that. It is
        # selected, not multiplied, as what is not applied may be NaN.
        apply = scalars[APPLY]
        g = flat.grad[: flat.n_hidden].mul_(scalars[GRAD_SCALE].to(dtype))
        torch.where(apply != 0, g, torch.zeros((), dtype=dtype, device=g.device), out=g)
        self.momentum.lerp_(g, ((1 - c.muon_momentum) * apply).to(dtype))
        g.lerp_(self.momentum, c.muon_momentum)
        lr = self.lr * (c.muon_lr / c.learning_rate) * apply
        keep = (1 - lr * c.weight_decay).to(dtype)
        self._update_matrices(g, lr, keep)
        if flat.narrow is not None:
            flat.narrow[: flat.n_hidden].copy_(flat.master[: flat.n_hidden])

    def _batches(self) -> list[list[Stack]]:
        return list(batches(stacks(self.flat.spans, self.flat.n_hidden, self.model)))

    def _update_matrices(self, g: Tensor, lr: Tensor, keep: Tensor) -> None:
        """Moves the hidden matrices by what is made of g, which lies as they do, at rate `lr` (0-d FP64), after they
        have been multiplied by `keep` (0-d)."""
        flat, dtype = self.flat, self.flat.master.dtype
        for batch in self.batches:
            sizes = [stack.count for stack in batch]
            x = torch.empty((sum(sizes), *batch[0].sides), dtype=self.work_dtype, device=g.device)
            for stack, part in zip(batch, x.split(sizes), strict=True):
                part.copy_(stack.of(g))
            x = orthogonalise(x)
            for stack, part in zip(batch, x.split(sizes), strict=True):
                part.mul_((lr * max(1.0, stack.rows / stack.columns) ** 0.5).to(dtype))
                stack.of(flat.master).mul_(keep).sub_(part)
            del x


def optimizer_of(flat: FlatParameters, config: OptimizerConfig, model: ModelConfig) -> AdamW:
    """The one that `config` names, for the parameters of a `model`."""
    if config.optimizer != "muon":
        return AdamW(flat, config)
    if flat.n_sharded == 0:
        return Muon(flat, config, model)
    from llmtrain.training.sharded_muon import ShardedMuon  # who has one card need not wait for FSDP's import

    return ShardedMuon(flat, config, model)
