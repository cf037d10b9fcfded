"""How ranks share a model and the data."""

from dataclasses import dataclass


@dataclass(frozen=True)
class Grid:
    """Stages x copies x shards. Ranks of one stage have the same layers; a shard is a part of these layers' weights;
    copies have the same. Data are shared among all ranks of a stage."""

    stages: int = 1
    copies: int = 1
    shards: int = 1

    @property
    def ranks(self) -> int:
        return self.stages * self.copies * self.shards

    @property
    def parts(self) -> int:
        """Ranks that have the whole model together."""
        return self.stages * self.shards

    def place(self, rank: int) -> tuple[int, int, int]:
        """Stage, copy and shard of a rank. Those that differ in their shard alone are neighbours."""
        return rank // (self.copies * self.shards), rank // self.shards % self.copies, rank % self.shards
