"""The thread that makes the batches of a run and stays a few ahead of the step."""

import queue
import threading
import time
from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from itertools import islice

import numpy as np
import torch

from llmtrain.corpus.batches import Batch, check_document_mask, empty_batch, fill_batch, locate, micro_batches, part_of
from llmtrain.corpus.order import SampleOrder
from llmtrain.corpus.windows import Cut, Pieces
from llmtrain.storage.errors import LlmtrainError

LOCATE_ROWS = 4096
"""Samples located at a time: the permutation is cheap only for many at once."""
AHEAD_TOKENS = 1 << 22
"""How far ahead of the batches the disk is asked for windows: some seconds of a fast card."""
HANGS = 2.0
"""Seconds after which a thread that was told to end is taken for one that cannot."""
FILL_TOKENS = 1 << 18
"""Small micro-batches are filled together up to this many tokens: 1.4 times as fast as for a quarter of it."""


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
                buffer = empty_batch(batch_size * self._per_fill, order.seq_len, pinned=True)
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
            source, window = locate(self._order, np.concatenate(chunk))
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
                    batch = empty_batch(len(source), self._order.seq_len, pinned=False)
                else:
                    pinned.copied.synchronize()
                    batch = part_of(pinned.batch, 0, len(source), len(source))
                attending = fill_batch(
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
