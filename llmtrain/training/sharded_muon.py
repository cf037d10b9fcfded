"""Muon of matrices whose rows are shared out among ranks."""

import torch
from torch import Tensor

from llmtrain.kernels.newton_schulz import BATCH, batch_size, orthogonalise
from llmtrain.model.matrices import rows_of
from llmtrain.training.flat import Span
from llmtrain.training.muon import Muon, Stack, batches, stacks
from llmtrain.training.sharded import ShardedParameters


class ShardedMuon(Muon):
    """Matrices of a few blocks at a time are gathered in the work dtype; each rank orthogonalises them all, as it does
    without shards, and takes its own rows. Experts, of which each is on one rank, are not gathered."""

    def _batches(self) -> list[list[Stack]]:
        assert isinstance(self.flat, ShardedParameters)
        experts = {name: span for name, span in self._hidden() if len(span.shape) == 3 and span.shape[0]}
        return list(batches(stacks(experts, self.flat.n_hidden, self.model)))

    def _hidden(self) -> list[tuple[str, Span]]:
        return [(name, span) for name, span in self.flat.spans.items() if span.begin < self.flat.n_hidden]

    def _update_matrices(self, g: Tensor, lr: Tensor, keep: Tensor) -> None:
        super()._update_matrices(g, lr, keep)
        group: list[str] = []  # that lie side by side
        elements = 0
        for name, span in self._hidden():
            if len(span.shape) == 2:
                group.append(name)
                elements += span.rows * span.shape[1]
            if group and (len(span.shape) > 2 or elements >= BATCH):
                self._update_gathered(group, g, lr, keep)
                group, elements = [], 0
        if group:
            self._update_gathered(group, g, lr, keep)

    def _update_gathered(self, group: list[str], g: Tensor, lr: Tensor, keep: Tensor) -> None:
        """As `_update_matrices`, of the parameters in `group`."""
        flat = self.flat
        assert isinstance(flat, ShardedParameters)
        whole: dict[str, Tensor] = flat.gather(g, group, self.work_dtype)
        by_sides: dict[tuple[int, int], list[tuple[Tensor, float]]] = {}  # views of them and their factors
        for name, of_all in whole.items():
            for part in of_all.split(rows_of(name, of_all.shape, self.model)):
                rows, columns = part.shape
                view = part if rows <= columns else part.mT
                of_sides = by_sides.setdefault((view.shape[0], view.shape[1]), [])
                of_sides.append((view, max(1.0, rows / columns) ** 0.5))
        for sides, of_sides in by_sides.items():
            most = batch_size(*sides)
            for i in range(0, len(of_sides), most):
                batch = of_sides[i : i + most]
                made = orthogonalise(torch.stack([view for view, _ in batch]))
                for (view, factor), x in zip(batch, made, strict=True):
                    view.copy_(x.mul_((lr * factor).to(flat.master.dtype)))
        for name, of_all in whole.items():
            span = flat.spans[name]
            flat.view(flat.master, name).mul_(keep).sub_(of_all[span.row : span.row + span.shape[0]])
