"""Where a run stands, as its records say: the lines of metrics.jsonl one after the other, and status.json.

One model with two sources. The process that trains adds each line as it writes it; `report/follow.py` reads them from
the files. What is drawn of it (`report/dashboard.py`) does not know which of the two it was.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from llmtrain.storage.journal import is_number

MOST_POINTS = 1024
"""Points that the course of the loss is kept in."""

RUNNING, STARTING, FINISHED, STOPPED, FAILED, GONE, UNKNOWN = (
    "running", "starting", "finished", "stopped", "failed", "gone", "unknown"
)  # fmt: skip
"""What a run can be: as status.json has it, or `starting` (a process holds the run directory and has not trained yet),
`gone` (a process that said it was running and is no more), `unknown` (nothing has been written yet)."""

TROUBLE = ("skipped", "save_failed", "slow_rank", "console", "tracker")
"""Events that a person should see, however long ago they were."""


class Losses:
    """The loss by step, in at most MOST_POINTS points: beyond that many train lines each is the mean of neighbours."""

    def __init__(self) -> None:
        self._points: list[tuple[int, int, float, int]] = []  # first step, last step, sum of losses, lines
        self._each = 1  # lines that make a point

    def add(self, step: int, loss: float) -> None:
        if self._points and step <= self._points[-1][1]:  # lines of another record, or in disorder
            self.cut(step - 1)
        if self._points and self._points[-1][3] < self._each:
            first, _, total, lines = self._points[-1]
            self._points[-1] = (first, step, total + loss, lines + 1)
        else:
            self._points.append((step, step, loss, 1))
        if len(self._points) > MOST_POINTS:
            self._each *= 2
            even, odd = self._points[::2], self._points[1::2]
            merged = [(a[0], b[1], a[2] + b[2], a[3] + b[3]) for a, b in zip(even, odd, strict=False)]
            self._points = merged + even[len(odd) :]

    def cut(self, step: int) -> None:
        """Forgets what lies beyond `step`: a run that goes on from a checkpoint trains on that again."""
        while self._points and self._points[-1][1] > step:
            self._points.pop()

    @property
    def steps(self) -> tuple[int, int]:
        """The first and the last step; (0, 0) without any."""
        return (self._points[0][0], self._points[-1][1]) if self._points else (0, 0)

    def columns(self, width: int) -> list[float]:
        """Mean losses of `width` equal stretches of the steps; one without a line is as the one before. Nothing where
        there are no two points."""
        points = list(self._points)  # another thread may add to them
        if len(points) < 2 or width < 2:
            return []
        first, last = points[0][0], points[-1][1]
        sums, lines = [0.0] * width, [0] * width
        for begin, end, total, n in points:
            i = min(width - 1, ((begin + end) // 2 - first) * width // (last - first + 1))
            sums[i] += total
            lines[i] += n
        mean = points[0][2] / points[0][3]
        means = []
        for total, n in zip(sums, lines, strict=True):
            mean = total / n if n else mean
            means.append(mean)
        return means


@dataclass
class RunState:
    """Where a run stands. Times are seconds since 1970."""

    name: str
    """The run directory, as it was named."""
    state: str = UNKNOWN
    reason: str = ""
    """Why it is in this state, in words; status.json has it."""
    process: str = ""
    """What holds the run directory, in words; "" where nothing is known to."""
    at_step: int = 0
    total_steps: int | None = None
    total_tokens: int | None = None
    parameters: int | None = None
    device: str = ""
    card_gib: float | None = None
    """Memory of the card."""
    attempt: int = 0
    started: float | None = None
    """When this attempt began."""
    seen: float | None = None
    """When the newest line was written."""
    train: dict[str, Any] = field(default_factory=dict)
    """The newest train line; empty before the first."""
    steps_of_line: int = 0
    """Steps since the train line before."""
    losses: Losses = field(default_factory=Losses)
    evals: dict[str, dict[str, Any]] = field(default_factory=dict)
    """The newest eval line of each source."""
    best: dict[str, dict[str, Any]] = field(default_factory=dict)
    """The eval line of each source with the lowest loss."""
    saved: dict[str, Any] = field(default_factory=dict)
    """The event of the newest checkpoint."""
    trouble: dict[str, Any] = field(default_factory=dict)
    """The newest event that a person should see."""
    _began_at: int = 0

    def add(self, line: dict[str, Any]) -> None:
        """Takes a line of metrics.jsonl. One that is not as it should be is passed over."""
        step, when = line.get("step"), line.get("time")
        if type(step) is not int:
            return
        if is_number(when):
            self.seen = when
        self.at_step = max(self.at_step, step)
        kind = line.get("kind")
        if kind == "train":
            before = self.train.get("step", self._began_at)
            self.steps_of_line = max(1, step - before) if step > before else 1
            self.train = line
            if is_number(line.get("lm_loss")):
                self.losses.add(step, line["lm_loss"])
        elif kind == "eval" and isinstance(source := line.get("source"), str):
            self.evals[source] = line
            if is_number(loss := line.get("val_loss")):
                best = self.best.get(source, {}).get("val_loss")
                if best is None or loss < best:
                    self.best[source] = line
        elif kind == "event":
            self._add_event(line, step)

    def _add_event(self, line: dict[str, Any], step: int) -> None:
        name = line.get("event")
        if name == "start":
            self._start(line, step)
        elif name == "checkpoint":
            self.saved = line
        elif name in TROUBLE:
            self.trouble = line

    def _start(self, line: dict[str, Any], step: int) -> None:
        """An attempt begins: what the one before did beyond its checkpoint counts no more."""
        self.at_step = self._began_at = step
        self.losses.cut(step)
        if self.train.get("step", 0) > step:
            self.train = {}
        for lines in (self.evals, self.best):
            for source in [source for source, one in lines.items() if one["step"] > step]:
                del lines[source]
        self.attempt = line["attempt"] if type(line.get("attempt")) is int else self.attempt + 1
        self.started = self.seen
        self.trouble = {}
        for name in ("total_steps", "total_tokens", "parameters"):
            value = line.get(name)
            setattr(self, name, value if type(value) is int else None)
        self.card_gib = line["card_gib"] if is_number(line.get("card_gib")) else None
        environment = line.get("environment")
        self.device = str(environment.get("device", "")) if isinstance(environment, dict) else ""

    @property
    def seconds_left(self) -> float | None:
        """Of training alone, at the rate of the newest train line; None where that is not known."""
        rate = self.train.get("tok_per_s")
        if self.total_tokens is None or not is_number(rate) or not rate or type(self.train.get("tokens")) is not int:
            return None
        return max(0.0, (self.total_tokens - self.train["tokens"]) / rate)

    @property
    def data_wait(self) -> float | None:
        """Share of the training time since the train line before that was spent on waiting for data."""
        step_ms, data_ms = self.train.get("step_ms"), self.train.get("data_ms")
        if not is_number(step_ms) or not is_number(data_ms) or not step_ms:
            return None
        return min(1.0, data_ms / (step_ms * self.steps_of_line))


EVAL_FIGURES = (
    "val_loss", "ppl", "bits_per_byte", "accuracy", "accuracy_stderr", "accuracy_norm", "accuracy_norm_stderr"
)  # fmt: skip
"""Figures of an eval line, where it has them."""


def said(line: dict[str, Any]) -> str:
    """What a line of metrics.jsonl says to people, "" of one that is for programs alone."""
    step = line.get("step")
    if line.get("kind") == "event" and line.get("text"):
        return f"step {step}: {line['text']}"
    if line.get("kind") == "eval":
        figures = figures_of(line, EVAL_FIGURES)
        return f"step {step}: {line.get('source')} {figures}" if figures else ""
    return ""


def figures_of(line: dict[str, Any], names: Sequence[str]) -> str:
    return ", ".join(f"{name} {line[name]:.4f}" for name in names if is_number(line.get(name)))
