"""The page of a report: one HTML file with its data, style and script in it, that asks nothing of a network."""

import json
import time
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict
from html import escape
from importlib.resources import files
from string import Template
from typing import Any

import numpy as np

from llmtrain import __version__
from llmtrain.report.runs import Run
from llmtrain.report.series import Chart, Drawn, as_json
from llmtrain.storage.units import duration, in_bytes

EVENT_ROWS = 300
"""Of a run, in the table of events."""


def page(runs: Sequence[Run], drawn: Sequence[Drawn], charts: Sequence[Chart], more: Sequence[Chart]) -> str:
    """The whole file. Whatever comes from a run is escaped."""
    names = ", ".join(run.name for run in runs)
    data = {
        "runs": [as_json(one) for one in drawn],
        "charts": [{**asdict(chart), "key": chart.key} for chart in charts],
        "more": [{**asdict(chart), "key": chart.key} for chart in more],
    }
    parts = {
        "title": escape(f"{names} · llmtrain"),
        "style": _resource("page.css"),
        "script": _resource("page.js"),
        "data": as_script(data),
        "body": "\n".join(body(runs, drawn, bool(charts), bool(more))),
    }
    return Template(_resource("page.html")).substitute(parts)


def _resource(name: str) -> str:
    return (files("llmtrain.report") / name).read_text(encoding="utf-8")


def as_script(data: Any) -> str:
    """JSON that ends no script element and begins no comment, whatever its texts hold."""
    text = json.dumps(data, separators=(",", ":"), allow_nan=False)
    return text.replace("&", "\\u0026").replace("<", "\\u003c").replace(">", "\\u003e")


def body(runs: Sequence[Run], drawn: Sequence[Drawn], charts: bool, more: bool) -> Iterator[str]:
    one = runs[0] if len(runs) == 1 else None
    if one is not None:
        yield f"<h1>{escape(one.name)}</h1>"
        yield f"<p>{state_badge(one)} <span class=soft>{escape(one.reason)}</span></p>"
        yield tiles(one)
    else:
        yield f"<h1>{len(runs)} runs</h1>"
        yield "<h2>Where they stand</h2>"
        yield runs_table(runs)
    if charts:
        yield '<nav id="controls" aria-label="How the curves are drawn"></nav>'
        yield '<div id="run-chips" class="chips"></div><div id="mark-chips" class="chips"></div>'
        yield '<main id="charts" class="charts"></main>'
        if more:
            yield (
                '<details class="card" style="margin-top:14px"><summary>Other figures that the runs logged</summary>'
                '<div id="more-charts" class="charts" style="padding:14px"></div></details>'
            )
        yield "<noscript><p>The curves are drawn by the page's own script: allow it.</p></noscript>"
        for note in notes(drawn):
            yield f'<p class="soft small">{escape(note)}</p>'
    else:
        yield '<p class="card empty">No train line is in the log yet: there is nothing to draw.</p>'
    yield from held_out(runs)
    yield from settings(runs)
    yield from samples(runs)
    yield from events(runs, drawn)
    yield from machines(runs)
    made = time.strftime("%Y-%m-%d %H:%M UTC", time.gmtime())
    yield (
        f"<footer>Made by llmtrain {__version__}, {made}. Training time leaves out evaluations, saves and pauses "
        "between attempts. Drag over a chart to zoom, double-click to see all again.</footer>"
    )


def notes(drawn: Sequence[Drawn]) -> Iterator[str]:
    """What the curves do not show."""
    for one in drawn:
        if one.train.cut:
            yield (
                f"{one.name}: {one.train.lines:,} log lines, drawn as {len(one.train.steps):,} stretches of equally "
                "many: the band is from the least to the greatest value of a stretch, the line its mean."
            )
        for kind, count in one.left_out.items():
            yield f"{one.name}: {count:,} more marks ({kind}) are not drawn."


def state_badge(run: Run) -> str:
    return f'<span class="state {escape(run.state)}">{escape(run.state)}</span>'


def figures(run: Run) -> Iterator[tuple[str, str, str]]:
    """(label, figure, what is to be said of it)."""
    train = run.history.train
    if run.parameters:
        yield "Parameters", in_short(run.parameters), f"{run.parameters:,}"
    if len(train):
        step, tokens = int(train.steps[-1]), int(train.tokens[-1])
        yield "Steps", f"{step:,}", f"of {run.total_steps:,}" if run.total_steps else ""
        yield "Tokens", in_short(tokens), f"{tokens:,}"
        if loss := last_loss(run):
            yield "Training loss", f"{loss[0]:.4f}", f"mean of the last {loss[1]} lines" if loss[1] > 1 else ""
    for source, last, best, best_step in held_out_losses(run):
        at_best = f"best {best:.4f} at step {best_step:,}" if best < last else "its best"
        yield f"Held out: {source}", f"{last:.4f}", at_best
    if len(train):
        rate = train.columns.get("tok_per_s")
        if rate is not None and np.isfinite(rate).any():
            yield "Tokens a second", f"{np.nanmedian(rate):,.0f}", "median"
        mfu = train.columns.get("mfu")
        if mfu is not None and np.isfinite(mfu).any():
            yield "MFU", f"{np.nanmedian(mfu):.1%}", "median"
        attempts = len(np.unique(train.attempts))
        yield "Training time", duration(float(train.seconds[-1])), f"in {attempts} attempts" * (attempts > 1)
    if run.checkpoint_bytes:
        yield "A checkpoint", in_bytes(run.checkpoint_bytes), ""


def in_short(number: int) -> str:
    """1.23B, 45.6M."""
    for unit, size in (("T", 10**12), ("B", 10**9), ("M", 10**6), ("k", 10**4)):
        if number >= size:
            return f"{number / (1000 if unit == 'k' else size):.3g}{unit}"
    return f"{number:,}"


def last_loss(run: Run) -> tuple[float, int] | None:
    """The training loss at the end: the mean of a fiftieth of the lines, 200 at most, and of how many."""
    losses = run.history.train.columns.get("lm_loss")
    if losses is None:
        return None
    last = losses[-min(200, max(1, len(losses) // 50)) :]
    last = last[np.isfinite(last)]
    return (float(last.mean()), len(last)) if len(last) else None


def held_out_losses(run: Run) -> Iterator[tuple[str, float, float, int]]:
    """(source, last loss, best loss, its step) of those that have a finite one."""
    for source, lines in run.history.evals.items():
        losses = lines.columns.get("val_loss")
        if losses is not None and len(rows := np.flatnonzero(np.isfinite(losses))):
            best = rows[losses[rows].argmin()]
            yield source, float(losses[rows[-1]]), float(losses[best]), int(lines.steps[best])


def tiles(run: Run) -> str:
    items = "".join(
        f'<div class="card"><dt>{escape(label)}</dt><dd>{escape(figure)}<small>{escape(more) or "&nbsp;"}</small></dd>'
        "</div>"
        for label, figure, more in figures(run)
    )
    return f'<dl class="tiles">{items}</dl>'


def runs_table(runs: Sequence[Run]) -> str:
    """A row for each run."""
    of_run = [{label: (figure, more) for label, figure, more in figures(run)} for run in runs]
    labels = list(dict.fromkeys(label for one in of_run for label in one))
    head = ["Run", "State", *labels]
    rows = []
    for i, (run, found) in enumerate(zip(runs, of_run, strict=True)):
        cells = [f'<th class="name">{swatch(i)}{escape(run.name)}</th>', f"<td>{state_badge(run)}</td>"]
        for label in labels:
            figure, more = found.get(label, ("–", ""))
            cells.append(f'<td class="number" title="{escape(more)}">{escape(figure)}</td>')
        rows.append(cells)
    numbers = frozenset(range(2, len(head)))
    return table(head, rows, numbers)


def swatch(run: int) -> str:
    return f'<span class="swatch" style="background:var(--run-{run % 8})"></span>'


def table(
    head: Sequence[str], rows: Iterable[Sequence[str]], numbers: frozenset[int] = frozenset(),
    card: bool = True,
) -> str:  # fmt: skip
    """Cells of `rows` are HTML, those of `head` are text; `card`: with a frame of its own."""
    top = "".join(f'<th{" class=number" * (i in numbers)}>{escape(one)}</th>' for i, one in enumerate(head))
    lines = "".join(f"<tr>{''.join(cells)}</tr>" for cells in rows)
    whole = f"<table><thead><tr>{top}</tr></thead><tbody>{lines}</tbody></table>"
    return f'<div class="{"card " * card}scroll" tabindex="0">{whole}</div>'


def held_out(runs: Sequence[Run]) -> Iterator[str]:
    """Each source's last and best figures."""
    rows = []
    for i, run in enumerate(runs):
        for source, last, best, step in held_out_losses(run):
            lines = run.history.evals[source]
            cells = [f'<th class="name">{swatch(i)}{escape(run.name)}</th>'] if len(runs) > 1 else []
            cells.append(f'<td class="name">{escape(source)}</td>')
            for name in ("ppl", "bits_per_byte"):
                values = lines.columns.get(name)
                finite = [] if values is None else values[np.isfinite(values)].tolist()
                cells.append(f'<td class="number">{f"{finite[-1]:.4f}" if len(finite) else "–"}</td>')
            cells.insert(-2, f'<td class="number">{last:.4f}</td>')
            cells += [f'<td class="number">{best:.4f}</td>', f'<td class="number">{step:,}</td>']
            rows.append(cells)
    if rows:
        head = ["Source", "Last loss", "Last perplexity", "Last bits a byte", "Best loss", "at step"]
        if len(runs) > 1:
            head = ["Run", *head]
        yield "<h2>Held-out text</h2>"
        yield table(head, rows, frozenset(range(len(head) - 5, len(head))))


def settings(runs: Sequence[Run]) -> Iterator[str]:
    """What differs between runs, and the whole configuration of each."""
    from llmtrain.report.compare import changes

    if len(runs) > 1:
        first, names = runs[0].settings, dict[str, None]()
        for other in runs[1:]:
            names |= dict.fromkeys(changes(first, other.settings))
        yield "<h2>Settings that differ</h2>"
        if names:
            rows = []
            for name in sorted(names):
                values = [run.settings.get(name) for run in runs]
                differs = [" class=differs" if value != values[0] else "" for value in values]
                cells = [f"<td{mark}>{escape(said(value))}</td>" for value, mark in zip(values, differs, strict=True)]
                rows.append([f"<th><code>{escape(name)}</code></th>", *cells])
            yield table(["Setting", *(run.name for run in runs)], rows)
        else:
            equal = "None: where a run lives and how often it logs or saves aside, they are equal."
            yield f'<p class="card empty">{equal}</p>'
    told = [run for run in runs if run.settings]
    if told:
        yield "<h2>Configuration</h2>" if len(runs) == 1 else "<h2>Configurations</h2>"
    for run in told:
        lines = "\n".join(f"{name} = {said(value)}" for name, value in run.settings.items())
        yield (
            f'<details class="card"><summary>{escape(run.name)}/config.toml</summary>'
            f'<pre style="padding:12px 14px">{escape(lines)}</pre></details>'
        )


def said(value: Any) -> str:
    """A setting's value."""
    if value is None:
        return "not set"
    return ", ".join(map(str, value)) if isinstance(value, list) else str(value)


def samples(runs: Sequence[Run]) -> Iterator[str]:
    """What the models wrote, the newest first."""
    shown = [(i, run, one) for i, run in enumerate(runs) for one in run.samples]
    if not shown:
        return
    yield "<h2>Samples</h2>"
    for i, run, one in shown:
        of = f"{swatch(i)}{escape(run.name)}, " if len(runs) > 1 else ""
        prompt = f"<mark>{escape(one['prompt'])}</mark>" if one["prompt"] else ""
        how = f" · {escape(one['how'])}" if one["how"] else ""
        yield (
            f'<div class="card sample"><p class="soft small">{of}step {one["step"]:,}{how}</p>'
            f"<pre>{prompt}{escape(one['text'])}</pre></div>"
        )


def events(runs: Sequence[Run], drawn: Sequence[Drawn]) -> Iterator[str]:
    """What happened, in a table for each run."""
    if not any(one.marks for one in drawn):
        return
    yield "<h2>What happened</h2>"
    for run, one in zip(runs, drawn, strict=True):
        # Saves are many and alike: the curves have them, the table the others first.
        marks = [mark for mark in one.marks if mark.kind != "save"]
        saves = [mark for mark in one.marks if mark.kind == "save"]
        kept = sorted([*marks[-EVENT_ROWS:], *saves[-20:]], key=lambda mark: mark.step)
        rows = [
            [
                f'<td class="number">{mark.step:,}</td>',
                f'<td style="white-space:nowrap"><span class="swatch dot" style="background:var(--mark-{mark.kind}, '
                f'var(--mark-note))"></span>{escape(mark.kind)}</td>',
                f'<td class="name">{escape(mark.text)}</td>',
            ]
            for mark in kept
        ]
        left = len(one.marks) - len(kept)
        note = f", without {left:,} earlier ones" if left else ""
        is_open = " open" if len(runs) == 1 and len(rows) <= 25 else ""
        yield (
            f'<details class="card"{is_open}><summary>{escape(run.name)}: {len(rows):,} events{note}</summary>'
            + table(["Step", "What", ""], rows, frozenset({0}), card=False)
            + "</details>"
        )


def worded(value: Any) -> str:
    """A fact of the machine, for people."""
    return {True: "yes", False: "no", None: "none"}[value] if value is None or isinstance(value, bool) else str(value)


def machines(runs: Sequence[Run]) -> Iterator[str]:
    """What the runs ran on, as they said when they started; what changed from attempt to attempt stands there twice."""
    names = list(dict.fromkeys(name for run in runs for one in run.environments for name in one))
    if not names:
        return
    yield "<h2>Machine</h2>"
    rows = []
    for name in names:
        cells = [f"<th>{escape(name)}</th>"]
        for run in runs:
            values = list(dict.fromkeys(worded(one[name]) for one in run.environments if name in one))
            cells.append(f'<td class="name">{escape(", then ".join(values)) or "–"}</td>')
        rows.append(cells)
    yield table(["", *(run.name for run in runs)], rows)
