"""How a batch is put together out of the order of samples.

This module and batch_stream are the ones of this room that know torch.
"""

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import torch

from llmtrain.corpus.order import SampleOrder, Source
from llmtrain.corpus.token_file import TokenFile
from llmtrain.corpus.windows import Pieces
from llmtrain.storage.errors import BadData, UsageError

IGNORED = -100


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


def locate(order: SampleOrder, samples: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """samples (N,) with -1 for missing ones -> source (N,), -1 for missing ones, and window (N,)."""
    source, window = order.locate(np.maximum(samples, 0))
    return np.where(samples < 0, -1, source), window


def empty_batch(rows: int, seq_len: int, pinned: bool) -> Batch:
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


def fill_batch(
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


def part_of(batch: Batch, begin: int, end: int, sequences: int, pairs: float = 0.0) -> Batch:
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
    source, window = locate(order, samples)
    batch = empty_batch(len(samples), order.seq_len, pinned=False)
    pairs = fill_batch(order, source, window, document_mask, batch, attention_windows=attention_windows)
    return part_of(batch, 0, len(samples), int((samples >= 0).sum()), float(pairs.sum()))


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
        batch = empty_batch(batch_size, seq_len, pinned=False)
        fill_batch(order, source, window, document_mask, batch)
        doc_start = batch.doc_start.to(device) if document_mask else None
        yield batch.ids.to(device), batch.targets.to(device), doc_start


def no_targets(file: TokenFile, windows: int, option: str) -> BadData:
    """The error for a held-out file of whose `windows` windows that were read none has a target; `option` says how many
    are read."""
    return BadData(
        f"{file.path}: none of its {windows:,} windows that were read has a token that counts in the loss: read more "
        f"of them with {option}, read longer ones, or name another file"
    )
