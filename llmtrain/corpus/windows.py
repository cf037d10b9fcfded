"""How a token file is cut into windows: `Concat` takes one after the other, `packing.Packed` whole documents."""

from typing import NamedTuple, Protocol

import numpy as np

from llmtrain.corpus.token_file import TokenFile


class Gathered(NamedTuple):
    """The tokens of some windows. A border is where a document, or a part of one, begins behind another in its row."""

    ids: np.ndarray
    """(N, T + 1) of the file's `id_type`, 0 behind `ends`"""
    rows: np.ndarray
    """(M,) int64, the row of each border, in order"""
    columns: np.ndarray
    """(M,) int64, its column, 1 to T"""
    ends: np.ndarray | None
    """(N,) int64, how many tokens of each row are text; None where all are"""
    counts: np.ndarray | None = None
    """(N, T + 1) uint8, 1 for tokens that count in the loss; None where all do"""


class Pieces(NamedTuple):
    """What some windows are made of, in order of the rows and of the columns."""

    rows: np.ndarray
    """(P,) int64"""
    starts: np.ndarray
    """(P,) int64, the token of the file where each begins"""
    lengths: np.ndarray
    """(P,) int64, in tokens"""


class Cut(Protocol):
    """A token file as windows of `seq_len` + 1 tokens, of which each is the context of the next."""

    file: TokenFile
    seq_len: int
    windows: int

    def pieces(self, windows: np.ndarray) -> Pieces:
        """windows (N,) int64 -> where their tokens lie. Raises BadData for an index that is damaged."""

    def gather(self, windows: np.ndarray, pieces: Pieces | None = None) -> Gathered:
        """windows (N,) int64, with their pieces where those are known. Raises BadData for an id beyond the vocabulary
        and a file that was truncated."""

    def read_index_ahead(self) -> None:
        """Asks the system to bring what says where the pieces lie into the page cache, as a whole."""


class Concat:
    """Window i begins at token i * seq_len: neighbours share a token, so that no target is lost."""

    def __init__(self, file: TokenFile, seq_len: int) -> None:
        self.file = file
        self.seq_len = seq_len
        self.windows = file.windows(seq_len)

    def pieces(self, windows: np.ndarray) -> Pieces:
        return Pieces(np.arange(len(windows)), windows * self.seq_len, np.full(len(windows), self.seq_len + 1))

    def gather(self, windows: np.ndarray, pieces: Pieces | None = None) -> Gathered:
        ids, counts = self.file.gather(windows, self.seq_len), None
        if self.file.has_mask:
            counts = self.file.read_mask(*self.pieces(windows)[1:]).reshape(ids.shape)
        return Gathered(ids, *self.file.borders(windows, ids), None, counts)

    def read_index_ahead(self) -> None:
        pass
