"""The picture of a comparison: losses against tokens, steps and time, and what the blocks at the end say."""

import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from io import BytesIO
from pathlib import Path
from typing import Any

import numpy as np

from llmtrain.report.compare import Blocks, trailing
from llmtrain.report.curves import Curve
from llmtrain.storage import atomic
from llmtrain.storage.errors import UsageError


def figure_class(option: str) -> type[Any]:
    """matplotlib's Figure, which needs no display. Raises UsageError where it is missing, naming what asked for it."""
    try:
        from matplotlib.figure import Figure
    except ImportError:
        raise UsageError(f"{option}: matplotlib is missing: pip install 'llmtrain[plot]'") from None
    return Figure


@contextmanager
def as_it_is() -> Iterator[None]:
    """In the block, what is drawn is drawn as it is, and without a word: a run may be called cost$5, or what no font
    has."""
    import matplotlib

    with matplotlib.rc_context({"text.parse_math": False}), warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)  # a glyph that is missing, an axis of one value
        yield


def add_legend(axes: Any, names: Sequence[str], **options: Any) -> None:
    """A legend of what was drawn with the labels "0", "1" and so on: with the names themselves matplotlib would leave
    out those that begin with _."""
    legend = axes.legend(fontsize="small", **options)
    for text in legend.get_texts():
        text.set_text(printable(names[int(text.get_text())]))


def printable(name: str) -> str:
    """Without what has no shape, such as a newline or half a surrogate pair."""
    return "".join(c if c.isprintable() else "?" for c in name)


def draw(path: Path, replicates: Sequence[Curve], changed: Curve, blocks: Blocks, result: dict[str, Any]) -> None:
    """Writes the image. Raises UsageError where matplotlib is missing, CannotCreate, StorageFailure."""
    figure = figure_class("--plot")(figsize=(11, 8), layout="constrained")
    with as_it_is():
        image = _drawn(figure, path.suffix[1:], replicates, changed, blocks, result)
    atomic.make_parent(path)
    atomic.write_bytes(path, image)


def _drawn(
    figure: Any, form: str, replicates: Sequence[Curve], changed: Curve, blocks: Blocks, result: dict[str, Any]
) -> bytes:
    width = float(blocks.edges[-1] - blocks.edges[-2])
    panels = figure.subplots(2, 2).flatten().tolist()
    axes_of = {"tokens": "tokens", "steps": "step", "seconds": "seconds of training"}
    for axes, (name, label) in zip(panels, axes_of.items(), strict=False):
        lowest = []
        for i, curve in enumerate([*replicates, changed]):
            means = trailing(curve, width)
            color = "tab:orange" if curve is changed else "black" if i == 0 else "tab:gray"
            axes.plot(getattr(curve, name), means, color=color, linewidth=1.2, label=str(i))
            late = means[len(means) // 10 :]
            lowest += [float(late.min()), float(late.max())]
        axes.set(xlabel=label, ylabel="loss, nats a token", ylim=(min(lowest), max(lowest)))
    add_legend(panels[0], [curve.name for curve in (*replicates, changed)])
    axes, floor = panels[3], result["floor"]
    middle = (blocks.edges[1:] + blocks.edges[:-1]) / 2
    mean = blocks.means[:-1].mean(0)
    for theirs in blocks.means[:-1]:
        axes.plot(middle, theirs - mean, color="tab:gray", linewidth=1)
    axes.plot(middle, blocks.means[-1] - mean, "o-", color="tab:orange", markersize=3, linewidth=1)
    axes.axhspan(-floor, floor, color="tab:blue", alpha=0.15, label=f"floor {floor:.2g}")
    axes.axhline(float(np.mean(blocks.means[-1] - mean)), color="tab:orange", linestyle="--", linewidth=1)
    axes.set(xlabel="tokens", ylabel="less the replicates' mean, nats", title=f"{result['verdict']}")
    axes.legend(fontsize="small")
    image = BytesIO()
    figure.savefig(image, format=form, dpi=110)
    return image.getvalue()
