"""What `sweep` and `bench` can be told. Imports no torch: the command line reads it."""

from dataclasses import asdict, dataclass
from typing import Any, Literal

from llmtrain.model.config import CheckpointActivations, ModelConfig
from llmtrain.training.config import Attention, Precision


def require_positive(config: object, *names: str) -> None:
    """Raise ValueError naming the first of the fields that is not above 0."""
    for name in names:
        if not getattr(config, name) > 0:
            raise ValueError(f"{name} must be above 0, not {getattr(config, name)}")


@dataclass(frozen=True)
class TimingConfig:
    """How long a training step is watched."""

    seconds: float = 0.5
    """Length of one burst of steps, in seconds; a burst holds at least one step."""
    bursts: int = 5
    """Bursts timed; the figure is their median, the spread their range."""
    warmup: int = 5
    """Steps before the first burst."""
    precision: Precision = "bf16"
    """Arithmetic of the matmuls and activations."""
    device: Literal["auto", "cpu", "cuda"] = "auto"
    """Where to run; auto: the card where there is one."""
    attention: Attention = "auto"
    """Implementation of attention; auto: as in training."""
    checkpoint_activations: CheckpointActivations = "none"
    """What the backward runs again to save memory: nothing, what is cheap for its bytes, or whole blocks."""

    def __post_init__(self) -> None:
        require_positive(self, "seconds", "warmup")
        if self.bursts < 2:
            raise ValueError(f"bursts must be 2 or more to show a spread, not {self.bursts}")


@dataclass(frozen=True)
class SweepConfig:
    """How a sweep goes about its rows."""

    replicate: bool = True
    """Take the first row that can be measured once more at the end: what it differs by is the table's floor."""
    row_timeout: float = 300.0
    """Seconds after which a row is given up and recorded as failed."""

    def __post_init__(self) -> None:
        require_positive(self, "row_timeout")


@dataclass(frozen=True)
class Shape:
    """A model and its batch: what one row of a table measures."""

    model: ModelConfig
    batch_size: int
    """Sequences in a micro-batch."""
    seq_len: int
    """Tokens in a sequence."""
    accumulate: int = 1
    """Micro-batches in a step."""

    def __post_init__(self) -> None:
        require_positive(self, "batch_size", "seq_len", "accumulate")
        if self.model.vocab_size < 2:
            raise ValueError(f"vocab_size must be 2 or more to draw random tokens, not {self.model.vocab_size}")
        if self.model.max_seq_len < self.seq_len:
            raise ValueError(f"seq_len {self.seq_len} is beyond the model's max_seq_len {self.model.max_seq_len}")

    @property
    def tokens_per_step(self) -> int:
        return self.batch_size * self.seq_len * self.accumulate

    def __str__(self) -> str:
        accumulate = f", accumulate {self.accumulate}" if self.accumulate > 1 else ""
        return f"{self.batch_size} x {self.seq_len}{accumulate}"


def shape_from(table: dict[str, Any]) -> Shape:
    """The Shape of what `asdict` made of one."""
    return Shape(**table | {"model": ModelConfig(**table["model"])})


@dataclass(frozen=True)
class SweepRow:
    """One line of a sweep."""

    name: str
    shape: Shape

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)
