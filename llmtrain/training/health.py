"""Whether a run is still one: it must not go on, or be saved, on numbers that are none."""

import math
from typing import Any

import numpy as np

from llmtrain.corpus.batches import IGNORED, assemble
from llmtrain.storage.errors import BadData, Diverged
from llmtrain.training.checkpoint import list_steps
from llmtrain.training.plan import Plan
from llmtrain.training.schedule import learning_rate
from llmtrain.training.start import Started

WINDOWS_NAMED = 8
"""Windows of a bad step that its line names; `llmtrain inspect RUN --step N` shows all."""


class Health:
    """Looks at a run whenever the device is waited for anyway."""

    def __init__(self, run: Started, plan: Plan) -> None:
        self._run, self._plan, self._optimizer = run, plan, run.step.optimizer
        # A run that is shorter than the row it may have has to apply something too.
        self._patience = min(run.config.optimizer.max_bad_steps, plan.total_steps - 1)
        self._skipped, self._spikes = int(self._optimizer.skipped), self._spikes_so_far()

    def check(self) -> tuple[str, dict[str, Any]]:
        """What was skipped since the last look, in words and as fields; nothing of both where nothing was.

        Raises Diverged where too many updates in a row were skipped, BadData where their data had nothing to learn.
        """
        _, skipped, in_a_row = self._optimizer.tally.tolist()
        spikes_before, self._spikes = self._spikes, self._spikes_so_far()
        new, self._skipped = skipped - self._skipped, skipped
        spikes = self._spikes - spikes_before
        # Where this process has skipped none, a longer row is what the run was resumed with.
        if in_a_row > self._patience and float(self._optimizer.bad[0]):
            text, fields = self._row()
            many = f"more than {self._patience} updates in a row were skipped (--max-bad-steps)"
            if "targets" in fields:
                raise BadData(f"{many}; {text}: lengthen --seq-len, or leave out documents that are longer than it")
            raise self._diverged(f"{many}; {text}", fields["first"])
        if not new:
            return "", {}
        text, fields = self._row()
        of_them = f", {spikes} as {'spikes' if spikes > 1 else 'a spike'}" if spikes else ""
        text = f"{new} update{'s were' if new > 1 else ' was'} skipped{of_them}; {text}"
        return text, {"skipped": new, "spikes": spikes, **fields}

    def _spikes_so_far(self) -> int:
        return int(self._optimizer.spikes.total) if self._optimizer.spikes else 0

    def _row(self) -> tuple[str, dict[str, Any]]:
        """The step that the last row of skipped ones began with, and which samples it saw."""
        number, lm_loss, aux_loss, grad_norm = self._optimizer.bad.tolist()
        config, plan, step = self._run.config, self._plan, int(number)
        lr = learning_rate(step - 1, plan.total_steps, config.optimizer, config.schedule)
        begin, end = plan.samples(step - 1), plan.samples(step)
        figures = {"lm_loss": lm_loss, "aux_loss": aux_loss, "grad_norm": grad_norm, "lr": lr}
        has = f"lm_loss {lm_loss:.5g}, aux_loss {aux_loss:.5g}, grad_norm {grad_norm:.5g}, learning rate {lr:.2e}"
        if not math.isfinite(lm_loss) and not self._has_targets(begin, end):
            figures["targets"], has = 0, "no token that counts in the loss"
        text = (
            f"step {step}, the first in a row, has {has} on samples {begin} to {end - 1}, {self._windows(begin, end)}: "
            f"see `llmtrain inspect {config.run.run_dir} --step {step}`"
        )
        return text, {"first": step, **figures, "samples": [begin, end]}

    def _has_targets(self, begin: int, end: int) -> bool:
        """Whether samples [begin, end) have any: those of fine-tuning data may be prompts alone."""
        batch = assemble(self._run.order, np.arange(begin, end), self._run.config.data.document_mask)
        return bool((batch.targets != IGNORED).any())

    def _windows(self, begin: int, end: int) -> str:
        """The first of the windows that samples [begin, end) are, by name of their source."""
        shown = min(end, begin + WINDOWS_NAMED)
        source, window = self._run.order.locate(np.arange(begin, shown))
        sources = self._run.order.sources
        named = [f"{sources[s].name} {w}" for s, w in zip(source.tolist(), window.tolist(), strict=True)]
        return f"windows {', '.join(named)}" + (f" and {end - shown} more" if end > shown else "")

    def _diverged(self, what: str, bad: int) -> Diverged:
        """The end of a run that went wrong at step `bad`."""
        sound = max((step for step in list_steps(self._run.config.run.run_dir) if step < bad), default=None)
        kept = f"; the checkpoint of step {sound} is from before" if sound is not None else ""
        return Diverged(f"{what}: lower --learning-rate or raise --warmup-steps and start in another --run-dir{kept}")
