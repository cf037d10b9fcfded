"""The loss of a run as it went: read from RUN/metrics.jsonl, against steps, tokens and training time."""

import math
import tomllib
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeGuard

import numpy as np
from numpy.typing import NDArray

from llmtrain.storage.errors import BadData, InputMissing, UsageError
from llmtrain.storage.journal import JsonLines

Floats = NDArray[np.float64]

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
    if not path.exists():
        raise InputMissing(f"{path}: no such file: name a run directory")
    train: dict[int, dict[str, Any]] = {}
    evals: dict[str, dict[int, dict[str, Any]]] = {}
    for line in JsonLines.read(path):
        if not all(type(line.get(name)) is int for name in ("step", "tokens")):
            continue
        if line.get("kind") == "train" and is_number(line.get("step_ms")):
            train[line["step"]] = line
        elif line.get("kind") == "eval" and isinstance(line.get("source"), str):
            evals.setdefault(line["source"], {})[line["step"]] = line
    if not train:
        raise BadData(f"{path}: has no train lines: name a run that has trained")
    ordered = [train[step] for step in sorted(train)]
    steps, seconds = np.array([line["step"] for line in ordered]), _training_seconds(ordered)
    lines = ordered
    if metric == VAL_LOSS:
        if source and source not in evals or not source and len(evals) != 1:
            known = ", ".join(evals) or "none"
            raise UsageError(f"{path}: its held-out sources are {known}: name one with --source, or use lm_loss")
        of_source = evals[source or next(iter(evals))]
        lines = [of_source[step] for step in sorted(of_source)]
        seconds = np.interp([line["step"] for line in lines], np.append(0, steps), np.append(0.0, seconds))
    finite = np.array([is_number(line.get(metric)) for line in lines], dtype=bool)
    if not finite.any():
        raise BadData(f"{path}: no {metric} in it is a finite number: name another run")
    kept = [line for line, is_finite in zip(lines, finite, strict=True) if is_finite]
    return Curve(
        str(run_dir),
        np.array([line["step"] for line in kept], np.int64),
        np.array([line["tokens"] for line in kept], np.int64),
        seconds[finite],
        np.array([line[metric] for line in kept], np.float64),
    )


def is_number(value: Any) -> TypeGuard[float]:
    """Whether a value of a line is a finite number."""
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)


def _training_seconds(lines: list[dict[str, Any]]) -> Floats:
    """Seconds of training up to each train line. step_ms is the mean since the line before; in the first line of an
    attempt that includes compiling and capturing, so the run's median stands in for it."""
    usual = float(np.median([line["step_ms"] for line in lines]))
    total, before, attempt, seconds = 0.0, 0, None, []
    for line in lines:
        begins, attempt = line.get("attempt") != attempt, line.get("attempt")
        total += (line["step"] - before) * (usual if begins else line["step_ms"]) / 1e3
        before = line["step"]
        seconds.append(total)
    return np.array(seconds)


def read_settings(run_dir: Path) -> dict[str, Any]:
    """"section.name" -> value of what a run was told; empty where it has no configuration. Raises BadData."""
    path = run_dir / "config.toml"
    try:
        tables = tomllib.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return {}
    except (OSError, UnicodeDecodeError, tomllib.TOMLDecodeError) as error:
        raise BadData(f"{path}: cannot be read as TOML ({error}): correct it") from None
    return {f"{section}.{name}": value for section, table in tables.items() for name, value in table.items()}
