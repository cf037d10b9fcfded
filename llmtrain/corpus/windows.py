"""How a token file is cut into windows: `Concat` takes one after the other, `packing.Packed` whole documents."""

from typing import NamedTuple, Protocol

import numpy as np

from llmtrain.corpus.token_file import TokenFile


class Gathered(NamedTuple):
    """The tokens of some windows. A border is where a document, or a part of one, begins behind another in its row."""

    ids: np.ndarray
    """(N, T + 1) uint16, 0 behind `ends`"""
    rows: np.ndarray
    """(M,) int64, the row of each border, in order"""
    columns: np.ndarray
    """(M,) int64, its column, 1 to T"""
    ends: np.ndarray | None
    """(N,) int64, how many tokens of each row are text; None where all are"""


class Cut(Protocol):
    """A token file as windows of `seq_len` + 1 tokens, of which each is the context of the next."""

    seq_len: int
    windows: int

    def gather(self, windows: np.ndarray) -> Gathered:
        """windows (N,) int64. Raises BadData for an id beyond the vocabulary and a file that was truncated."""

    def first_tokens(self, windows: np.ndarray) -> np.ndarray:
        """Where in the file each window (N,) begins, int64."""

    def read_ahead(self, windows: np.ndarray) -> None:
        """Asks the system to bring the tokens of `windows` (N,) into the page cache."""

    def read_index_ahead(self) -> None:
        """The same for what says where documents lie, as a whole."""

    def release(self) -> None:
        """Lets go of the pages that were read: they stay in the page cache, but no longer count as this process'."""


class Concat:
    """Window i begins at token i * seq_len: neighbours share a token, so that no target is lost."""

    def __init__(self, file: TokenFile, seq_len: int) -> None:
        self.file = file
        self.seq_len = seq_len
        self.windows = file.windows(seq_len)

    def gather(self, windows: np.ndarray) -> Gathered:
        ids = self.file.gather(windows, self.seq_len)
        return Gathered(ids, *self.file.borders(windows, ids), None)

    def first_tokens(self, windows: np.ndarray) -> np.ndarray:
        return windows * self.seq_len

    def read_ahead(self, windows: np.ndarray) -> None:
        self.file.read_ahead(windows * self.seq_len, np.full(len(windows), self.seq_len + 1))

    def read_index_ahead(self) -> None:
        self.file.read_index_ahead()

    def release(self) -> None:
        self.file.release()
