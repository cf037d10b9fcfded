"""What a training run is told. Imports no torch: the command line reads it.

A field with `defines_run` in its metadata, and every field of the model, decides what the run computes: on `--resume`
another value is refused. The others (intervals, device, the split into micro-batches) may change between attempts; the
corpus is compared by content, so it may move.
"""

import dataclasses
import math
import os
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from llmtrain.model.config import CheckpointActivations, ModelConfig

DEFINES = {"defines_run": True}

Precision = Literal["bf16", "fp32", "fp8", "mxfp8"]
Fp8Scaling = Literal["tensorwise", "rowwise", "block"]
PipelineSchedule = Literal["1f1b", "interleaved", "zero-bubble"]
Attention = Literal["auto", "cudnn", "cudnn-graph", "flash", "efficient", "triton", "reference"]


def world_size() -> int:
    """Processes of the run that this one is part of, as the environment made by torchrun or a Slurm script says."""
    return int(os.environ.get("WORLD_SIZE") or 1)


def under_torchrun() -> bool:
    return "TORCHELASTIC_RUN_ID" in os.environ


def _at_least(config: Any, low: float, *names: str) -> None:
    for name in names:
        value = getattr(config, name)
        if value is not None and not value >= low:
            raise ValueError(f"{name} must be {low} or more, not {value}")
        if value is not None and value >= 1 << 63:
            raise ValueError(f"{name} must be below 2^63, not {value}")


def check_fp8_scaling(config: Any) -> None:
    """Raises ValueError for an fp8_scaling that would scale nothing."""
    if config.fp8_scaling != "tensorwise" and config.precision != "fp8":
        raise ValueError(f"fp8_scaling {config.fp8_scaling} is of precision fp8: precision is {config.precision}")


def eight_bit(config: Any) -> Fp8Scaling | None:
    """By which scales the blocks' matmuls run in eight bits, of what has `precision` and `fp8_scaling`; None: not."""
    return config.fp8_scaling if config.precision == "fp8" else None


@dataclass(frozen=True)
class DataConfig:
    tokens: tuple[str, ...] = field(default=("data/corpus.u16",), metadata={"metavar": "[NAME=]PATH[:WEIGHT|:TOKENS]"})
    """Token file to train on; repeat it to mix several by weight (:0.7) or by how many tokens to take (:2.5B)."""
    seq_len: int = field(default=1024, metadata=DEFINES)
    """Length of a sample, in tokens."""
    packing: Literal["concat", "documents"] = field(default="concat", metadata=DEFINES)
    """How samples are cut: out of the stream, or filled with whole documents, best fit, by an index that is made once
    beside the token file."""
    document_mask: bool = field(default=False, metadata=DEFINES)
    """Attention within documents; the target behind a document's end is then ignored."""
    eos_id: int | None = field(default=None, metadata=DEFINES)
    """The id that ends each document, for token files of others that do not say."""
    val_tokens: tuple[str, ...] = field(default=(), metadata={"metavar": "[NAME=]PATH"})
    """Held-out token file to evaluate on; repeat it to evaluate on several. With --tokens and without this, what
    --config names gives way to the held-out file beside those tokens (X.val.u16), or to none."""
    val_choices: tuple[str, ...] = field(default=(), metadata={"metavar": "[NAME=]FILE"})
    """Multiple-choice questions (JSON Lines) to answer by likelihood whenever val_tokens are evaluated; repeatable."""
    val_text: tuple[str, ...] = field(default=(), metadata={"metavar": "[NAME=]PATH"})
    """Held-out text whose documents are evaluated one by one at the same times; repeatable."""
    val_text_field: str | None = None
    """Of JSON Lines and Parquet in val_text: the field that holds the text; `text` when not given."""
    val_kind_field: str | None = None
    """Of JSON Lines and Parquet in val_text: the field that names a document's kind; each kind gets its own loss."""

    def __post_init__(self) -> None:
        _at_least(self, 1, "seq_len")
        _at_least(self, 0, "eos_id")
        if not self.tokens:
            raise ValueError("tokens must name at least one token file")
        for name in ("val_text_field", "val_kind_field"):
            if getattr(self, name) is not None and not self.val_text:
                raise ValueError(f"{name} {getattr(self, name)} is of val_text: give that too, or leave it out")

    @property
    def evaluates(self) -> bool:
        """Whether there is anything to evaluate on."""
        return bool(self.val_tokens or self.val_choices or self.val_text)


@dataclass(frozen=True)
class OptimizerConfig:
    optimizer: Literal["adamw", "muon"] = field(default="adamw", metadata=DEFINES)
    """What makes an update of a gradient; muon: Muon for the blocks' matrices, AdamW for the rest."""
    learning_rate: float = field(default=4e-4, metadata=DEFINES)
    """Peak learning rate, AdamW's."""
    muon_lr: float = field(default=0.02, metadata=DEFINES)
    """Peak learning rate of Muon's matrices: of their singular values, times sqrt(max(1, rows / columns)); it follows
    the schedule too."""
    muon_momentum: float = field(default=0.95, metadata=DEFINES)
    """Decay of Muon's momentum."""
    ema_decay: float = field(default=0.0, metadata=DEFINES)
    """Decay a step of an average of the weights that is kept beside them, for `--weights ema`; 0: none is. 0.999 looks
    back over the last thousand steps; early on the decay is (1 + t) / (10 + t) where that is less."""
    weight_decay: float = field(default=0.01, metadata=DEFINES)
    """Decoupled decay a step, times the learning rate of what it is of; matrices only."""
    beta1: float = field(default=0.9, metadata=DEFINES)
    """Decay of AdamW's first moment."""
    beta2: float = field(default=0.95, metadata=DEFINES)
    """Decay of AdamW's second moment."""
    adam_eps: float = field(default=1e-8, metadata=DEFINES)
    """Added to the root of the second moment."""
    grad_clip: float = field(default=1.0, metadata=DEFINES)
    """Largest norm of the mean gradient; 0: no clipping."""
    max_bad_steps: int = 20
    """Updates in a row that may be skipped, for whichever reason; one more stops the run. Skipping leaves the weights
    as they are, so only other data can end such a row: were every second step bad by its data, 20 in a row would come
    once in a million."""
    skip_spikes: float = 0.0
    """Skip an update whose loss or gradient norm is this many standard deviations above the mean of the last 128 that
    were applied; 6 is a usual choice, 0: skip none. A run that is resumed may be given it."""

    def __post_init__(self) -> None:
        _at_least(self, 0, "learning_rate", "muon_lr", "weight_decay", "grad_clip")
        # Less is nothing beside the least number that a card takes the root of, and 0 / 0 where a gradient is always 0.
        _at_least(self, 1e-15, "adam_eps")
        _at_least(self, 0, "max_bad_steps", "skip_spikes")
        if self.optimizer == "muon" and not self.learning_rate:
            raise ValueError("learning_rate must be above 0 with muon, whose own rate follows it through the schedule")
        for name in ("beta1", "beta2", "muon_momentum", "ema_decay"):
            if not 0 <= getattr(self, name) < 1:
                raise ValueError(f"{name} must be in [0, 1), not {getattr(self, name)}")


@dataclass(frozen=True)
class ScheduleConfig:
    schedule: Literal["cosine", "linear", "wsd"] = field(default="cosine", metadata=DEFINES)
    """How the learning rate falls after the warmup; wsd: not before the last decay_share of the steps, then as 1 less
    the root of the share that has passed."""
    decay_share: float = field(default=0.2, metadata=DEFINES)
    """Share of the run's steps in which wsd lets the learning rate fall; 0: never."""
    total_steps: int | None = field(default=None, metadata=DEFINES)
    """Optimizer steps of the run; default: as many as the tokens asked of each source, or else the epochs, have."""
    epochs: float = field(default=1.0, metadata=DEFINES)
    """Passes over the corpus, where neither total_steps nor numbers of tokens are given."""
    warmup_steps: int = field(default=2000, metadata=DEFINES)
    """Steps of linear warmup."""
    min_lr_ratio: float = field(default=0.1, metadata=DEFINES)
    """Learning rate at the end, as a share of the peak."""

    def __post_init__(self) -> None:
        _at_least(self, 1, "total_steps")
        _at_least(self, 0, "warmup_steps")
        if not 0 < self.epochs < float("inf"):
            raise ValueError(f"epochs must be above 0 and finite, not {self.epochs}")
        for name in ("min_lr_ratio", "decay_share"):
            if not 0 <= getattr(self, name) <= 1:
                raise ValueError(f"{name} must be in [0, 1], not {getattr(self, name)}")


DEFAULT_BATCH_SIZE = 8


def of_auto(batch_size: int | Literal["auto"]) -> int:
    """The batch_size that counts in the sequences of a step. auto is no number of them: what a step is does not depend
    on the memory of a card."""
    return DEFAULT_BATCH_SIZE if batch_size == "auto" else batch_size


@dataclass(frozen=True)
class RunConfig:
    run_dir: Path = field(default=Path("runs/default"), metadata={"metavar": "DIR"})
    """Where the run keeps its configuration, metrics and checkpoints."""
    init_from: Path | None = field(default=None, metadata={"metavar": "DIR"})
    """Checkpoint, or run directory whose newest one counts, that the weights are taken from instead of the seed. All
    else begins anew: data, their length and the optimizer may be others. Read where the run has no checkpoint."""
    branch_from: str | None = field(default=None, metadata={"metavar": "RUN:STEP"})
    """Run and step that this one goes on from as a branch, with the optimizer's moments: with another schedule or end,
    say. With the same data it goes on with its position too. Read where the run has no checkpoint of its own."""
    batch_size: int | Literal["auto"] = DEFAULT_BATCH_SIZE
    """Sequences of one device batch (micro-batch); auto: as many as fit the memory (on a CPU up to 8,192 tokens), while
    a step keeps its sequences: global_batch_size, or accumulate times the batch_size of the --config file, else 8."""
    accumulate: int = 1
    """Device batches summed on each rank before one optimizer step."""
    global_batch_size: int | None = None
    """Sequences of one optimizer step; derives accumulate."""
    parallel: Literal["auto", "ddp", "fsdp", "pipeline"] = "auto"
    """How the ranks that torchrun starts share the work: ddp: each has the whole model and a part of every step; fsdp:
    weights, gradients and moments are shared out too, and gathered block by block; pipeline: each
    has some of the layers and hands micro-batches on; auto: ddp where that is predicted to fit each rank's memory, else
    fsdp."""
    shard_ranks: int = 0
    """Neighbours that share out the model with fsdp, or each of its stages with pipeline; the other ranks have copies.
    0: with fsdp all ranks share it out, with pipeline none do."""
    reshard_after_forward: bool = True
    """Of weights that are shared out: free each block's behind its forward, and gather them again for its backward.
    Off: what is gathered stays until the update. That takes 2 bytes a parameter of each rank's memory (4 in FP32), with
    pipeline a parameter of its stages; a rank receives as many once a step, where it was twice a micro-batch."""
    pipeline_schedule: PipelineSchedule = "1f1b"
    """In which order the stages of a pipeline run the micro-batches of a step. interleaved: two stages a rank, so that
    ranks wait half as long for each other; zero-bubble: two as well, there and back, and weights' gradients fill the
    gaps."""
    pipeline_ranks: int = 0
    """Ranks that have the stages of one model; the others are further pipelines, which share the step's sequences; 0:
    all ranks, or with shard_ranks all groups of so many."""
    rank_timeout: float = 120.0
    """Seconds after which a rank that gives no sign of life, or makes no micro-batch, ends the run."""
    precision: Precision = field(default="bf16", metadata=DEFINES)
    """Type of activations and matmul operands; weights, gradients and moments are FP32 in any case. fp8: bf16, but the
    operands of the blocks' matmuls are in eight bits, apart from attention's, routers' and those of experts' dW.
    mxfp8: bf16, but the operands of the blocks' matmuls, experts' apart, are rounded to MXFP8; that is emulated, and so
    slower, to see what it does to a loss."""
    fp8_scaling: Fp8Scaling = field(default="tensorwise", metadata=DEFINES)
    """With precision fp8: what shares a scale. tensorwise: all of an operand, by its largest magnitudes of the last 16
    steps; rowwise: a row; block: 128 numbers of a row, of weights 128 x 128. Experts have one for each row always."""
    device: Literal["auto", "cpu", "cuda"] = "auto"
    """Where to train; auto: CUDA where there is a card."""
    attention: Attention = "auto"
    """Implementation of attention; auto: the fastest that was measured for the card and the shape."""
    checkpoint_activations: CheckpointActivations = "none"
    """What the backward runs again to save memory: nothing, what is cheap for its bytes, or whole blocks."""
    deterministic: bool = False
    """Bit-equal results from run to run on CUDA too, at some cost in speed."""
    verify_every: int = 0
    """Steps between those that are run a second time, from a copy of the state, to see that the machine gives the same
    bits; needs deterministic and 12 bytes a parameter; 0: none is."""
    seed: int = field(default=0, metadata=DEFINES)
    """Seed of the initial weights and of the order of samples."""
    checkpoint_every: int = 1000
    """Steps between checkpoints; the end of the run is always saved."""
    keep_checkpoints: int = 3
    """Newest checkpoints to keep; 2 or more."""
    keep_every: int = 0
    """Steps between checkpoints that are kept for good, a multiple of checkpoint_every; 0: none is."""
    max_save_failures: int = 3
    """Saves in a row that may fail, on a full disk say, before the run ends; 1 or more."""
    log_every: int = 10
    """Steps between log lines."""
    console: Literal["auto", "lines"] = "auto"
    """What is shown while it trains; auto: a dashboard below the lines on a terminal, a line each log_every steps
    elsewhere."""
    tensorboard: bool = False
    """Write the curves for TensorBoard too, into RUN/tensorboard; needs the extra `tensorboard`."""
    wandb: str = field(default="", metadata={"metavar": "[PROJECT]", "bare": "llmtrain"})
    """Project of Weights & Biases to log the curves to as well, llmtrain where none is named; needs the extra `wandb`.
    WANDB_MODE=offline keeps them in RUN/wandb. Empty: none."""
    val_every: int = 0
    """Steps between evaluations on val_tokens, val_choices and val_text; 0: only at the start and at the end."""
    val_windows: int = 256
    """Windows of each held-out token file or text that one evaluation reads, spread over it; 0: all."""

    def __post_init__(self) -> None:
        _at_least(self, 1, "accumulate", "global_batch_size", "checkpoint_every", "log_every")
        if self.batch_size != "auto":
            _at_least(self, 1, "batch_size")
        _at_least(self, 1, "max_save_failures", "rank_timeout")
        _at_least(self, 0, "shard_ranks", "verify_every", "seed", "keep_every", "val_every", "val_windows")
        _at_least(self, 2, "keep_checkpoints")
        check_fp8_scaling(self)
        if len(self.wandb) > 128 or set(self.wandb) & set("/\\#?%:"):
            raise ValueError(f"wandb must be a name of at most 128 characters without /\\#?%:, not {self.wandb}")
        if self.verify_every and not self.deterministic:
            raise ValueError(
                f"verify_every {self.verify_every} needs --deterministic: without it a step may rightly give other bits"
            )
        shared_out = self.parallel in ("auto", "fsdp") or self.parallel == "pipeline" and self.shard_ranks > 1
        if not self.reshard_after_forward and not shared_out:
            raise ValueError(
                f"reshard_after_forward is off, which is of weights that are shared out: with parallel {self.parallel} "
                f"{'and shard_ranks 0 or 1 ' * (self.parallel == 'pipeline')}none are: give --reshard-after-forward"
            )
        if self.init_from is not None and self.branch_from is not None:
            raise ValueError(
                f"init_from {self.init_from} and branch_from {self.branch_from} both say what to begin with: give one"
            )
        if self.branch_from is not None:
            name, _, step = self.branch_from.rpartition(":")
            if not name or not (step.isascii() and step.isdigit()):
                raise ValueError(f"branch_from must be RUN:STEP, such as runs/default:1000, not {self.branch_from}")
        if self.keep_every % self.checkpoint_every:
            raise ValueError(
                f"keep_every {self.keep_every} must be a multiple of checkpoint_every, {self.checkpoint_every}: no "
                "other step has a checkpoint to keep"
            )
        if self.global_batch_size is not None and self.accumulate != 1:
            raise ValueError(
                f"accumulate {self.accumulate} and global_batch_size {self.global_batch_size} both say how many "
                "sequences a step has: give one of them"
            )

    @property
    def sequences_per_step(self) -> int:
        return self.global_batch_size or of_auto(self.batch_size) * self.accumulate

    def micro_batches(self, ranks: int) -> int:
        """Of each rank in a whole step, where so many share its sequences."""
        return math.ceil(self.sequences_per_step / (self.micro_batch_size * ranks))

    @property
    def micro_batch_size(self) -> int:
        """batch_size, once auto has become a number."""
        assert self.batch_size != "auto"
        return self.batch_size


@dataclass(frozen=True)
class TrainConfig:
    """Everything a run is told; each part is a table of config.toml."""

    model: ModelConfig
    data: DataConfig
    optimizer: OptimizerConfig
    schedule: ScheduleConfig
    run: RunConfig


SECTIONS: dict[str, type] = {
    "model": ModelConfig,
    "data": DataConfig,
    "optimizer": OptimizerConfig,
    "schedule": ScheduleConfig,
    "run": RunConfig,
}


Tables = dict[str, dict[str, Any]]


def sequences_per_step(run: dict[str, Any]) -> int:
    """As RunConfig has it."""
    return run.get("global_batch_size") or of_auto(run.get("batch_size", DEFAULT_BATCH_SIZE)) * run.get("accumulate", 1)


def keep_the_step(given: dict[str, Any], run: dict[str, Any]) -> dict[str, Any]:
    """`given` on the command line over the table `run`: where it makes a number of batch_size "auto", with the
    sequences that a step had with that number."""
    under = run.get("batch_size", "auto")
    if given.get("batch_size") != "auto" or under == "auto" or "global_batch_size" in run.keys() | given.keys():
        return given
    of_step = sequences_per_step({**run, **given, "batch_size": under})
    return given | {"accumulate": 1, "global_batch_size": of_step}


def of_pipeline(run: dict[str, Any], ranks: int) -> int:
    """Of so many ranks, those that see the same sequences as they have the stages of one model; `run`: the table. What
    cannot be is refused elsewhere."""
    if run.get("parallel") != "pipeline":
        return 1
    all_stages = max(1, ranks // max(1, run.get("shard_ranks", 0)))
    return min(run.get("pipeline_ranks") or all_stages, ranks)


def for_ranks(config: TrainConfig, ranks: int) -> TrainConfig:
    """The same run, whose batch_size and accumulate are those of each of `ranks`, or of each pipeline of them."""
    if ranks == 1 or config.run.global_batch_size is not None:
        return config
    whole = config.run.sequences_per_step * (ranks // of_pipeline(dataclasses.asdict(config.run), ranks))
    return dataclasses.replace(config, run=dataclasses.replace(config.run, accumulate=1, global_batch_size=whole))
