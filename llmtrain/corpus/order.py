"""Which window is sample i: a pure function of (corpus, seed, i) with no array of the corpus' length.

Each epoch of a source is a keyed permutation of its windows. A mixture deals samples out in aligned blocks of
1,000, each with the same count of every source, in a keyed order of its own.
"""

import hashlib
import math
import os
import re
from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction
from pathlib import Path
from typing import NamedTuple

import numpy as np

from llmtrain.corpus.shards import find_parts
from llmtrain.corpus.token_file import TokenFile
from llmtrain.corpus.token_manifest import held_out_path
from llmtrain.corpus.windows import Concat, Cut
from llmtrain.storage.errors import BadData, UsageError

BLOCK = 1000
ROUNDS = 6
MOST_TOKENS = 10**18
"""That a run is asked to take: beyond all text there is."""

_BUDGET = re.compile(r"([0-9]+\.?[0-9]*|\.[0-9]+)([KMBTkmbt])")
_UNITS = {"K": 10**3, "M": 10**6, "B": 10**9, "T": 10**12}

_GOLDEN = 0x9E3779B97F4A7C15
_STEPS = np.array([(i + 1) * _GOLDEN % 2**64 for i in range(ROUNDS)], np.uint64)[:, None]
_SHIFTS = [np.uint64(shift) for shift in (30, 27, 31)]
_FACTORS = [np.uint64(factor) for factor in (0xBF58476D1CE4E5B9, 0x94D049BB133111EB)]


def _mix(x: np.ndarray) -> np.ndarray:
    """The finaliser of splitmix64 (Steele, Lea, Flood 2014): uint64 -> uint64, a bijection; `x` is overwritten."""
    x ^= x >> _SHIFTS[0]
    x *= _FACTORS[0]
    x ^= x >> _SHIFTS[1]
    x *= _FACTORS[1]
    x ^= x >> _SHIFTS[2]
    return x


def _rounds(x: np.ndarray, keys: np.ndarray, a: int, b: int) -> np.ndarray:
    """One pass of a Feistel network over Z_a x Z_b: x (N,) uint64 in [0, a * b), keys (ROUNDS, N or 1)."""
    rows, columns = np.uint64(a), np.uint64(b)
    # Each hash is reduced before it is added: a sum that wrapped at 2^64 would make it no bijection.
    left, right = np.divmod(x, columns)
    for i in range(0, ROUNDS, 2):
        left = (left + _mix(right + keys[i]) % rows) % rows
        right = (right + _mix(left + keys[i + 1]) % columns) % columns
    return left * columns + right


def permute(index: np.ndarray, n: int, key: int | np.ndarray) -> np.ndarray:
    """Where a keyed bijection of [0, n) sends `index`: int64 (any shape) -> int64 (the same shape).

    `key` is a number below 2^64, or uint64 of `index`' shape: one permutation for each element. Memory is that of
    `index`, whatever n. The network is an unbalanced Feistel over Z_a x Z_b with a, b about sqrt(n) (Black and
    Rogaway 2002, "Ciphers with arbitrary finite domains"): a * b exceeds n by less than sqrt(n), so one index in
    sqrt(n) walks on, and no walk is longer than a * b - n + 1, because a walk meets no value twice.
    """
    flat = np.asarray(index, np.int64).reshape(-1)
    if flat.size and not 0 <= int(flat.min()) <= int(flat.max()) < n:
        raise ValueError(f"index outside [0, {n})")
    a = math.isqrt(n - 1) + 1
    b = -(-n // a)
    base = np.atleast_1d(np.asarray(key, np.uint64)).reshape(-1)
    keys = _mix(base + _STEPS)  # (ROUNDS, N or 1)
    out = _rounds(flat.astype(np.uint64), keys, a, b)
    while (outside := np.flatnonzero(out >= n)).size:
        out[outside] = _rounds(out[outside], keys if base.size == 1 else keys[:, outside], a, b)
    return out.astype(np.int64).reshape(np.shape(index))


@dataclass(frozen=True)
class Source:
    """One token file of a mixture."""

    name: str
    file: TokenFile
    weight: float
    """Its share of the samples, relative to the other sources' weights."""
    budget: int | None = None
    """Tokens that a run takes of it, where that was said in the place of a weight."""
    cut: Cut | None = None
    """How it is cut into windows; None: out of the stream."""


class SourceSpec(NamedTuple):
    """A source as it is named on the command line; fields as of `Source`."""

    name: str
    path: str
    weight: float = 1.0
    budget: int | None = None


def parse_sources(specs: Sequence[str], option: str = "--tokens") -> list[SourceSpec]:
    """Reads `[NAME=]PATH[:WEIGHT|:BUDGET]`, in the order given. A budget is a number of tokens such as 300M or 2.5B;
    either all sources have one or none.

    NAME is the file's stem and WEIGHT 1 where not said. A `=` after a slash and a `:` before what is no number
    belong to the path. Raises UsageError, which names the `option` that was given.
    """
    sources = []
    for spec in specs:
        name, equals, path = spec.partition("=")
        named = bool(equals) and "/" not in name
        if not named:
            path = spec
        weight, budget = 1.0, None
        before, colon, after = path.rpartition(":")
        if colon and _BUDGET.fullmatch(after):
            path, budget = before, amount_of(after)
            if budget is None:
                raise UsageError(f"{option} {path}: {after[:40]} tokens are more than there are: name fewer, as 2.5B")
            weight = float(budget)
        elif colon:
            try:
                path, weight = before, float(after)
            except ValueError:
                pass
        if not path or (named and not name):
            raise UsageError(f"{option} {spec}: names no file: write [NAME=]PATH")
        if not named:
            name = Path(path).name.removesuffix(".u16").removesuffix(".u32")
        if not (weight > 0 and math.isfinite(weight)):
            raise UsageError(f"{option} {spec}: the weight {after} is not above 0: leave the source out or weigh it")
        if not 1e-100 < weight < 1e100:  # sums and shares stay finite
            raise UsageError(f"{option} {spec}: the weight {after} is out of bounds: weights are shares, as 1 and 3")
        sources.append(SourceSpec(name, path, weight, budget))
    if not sources:
        raise UsageError(f"{option} is missing: name a file, [NAME=]PATH")
    without = [source.name for source in sources if source.budget is None]
    if 0 < len(without) < len(sources):
        raise UsageError(
            f"{option} {without[0]}: says no number of tokens as others do: give all of them one, or all a weight"
        )
    names = [source.name for source in sources]
    for name in names:
        if names.count(name) > 1:
            raise UsageError(f"{option}: two sources are called {name}: tell them apart with NAME=PATH")
    return sources


def amount_of(text: str) -> int | None:
    """A number of tokens as people write it: 2.5B, 300M, 1000000; None where it is none, or more than there are."""
    amount = _BUDGET.fullmatch(text)
    if len(text) > 30 or not (amount or text.isascii() and text.isdigit()):
        return None
    tokens = round(Fraction(amount[1]) * _UNITS[amount[2].upper()]) if amount else int(text)
    return tokens if tokens <= MOST_TOKENS else None


def absolute_spec(spec: str, option: str = "--tokens") -> str:
    """`[NAME=]PATH[:WEIGHT|:BUDGET]` with the same meaning wherever it is read. Raises as `parse_sources`."""
    ((name, path, weight, budget),) = parse_sources([spec], option)
    path = os.path.abspath(path)
    if budget is not None:
        return f"{name}={path}:{spec.rpartition(':')[2]}"
    # A path with a colon needs its weight said, or its end would be taken for one.
    return f"{name}={path}" + (f":{weight!r}" if weight != 1 or ":" in path else "")


def held_out_beside(specs: Sequence[str]) -> list[str]:
    """The held-out files that `tokenize-corpus` wrote beside those token files, as `[NAME=]PATH`; none where it wrote
    none. Raises as `parse_sources`."""
    found = []
    for name, path, _, _ in parse_sources(specs):
        held_out = held_out_path(Path(path))
        if held_out.exists() or find_parts(held_out):
            found.append(f"{name}.val={held_out}" + (":1" if ":" in str(held_out) else ""))
    return found


def block_counts(weights: Sequence[float]) -> list[int]:
    """Samples of each source in a block of 1,000, by largest remainder; equal remainders go to the earlier one."""
    exact = [BLOCK * weight / math.fsum(weights) for weight in weights]
    counts = [int(share) for share in exact]
    by_remainder = sorted(range(len(exact)), key=lambda s: (counts[s] - exact[s], s))
    for s in by_remainder[: BLOCK - sum(counts)]:
        counts[s] += 1
    return counts


class SampleOrder:
    """The order of samples over `sources` at `seq_len` tokens a window: sample number -> (source, window).

    Source s serves its windows in order of k = 0, 1, 2, ...: epoch k // windows of its own, and within an epoch
    a permutation keyed by (seed, position of the source, epoch); what files are called does not matter.
    Raises BadData for a file shorter than one window, UsageError for a weight below 1/1000 of the mixture.
    """

    def __init__(self, sources: Sequence[Source], seq_len: int, seed: int) -> None:
        self.sources = tuple(sources)
        self.seq_len = seq_len
        self.seed = seed
        self.cuts = [source.cut or Concat(source.file, seq_len) for source in self.sources]
        assert all(cut.seq_len == seq_len for cut in self.cuts)
        self.windows = np.array([cut.windows for cut in self.cuts], np.int64)
        for source, windows in zip(self.sources, self.windows, strict=True):
            if windows == 0:
                held_out = source.file.path.stem.endswith(".val")
                raise BadData(
                    f"{source.file.path}: holds {source.file.tokens:,} tokens, a window of --seq-len {seq_len} needs "
                    f"{seq_len + 1:,}: shorten --seq-len or "
                    + ("tokenize with a larger --holdout" if held_out else "add text")
                )
        self.counts = np.array(block_counts([source.weight for source in self.sources]), np.int64)
        for source, count in zip(self.sources, self.counts, strict=True):
            if count == 0:
                raise UsageError(
                    f"--tokens {source.name}: its weight is below 1/{BLOCK} of the mixture: raise it or leave it out"
                )
        keys = [hashlib.blake2b(f"{seed}/{s}".encode(), digest_size=8).digest() for s in range(len(self.sources) + 1)]
        self._keys = np.array([int.from_bytes(key, "little") for key in keys], np.uint64)  # the last deals blocks

    @property
    def samples_per_epoch(self) -> int:
        """Windows of all sources together."""
        return int(self.windows.sum())

    def _key(self, s: int, period: np.ndarray) -> np.ndarray:
        """The key of each epoch (or block) number in `period` (N,): uint64 (N,)."""
        return _mix(self._keys[s] + (period.astype(np.uint64) + np.uint64(1)) * np.uint64(_GOLDEN))

    def _deal(self, samples: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """samples (N,) -> the source of each (N,), and how many samples before it came from that source (N,)."""
        if len(self.sources) == 1:
            return np.zeros_like(samples), samples
        blocks, row = np.unique(samples // BLOCK, return_inverse=True)
        slots = np.broadcast_to(np.arange(BLOCK), (len(blocks), BLOCK))
        dealt = permute(slots, BLOCK, np.repeat(self._key(-1, blocks), BLOCK))
        dealt = np.searchsorted(np.cumsum(self.counts), dealt, side="right")  # (blocks, BLOCK): the slot's source
        rank = np.empty_like(dealt)
        for s in range(len(self.sources)):
            mine = dealt == s
            rank[mine] = (np.cumsum(mine, axis=1) - 1)[mine]
        source = dealt[row, samples % BLOCK]
        return source, samples // BLOCK * self.counts[source] + rank[row, samples % BLOCK]

    def locate(self, samples: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """samples (N,) int64, each >= 0 -> source index (N,) int64, window index in that source (N,) int64."""
        source, turn = self._deal(np.asarray(samples, np.int64))
        window = np.empty_like(turn)
        for s, windows in enumerate(self.windows):
            mine = np.flatnonzero(source == s) if len(self.sources) > 1 else slice(None)
            epoch, position = np.divmod(turn[mine], windows)
            window[mine] = permute(position, int(windows), self._key(s, epoch))
        return source, window

    def drawn(self, samples: int) -> np.ndarray:
        """How many of the first `samples` samples come from each source, (sources,) int64."""
        blocks, rest = divmod(samples, BLOCK)
        drawn = blocks * self.counts
        if rest:
            source, _ = self._deal(np.arange(samples - rest, samples))
            drawn = drawn + np.bincount(source, minlength=len(self.sources))
        return drawn
