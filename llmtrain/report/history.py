"""Everything that RUN/metrics.jsonl says, as columns of numbers: a line takes some 150 bytes however long the run."""

import os
from array import array
from collections import deque
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from llmtrain.storage.errors import InputMissing
from llmtrain.storage.journal import JsonLines

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]

MOST_COLUMNS = 64
"""Names of figures, and of held-out sources, beyond which further ones are left out: no run has as many."""
OF_A_KIND = 200
"""Events of one name that are kept from the begin, and as many from the end."""
LARGEST = 1 << 62
AXES = ("step", "tokens", "time", "attempt", "kind", "source")


@dataclass(frozen=True)
class Lines:
    """Lines of one kind in the order of their steps, one a step: the newest. All arrays are of one length."""

    steps: Ints
    tokens: Ints
    attempts: Ints
    seconds: Floats
    """Of training alone up to each line: evaluations, saves and pauses between attempts are left out."""
    columns: dict[str, Floats]
    """Figure -> values; NaN where a line has none or one that is not finite."""

    def __len__(self) -> int:
        return len(self.steps)


@dataclass
class Events:
    """The events of one name: the first and the last of them."""

    first: list[dict[str, Any]] = field(default_factory=list)
    last: deque[dict[str, Any]] = field(default_factory=lambda: deque(maxlen=OF_A_KIND))
    count: int = 0

    def add(self, line: dict[str, Any]) -> None:
        self.count += 1
        (self.first if len(self.first) < OF_A_KIND else self.last).append(line)

    @property
    def kept(self) -> list[dict[str, Any]]:
        return [*self.first, *self.last]


@dataclass(frozen=True)
class History:
    """A run as it went."""

    train: Lines
    evals: dict[str, Lines]
    """By held-out source."""
    events: dict[str, Events]
    """By name."""


class _Rows:
    """Lines that are being read."""

    def __init__(self) -> None:
        self.steps, self.tokens, self.attempts = array("q"), array("q"), array("q")
        self.columns: dict[str, array[float]] = {}

    def add(self, line: dict[str, Any]) -> None:
        before = len(self.steps)
        self.steps.append(line["step"])
        self.tokens.append(line["tokens"])
        attempt = line.get("attempt")
        self.attempts.append(attempt if type(attempt) is int and 0 <= attempt < LARGEST else 0)
        for name, value in line.items():
            if type(value) is not float and type(value) is not int or name in AXES:
                continue  # numbers that are not finite were written as null
            column = self.columns.get(name)
            if column is None:
                if len(self.columns) == MOST_COLUMNS:
                    continue
                column = self.columns[name] = array("d")
            if (missing := before - len(column)) > 0:
                column.extend(array("d", [np.nan]) * missing)
            column.append(value if -LARGEST < value < LARGEST else np.nan)

    def arrays(self) -> tuple[Ints, Ints, Ints, dict[str, Floats]]:
        """Steps, tokens, attempts and columns, sorted by step, the last of equal ones alone."""
        rows = len(self.steps)
        steps = np.array(self.steps, np.int64)
        kept: Any = slice(None)
        if not (np.diff(steps) > 0).all():
            order = np.argsort(steps, kind="stable")
            newest = np.append(np.diff(steps[order]) > 0, True)
            kept = order[newest]
        columns = {}
        for name in list(self.columns):
            values = self.columns.pop(name)
            values.extend(array("d", [np.nan]) * (rows - len(values)))
            columns[name] = np.array(values, np.float64)[kept]
        return steps[kept], np.array(self.tokens, np.int64)[kept], np.array(self.attempts, np.int64)[kept], columns


def read_history(run_dir: Path) -> History:
    """Reads RUN/metrics.jsonl, which may be growing, torn or damaged: what is no line of a run is passed over. Raises
    InputMissing where there is no such file, StorageFailure."""
    path = run_dir / "metrics.jsonl"
    if not os.path.exists(path):
        raise InputMissing(f"{path}: no such file: name a run directory")
    train, evals, events = _Rows(), dict[str, _Rows](), dict[str, Events]()
    for line in JsonLines.read(path):
        if not all(type(line.get(name)) is int and 0 <= line[name] < LARGEST for name in ("step", "tokens")):
            continue
        kind = line.get("kind")
        if kind == "train":
            train.add(line)
        elif kind == "eval" and isinstance(source := line.get("source"), str):
            if source in evals or len(evals) < MOST_COLUMNS:
                evals.setdefault(source, _Rows()).add(line)
        elif kind == "event":
            name = str(line.get("event"))
            if name in events or len(events) < MOST_COLUMNS:
                events.setdefault(name, Events()).add(line)
    steps, tokens, attempts, columns = train.arrays()
    seconds = training_seconds(steps, columns.get("step_ms"), attempts)
    lines = Lines(steps, tokens, attempts, seconds, columns)
    return History(lines, {source: _of_evals(rows, lines) for source, rows in evals.items()}, events)


def _of_evals(rows: _Rows, train: Lines) -> Lines:
    steps, tokens, attempts, columns = rows.arrays()
    return Lines(steps, tokens, attempts, seconds_at(steps, train), columns)


def seconds_at(steps: Ints, train: Lines) -> Floats:
    """Seconds of training up to any steps, between two train lines by a straight line."""
    return np.asarray(np.interp(steps, np.append(0, train.steps), np.append(0.0, train.seconds)))


def training_seconds(steps: Ints, step_ms: Floats | None, attempts: Ints) -> Floats:
    """Seconds of training up to each train line. step_ms is the mean since the line before; in the first line of an
    attempt that includes compiling and capturing, so the run's median stands in for it, as for one that is missing."""
    if step_ms is None or not len(steps) or not np.isfinite(step_ms).any():
        return np.zeros(len(steps))
    usual = float(np.nanmedian(step_ms))
    begins = np.append(True, np.diff(attempts) != 0)
    each = np.where(begins | ~np.isfinite(step_ms), usual, step_ms)
    return np.asarray(np.cumsum(np.diff(steps, prepend=0) * each) / 1e3)
