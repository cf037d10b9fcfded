"""What `sweep` and `bench` can be told. Imports no torch: the command line reads it.

Shapes of ops are a card's by default; `on_cpu` in a field's metadata is what takes a CPU less than a minute.
"""

from dataclasses import asdict, dataclass, field
from typing import Any, Literal

from llmtrain.model.config import CheckpointActivations, ModelConfig
from llmtrain.training.config import Attention, Fp8Scaling, Precision, check_fp8_scaling


def require_positive(config: object, *names: str) -> None:
    """Raise ValueError naming the first of the fields that is not above 0."""
    for name in names:
        if not getattr(config, name) > 0:
            raise ValueError(f"{name} must be above 0, not {getattr(config, name)}")
        if getattr(config, name) >= 1 << 63:
            raise ValueError(f"{name} must be below 2^63, not {getattr(config, name)}")


def require_each_positive(config: object, *names: str) -> None:
    """Raise ValueError naming the first of the fields that is empty or holds a number that is not above 0."""
    for name in names:
        values = getattr(config, name)
        if not values or min(values) < 1:
            raise ValueError(f"{name} must be one or more numbers above 0, not {values}")
        if max(values) >= 1 << 63:
            raise ValueError(f"{name} must be below 2^63, not {max(values)}")


@dataclass(frozen=True)
class TimingConfig:
    """How long a training step is watched."""

    seconds: float = 0.5
    """Length of one burst of steps, in seconds; a burst holds at least one step."""
    bursts: int = 5
    """Bursts timed, 2 or more; the figure is their median, the spread their range."""
    warmup: int = 5
    """Steps before the first burst."""
    precision: Precision = "bf16"
    """Arithmetic of the matmuls and activations."""
    fp8_scaling: Fp8Scaling = "tensorwise"
    """With precision fp8: what shares a scale, as in training."""
    device: Literal["auto", "cpu", "cuda"] = "auto"
    """Where to run; auto: the card where there is one."""
    attention: Attention = "auto"
    """Implementation of attention; auto: as in training."""
    checkpoint_activations: CheckpointActivations = "none"
    """What the backward runs again to save memory: nothing, what is cheap for its bytes, or whole blocks."""

    def __post_init__(self) -> None:
        require_positive(self, "seconds", "warmup")
        check_fp8_scaling(self)
        if self.bursts < 2:
            raise ValueError(f"bursts must be 2 or more to show a spread, not {self.bursts}")


@dataclass(frozen=True)
class BatchesConfig:
    """What a training step is fed."""

    tokens: tuple[str, ...] = field(default=(), metadata={"metavar": "[NAME=]PATH[:WEIGHT|:TOKENS]"})
    """Token file whose first samples it takes, as `train` would read them; repeat it to mix several. Random tokens
    where none is named."""


@dataclass(frozen=True)
class OpTimingConfig:
    """How an op is timed: the method of docs/ops.md, in full by default."""

    sessions: int = 4
    """Times every arm is built anew; every other one runs in reverse order. A single one needs 2 rounds or more."""
    rounds: int = 3
    """Turns of each arm in a session, in rotating order; 2 or more where there is a single session."""
    samples: int = 67
    """Samples in a turn, at most."""
    turn_seconds: float = 0.05
    """Seconds after which a turn ends, once it has 11 samples."""
    compile: bool = True
    """Have torch.compile among the peers: seconds a shape, and minutes for products of matrices."""
    device: Literal["auto", "cpu", "cuda"] = "auto"
    """Where to run; auto: the card where there is one."""

    def __post_init__(self) -> None:
        require_positive(self, "sessions", "rounds", "samples", "turn_seconds")
        if self.sessions * self.rounds < 2:
            raise ValueError(f"rounds must be 2 or more where sessions is 1, not {self.rounds}")


@dataclass(frozen=True)
class NormShapesConfig:
    """Shapes of RMSNorm."""

    tokens: tuple[int, ...] = field(default=(256, 16384, 65536), metadata={"on_cpu": (256, 4096)})
    """Rows, or tokens where there are heads; may be repeated."""
    width: tuple[int, ...] = field(default=(768, 2048), metadata={"on_cpu": (256,)})
    """Width of a row; may be repeated."""
    heads: int = 0
    """Norm this many heads of every token by one shared weight; 0: plain rows."""
    residual: bool = False
    """Add a residual stream first."""

    def __post_init__(self) -> None:
        require_each_positive(self, "tokens", "width")
        if self.heads < 0:
            raise ValueError(f"heads must be 0 or more, not {self.heads}")
        if self.heads and self.residual:
            raise ValueError("residual cannot be with heads: they are norms of a block's input and of q and k")


@dataclass(frozen=True)
class SwiGLUShapesConfig:
    """Shapes of SwiGLU and of the rotation of q and k."""

    tokens: tuple[int, ...] = field(default=(2048, 16384, 131072), metadata={"on_cpu": (256, 2048)})
    """Tokens; may be repeated."""
    d_ff: int = field(default=3456, metadata={"on_cpu": 256})
    """Width of the feed-forward."""
    n_heads: int = field(default=20, metadata={"on_cpu": 4})
    """Query heads that are rotated."""
    n_kv_heads: int = field(default=4, metadata={"on_cpu": 2})
    """Key heads that are rotated."""
    head_dim: int = field(default=64, metadata={"on_cpu": 32})
    """Width of a head."""

    def __post_init__(self) -> None:
        require_each_positive(self, "tokens")
        require_positive(self, "d_ff", "n_heads", "n_kv_heads", "head_dim")
        if self.head_dim % 2:
            raise ValueError(f"head_dim must be even to be rotated, not {self.head_dim}")


@dataclass(frozen=True)
class GemmShapesConfig:
    """Shapes of the matrix products of a linear layer, y = x W^T."""

    tokens: int = field(default=16384, metadata={"on_cpu": 256})
    """Rows of x."""
    inputs: tuple[int, ...] = field(default=(768, 2048), metadata={"on_cpu": (64, 256)})
    """Columns of x; may be repeated."""
    outputs: tuple[int, ...] = field(default=(2816, 16384), metadata={"on_cpu": (256, 1024)})
    """Columns of y; one for each of the inputs."""

    def __post_init__(self) -> None:
        require_positive(self, "tokens")
        require_each_positive(self, "inputs", "outputs")
        if len(self.inputs) != len(self.outputs):
            raise ValueError(f"outputs must be one for each of the {len(self.inputs)} inputs, not {len(self.outputs)}")


@dataclass(frozen=True)
class AttentionShapesConfig:
    """Documents laid end to end, and the heads that attend within them."""

    tokens: int = field(default=65536, metadata={"on_cpu": 512})
    """Tokens in all, about."""
    shortest: int = field(default=256, metadata={"on_cpu": 64})
    """Length of the shortest document."""
    longest: int = field(default=256, metadata={"on_cpu": 64})
    """Length of the longest document; lengths are drawn evenly between the two."""
    n_heads: int = field(default=12, metadata={"on_cpu": 4})
    """Query heads."""
    n_kv_heads: int = field(default=4, metadata={"on_cpu": 2})
    """Key and value heads."""
    head_dim: int = field(default=64, metadata={"on_cpu": 16})
    """Width of a head."""
    window: int = 0
    """Keys that a token sees at most; 0: all of its document."""
    slots: int = 0
    """Documents that there is room for; 0: as many as there are."""

    def __post_init__(self) -> None:
        require_positive(self, "tokens", "shortest", "n_heads", "n_kv_heads", "head_dim")
        if not self.shortest <= self.longest <= self.tokens:
            raise ValueError(f"longest must be from shortest {self.shortest} to tokens {self.tokens}")
        if self.n_heads % self.n_kv_heads:
            raise ValueError(f"n_heads {self.n_heads} is no multiple of n_kv_heads {self.n_kv_heads}")
        if self.window < 0 or self.slots < 0:
            raise ValueError("window and slots must be 0 or more")


@dataclass(frozen=True)
class HeadShapesConfig:
    """Shapes of the language-model head."""

    tokens: tuple[int, ...] = field(default=(16384,), metadata={"on_cpu": (256,)})
    """Rows; may be repeated."""
    width: int = field(default=1280, metadata={"on_cpu": 64})
    """Width of a row."""
    vocabulary: int = field(default=65536, metadata={"on_cpu": 1024})
    """Rows of the weight, 2 or more: of a single one there is nothing to choose."""

    def __post_init__(self) -> None:
        require_each_positive(self, "tokens")
        require_positive(self, "width", "vocabulary")
        if self.vocabulary < 2:
            raise ValueError(f"vocabulary must be 2 or more, not {self.vocabulary}")


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
    checkpoint_activations: CheckpointActivations | None = None
    """None: as the sweep's timing says."""

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)
