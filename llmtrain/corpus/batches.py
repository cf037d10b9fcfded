"""Batches out of the order of samples, made by a thread that stays a few ahead of the step.

The one module of this room that knows torch.
"""

import queue
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import islice

import numpy as np
import torch

from llmtrain.corpus.order import SampleOrder
from llmtrain.storage.errors import UsageError

IGNORED = -100
LOCATE_ROWS = 4096
"""Samples located, and read ahead from disk, at a time: the permutation costs little only for many at once."""


@dataclass(frozen=True)
class Batch:
    """What one micro-step sees. A missing sample is a row of ids 0 whose targets are all ignored."""

    ids: torch.Tensor
    """(B, T) int64"""
    targets: torch.Tensor
    """(B, T) int64, the id that follows; -100 is ignored"""
    doc_start: torch.Tensor
    """(B, T) int32, the column where the token's document begins; 0 where it began before the window"""
    sequences: int
    """rows that are not missing"""


def micro_batches(*, start: int, stop: int, sequences_per_step: int, batch_size: int) -> Iterator[np.ndarray]:
    """The sample numbers of each micro-batch in turn: (batch_size,) int64, -1 for a missing row.

    Each step takes `sequences_per_step` samples from `start` on, in groups of `batch_size`; a step's last group is
    filled up with missing rows. Only the last step may be short of samples, and has as many groups as it needs.
    """
    for begin in range(start, stop, sequences_per_step):
        end = min(begin + sequences_per_step, stop)
        for first in range(begin, end, batch_size):
            samples = np.arange(first, first + batch_size, dtype=np.int64)
            samples[samples >= end] = -1
            yield samples


def _locate(order: SampleOrder, samples: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """samples (N,) with -1 for missing ones -> source (N,), -1 for missing ones, and window (N,)."""
    source, window = order.locate(np.maximum(samples, 0))
    return np.where(samples < 0, -1, source), window


def _fill(
    order: SampleOrder, source: np.ndarray, window: np.ndarray, document_mask: bool, batch: Batch
) -> Batch:
    """Writes the rows located at `source`, `window` (B,) into the tensors of `batch`, on the host."""
    rows, seq_len = batch.ids.shape
    tokens = np.zeros((rows, seq_len + 1), np.uint16)
    starts = [np.arange(rows) * seq_len]
    ends = []
    for s in range(len(order.sources)):
        mine = np.flatnonzero(source == s)
        if mine.size:
            file = order.sources[s].file
            tokens[mine] = gathered = file.gather(window[mine], seq_len)
            row, column = file.borders(window[mine], gathered)
            border = mine[row] * seq_len + column
            ends.append(border - 1)  # flat position of a document's last token
            starts.append(border[column < seq_len])
    ids, targets, doc_start = batch.ids.numpy(), batch.targets.numpy(), batch.doc_start.numpy()
    ids[:] = tokens[:, :-1]
    targets[:] = tokens[:, 1:]
    missing = source < 0
    targets[missing] = IGNORED
    if document_mask:
        targets.reshape(-1)[np.concatenate(ends)] = IGNORED
    begin = np.sort(np.concatenate(starts))  # flat position of each run of one document
    length = np.diff(begin, append=rows * seq_len)
    doc_start.reshape(-1)[:] = np.repeat((begin % seq_len).astype(np.int32), length)
    return Batch(batch.ids, batch.targets, batch.doc_start, rows - int(missing.sum()))


def _empty(rows: int, seq_len: int, pinned: bool) -> Batch:
    """Tensors for a batch on the host, unwritten."""
    ids, targets = (torch.empty((rows, seq_len), dtype=torch.int64, pin_memory=pinned) for _ in range(2))
    return Batch(ids, targets, torch.empty((rows, seq_len), dtype=torch.int32, pin_memory=pinned), 0)


def check_document_mask(order: SampleOrder) -> None:
    """Raises UsageError for a source whose documents' borders are not known."""
    for source in order.sources:
        if not source.file.has_borders:
            raise UsageError(f"{source.file.path}: has no manifest, so a document mask cannot be had: leave it out")


def assemble(order: SampleOrder, samples: np.ndarray, document_mask: bool = False) -> Batch:
    """The batch of `samples` (B,) int64, -1 for missing ones, on the CPU.

    With `document_mask` the target after an EOS is ignored. Raises BadData for an id beyond the vocabulary.
    """
    if document_mask:
        check_document_mask(order)
    source, window = _locate(order, samples)
    return _fill(order, source, window, document_mask, _empty(len(samples), order.seq_len, pinned=False))


@dataclass(frozen=True)
class _Pinned:
    """A host buffer that is written again and again; `copied` says that the last copy out of it is done."""

    batch: Batch
    copied: torch.cuda.Event


class BatchStream:
    """The batches of samples `start` to `stop`, in order, on `device`; a thread makes up to `depth` in advance.

    On CUDA the thread writes pinned buffers. `__next__` itself copies one to the device, on the caller's current
    stream, and records the buffer's event right behind the copy; the thread waits for that event before it writes
    the buffer again. So a batch that was handed out is the caller's alone, and nobody waits for the device but the
    thread. On the CPU each batch has memory of its own.

    What the thread raises (BadData for an id beyond the vocabulary) is raised by `__next__`, after the batches
    before it. `wait_seconds` is how long `__next__` has waited for the thread, in all.
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
        depth: int = 4,
    ) -> None:
        if document_mask:
            check_document_mask(order)
        self.wait_seconds = 0.0
        self._order = order
        self._document_mask = document_mask
        self._device = torch.device(device)
        self._groups = micro_batches(
            start=start, stop=stop, sequences_per_step=sequences_per_step, batch_size=batch_size
        )
        # What the thread may write into next: None asks for fresh memory.
        self._free: queue.SimpleQueue[_Pinned | None] = queue.SimpleQueue()
        self._ready: queue.SimpleQueue[tuple[Batch, _Pinned | None] | BaseException | None] = queue.SimpleQueue()
        for _ in range(depth):
            pinned = None
            if self._device.type == "cuda":
                buffers = _empty(batch_size, order.seq_len, pinned=True)
                pinned = _Pinned(buffers, torch.cuda.Event(blocking=True))
            self._free.put(pinned)
        self._closed = threading.Event()
        self._thread = threading.Thread(target=self._work, name="batches", daemon=True)
        self._thread.start()

    def _located(self) -> Iterator[tuple[np.ndarray, np.ndarray]]:
        """(source, window) of each micro-batch, its windows asked for from disk one chunk of rows in advance."""
        ahead: list[tuple[np.ndarray, np.ndarray]] = []
        chunk = 1  # the first batch waits for itself alone
        while groups := list(islice(self._groups, chunk)):
            samples = np.stack(groups)  # (groups, B)
            source, window = _locate(self._order, samples.reshape(-1))
            for s in range(len(self._order.sources)):
                self._order.sources[s].file.read_ahead(window[source == s], self._order.seq_len)
            yield from ahead
            ahead = list(zip(source.reshape(samples.shape), window.reshape(samples.shape), strict=True))
            chunk = max(1, LOCATE_ROWS // samples.shape[1])
        yield from ahead

    def _work(self) -> None:
        """The thread: fills one free buffer after the other until the samples end, it fails, or it is closed."""
        try:
            for source, window in self._located():
                pinned = self._free.get()
                if self._closed.is_set():
                    return
                if pinned is None:
                    buffers = _empty(len(source), self._order.seq_len, pinned=False)
                else:
                    pinned.copied.synchronize()
                    buffers = pinned.batch
                self._ready.put((_fill(self._order, source, window, self._document_mask, buffers), pinned))
            self._ready.put(None)
        except BaseException as error:
            self._ready.put(error)

    def __iter__(self) -> "BatchStream":
        return self

    def __next__(self) -> Batch:
        if self._closed.is_set():
            raise StopIteration
        began = time.perf_counter()
        made = self._ready.get()
        self.wait_seconds += time.perf_counter() - began
        if made is None or isinstance(made, BaseException):
            self.close()
            raise made or StopIteration
        batch, pinned = made
        if pinned is not None:
            ids, targets, doc_start = (
                part.to(self._device, non_blocking=True) for part in (batch.ids, batch.targets, batch.doc_start)
            )
            pinned.copied.record(torch.cuda.current_stream(self._device))
            batch = Batch(ids, targets, doc_start, batch.sequences)
        self._free.put(pinned)
        return batch

    def close(self) -> None:
        """Ends the thread and waits for its end. Nothing comes after it; may be called twice."""
        self._closed.set()
        self._free.put(None)  # wakes the thread
        self._thread.join()
        self._groups = iter(())

    def __enter__(self) -> "BatchStream":
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()
