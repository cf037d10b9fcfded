"""What samples say: medians, spread, the floor of an A/A replicate, and wins that stand above it. No torch."""

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from statistics import median

NOISY_SPREAD = 0.05
"""Block medians further apart than this fraction carry the mark `~`."""


@dataclass(frozen=True)
class Times:
    """Samples of one arm (any unit, lower is better), in blocks: sessions, or the rounds of a single session.

    Raises ValueError when a block is empty or a sample is not a positive finite number.
    """

    blocks: tuple[tuple[float, ...], ...]

    def __post_init__(self) -> None:
        if not self.blocks or not all(self.blocks):
            raise ValueError("blocks: every block needs at least one sample")
        for sample in self.samples:
            if not (math.isfinite(sample) and sample > 0):
                raise ValueError(f"blocks: a time must be positive and finite, not {sample}")

    @property
    def samples(self) -> list[float]:
        return [sample for block in self.blocks for sample in block]

    @property
    def medians(self) -> tuple[float, ...]:
        """The median of each block."""
        return tuple(median(block) for block in self.blocks)

    @property
    def pooled(self) -> float:
        """The median over the samples of all blocks: the figure a table shows."""
        return median(self.samples)

    @property
    def spread(self) -> float:
        """(largest - smallest block median) / smallest; 0 for one block, which cannot show any."""
        medians = self.medians
        return (max(medians) - min(medians)) / min(medians)

    @property
    def noisy(self) -> bool:
        return self.spread > NOISY_SPREAD


def block_ratios(ours: Times, peer: Times) -> tuple[float, ...]:
    """peer / ours, block by block: above 1 where ours is faster. Raises ValueError for unequal numbers of blocks."""
    if len(ours.blocks) != len(peer.blocks):
        raise ValueError(f"blocks: {len(ours.blocks)} of one arm against {len(peer.blocks)} of the other")
    return tuple(theirs / mine for mine, theirs in zip(ours.medians, peer.medians, strict=True))


def noise_floor(replicates: Iterable[tuple[Times, Times]]) -> float:
    """The largest relative difference, in any block, between an arm and its own second copy.

    What two copies of the same code differ by is what a difference between versions has to exceed.
    Raises ValueError without a replicate: a table that has none can claim no win.
    """
    differences = [max(r, 1 / r) - 1 for arm, copy in replicates for r in block_ratios(arm, copy)]
    if not differences:
        raise ValueError("replicates: none given, so there is no floor")
    return max(differences)


@dataclass(frozen=True)
class Comparison:
    """One arm against a peer: `ratio` above 1 where ours is faster."""

    ratio: float
    """peer / ours of the pooled medians."""
    verdict: str
    """`+` faster and `-` slower beyond the floor in every block, `=` otherwise."""
    noisy: bool
    """The block medians of either arm spread over 5%."""

    def __str__(self) -> str:
        return f"{self.ratio:.2f}{self.verdict}{'~' if self.noisy else ''}"


def compare(ours: Times, peer: Times, floor: float) -> Comparison:
    """`ours` against `peer`: a win or a loss only where every block agrees beyond `floor` (a fraction)."""
    ratios = block_ratios(ours, peer)
    if min(ratios) > 1 + floor:
        verdict = "+"
    elif max(ratios) < 1 / (1 + floor):
        verdict = "-"
    else:
        verdict = "="
    return Comparison(peer.pooled / ours.pooled, verdict, ours.noisy or peer.noisy)


def geometric_mean(ratios: Sequence[float]) -> float:
    return math.exp(math.fsum(math.log(r) for r in ratios) / len(ratios))


def range_line(ratios: Sequence[float]) -> str:
    """The line under a table of ratios: geometric mean, least, largest, and how many rows are slower."""
    below = sum(r < 1 for r in ratios)
    return (
        f"geometric mean {geometric_mean(ratios):.2f}, least {min(ratios):.2f}, largest {max(ratios):.2f}, "
        f"{below} of {len(ratios)} below 1"
    )


def rotation(count: int, turn: int, *, backwards: bool = False) -> list[int]:
    """The order of `count` arms in round `turn`: each round starts one arm later, so that none is always first.

    `backwards` reverses it: an arm then follows the neighbour it otherwise precedes.
    """
    order = [(turn + i) % count for i in range(count)]
    return order[::-1] if backwards else order
