"""The arithmetic of a run, made before its first step."""

import math
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch

from llmtrain.corpus.batches import assemble
from llmtrain.corpus.order import SampleOrder, parse_sources
from llmtrain.kernels.attention import Backend
from llmtrain.model.cards import Card, card_of
from llmtrain.model.flops import flops_per_token, layer_pairs, parameter_counts, rerun_flops_per_token
from llmtrain.model.memory import MemoryPlan, state_bytes
from llmtrain.storage.errors import UsageError
from llmtrain.training.arrangement import ALONE, Arrangement
from llmtrain.training.config import TrainConfig
from llmtrain.training.fit import Room, memory_of
from llmtrain.training.pace import Pace, usual

PAIRS_OF = 1 << 17
"""Tokens from the beginning of the run whose documents stand for all, in the plan."""


@dataclass(frozen=True)
class Plan:
    """Derived numbers that the loop and the log need too."""

    total_samples: int
    total_steps: int
    sequences_per_step: int
    flops_per_token: float
    """Where a document mask makes it depend on the batch, that of the run's first ones."""
    pairs_per_token: float
    """(query, key) pairs that attend, for a token, of those same batches."""
    flops: Callable[[float], tuple[float, float]]
    """(query, key) pairs that attend, a token -> FLOPs a token, and what is run again beyond that."""
    peak_flops: float | None
    """FLOP/s of the device, or of all ranks' devices; None where its name is not in the table."""
    card: Card | None
    """The device, where it is one of the table."""
    pace: Pace | None
    """What each device is expected to do; None where nothing like it was measured."""
    attention: Backend
    memory: MemoryPlan
    room: Room
    on_card: bool
    """Whether that is a card's."""
    parallel: Arrangement
    """How the processes of the run share the work."""

    @property
    def ranks(self) -> int:
        """Processes that share the data of a step."""
        return self.parallel.grid.copies * self.parallel.grid.shards

    def samples(self, step: int) -> int:
        """Samples consumed after `step` steps."""
        return min(step * self.sequences_per_step, self.total_samples)

    def micro_batches(self, step: int, batch_size: int) -> int:
        """Of each rank, in step number `step + 1`."""
        return math.ceil((self.samples(step + 1) - self.samples(step)) / (batch_size * self.ranks))


def samples_of_run(config: TrainConfig, order: SampleOrder | None) -> int:
    """From total_steps, from the tokens asked of each source, or from epochs; the latter two may end in the middle of a
    step. Epochs need an `order`. Raises UsageError for epochs of tokens that are counted."""
    if config.schedule.total_steps is not None:
        return config.schedule.total_steps * config.run.sequences_per_step
    budgets = [source.budget for source in parse_sources(config.data.tokens) if source.budget is not None]
    if budgets:
        if config.schedule.epochs != 1:
            raise UsageError(
                f"--epochs {config.schedule.epochs}: --tokens says already how many tokens to take: leave one out"
            )
        return max(1, round(sum(budgets) / config.data.seq_len))
    assert order is not None, "epochs of token files that are not there"
    return max(1, round(config.schedule.epochs * order.samples_per_epoch))


def steps_of_run(config: TrainConfig, order: SampleOrder | None) -> int:
    """Its last one may be partial."""
    return math.ceil(samples_of_run(config, order) / config.run.sequences_per_step)


def make_plan(
    config: TrainConfig, order: SampleOrder | None, device: torch.device, device_name: str, attention: Backend,
    room: Room, parallel: Arrangement = ALONE, pace: Pace | None = None,
) -> Plan:  # fmt: skip
    """Steps from total_steps, or from epochs; only the last step may be partial. order: None where the token files are
    not there, so that nothing is known of their documents; pace: by default what was measured."""
    per_step = config.run.sequences_per_step
    total_samples = samples_of_run(config, order)
    if total_samples * config.data.seq_len >= 1 << 62:
        raise UsageError(f"{total_samples:.3g} samples are more than can be counted: lower --total-steps or --epochs")

    def flops(pairs: float) -> tuple[float, float]:
        model, seq_len, mode = config.model, config.data.seq_len, config.run.checkpoint_activations
        return flops_per_token(model, seq_len, pairs), rerun_flops_per_token(model, seq_len, mode, pairs)

    pairs = layer_pairs(config.model, config.data.seq_len) / config.data.seq_len
    if config.data.document_mask and order is not None:
        first = np.arange(max(1, PAIRS_OF // config.data.seq_len))
        looked_at = assemble(order, first, document_mask=True, attention_windows=config.model.windows)
        pairs = looked_at.pairs / looked_at.ids.numel()
    card = card_of(device_name)
    if pace is None and card is not None:
        micro_tokens = config.run.micro_batch_size * config.data.seq_len
        pace = usual(parameter_counts(config.model).total, micro_tokens, config.run.precision, card)
    return Plan(
        total_samples=total_samples,
        total_steps=steps_of_run(config, order),
        sequences_per_step=per_step,
        flops_per_token=flops(pairs)[0],
        pairs_per_token=pairs,
        flops=flops,
        peak_flops=card.bf16 * parallel.grid.ranks if card else None,
        card=card,
        pace=pace,
        attention=attention,
        memory=memory_of(config, config.run.micro_batch_size, attention.name, device, room.shards, parallel.grid.ranks),
        room=room,
        on_card=device.type == "cuda",
        parallel=parallel,
    )


def checkpoint_bytes(config: TrainConfig, shards: int = 1) -> int:
    """Masters and moments in FP32, of several shards one's; headers and state.json are small beside them."""
    optimizer = config.optimizer
    return sum(state_bytes(config.model, optimizer.optimizer, bool(optimizer.ema_decay), shards).values())


def saved_bytes(memory: MemoryPlan) -> int:
    """Of a checkpoint, what a rank writes."""
    return sum(memory.fixed.get(name, 0) for name in ("weights", "moments", "average"))


def checkpoints_kept(config: TrainConfig, total_steps: int) -> tuple[int, int]:
    """Checkpoints on the disk at the end, and those beside them while one is written."""
    run = config.run
    saves = math.ceil(total_steps / run.checkpoint_every)
    for_good = total_steps // run.keep_every if run.keep_every else 0
    kept = min(saves, run.keep_checkpoints + for_good + bool(run.verify_every))
    return kept, int(saves > kept)


@dataclass(frozen=True)
class SourceUse:
    """What a run takes of one of its token files."""

    name: str
    path: Path
    tokens: int | None
    """In the file; None where it is not there."""
    taken: int
    """By the run."""
    share: float
    """Of the run."""
    epochs: float | None
    budget: int | None
    """Tokens that were asked for."""
    vocab_size: int | None = None
    """Of the tokenizer, where the file says it."""


def source_uses(order: SampleOrder, total_samples: int) -> list[SourceUse]:
    """Of each source, in their order."""
    return [
        SourceUse(
            source.name, source.file.path, source.file.tokens, int(samples) * order.seq_len,
            int(samples) / total_samples, float(samples / windows), source.budget,
            source.file.manifest["vocab_size"] if source.file.manifest else None,
        )
        for source, samples, windows in zip(order.sources, order.drawn(total_samples), order.windows, strict=True)
    ]  # fmt: skip
