"""The tiles of our attention kernels, by head size and by how many keys a query sees. Chosen by
scripts/bench/attention_blocks.py, which times others."""

from typing import NamedTuple


class Blocks(NamedTuple):
    """How one of the kernels goes about its work."""

    rows: int
    """(query, head) rows of a tile."""
    keys: int
    """Keys of a tile."""
    warps: int
    stages: int
    split: bool
    """Three loops, of which the middle one needs no mask; else one loop that always masks, for ranges of few tiles."""
    registers: int | None = None
    """Registers that a thread may have at most, where the compiler would take more and so leave fewer programs a
    processor."""


LONG, SHORT, FP32 = "long", "short", "fp32"
"""FP32 numbers are multiplied by the threads themselves, which hold whole rows of a tile for it: in tiles made for 16
bits that would be up to 13 KB a thread, nearly all of it spilled."""

SHORT_BELOW = 512
"""Keys that a query sees at most, or the mean length of documents, below which the kernels take their short form."""

_FP32 = {(32, FP32): Blocks(32, 32, 4, 2, False), (64, FP32): Blocks(32, 32, 4, 2, False),
         (128, FP32): Blocks(32, 32, 8, 2, False)}  # fmt: skip
"""Of all three kernels. By what the compiler makes of them, not by measurement."""

FORWARD = {
    **_FP32,
    (16, LONG): Blocks(64, 64, 4, 2, True),
    (32, LONG): Blocks(128, 64, 4, 3, True),
    (64, LONG): Blocks(128, 64, 8, 3, True, 128),
    (64, SHORT): Blocks(64, 64, 4, 2, False, 128),
    (128, LONG): Blocks(128, 64, 8, 3, True),
    (128, SHORT): Blocks(64, 64, 4, 2, False),
}
DQ = {
    **_FP32,
    (16, LONG): Blocks(64, 64, 4, 2, True),
    (32, LONG): Blocks(64, 64, 4, 2, True),
    (64, LONG): Blocks(64, 64, 4, 2, True, 168),
    (64, SHORT): Blocks(64, 64, 4, 2, False, 128),
    (128, LONG): Blocks(64, 64, 4, 2, True),
}
DKV = {
    **_FP32,
    (16, LONG): Blocks(64, 64, 4, 2, True),
    (32, LONG): Blocks(64, 64, 4, 2, True),
    (64, LONG): Blocks(64, 128, 8, 2, True),
    (64, SHORT): Blocks(64, 64, 4, 2, False, 168),
    (128, LONG): Blocks(32, 128, 8, 2, True),
}


def supports(head_dim: int) -> bool:
    """Whether there is a kernel for heads of this size."""
    return (head_dim, LONG) in FORWARD


def blocks_for(table: dict[tuple[int, str], Blocks], head_dim: int, keys_seen: int, fp32: bool = False) -> Blocks:
    """Of FORWARD, DQ or DKV, where a query sees about `keys_seen` keys at most."""
    if fp32 and (head_dim, FP32) in table:
        return table[head_dim, FP32]
    short = keys_seen < SHORT_BELOW and (head_dim, SHORT) in table
    return table[head_dim, SHORT if short else LONG]
