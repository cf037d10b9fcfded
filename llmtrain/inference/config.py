"""What generation and evaluation are told. Imports no torch: the command line reads it."""

from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal


@dataclass(frozen=True)
class ModelSource:
    """Which trained model, and how it runs."""

    run_dir: Path = field(default=Path("runs/default"), metadata={"metavar": "DIR"})
    """Run directory whose newest whole checkpoint is read."""
    checkpoint: Path | None = field(default=None, metadata={"metavar": "DIR"})
    """Checkpoint folder to read in place of a run's newest, such as runs/default/checkpoints/step-00001000."""
    weights: Literal["last", "ema"] = "last"
    """Weights of the checkpoint: the last ones, or their average, where the run kept one (--ema-decay)."""
    tokenizer: Path | None = field(default=None, metadata={"metavar": "FILE"})
    """Tokenizer file; default: tokenizer.json of the run directory."""
    device: Literal["auto", "cpu", "cuda"] = "auto"
    """Where to run; auto: CUDA where there is a card."""
    precision: Literal["auto", "bf16", "fp32"] = "auto"
    """Type of activations and matmul operands; auto: bf16 on CUDA, fp32 on the CPU."""


@dataclass(frozen=True)
class PromptConfig:
    """What is continued."""

    prompt: tuple[str, ...] = field(default=(), metadata={"metavar": "TEXT"})
    """Text to continue; repeat it for several texts in one batch. Default: a document from its beginning."""
    prompt_file: Path | None = field(default=None, metadata={"metavar": "FILE"})
    """File whose text is continued, as it is; - for standard input."""
    keep: bool = False
    """Also add what is generated to RUN/samples.jsonl, from which `llmtrain report` shows it."""

    def __post_init__(self) -> None:
        if self.prompt and self.prompt_file is not None:
            raise ValueError(f"prompt and prompt_file {self.prompt_file} both say what to continue: give one of them")


@dataclass(frozen=True)
class SamplingConfig:
    """How the next token is chosen."""

    max_new_tokens: int = 256
    """Tokens to add at most; the end-of-text token and the model's max_seq_len end a text earlier."""
    temperature: float = 0.8
    """Divides the logits; 0: always the likeliest token."""
    top_k: int = 200
    """Choose among this many likeliest tokens; 0: among all."""
    top_p: float = 1.0
    """Choose among the fewest likeliest tokens whose probabilities reach this sum; 1: among all."""
    seed: int = 0
    """Seed of the choices: the same one gives the same text."""

    def __post_init__(self) -> None:
        if self.max_new_tokens < 1:
            raise ValueError(f"max_new_tokens must be 1 or more, not {self.max_new_tokens}")
        if not 0 <= self.temperature < float("inf"):
            raise ValueError(f"temperature must be 0 or more, not {self.temperature}")
        if self.top_k < 0:
            raise ValueError(f"top_k must be 0 or more, not {self.top_k}")
        if not 0 < self.top_p <= 1:
            raise ValueError(f"top_p must be above 0 and at most 1, not {self.top_p}")
        if not 0 <= self.seed < 1 << 63:
            raise ValueError(f"seed must be from 0 to 2^63 - 1, not {self.seed}")


@dataclass(frozen=True)
class EvaluateConfig:
    """What a model is evaluated on."""

    tokens: tuple[str, ...] = field(default=(), metadata={"metavar": "[NAME=]PATH"})
    """Token file to evaluate on; repeat it for several, each gets its own line. Default: what the run evaluates on."""
    choices: tuple[str, ...] = field(default=(), metadata={"metavar": "[NAME=]FILE"})
    """Multiple-choice questions (JSON Lines with prompt or question, choices, answer) to answer by likelihood."""
    text: tuple[str, ...] = field(default=(), metadata={"metavar": "[NAME=]PATH"})
    """Text (a file, a folder or a glob) whose documents are evaluated one by one."""
    text_field: str | None = None
    """Of JSON Lines and Parquet in text: the field that holds the text; `text` when not given."""
    kind_field: str | None = None
    """Of JSON Lines and Parquet in text: the field that names a document's kind; each kind gets its own line."""
    seq_len: int = 0
    """Length of a window, in tokens; 0: that of the training."""
    batch_size: int = 8
    """Windows of one device batch."""
    max_windows: int = 0
    """Windows of each token file or text to read, spread evenly over it; 0: all."""

    def __post_init__(self) -> None:
        for name in ("seq_len", "max_windows"):
            if getattr(self, name) < 0:
                raise ValueError(f"{name} must be 0 or more, not {getattr(self, name)}")
        if self.batch_size < 1:
            raise ValueError(f"batch_size must be 1 or more, not {self.batch_size}")
        for name in ("text_field", "kind_field"):
            if getattr(self, name) is not None and not self.text:
                raise ValueError(f"{name} {getattr(self, name)} is of --text: give that too, or leave it out")


@dataclass(frozen=True)
class ExportConfig:
    """What is exported, and as what."""

    output: Path = field(metadata={"metavar": "DIR"})
    """Folder to make; it must not exist."""
    format: Literal["hf", "gguf"] = "hf"
    """hf: what transformers and vLLM load and llama.cpp's converter takes; gguf: one file for llama.cpp."""
    dtype: Literal["auto", "bf16", "fp16", "fp32"] = "auto"
    """Type of the exported matrices; auto: what the run computed with, bf16 or fp32."""
    tokenizer: Path | None = field(default=None, metadata={"metavar": "FILE"})
    """Tokenizer file; default: tokenizer.json of the run directory."""


@dataclass(frozen=True)
class ImportConfig:
    """What a model of others becomes."""

    run_dir: Path = field(metadata={"metavar": "DIR"})
    """Run directory to make; it must not exist."""
    tokenizer: Path | None = field(default=None, metadata={"metavar": "FILE"})
    """Tokenizer file; default: tokenizer.json of the folder."""


@dataclass(frozen=True)
class HarnessConfig:
    """What lm-evaluation-harness is asked."""

    task: tuple[str, ...] = field(default=(), metadata={"metavar": "NAME"})
    """Task or group of the harness; repeatable."""
    num_fewshot: int | None = None
    """Solved examples before each question; default: what the task says."""
    limit: int | None = None
    """Questions of each task at most; default: all."""
    include_path: Path | None = field(default=None, metadata={"metavar": "DIR"})
    """Folder with further tasks, as YAML files of the harness."""
    batch_size: int = 8
    """Sequences of the training's length that a device batch holds; shorter ones are more."""
    output: Path | None = field(default=None, metadata={"metavar": "FILE"})
    """Where the scores go as JSON; default: they are printed alone."""

    def __post_init__(self) -> None:
        if not self.task:
            raise ValueError("task is missing: name one of lm-evaluation-harness with --task, such as hellaswag")
        for name in ("limit", "batch_size"):
            if (value := getattr(self, name)) is not None and value < 1:
                raise ValueError(f"{name} must be 1 or more, not {value}")
        if self.num_fewshot is not None and self.num_fewshot < 0:
            raise ValueError(f"num_fewshot must be 0 or more, not {self.num_fewshot}")
