"""What `llmtrain compare` and `llmtrain report` are told."""

from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal


@dataclass(frozen=True)
class CompareConfig:
    replicate: tuple[Path, ...] = field(default=(), metadata={"metavar": "DIR"})
    """One more run of the configuration of RUN_A; repeat it for several. A third run lowers the floor by far more than
    longer ones do."""
    metric: Literal["lm_loss", "val_loss"] = "lm_loss"
    """Loss that is compared, in nats a token: of the training steps or of the held-out file."""
    source: str = ""
    """Held-out file, by its name in the run, where val_loss has several."""
    tail: float = 0.25
    """Share of the tokens, at the end, that the verdict rests on."""
    blocks: int = 0
    """Blocks that the tail is cut into; 0: 20, or as many as hold a loss of every run."""
    confidence: float = 0.95
    """Share of the comparisons of equal runs that must not be called a difference."""
    plot: Path | None = field(default=None, metadata={"metavar": "FILE"})
    """Image to draw the curves and the blocks' differences into, .png or .svg; needs the extra `plot`."""

    def __post_init__(self) -> None:
        if not 0 < self.tail <= 1:
            raise ValueError(f"tail must be above 0 and at most 1, not {self.tail}")
        if self.blocks != 0 and not 2 <= self.blocks <= 10_000:
            raise ValueError(f"blocks must be 0 or from 2 to 10000, not {self.blocks}")
        if not 0 < self.confidence < 1:
            raise ValueError(f"confidence must be between 0 and 1, not {self.confidence}")
        if self.plot is not None and self.plot.suffix not in (".png", ".svg", ".pdf"):
            raise ValueError(f"plot {self.plot} must end with .png, .svg or .pdf")


@dataclass(frozen=True)
class ReportConfig:
    output: Path = field(default=Path("report.html"), metadata={"metavar": "FILE"})
    """The page to write: one file that needs no network and no server."""
    png: Path | None = field(default=None, metadata={"metavar": "DIR"})
    """Folder to write each curve to as an image too; needs the extra `plot`."""
    png_axis: Literal["step", "tokens", "time"] = "step"
    """What the images have across; on the page it can be chosen."""
    points: int = 1500
    """Points of a curve beyond which one stands for a stretch of log lines: its least, mean and greatest value."""

    def __post_init__(self) -> None:
        if not 100 <= self.points <= 100_000:
            raise ValueError(f"points must be from 100 to 100000, not {self.points}")
        if self.output.suffix not in (".html", ".htm"):
            raise ValueError(f"output {self.output} must end with .html")
