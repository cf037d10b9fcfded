"""Batches out of the order of samples, made by a thread that stays a few ahead of the step.

The one module of this room that knows torch.
"""

import queue
import threading
import time
from collections import Counter, deque
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from itertools import islice

import numpy as np
import torch

from llmtrain.corpus.order import SampleOrder, Source
from llmtrain.corpus.token_file import TokenFile
from llmtrain.corpus.windows import Cut, Pieces
from llmtrain.storage.errors import BadData, LlmtrainError, UsageError

IGNORED = -100
LOCATE_ROWS = 4096
"""Samples located at a time: the permutation is cheap only for many at once."""
AHEAD_TOKENS = 1 << 22
"""How far ahead of the batches the disk is asked for windows: some seconds of a fast card."""
HANGS = 2.0
"""Seconds after which a thread that was told to end is taken for one that cannot."""
FILL_TOKENS = 1 << 18
"""Small micro-batches are filled together up to this many tokens: 1.4 times as fast as for a quarter of it."""


@dataclass(frozen=True)
class Batch:
    """What one micro-step sees. A missing sample is a row of ids 0 whose targets are all ignored."""

    ids: torch.Tensor
    """(B, T) int64"""
    targets: torch.Tensor
    """(B, T) int64, the id that follows; -100 is ignored, as a prompt's ids are"""
    doc_start: torch.Tensor
    """(B, T) int32, the column where the token's document begins; 0 where it began before the window"""
    sequences: int
    """rows that are not missing"""
    pairs: float
    """(query, key) pairs that attend in those rows, counted document by document where there is a document mask; the
    mean over the model's layers, whose windows differ"""


def micro_batches(
    *, start: int, stop: int, sequences_per_step: int, batch_size: int, rank: int = 0, ranks: int = 1
) -> Iterator[np.ndarray]:
    """The sample numbers of each micro-batch in turn: (batch_size,) int64, -1 for a missing row.

    Each step takes `sequences_per_step` samples from `start` on, in groups of `batch_size`; a step's last group is
    filled up with missing rows. Only the last step may be short of samples, and has as many groups as it needs.
    Several ranks take the groups of a step in turn; each has as many as the others, its last may be all missing rows.
    """
    for begin in range(start, stop, sequences_per_step):
        end = min(begin + sequences_per_step, stop)
        for of_all in range(begin, end, ranks * batch_size):
            first = of_all + rank * batch_size
            samples = np.arange(first, first + batch_size, dtype=np.int64)
            samples[samples >= end] = -1
            yield samples


def _locate(order: SampleOrder, samples: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """samples (N,) with -1 for missing ones -> source (N,), -1 for missing ones, and window (N,)."""
    source, window = order.locate(np.maximum(samples, 0))
    return np.where(samples < 0, -1, source), window


def _empty(rows: int, seq_len: int, pinned: bool) -> Batch:
    """Tensors for a batch on the host, unwritten."""
    ids, targets = (torch.empty((rows, seq_len), dtype=torch.int64, pin_memory=pinned) for _ in range(2))
    return Batch(ids, targets, torch.empty((rows, seq_len), dtype=torch.int32, pin_memory=pinned), rows, 0)


def attending_pairs(length: np.ndarray, attention_windows: Sequence[int | None]) -> np.ndarray:
    """(query, key) pairs of causal documents of these lengths, the mean over layers; `attention_windows`: keys that a
    token sees at most in each layer, None: all."""
    total = np.zeros(length.shape)
    for width, layers in Counter(attention_windows).items():
        seen = length if width is None else np.minimum(length, width)
        total += layers * (length * seen - seen * (seen - 1) // 2)
    return total / len(attention_windows)


def _fill(
    order: SampleOrder,
    source: np.ndarray,
    window: np.ndarray,
    document_mask: bool,
    batch: Batch,
    pieces: list[Pieces] | None = None,
    attention_windows: Sequence[int | None] = (None,),
) -> np.ndarray:
    """Writes the rows located at `source`, `window` (B,) into the host tensors of `batch`, (B, T). Returns the pairs
    that attend in each row, (B,), none in a missing one. `pieces`: of each source's windows, where known."""
    rows, seq_len = batch.ids.shape
    tokens = np.zeros((rows, seq_len + 1), np.result_type(*(cut.file.id_type for cut in order.cuts)))
    starts = [np.arange(rows) * seq_len]
    ends = []
    ignored = []
    for s in range(len(order.sources)):
        mine = np.flatnonzero(source == s)
        if mine.size:
            gathered = order.cuts[s].gather(window[mine], pieces[s] if pieces else None)
            if mine.size == rows:
                tokens = gathered.ids
            else:
                tokens[mine] = gathered.ids
            border = mine[gathered.rows] * seq_len + gathered.columns
            ends.append(border - 1)  # flat position of a document's last token
            starts.append(border[gathered.columns < seq_len])
            if gathered.ends is not None:
                short = np.flatnonzero(gathered.ends <= seq_len)
                last, row_end = mine[short] * seq_len + gathered.ends[short] - 1, (mine[short] + 1) * seq_len
                ignored.append(_ranges(last, row_end))
                starts.append(last[last + 1 < row_end] + 1)
            if gathered.counts is not None:
                row, column = np.nonzero(gathered.counts[:, 1:] == 0)
                ignored.append(mine[row] * seq_len + column)
    ids, targets, doc_start = batch.ids.numpy(), batch.targets.numpy(), batch.doc_start.numpy()
    ids[:] = tokens[:, :-1]
    targets[:] = tokens[:, 1:]
    targets[source < 0] = IGNORED
    if ignored:  # what follows a row's last document is not to be predicted, nor is what a mask leaves out
        targets.reshape(-1)[np.concatenate(ignored)] = IGNORED
    if document_mask and ends:
        targets.reshape(-1)[np.concatenate(ends)] = IGNORED
    begin = np.sort(np.concatenate(starts))  # flat position of each run of one document
    length = np.append(begin[1:], rows * seq_len) - begin
    doc_start.reshape(-1)[:] = np.repeat((begin % seq_len).astype(np.int32), length)
    if not document_mask:
        length, begin = np.full(rows, seq_len), np.arange(rows) * seq_len
    pairs = attending_pairs(length, attention_windows)
    return np.where(source < 0, 0.0, np.add.reduceat(pairs, np.searchsorted(begin, np.arange(rows) * seq_len)))


def _ranges(begins: np.ndarray, ends: np.ndarray) -> np.ndarray:
    """The numbers of all ranges [begin, end), one range after the other."""
    lengths = ends - begins
    return np.repeat(begins - (np.cumsum(lengths) - lengths), lengths) + np.arange(int(lengths.sum()))


def _rows(batch: Batch, begin: int, end: int, sequences: int, pairs: float = 0.0) -> Batch:
    """A part of a batch, sharing its memory."""
    return Batch(batch.ids[begin:end], batch.targets[begin:end], batch.doc_start[begin:end], sequences, pairs)


def check_document_mask(order: SampleOrder) -> None:
    """Raises UsageError for a source whose documents' borders are not known."""
    for source in order.sources:
        if not source.file.has_borders:
            raise UsageError(
                f"{source.file.path}: does not say where documents end: give --eos-id, or leave --document-mask out"
            )


def assemble(
    order: SampleOrder,
    samples: np.ndarray,
    document_mask: bool = False,
    attention_windows: Sequence[int | None] = (None,),
) -> Batch:
    """The batch of `samples` (B,) int64, -1 for missing ones, on the CPU. `attention_windows`: of the model's layers,
    for counting pairs.

    With `document_mask` the target after an EOS is ignored. Raises BadData for an id beyond the vocabulary.
    """
    if document_mask:
        check_document_mask(order)
    source, window = _locate(order, samples)
    batch = _empty(len(samples), order.seq_len, pinned=False)
    pairs = _fill(order, source, window, document_mask, batch, attention_windows=attention_windows)
    return _rows(batch, 0, len(samples), int((samples >= 0).sum()), float(pairs.sum()))


def held_out_batches(
    file: TokenFile,
    seq_len: int,
    batch_size: int,
    windows: int,
    device: str | torch.device,
    document_mask: bool = False,
    rank: int = 0,
    ranks: int = 1,
) -> Iterator[tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]]:
    """(ids, targets, doc_start), each (batch_size, seq_len) on `device`, of `windows` windows spread evenly over
    `file`; doc_start is None without a document mask.

    In the order of the file; 0 windows means all; several ranks take the batches in turn, as many each. What there is
    too little of is filled up with missing rows. Raises BadData for a file shorter than a window or an id beyond the
    vocabulary, UsageError as `check_document_mask`.
    """
    order = SampleOrder([Source(file.path.name, file, 1.0)], seq_len, seed=0)
    if document_mask:
        check_document_mask(order)
    available = file.windows(seq_len)
    count = min(windows or available, available)
    chosen = np.arange(count) * available // count
    for first in range(0, count, ranks * batch_size):
        begin = first + rank * batch_size
        window = np.zeros(batch_size, np.int64)
        source = np.full(batch_size, -1)
        present = chosen[begin : begin + batch_size]
        window[: len(present)] = present
        source[: len(present)] = 0
        batch = _empty(batch_size, seq_len, pinned=False)
        _fill(order, source, window, document_mask, batch)
        doc_start = batch.doc_start.to(device) if document_mask else None
        yield batch.ids.to(device), batch.targets.to(device), doc_start


def no_targets(file: TokenFile, windows: int, option: str) -> BadData:
    """The error for a held-out file of whose `windows` windows that were read none has a target; `option` says how many
    are read."""
    return BadData(
        f"{file.path}: none of its {windows:,} windows that were read has a token that counts in the loss: read more "
        f"of them with {option}, read longer ones, or name another file"
    )


@dataclass(frozen=True)
class _Pinned:
    """A host buffer that is written again and again; `copied` says that the last copy out of it is done."""

    batch: Batch
    copied: torch.cuda.Event


@dataclass(frozen=True)
class _Filled:
    """Rows of a few micro-batches, on their way from the thread to the consumer."""

    batch: Batch
    sequences: list[int]
    """of each micro-batch"""
    pairs: list[float]
    """of each micro-batch"""
    pinned: _Pinned | None


def _read_index_ahead(cut: Cut) -> None:
    with suppress(LlmtrainError, OSError):  # whoever reads the index says what is wrong with it
        cut.read_index_ahead()


class BatchStream:
    """The batches of samples `start` to `stop`, in order, on `device`, made in advance by a thread.

    The thread fills one host buffer after the other, with one micro-batch or with as many as 262,144 tokens are, and
    is at most `depth` buffers ahead. On CUDA they are pinned and used again: the consumer copies one to the device
    on its current stream, records the buffer's event right behind the copy and gives the buffer back; the thread
    waits for that event before it writes. So a batch that was handed out is the caller's alone, and only the thread
    ever waits for the device. On the CPU each buffer is fresh memory.

    What the thread raises (BadData for an id beyond the vocabulary) is raised by `__next__`, in its turn.
    `wait_seconds` is how long `__next__` and `ready` have waited for the thread, in all.
    """

    def __init__(
        self,
        order: SampleOrder,
        *,
        start: int,
        stop: int,
        sequences_per_step: int,
        batch_size: int,
        device: str | torch.device,
        document_mask: bool = False,
        rank: int = 0,
        ranks: int = 1,
        attention_windows: Sequence[int | None] = (None,),
        depth: int = 4,
    ) -> None:
        if document_mask:
            check_document_mask(order)
        self.wait_seconds = 0.0
        self._order = order
        self._document_mask = document_mask
        self._attention_windows = attention_windows
        self._device = torch.device(device)
        self._batch_size = batch_size
        self._per_fill = max(1, FILL_TOKENS // (batch_size * order.seq_len))
        self._groups = micro_batches(
            start=start,
            stop=stop,
            sequences_per_step=sequences_per_step,
            batch_size=batch_size,
            rank=rank,
            ranks=ranks,
        )
        # What the thread may write into next; None stands for fresh memory.
        self._free: queue.SimpleQueue[_Pinned | None] = queue.SimpleQueue()
        self._ready: queue.SimpleQueue[_Filled | BaseException | None] = queue.SimpleQueue()
        for _ in range(depth):
            pinned = None
            if self._device.type == "cuda":
                buffer = _empty(batch_size * self._per_fill, order.seq_len, pinned=True)
                pinned = _Pinned(buffer, torch.cuda.Event(blocking=True))
            self._free.put(pinned)
        self._next: list[_Filled | BaseException | None] = []
        self._left = 0
        self._closed = threading.Event()
        self._batches = self._take()
        self._thread = threading.Thread(target=self._work, name="batches", daemon=True)
        self._thread.start()

    def _fills(self) -> Iterator[np.ndarray]:
        """The sample numbers of each fill, (a few * batch_size,)."""
        while groups := list(islice(self._groups, self._per_fill)):
            yield np.concatenate(groups)

    def _located(self) -> Iterator[tuple[np.ndarray, np.ndarray]]:
        """(source, window) of the rows of each fill, a good many at a time."""
        fills = self._fills()
        at_once = 1  # the first batch waits for no other
        while chunk := list(islice(fills, at_once)):
            source, window = _locate(self._order, np.concatenate(chunk))
            cuts = np.cumsum([len(samples) for samples in chunk])[:-1]
            yield from zip(np.split(source, cuts), np.split(window, cuts), strict=True)
            at_once = max(1, LOCATE_ROWS // len(chunk[0]))

    def _read_ahead(self) -> Iterator[tuple[np.ndarray, np.ndarray, list[Pieces]]]:
        """What `_located` gives and the pieces of each source's windows, asked for from disk AHEAD_TOKENS before they
        are handed on. The distance grows by one fill for each that is handed on: the first ones come at once and the
        disk is never asked for much."""
        ahead: deque[tuple[np.ndarray, np.ndarray, list[Pieces]]] = deque()
        most = max(1, AHEAD_TOKENS // (self._batch_size * self._per_fill * self._order.seq_len))
        grow = False
        for source, window in self._located():
            pieces = [cut.pieces(window[source == s]) for s, cut in enumerate(self._order.cuts)]
            for cut, (_, starts, lengths) in zip(self._order.cuts, pieces, strict=True):
                cut.file.read_ahead(starts, lengths)
            ahead.append((source, window, pieces))
            if len(ahead) > most or not grow:
                yield ahead.popleft()
            grow = not grow
        yield from ahead

    def _work(self) -> None:
        """The thread: fills one free buffer after the other until the samples end, it fails, or it is closed."""
        for cut in self._order.cuts:
            threading.Thread(target=_read_index_ahead, args=(cut,), daemon=True).start()
        if self._device.type == "cuda" and self._device.index is not None:
            torch.cuda.set_device(self._device)  # a thread begins on card 0
        try:
            for source, window, pieces in self._read_ahead():
                pinned = self._free.get()
                if self._closed.is_set():
                    return
                if pinned is None:
                    batch = _empty(len(source), self._order.seq_len, pinned=False)
                else:
                    pinned.copied.synchronize()
                    batch = _rows(pinned.batch, 0, len(source), len(source))
                attending = _fill(
                    self._order, source, window, self._document_mask, batch, pieces, self._attention_windows
                )
                sequences = (source >= 0).reshape(-1, self._batch_size).sum(1).tolist()
                by_group = attending.reshape(-1, self._batch_size).sum(1).tolist()
                self._ready.put(_Filled(batch, sequences, by_group, pinned))
            self._ready.put(None)
        except BaseException as error:
            self._ready.put(error)

    def _take(self) -> Iterator[Batch]:
        """The consumer's side: each buffer to the device, the buffer back to the thread, then its micro-batches."""
        while True:
            self.ready(None)
            made = self._next.pop()
            if made is None:
                self._next.append(None)  # the end is no wait
                return
            if isinstance(made, BaseException):
                raise made
            batch = made.batch
            if made.pinned is not None:
                batch = Batch(
                    batch.ids.to(self._device, non_blocking=True),
                    batch.targets.to(self._device, non_blocking=True),
                    batch.doc_start.to(self._device, non_blocking=True),
                    batch.sequences,
                    batch.pairs,
                )
                made.pinned.copied.record(torch.cuda.current_stream(self._device))
            self._free.put(made.pinned)
            self._left = len(made.sequences)
            parts = (one.split(self._batch_size) for one in (batch.ids, batch.targets, batch.doc_start))
            for ids, targets, doc_start, sequences, pairs in zip(*parts, made.sequences, made.pairs, strict=True):
                self._left -= 1
                yield Batch(ids, targets, doc_start, sequences, pairs)

    def ready(self, seconds: float | None) -> bool:
        """Waits for the thread until `__next__` need not, for so many seconds at most; whether it has come to that."""
        if not self._left and not self._next:
            began = time.perf_counter()
            with suppress(queue.Empty):
                self._next.append(self._ready.get(timeout=seconds))
            self.wait_seconds += time.perf_counter() - began
        return bool(self._left or self._next)

    def __iter__(self) -> "BatchStream":
        return self

    def __next__(self) -> Batch:
        if self._closed.is_set():
            raise StopIteration
        return next(self._batches)

    def close(self) -> None:
        """Ends the thread and waits for its end; nothing comes after it. May be called again. A thread that hangs, on a
        disk that no longer answers, is left behind: it only reads."""
        self._closed.set()
        self._free.put(None)  # wakes the thread
        self._thread.join(HANGS)

    def __enter__(self) -> "BatchStream":
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()
