"""The picture of a run on a terminal: a frame of text out of its state, for any width and height."""

import textwrap
import time
from collections.abc import Sequence

from rich.cells import cell_len
from rich.text import Text

from llmtrain.report.state import FAILED, FINISHED, GONE, RUNNING, STARTING, STOPPED, RunState, said
from llmtrain.storage.journal import is_number
from llmtrain.storage.units import duration

WIDEST = 160
"""Columns beyond which a frame does not grow."""
SIDE_BY_SIDE = 96
"""Columns from which on the curve stands beside the figures."""
LONGEST_BAR = 40
MOST_WORDS = 4
"""Lines of the reason of a run that does not train."""
LEAST_WIDTH, LEAST_HEIGHT = 24, 4
"""Of a frame."""
STYLES = {
    RUNNING: "green", STARTING: "cyan", FINISHED: "bold green", STOPPED: "yellow", FAILED: "bold red", GONE: "bold red"
}  # fmt: skip
LABEL, VALUE, GOOD, BAD, CURVE = "dim", "bold", "green", "yellow", "cyan"

BLOCKS = " ▁▂▃▄▅▆▇█"
IN_ASCII = str.maketrans(BLOCKS + "━╭╮╰╯─│°", " ..::==##=++++-| ")

Row = tuple[str, list[Text]]
"""A label and the parts of what stands behind it, the most important first; those that do not fit are left out."""


def frame(state: RunState, width: int, height: int, now: float | None = None, ascii_only: bool = False) -> Text:
    """The picture, in at most `height` lines of at most `width` columns, without a newline at the end."""
    now = time.time() if now is None else now
    width, height = max(LEAST_WIDTH, min(width, WIDEST)), max(LEAST_HEIGHT, height)
    inner, room = width - 4, height - 2
    left = max(46, inner * 55 // 100) if width >= SIDE_BY_SIDE else inner
    rows = _rows(state, now, left)
    if width >= SIDE_BY_SIDE:
        kept = rows[: max(1, room)]
        lines = [_line(row, left) for row in kept]
        curve = _curve(state.losses.columns(inner - left - 11), max(2, len(lines)), state.losses.steps)
        blank = Text(" " * left)
        lines += [blank.copy() for _ in range(min(len(curve), room) - len(lines))]
        for line, part in zip(lines, curve, strict=False):
            line.append("  ").append_text(part)
    else:
        kept = rows[: max(1, room)]
        lines = [_line(row, inner) for row in kept]
        left_over = room - len(lines)
        if left_over >= 2:
            lines += _curve(state.losses.columns(inner - 9), min(7, left_over), state.losses.steps)
    body = [_line(("", [part]), inner) for part in _words(state, inner)][: max(1, room - 1)]
    whole = _boxed(state, body + lines[: max(1, room - len(body))], width, now)
    if ascii_only:
        whole.plain = whole.plain.translate(IN_ASCII)
    return whole


def _boxed(state: RunState, lines: Sequence[Text], width: int, now: float) -> Text:
    """The lines within a border that says the run's name and state."""
    corners, across, down = "╭╮╰╯", "─", "│"
    shown = Text(f" {state.state} ", STYLES.get(state.state, "dim"))
    name = Text(f" {_shortened(state.name, width - len(shown) - 8)} ", "bold")
    top = Text().append(corners[0] + across, "dim").append_text(name)
    top.append(across * (width - top.cell_len - shown.cell_len - 2), "dim").append_text(shown)
    top.append(across + corners[1], "dim")
    foot = Text(f" {_foot(state, now, width - 6)} ", "dim")
    bottom = Text().append(corners[2] + across, "dim").append_text(foot)
    bottom.append(across * (width - bottom.cell_len - 1) + corners[3], "dim")
    whole = Text(no_wrap=True, overflow="crop", end="").append_text(top)
    for line in lines:
        line.truncate(width - 4, pad=True)
        whole.append("\n").append(f"{down} ", "dim").append_text(line).append(f" {down}", "dim")
    return whole.append("\n").append_text(bottom)


def _clean(text: str) -> str:
    """In one line, without what would steer the terminal."""
    return "".join(c if c.isprintable() else "?" for c in " ".join(text.split()))


def _shortened(text: str, width: int) -> str:
    """The end of a text that is too long: of a path that says most."""
    text = _clean(text)
    if cell_len(text) <= width:
        return text
    while text and cell_len(text) > width - 3:
        text = text[1:]
    return "..." + text


def _foot(state: RunState, now: float, width: int) -> str:
    parts = [time.strftime("%H:%M:%S", time.localtime(now))]
    if state.seen is not None:
        parts.append(f"last line {duration(max(0.0, now - state.seen))} ago")
    if state.started is not None and state.state == RUNNING:
        parts.append(f"runs for {duration(max(0.0, now - state.started))}")
    if state.attempt > 1:
        parts.append(f"attempt {state.attempt}")
    if state.process:
        parts.append(state.process)
    while len(", ".join(parts)) > width and len(parts) > 1:
        parts.pop()
    return ", ".join(parts)[:width]


def _words(state: RunState, width: int) -> list[Text]:
    """What a run that does not train has to say, in as many lines as it takes, up to a few."""
    if state.state in (RUNNING, STARTING):
        return []
    lines = textwrap.wrap(_clean(state.reason), width)[:MOST_WORDS]
    return [Text(line, STYLES.get(state.state, "dim")) for line in lines]


def _line(row: Row, width: int) -> Text:
    """A row in exactly `width` columns: parts that do not fit are left out, from the end."""
    label, parts = row
    line = Text().append(f"{label:<6}" if label else "", LABEL)
    for i, part in enumerate(parts):
        gap = "  " if i else ""
        if i and line.cell_len + len(gap) + part.cell_len > width:
            break
        line.append(gap).append_text(part)
    line.truncate(width, overflow="ellipsis", pad=True)
    return line


def _figure(text: str, unit: str = "", before: str = "", style: str = VALUE) -> Text:
    # Not Text(..., LABEL): that would be the style of all that is appended, too.
    whole = Text().append(f"{before} " if before else "", LABEL).append(text, style)
    return whole.append(f" {unit}", LABEL) if unit else whole


def _rows(state: RunState, now: float, width: int) -> list[Row]:
    """Everything there is to say, the most important first; width: of a row."""
    train = state.train
    rows: list[Row] = [("step", _progress(state, width - 6))]
    if train:
        rows.append(("loss", _known([
            _value(train, "lm_loss", "{:.4f}"),
            _value(train, "ppl", "{:.2f}", before="ppl"),
            _value(train, "grad_norm", "{:.2f}", before="grad"),
            _value(train, "aux_loss", "{:.4f}", before="aux") if train.get("aux_loss") else None,
        ])))  # fmt: skip
        rows.append(("speed", _known([
            _value(train, "tok_per_s", "{:,.0f}", "tok/s"),
            _percent(train, "mfu"),
            _pace(train),
            _wait(state),
            None if is_number(train.get("mfu")) else _value(train, "tflops", "{:,.3g}", "TFLOP/s"),
        ])))  # fmt: skip
        rows.append(("rate", _known([
            _value(train, "lr", "{:.2e}", before="lr"),
            _value(train, "epoch", "{:.2f}", before="epoch"),
            _figure(_many(train["tokens"]), "tokens") if is_number(train.get("tokens")) else None,
        ])))  # fmt: skip
    if state.trouble:
        rows.append(("note", [Text(_clean(said(state.trouble)), BAD)]))
    if card := _card(state):
        rows.append(("card", card))
    if state.evals:
        rows.append(("val", [part for source in list(state.evals) for part in _evaluation(state, source)]))
    if state.saved:
        rows.append(("saved", _saved(state, now)))
    if is_number(train.get("host_rss_mib")):
        rows.append(("host", [_figure(f"{train['host_rss_mib'] / 1024:.1f}", "GiB"), *_about(state)]))
    return rows


def _known(parts: list[Text | None]) -> list[Text]:
    return [part for part in parts if part is not None]


def _value(line: dict, name: str, form: str, unit: str = "", before: str = "") -> Text | None:
    return _figure(form.format(line[name]), unit, before) if is_number(line.get(name)) else None


def _percent(line: dict, name: str) -> Text | None:
    return _figure(f"{line[name]:.1%}", before=name) if is_number(line.get(name)) else None


def _pace(train: dict) -> Text | None:
    ms = train.get("step_ms")
    return _figure(f"{ms:,.0f}" if ms >= 100 else f"{ms:.1f}", "ms/step") if is_number(ms) else None


def _wait(state: RunState) -> Text | None:
    wait = state.data_wait
    return None if wait is None else _figure(f"{wait:.1%}", before="wait", style=BAD if wait > 0.05 else VALUE)


def _many(n: float) -> str:
    """1.23B."""
    for size, letter in ((1e12, "T"), (1e9, "B"), (1e6, "M"), (1e3, "k")):
        if n >= size:
            return f"{n / size:.2f}{letter}"
    return f"{n:.0f}"


def _progress(state: RunState, width: int) -> list[Text]:
    at, total = state.at_step, state.total_steps
    if not total:
        return [_figure(f"{at:,}")]
    left = state.seconds_left
    parts = [_figure(f"{at:,}", f"of {total:,}"), _figure(f"{at / total:.1%}")]
    if left is not None and state.state in (RUNNING, STARTING):
        parts.append(_figure(duration(left), "left", style=GOOD))
    rest = width - sum(part.cell_len + 2 for part in parts)
    return [*parts, _bar(at / total, min(rest, LONGEST_BAR))] if rest >= 4 else parts


def _bar(share: float, width: int) -> Text:
    full = round(width * min(1.0, share))
    return Text().append("━" * full, GOOD).append("━" * (width - full), "dim")


def _card(state: RunState) -> list[Text]:
    train = state.train
    if not is_number(peak := train.get("peak_gib")) or not peak:
        return []
    of = f"of {state.card_gib:.1f} GiB" if state.card_gib else "GiB"
    hot, power, busy = (train.get(name) for name in ("card_c", "card_w", "card_busy"))
    return _known([
        _figure(f"{peak:.1f}", of),
        _figure(f"{hot:.0f}", "°C") if is_number(hot) else None,
        _figure(f"{power:.0f}", "W") if is_number(power) else None,
        _figure(f"{busy:.0%}", "busy") if is_number(busy) else None,
    ])  # fmt: skip


def _evaluation(state: RunState, source: str) -> list[Text]:
    line, best = state.evals[source], state.best.get(source)
    if right := _value(line, "accuracy", "{:.1%}", f"right, {_clean(source)}, step {line['step']:,}"):
        return [right]
    shown = _value(line, "val_loss", "{:.4f}", f"{_clean(source)}, step {line['step']:,}")
    if shown is None:
        return [Text(f"{_clean(source)}: not finite, step {line['step']:,}", BAD)]
    worse = best is not None and best["step"] != line["step"]
    return [shown, _figure(f"{best['val_loss']:.4f}", f"at {best['step']:,}", "best")] if worse and best else [shown]


def _saved(state: RunState, now: float) -> list[Text]:
    saved = state.saved
    parts = [_figure(f"step {saved['step']:,}")]
    if is_number(saved.get("time")):
        parts.append(_figure(f"{duration(max(0.0, now - saved['time']))} ago"))
    if is_number(saved.get("delay_ms")):
        parts.append(_figure(f"{saved['delay_ms']:,.0f} ms", before="waited"))
    return parts


def _about(state: RunState) -> list[Text]:
    parts = [Text(f"{_many(state.parameters)} parameters", LABEL)] if state.parameters else []
    return parts + ([Text(_clean(state.device), LABEL)] if state.device else [])


def _curve(means: list[float], height: int, steps: tuple[int, int]) -> list[Text]:
    """Mean losses as an area of `height` lines with its scale at the left; none where there is nothing to draw."""
    if not means or height < 2:
        return []
    # The fall of the first steps would leave no room for what follows.
    shown = means[len(means) // 10 :] if len(means) >= 20 else means
    low, high = min(shown), max(shown)
    span = (high - low) or 1.0
    rows = height - 1
    # The lowest value has one eighth too, so that it is seen to be there.
    eighths = [1 + round((8 * rows - 1) * min(1.0, (mean - low) / span)) for mean in means]
    lines = []
    for row in range(rows):
        under = 8 * (rows - 1 - row)
        scale = f"{high:>8.3f}" if row == 0 else f"{low:>8.3f}" if row == rows - 1 else f"{'loss' * (row == 1):>8}"
        area = "".join(BLOCKS[min(8, max(0, n - under))] for n in eighths)
        lines.append(Text().append(scale + " ", LABEL).append(area, CURVE))
    first, last = (f"{step:,}" for step in steps)
    gap = max(1, len(means) - len(first) - len(last))
    lines.append(Text(" " * 9 + first + " " * gap + last, LABEL))
    return lines
