"""The arithmetic of a run, said before its first step."""

import math
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch

from llmtrain.corpus.batches import assemble
from llmtrain.corpus.order import SampleOrder
from llmtrain.corpus.packing import Packed
from llmtrain.kernels.attention import Backend
from llmtrain.model.flops import (
    causal_pairs,
    classic_flops_per_token,
    flops_per_token,
    layer_pairs,
    parameter_counts,
    peak_flops,
    rerun_flops_per_token,
)
from llmtrain.model.memory import MemoryPlan, hidden_elements, state_bytes
from llmtrain.storage.disk import free_bytes
from llmtrain.storage.errors import UsageError
from llmtrain.storage.units import in_bytes, in_flops
from llmtrain.training.config import TrainConfig
from llmtrain.training.fit import Room, Unit, by_part, memory_of
from llmtrain.training.schedule import decay_begin, learning_rate

PAIRS_OF = 1 << 17
"""Tokens from the beginning of the run whose documents stand for all, in the plan."""

MOST_EPOCHS = 4
"""Up to which repeated text is nearly as good as new (Muennighoff et al. 2023)."""

MFU_GUESS = 0.4
"""Share of the peak that the expected hours assume, until the first log line knows better."""


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
    attention: Backend
    memory: MemoryPlan
    room: Room
    on_card: bool
    """Whether that is a card's."""
    ranks: int
    """Processes that share a step."""

    def samples(self, step: int) -> int:
        """Samples consumed after `step` steps."""
        return min(step * self.sequences_per_step, self.total_samples)

    def micro_batches(self, step: int, batch_size: int) -> int:
        """Of each rank, in step number `step + 1`."""
        return math.ceil((self.samples(step + 1) - self.samples(step)) / (batch_size * self.ranks))


def samples_of_run(config: TrainConfig, order: SampleOrder) -> int:
    """From total_steps, from the tokens asked of each source, or from epochs; the latter two may end in the middle of a
    step. Raises UsageError for epochs of tokens that are counted."""
    if config.schedule.total_steps is not None:
        return config.schedule.total_steps * config.run.sequences_per_step
    budgets = [source.budget for source in order.sources if source.budget is not None]
    if budgets:
        if config.schedule.epochs != 1:
            raise UsageError(
                f"--epochs {config.schedule.epochs}: --tokens says already how many tokens to take: leave one out"
            )
        return max(1, round(sum(budgets) / config.data.seq_len))
    return max(1, round(config.schedule.epochs * order.samples_per_epoch))


def steps_of_run(config: TrainConfig, order: SampleOrder) -> int:
    """Its last one may be partial."""
    return math.ceil(samples_of_run(config, order) / config.run.sequences_per_step)


def make_plan(
    config: TrainConfig, order: SampleOrder, device: torch.device, device_name: str, attention: Backend, room: Room,
    ranks: int = 1,
) -> Plan:
    """Steps from total_steps, or from epochs; only the last step may be partial."""
    per_step = config.run.sequences_per_step
    total_samples = samples_of_run(config, order)
    if total_samples * config.data.seq_len >= 1 << 62:
        raise UsageError(f"{total_samples:.3g} samples are more than can be counted: lower --total-steps or --epochs")

    def flops(pairs: float) -> tuple[float, float]:
        model, seq_len, mode = config.model, config.data.seq_len, config.run.checkpoint_activations
        return flops_per_token(model, seq_len, pairs), rerun_flops_per_token(model, seq_len, mode, pairs)

    pairs = layer_pairs(config.model, config.data.seq_len) / config.data.seq_len
    if config.data.document_mask:
        first = np.arange(max(1, PAIRS_OF // config.data.seq_len))
        looked_at = assemble(order, first, document_mask=True, attention_windows=config.model.windows)
        pairs = looked_at.pairs / looked_at.ids.numel()
    return Plan(
        total_samples=total_samples,
        total_steps=steps_of_run(config, order),
        sequences_per_step=per_step,
        flops_per_token=flops(pairs)[0],
        pairs_per_token=pairs,
        flops=flops,
        peak_flops=peak * ranks if (peak := peak_flops(device_name)) else None,
        attention=attention,
        memory=memory_of(config, config.run.micro_batch_size, attention.name, device),
        room=room,
        on_card=device.type == "cuda",
        ranks=ranks,
    )


def checkpoint_bytes(config: TrainConfig) -> int:
    """Masters and moments in FP32; headers and state.json are small beside them."""
    return sum(state_bytes(config.model, config.optimizer.optimizer, bool(config.optimizer.ema_decay)).values())


MX_WORDS = " (emulated: operands rounded to MXFP8 and multiplied in bf16)"


def memory_lines(memory: MemoryPlan, room: Room, on_card: bool) -> list[str]:
    """The peak by part, and what the activations are."""
    unit = Unit(memory.held)
    place = "card" if on_card else "machine"
    there = f"of the {place}'s {unit.number(room.total)}, {unit.number(room.free)} are free"
    if memory.held > room.free:
        there += ", which is TOO LITTLE: lower --batch-size, or see --checkpoint-activations"
    activations = sum(memory.activations.values())
    return [
        f"memory      {unit(memory.held)} at the peak: {unit.each(by_part(memory))}; {there}",
        f"activations {unit(activations)}: {unit.each(memory.activations)}",
    ]


def schedule_line(config: TrainConfig, total_steps: int) -> str:
    """How the learning rate goes, its peak and end, and whether the run gets there."""
    peak, warmup = config.optimizer.learning_rate, config.schedule.warmup_steps
    end = learning_rate(total_steps - 1, total_steps, config.optimizer, config.schedule)
    if total_steps < warmup:
        return (
            f"schedule    lr rises to {end:.2e}, as THE RUN ENDS IN ITS WARMUP: {peak:.2e} is reached at step "
            f"{warmup:,}: lower --warmup-steps"
        )
    begin = decay_begin(total_steps, config.schedule)
    stays = f", stays until step {begin:,}" if begin > warmup else ""
    falls = f" and ends at {end:.2e}" if begin < total_steps else " and stays"
    return f"schedule    {config.schedule.schedule}: lr rises to {peak:.2e} over {warmup:,} steps{stays}{falls}"


def optimizer_line(config: TrainConfig) -> str:
    """What updates which parameters, at which rates and decay."""
    c, total = config.optimizer, parameter_counts(config.model).total
    adamw = f"AdamW, betas {c.beta1:g} and {c.beta2:g}"
    text = adamw
    if c.optimizer == "muon":
        hidden = hidden_elements(config.model)
        text = (
            f"Muon, momentum {c.muon_momentum:g}, lr up to {c.muon_lr:.2e}, for the {hidden:,} parameters of the "
            f"blocks' matrices; {adamw} for the other {total - hidden:,}"
        )
    if c.ema_decay:
        text += f"; EMA of the weights, decay {c.ema_decay:g}"
    clipping = f"clip {c.grad_clip:g}" if c.grad_clip else "no clipping"
    return f"optimizer   {text}; decay {c.weight_decay:g}, {clipping}"


def disk_line(config: TrainConfig, total_steps: int, there: int, free: int | None) -> str:
    """What the run's checkpoints will take, `there` of them being on the disk, against the bytes that are free."""
    run, one = config.run, checkpoint_bytes(config)
    saves = math.ceil(total_steps / run.checkpoint_every)
    for_good = total_steps // run.keep_every if run.keep_every else 0
    kept = min(saves, run.keep_checkpoints + for_good + bool(run.verify_every))
    in_work = int(saves > kept)
    text = f"disk        {in_bytes(one)} a checkpoint, {in_bytes(kept * one)} for the {kept} that are kept"
    text += f" and {in_bytes(one)} for one in work" * in_work
    if free is None:
        return text
    text += f", {in_bytes(free)} free"
    if (kept + in_work - there) * one > free:
        text += ", so IT WILL NOT FIT: free space, or lower --keep-checkpoints or raise --keep-every"
    return text


def describe(config: TrainConfig, plan: Plan, order: SampleOrder, device_name: str, checkpoints: int) -> list[str]:
    """The lines printed before step 0; `checkpoints` are on the disk already."""
    model, run, seq_len = config.model, config.run, config.data.seq_len
    counts = parameter_counts(model)
    tokens_per_step = plan.sequences_per_step * seq_len
    micro = math.ceil(plan.sequences_per_step / (run.micro_batch_size * plan.ranks))
    devices = f"{plan.ranks} x {device_name}" if plan.ranks > 1 else device_name
    on_ranks = f" on each of {plan.ranks} ranks" if plan.ranks > 1 else ""
    total_tokens = plan.total_samples * seq_len
    hidden = ["within documents"] * config.data.document_mask
    if with_window := sum(window is not None for window in model.windows):
        hidden.append(f"{with_window} of {model.n_layers} layers within {model.window:,} tokens")
    documents = ""
    if hidden:
        share = plan.pairs_per_token / (causal_pairs(seq_len) / seq_len)
        documents = f"; {', '.join(hidden)}, {share:.0%} of the pairs of whole rows"
    lines = [
        f"model       {counts.total:,} parameters, {counts.active:,} active: "
        f"d_model {model.d_model}, {model.n_layers} layers, {model.n_heads}/{model.n_kv_heads} heads of "
        f"{model.head_dim}, {model.feed_forward_words()}, vocabulary {model.vocab_size:,}",
        f"device      {devices}, {run.precision}{MX_WORDS * (run.precision == 'mxfp8')}"
        + (", deterministic" if run.deterministic else ""),
        f"attention   {plan.attention.name}: {plan.attention.why}" + documents,
        f"step        {plan.sequences_per_step} sequences x {seq_len} = {tokens_per_step:,} tokens, in {micro} "
        f"micro-batch{'es' if micro > 1 else ''} of {run.micro_batch_size}" + on_ranks,
        f"run         {plan.total_steps:,} steps, {total_tokens:,} tokens, "
        f"{_few(total_tokens / counts.total)} a parameter; {order.samples_per_epoch / plan.sequences_per_step:,.1f} "
        "steps an epoch",
        optimizer_line(config),
        schedule_line(config, plan.total_steps),
    ]
    lines += corpus_lines(order, plan.total_samples)
    lines += [
        *memory_lines(plan.memory, plan.room, plan.on_card),
        f"saving      {in_bytes(checkpoint_bytes(config))} of {'pinned' if plan.on_card else 'more'} host memory "
        "hold what is written while training goes on",
        disk_line(config, plan.total_steps, checkpoints, free_bytes(_existing(run.run_dir))),
        f"cost        {plan.flops_per_token / 1e6:,.1f} MFLOPs a token "
        f"(classic {classic_flops_per_token(model, seq_len) / 1e6:,.1f}), "
        f"{in_flops(plan.flops_per_token * total_tokens)} in all",
    ]
    if plan.peak_flops is not None:
        hours = plan.flops_per_token * total_tokens / plan.peak_flops / MFU_GUESS / 3600
        lines.append(f"time        {hours:,.2f} hours at {MFU_GUESS:.0%} of {plan.peak_flops / 1e12:,.0f} TFLOP/s")
    else:
        lines.append("time        known from the first log line on (no peak rate on record for this device)")
    return lines


def corpus_lines(order: SampleOrder, total_samples: int) -> list[str]:
    """How often the run goes through each source, and what of that a person may not have meant."""
    lines = []
    for source, samples, windows in zip(order.sources, order.drawn(total_samples), order.windows, strict=True):
        epochs, tokens = samples / windows, int(samples) * order.seq_len
        line = f"corpus      {source.name}: {source.file.tokens:,} tokens, {epochs:.2f} epochs"
        if len(order.sources) > 1:
            line += f", {tokens / (total_samples * order.seq_len):.1%} of the run"
        # Thousandths of the mixture, and --total-steps, may give a source more or less than was asked.
        if source.budget is not None and abs(tokens - source.budget) > 0.01 * source.budget + order.seq_len:
            line += f", {tokens:,} OF {source.budget:,} TOKENS ASKED"
        if epochs > MOST_EPOCHS:
            line += f", MORE THAN {MOST_EPOCHS}, AFTER WHICH A REPETITION TEACHES LITTLE: add text or lower its share"
        lines.append(f"{line} ({source.file.path})")
        if isinstance(source.cut, Packed):
            header = source.cut.header
            lines.append(
                f"packing     {source.name}: {header['windows']:,} windows of whole documents, "
                f"{header['padding'] / (header['windows'] * (order.seq_len + 1)):.2%} padding, "
                f"{header['split'] / header['documents']:.2%} of {header['documents']:,} documents split"
            )
    return lines


def _few(number: float) -> str:
    """One decimal; below 1 two digits, so that a little is not 0.0."""
    return f"{number:,.1f}" if number >= 1 else f"{number:.2g}"


def _existing(path: Path) -> Path:
    """The nearest folder above that exists."""
    while not path.exists():
        path = path.absolute().parent
    return path
