"""The loss of a run as it went: read from RUN/metrics.jsonl, against steps, tokens and training time."""

import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from llmtrain.report.history import Floats, read_history
from llmtrain.storage.errors import BadData, UsageError
from llmtrain.storage.manifest import read_toml

NOTHING: Floats = np.zeros(0)

LM_LOSS, VAL_LOSS = "lm_loss", "val_loss"


@dataclass(frozen=True)
class Curve:
    """One run; the arrays are of one length, in the order of the steps."""

    name: str
    steps: NDArray[np.int64]
    tokens: NDArray[np.int64]
    seconds: Floats
    """Of training alone: evaluations, saves and pauses between attempts are left out."""
    losses: Floats
    """Nats a token."""


def read_curve(run_dir: Path, metric: str = LM_LOSS, source: str = "") -> Curve:
    """The curve of a run. metric: "lm_loss" of its train lines, or "val_loss" of its eval lines, of the held-out
    `source` (needed where there are several). Raises InputMissing where there is no run, BadData where it has no such
    lines, UsageError for a source that is not there."""
    path = run_dir / "metrics.jsonl"
    history = read_history(run_dir)
    lines = history.train
    if not (lines.columns.get("step_ms", NOTHING) > 0).any():
        raise BadData(f"{path}: has no train lines: name a run that has trained")
    if metric == VAL_LOSS:
        evals = {name: of_name for name, of_name in history.evals.items() if VAL_LOSS in of_name.columns}
        if source and source not in evals or not source and len(evals) != 1:
            known = ", ".join(evals) or "none"
            raise UsageError(f"{path}: its held-out sources are {known}: name one with --source, or use lm_loss")
        lines = evals[source or next(iter(evals))]
    losses = lines.columns.get(metric, NOTHING)
    finite = np.isfinite(losses)
    if not finite.any():
        raise BadData(f"{path}: no {metric} in it is a finite number: name another run")
    return Curve(str(run_dir), lines.steps[finite], lines.tokens[finite], lines.seconds[finite], losses[finite])


def read_settings(run_dir: Path) -> dict[str, Any]:
    """"section.name" -> value of what a run was told; empty where it has no configuration. Raises BadData."""
    path = run_dir / "config.toml"
    if not os.path.lexists(path):
        return {}
    tables = read_toml(path)
    for section, table in tables.items():
        if not isinstance(table, dict):
            raise BadData(f"{path}: {section} is no table: correct it")
    return {f"{section}.{name}": value for section, table in tables.items() for name, value in table.items()}
