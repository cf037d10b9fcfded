"""Run directories with losses that are made up, so that the answer is known."""

import json
from pathlib import Path

import numpy as np

TOKENS = 1000
"""Of a step."""


def write_run(
    folder: Path, losses: np.ndarray, *, every: int = 1, step_ms: float = 100.0, optimizer: str = "adamw", seed: int = 0
) -> Path:
    """A run of one loss a step that logs every `every`-th."""
    folder.mkdir(parents=True)
    lines = []
    for step, loss in enumerate(losses.tolist(), 1):
        if step % every == 0:
            lines.append(
                {"kind": "train", "step": step, "tokens": step * TOKENS, "time": 0.0, "attempt": 1,
                 "lm_loss": loss, "step_ms": step_ms}
            )  # fmt: skip
        if step % 50 == 0:
            lines.append(
                {"kind": "eval", "step": step, "tokens": step * TOKENS, "time": 0.0, "attempt": 1, "source": "held",
                 "val_loss": loss + 0.1}
            )  # fmt: skip
    (folder / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    (folder / "config.toml").write_text(
        f'[optimizer]\nname = "{optimizer}"\n[run]\nrun_dir = "{folder}"\nseed = {seed}\n'
    )
    return folder


def falling(steps: int, seed: int, *, batch_seed: int = 0, offset: float = 0.0, speed: float = 1.0) -> np.ndarray:
    """Losses that fall as those of a model do. The batches' noise is the same for equal batch_seed; that of the run
    itself is a tenth of it."""
    t = np.arange(1, steps + 1) * speed
    batches = np.random.default_rng(batch_seed).normal(0, 0.05, steps)
    own = np.random.default_rng(1000 + seed).normal(0, 0.005, steps)
    return 3.0 + 6.0 * t**-0.4 + batches + own + offset
