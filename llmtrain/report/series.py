"""What the page and the pictures of a report draw: curves of a bounded number of points, and marks on them."""

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from llmtrain.report.history import Floats, History, Ints, Lines, seconds_at
from llmtrain.report.state import TROUBLE

MOST_POINTS = 1500
"""Of a curve: about as many as a wide screen has columns."""
MOST_MARKS = 1000
"""Of one kind on a run's curves."""
MOST_SPIKES = 50
BEFORE_A_SPIKE = 128
"""Lines before one, from whose mean and scatter it stands out."""
SPIKE = 6.0
"""In standard deviations."""
TEXT = 400
"""Characters of an event's text that are shown."""


@dataclass(frozen=True)
class Chart:
    """A figure that is drawn against the steps of all runs."""

    name: str
    """Of the column."""
    title: str
    unit: str
    noisy: bool = True
    """Whether smoothing it says more than it hides."""
    source: str = ""
    """The held-out source that it is of; empty: train lines have it."""
    log: bool = False

    @property
    def key(self) -> str:
        return f"{self.name} {self.source}" if self.source else self.name


TRAIN_CHARTS = (
    Chart("lm_loss", "Training loss", "nats a token"),
    Chart("lr", "Learning rate", "", noisy=False),
    Chart("grad_norm", "Gradient norm", "before clipping"),
    Chart("tok_per_s", "Throughput", "tokens a second"),
    Chart("mfu", "Model FLOPs utilisation", "share of the peak"),
    Chart("aux_loss", "Auxiliary losses", "nats a token"),
    Chart("data_ms", "Waiting for data", "ms between two log lines"),
    Chart("skipped", "Skipped updates", "in all", noisy=False),
    Chart("peak_gib", "Memory of the card", "GiB, peak", noisy=False),
    Chart("host_rss_mib", "Memory of the host", "MiB, peak", noisy=False),
    Chart("card_c", "Temperature of the card", "degrees Celsius"),
    Chart("card_w", "Power of the card", "watts"),
)
DERIVED = ("ppl", "epoch", "hfu", "tflops", "step_ms")
"""Figures that say again what another one says."""


@dataclass(frozen=True)
class Curve:
    """One figure of one run; where a line is not as long as a point, a point stands for a stretch of lines."""

    mean: Floats
    low: Floats | None = None
    """The least value of each stretch, and below the greatest; None where every line has a point of its own."""
    high: Floats | None = None


@dataclass(frozen=True)
class Bunch:
    """The figures of lines of one kind, cut into the same stretches. All arrays are of one length."""

    steps: Ints
    """Of the last line of each stretch."""
    tokens: Ints
    seconds: Floats
    curves: dict[str, Curve]
    lines: int
    """How many there were."""

    @property
    def cut(self) -> bool:
        """Whether a point stands for several lines."""
        return self.lines > len(self.steps)


@dataclass(frozen=True)
class Mark:
    """Something that happened, on the curves."""

    kind: str
    """save, start, resume, failure, spike, skipped or note."""
    step: int
    tokens: int
    seconds: float
    text: str


@dataclass
class Drawn:
    """A run as it is drawn."""

    name: str
    train: Bunch
    evals: dict[str, Bunch]
    marks: list[Mark] = field(default_factory=list)
    left_out: dict[str, int] = field(default_factory=dict)
    """Kind -> marks that are not drawn."""


def bunch(lines: Lines, names: Iterable[str], most: int = MOST_POINTS) -> Bunch:
    """Figures of lines at `most` points at most. Beyond, each point is a stretch of equally many lines, of which it
    keeps the least, the mean and the greatest value; those that are not finite are left out of them."""
    rows, names = len(lines), [name for name in names if name in lines.columns]
    if rows <= most:
        curves = {name: Curve(lines.columns[name]) for name in names}
        return Bunch(lines.steps, lines.tokens, lines.seconds, curves, rows)
    begins = np.linspace(0, rows, most + 1).astype(np.int64)[:-1]
    ends = np.append(begins[1:], rows) - 1
    curves = {}
    for name in names:
        values = lines.columns[name]
        finite = np.isfinite(values)
        sums = np.add.reduceat(np.where(finite, values, 0.0), begins)
        counts = np.add.reduceat(finite.astype(np.int64), begins)
        mean = np.divide(sums, counts, out=np.full(len(sums), np.nan), where=counts > 0)
        low, high = np.fmin.reduceat(values, begins), np.fmax.reduceat(values, begins)
        curves[name] = Curve(mean, low, high)
    return Bunch(lines.steps[ends], lines.tokens[ends], lines.seconds[ends], curves, rows)


def charts_of(histories: Sequence[History]) -> tuple[list[Chart], list[Chart]]:
    """What there is to draw of these runs: the usual figures, and others that their train lines hold."""
    usual: list[Chart] = []
    sources = list(dict.fromkeys(source for one in histories for source in one.evals))
    for chart in TRAIN_CHARTS:
        if any(_says_something(one.train.columns.get(chart.name)) for one in histories):
            usual.append(chart)
        if chart.name == "lm_loss":
            usual += [
                Chart("val_loss", f"Held-out loss: {source}", "nats a token", noisy=False, source=source)
                for source in sources
                if any(source in one.evals and "val_loss" in one.evals[source].columns for one in histories)
            ]
    known = {chart.name for chart in TRAIN_CHARTS} | set(DERIVED)
    others = dict.fromkeys(name for one in histories for name in one.train.columns if name not in known)
    more = [Chart(n, n, "") for n in others if any(_says_something(one.train.columns.get(n)) for one in histories)]
    return usual, more


def _says_something(values: Floats | None) -> bool:
    """Whether there is a finite value other than 0."""
    return values is not None and bool((np.isfinite(values) & (values != 0)).any())


def draw(name: str, history: History, charts: Sequence[Chart], most: int = MOST_POINTS) -> Drawn:
    """The run's part of `charts`."""
    train = bunch(history.train, {chart.name for chart in charts if not chart.source}, most)
    of_evals = ("val_loss", "bits_per_byte", "ppl")
    evals = {source: bunch(lines, of_evals, most) for source, lines in history.evals.items()}
    drawn = Drawn(name, train, evals)
    add_marks(drawn, history)
    return drawn


KINDS = dict.fromkeys((*TROUBLE, "mismatch"), "failure")
KINDS |= {"checkpoint": "save", "start": "start", "skipped": "skipped"}
"""Name of an event -> kind of its mark; others are notes."""


def add_marks(drawn: Drawn, history: History) -> None:
    """Events, spikes and losses that are no numbers, in the order of their steps."""
    train = history.train
    found: list[tuple[str, int, int, str]] = []
    counts: dict[str, int] = {}
    for name, events in history.events.items():
        kind = KINDS.get(name, "note")
        for one in events.kept:
            shown = "resume" if kind == "start" and one["step"] > 0 else kind
            found.append((shown, one["step"], one["tokens"], str(one.get("text") or name)[:TEXT]))
        counts[kind] = counts.get(kind, 0) + events.count - len(events.kept)
    if (losses := train.columns.get("lm_loss")) is not None:
        for i in np.flatnonzero(~np.isfinite(losses))[:MOST_SPIKES].tolist():
            found.append(("failure", int(train.steps[i]), int(train.tokens[i]), "the loss is no finite number"))
        counts["failure"] = counts.get("failure", 0) + max(0, int((~np.isfinite(losses)).sum()) - MOST_SPIKES)
        for i, above in spikes(losses):
            text = f"loss {losses[i]:.4f}, {above:.1f} standard deviations above the {BEFORE_A_SPIKE} lines before it"
            found.append(("spike", int(train.steps[i]), int(train.tokens[i]), text))
    found.sort(key=lambda mark: mark[1])
    steps = np.array([step for _, step, _, _ in found], np.int64)
    seconds = seconds_at(steps, train) if len(train) else np.zeros(len(found))
    by_kind: dict[str, int] = {}
    for (kind, step, tokens, text), second in zip(found, seconds.tolist(), strict=True):
        by_kind[kind] = by_kind.get(kind, 0) + 1
        if by_kind[kind] <= MOST_MARKS:
            drawn.marks.append(Mark(kind, step, tokens, second, text))
        else:
            counts[kind] = counts.get(kind, 0) + 1
    drawn.left_out = {kind: count for kind, count in counts.items() if count}


def mark_end(drawn: Drawn, text: str) -> None:
    """A failure where the curves end."""
    train = drawn.train
    at = (int(train.steps[-1]), int(train.tokens[-1]), float(train.seconds[-1])) if len(train.steps) else (0, 0, 0.0)
    drawn.marks.append(Mark("failure", *at, text[:TEXT]))


def spikes(losses: Floats) -> list[tuple[int, float]]:
    """(line, how many standard deviations above) of losses that stand out from the lines before them, each the highest
    of those that it stands among."""
    finite = np.isfinite(losses)
    rows, values = np.flatnonzero(finite), losses[finite]
    if len(values) <= BEFORE_A_SPIKE:
        return []
    values = values - values.mean()  # so that the squares keep their digits
    sums, squares = np.append(0.0, np.cumsum(values)), np.append(0.0, np.cumsum(values**2))
    n = BEFORE_A_SPIKE
    mean = (sums[n:-1] - sums[: -n - 1]) / n
    scatter = np.sqrt(np.maximum(0.0, (squares[n:-1] - squares[: -n - 1]) / n - mean**2))
    above = (values[n:] - mean) / np.maximum(scatter, 1e-6)
    candidates = np.flatnonzero(above > SPIKE)
    chosen: list[tuple[int, float]] = []
    for i in candidates[np.argsort(-values[n:][candidates])].tolist():
        row = int(rows[n + i])
        if all(abs(row - other) > n for other, _ in chosen):
            chosen.append((row, float(above[i])))
        if len(chosen) == MOST_SPIKES:
            break
    return sorted(chosen)


def short(value: float) -> float | None:
    """Six digits, which no screen shows more of; None for what is not finite."""
    return float(f"{value:.6g}") if math.isfinite(value) else None


def as_json(drawn: Drawn) -> dict[str, Any]:
    """For the page's script."""

    def of(one: Bunch) -> dict[str, Any]:
        curves: dict[str, Any] = {}
        for name, curve in one.curves.items():
            curves[name] = {"y": [short(v) for v in curve.mean.tolist()]}
            if curve.low is not None and curve.high is not None:
                curves[name] |= {"lo": [short(v) for v in curve.low.tolist()]}
                curves[name] |= {"hi": [short(v) for v in curve.high.tolist()]}
        axes = {"step": one.steps.tolist(), "tokens": one.tokens.tolist()}
        return {**axes, "seconds": [short(v) for v in one.seconds.tolist()], "lines": one.lines, "curves": curves}

    return {
        "name": drawn.name,
        "train": of(drawn.train),
        "evals": {source: of(one) for source, one in drawn.evals.items()},
        "marks": [[m.kind, m.step, m.tokens, short(m.seconds), m.text] for m in drawn.marks],
    }
