"""What `llmtrain plan` is told beside what `train` is. Imports no torch: the command line reads it."""

import math
from dataclasses import dataclass, field
from pathlib import Path

MOST_RANKS = 1 << 20
"""Of one run: no machine is near."""


@dataclass(frozen=True)
class PlanConfig:
    card: str | None = field(default=None, metadata={"metavar": "NAME"})
    """Card to plan for, such as H200, H100, A100-80 or 4090, which need not be here; default: what --device finds."""
    ranks: int = 1
    """Cards that share a step, as with torchrun --nproc-per-node."""
    mfu: float | None = None
    """Share of the card's bf16 peak that the run is expected to reach, such as 0.45."""
    measured: Path | None = field(default=None, metadata={"metavar": "RUN|FILE"})
    """Where the expected speed comes from: a run directory, or the JSON that `bench step --output` wrote. Default: what
    the nearest model in docs/ was measured to reach."""
    total_tokens: str | None = field(default=None, metadata={"metavar": "NUMBER"})
    """Tokens that the run trains on, such as 2.5B, in place of --total-steps or --epochs. Token files need not be
    there; without them and without a number, 20 tokens a parameter are assumed."""

    def __post_init__(self) -> None:
        if self.ranks < 1:
            raise ValueError(f"ranks must be 1 or more, not {self.ranks}")
        if self.ranks > MOST_RANKS:
            raise ValueError(f"ranks must be at most {MOST_RANKS}, not {self.ranks}")
        if self.mfu is not None and not 0 < self.mfu < math.inf:
            raise ValueError(f"mfu must be above 0, such as 0.45, not {self.mfu}")
        if self.mfu is not None and self.measured is not None:
            raise ValueError(f"mfu {self.mfu} and measured {self.measured} both say how fast the run is: give one")
