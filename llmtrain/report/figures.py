"""The pictures of a report, for papers: each chart of the page as a PNG."""

import re
from collections.abc import Sequence
from io import BytesIO
from pathlib import Path

import numpy as np

from llmtrain.report.plot import add_legend, as_it_is, figure_class, printable
from llmtrain.report.series import Bunch, Chart, Drawn
from llmtrain.storage import atomic
from llmtrain.storage.errors import write_error

AXES = {"step": ("steps", "step"), "tokens": ("tokens", "tokens"), "time": ("seconds", "seconds of training")}
COLORS = ("#1f66d1", "#c2540a", "#1a7f4b", "#7a3fd0", "#c0266d", "#0b7a8a", "#8a5a16", "#5a6470")
FEW = 60
"""Points up to which each is a dot too."""


def write_figures(folder: Path, drawn: Sequence[Drawn], charts: Sequence[Chart], axis: str) -> list[Path]:
    """Writes an image for each chart; returns their paths. Raises UsageError where matplotlib is missing, CannotCreate,
    StorageFailure."""
    figure_type = figure_class("--png")
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise write_error(error, folder, "created") from None
    written = []
    for chart in charts:
        with as_it_is():
            image = _image(figure_type(figsize=(6.4, 4.0), layout="constrained"), drawn, chart, AXES[axis])
        path = folder / f"{file_name(chart)}.png"
        atomic.write_bytes(path, image)
        written.append(path)
    return written


def _image(figure, drawn: Sequence[Drawn], chart: Chart, across: tuple[str, str]) -> bytes:  # type: ignore[no-untyped-def]
    """The PNG of a chart; across: as in AXES."""
    attribute, label = across
    axes = figure.subplots()
    visible = []
    for i, run in enumerate(drawn):
        bunch = run.evals.get(chart.source) if chart.source else run.train
        if bunch is None or chart.name not in bunch.curves:
            continue
        visible.append(_draw(axes, chart, bunch, getattr(bunch, attribute), COLORS[i % len(COLORS)], str(i)))
    axes.set(xlabel=label, ylabel=printable(chart.unit or chart.title), title=printable(chart.title))
    _fit(axes, chart, [values for values in visible if len(values)])
    axes.grid(color="#e8e8e4", linewidth=0.8)
    axes.set_axisbelow(True)
    axes.spines[["top", "right"]].set_visible(False)
    if len(drawn) > 1:
        add_legend(axes, [run.name for run in drawn], frameon=False)
    image = BytesIO()
    figure.savefig(image, format="png", dpi=200)
    return image.getvalue()


def _draw(axes, chart: Chart, bunch: Bunch, x: np.ndarray, color: str, name: str) -> np.ndarray:  # type: ignore[no-untyped-def]
    """Draws a run's curve; returns its finite values."""
    curve = bunch.curves[chart.name]
    if curve.low is not None and curve.high is not None:
        axes.fill_between(x, curve.low, curve.high, color=color, alpha=0.15, linewidth=0)
    dots = {"marker": "o", "markersize": 3} if len(x) <= FEW else {}
    axes.plot(x, curve.mean, color=color, linewidth=1.1, label=name, **dots)
    return curve.mean[np.isfinite(curve.mean)]


def _fit(axes, chart: Chart, values: list[np.ndarray]) -> None:  # type: ignore[no-untyped-def]
    """Leaves the hundredth that lies farthest out beyond the frame, as the page does."""
    every = np.concatenate(values) if values else np.zeros(0)
    if len(every) > FEW:
        low, high = np.quantile(every, [0.01, 0.99])
        if high > low:
            axes.set_ylim(low - 0.06 * (high - low), high + 0.06 * (high - low))


def file_name(chart: Chart) -> str:
    """A source may be called anything."""
    return re.sub(r"[^A-Za-z0-9._-]+", "-", chart.key).strip("-.") or "chart"
