"""Held-out text whose documents are evaluated one by one, and its losses by kind of document."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from llmtrain.corpus.choices import named
from llmtrain.corpus.documents import MISSING_FIELD
from llmtrain.corpus.engine import utf8_error
from llmtrain.corpus.inputs import find_inputs, shown
from llmtrain.corpus.reading import Reading, read_documents
from llmtrain.corpus.tokenizer import Tokenizer, token_bytes
from llmtrain.storage.errors import BadData

BATCH = 256
"""Documents that are tokenized together."""


class Window(NamedTuple):
    """A part of a document: each token counts once, given those before it in the window."""

    kind: int
    ids: list[int]
    """Of a first window the end of a document comes first, of a later one the last token of the one before."""
    nbytes: int
    """Bytes of text of its targets, the end of a document being none."""


@dataclass(frozen=True)
class HeldOutText:
    """Documents of text in windows."""

    name: str
    kinds: tuple[str, ...]
    """By number; empty where kinds are not told apart."""
    windows: tuple[Window, ...]

    def spread(self, count: int) -> tuple[Window, ...]:
        """`count` windows, spread evenly; 0: all."""
        available = len(self.windows)
        count = min(count or available, available)
        return tuple(self.windows[i * available // count] for i in range(count))


def read_text(
    spec: str,
    tokenizer: Tokenizer,
    seq_len: int,
    text_field: str | None = None,
    kind_field: str | None = None,
    option: str = "--text",
) -> HeldOutText:
    """The documents of `[NAME=]PATH` (a file, a folder or a glob, as `tokenize-corpus` reads them), all in memory, in
    windows of at most `seq_len` targets. `kind_field`: of JSON Lines and Parquet, the field that names a document's
    kind. `option`: what names it, --text or --val-text, for messages.

    Raises InputMissing, StorageFailure, UsageError, and BadData for what is damaged, has no such field or no text.
    """
    name, path = named(spec, option)
    inputs = find_inputs([path], text_field=kind_field or text_field, option=option)
    reading = Reading(text_field=text_field or Reading.text_field)
    if kind_field is not None:  # as a prompt is read: text before the text, and its length
        reading = Reading(prompt_field=kind_field, completion_field=reading.text_field)
    sizes = token_bytes(tokenizer)
    kinds: dict[str, int] = {}
    windows: list[Window] = []
    waiting: list[tuple[int, str]] = []

    def take() -> None:
        encoded = tokenizer.encode_batch([text for _, text in waiting])
        for (kind, _), ids in zip(waiting, encoded, strict=True):
            whole = [tokenizer.eos_id, *ids, tokenizer.eos_id]
            for begin in range(0, len(whole) - 1, seq_len):
                of_window = whole[begin : begin + seq_len + 1]
                windows.append(Window(kind, of_window, int(sizes[of_window[1:]].sum())))
        waiting.clear()

    for document in read_documents(inputs, reading):
        offset = utf8_error(document.data)
        if document.damage is not None or offset is not None:
            input, why = inputs[document.file], document.damage.detail if document.damage else "not UTF-8"
            unnamed = document.damage is not None and document.damage.reason == MISSING_FIELD
            fields = f"{option}-field or {option.removesuffix('text')}kind-field"
            raise BadData(
                f"{shown(input.name)}: {why} at {input.place(document.place, offset or 0)}: "
                + (f"name the field with {fields}" if unnamed else "correct it")
            )
        kind, text = document.data[: document.prompt].decode(), document.data[document.prompt :].decode()
        if text:
            waiting.append((kinds.setdefault(kind, len(kinds)), text))
        if len(waiting) == BATCH:
            take()
    take()
    if not windows:
        raise BadData(f"{path}: holds no document with text: name another file")
    return HeldOutText(name, () if kind_field is None else tuple(kinds), tuple(windows))


def sums_by_kind(kinds: int, windows: Iterable[Window], nats: Sequence[float]) -> list[list[float]]:
    """[nats, targets, bytes] of each kind, by number."""
    sums = [[0.0, 0, 0] for _ in range(max(kinds, 1))]
    for window, of_window in zip(windows, nats, strict=True):
        of_kind = sums[window.kind]
        for i, number in enumerate((of_window, len(window.ids) - 1, window.nbytes)):
            of_kind[i] += number
    return sums
