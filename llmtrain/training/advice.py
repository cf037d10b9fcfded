"""What of a run's settings is far from what others found to be good, each with its reason and where that stands.

Optima are broad, so a setting is only named where it is off by a factor or costs something for nothing.
"""

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from llmtrain.corpus.token_manifest import held_out_path
from llmtrain.model.flops import flops_per_token, parameter_counts
from llmtrain.storage.units import plural
from llmtrain.training.config import TrainConfig
from llmtrain.training.fit import split_as
from llmtrain.training.plan import Plan, SourceUse

TOKENS_A_PARAMETER = 20
"""Of the model that has the lowest loss for its FLOPs (Hoffmann et al. 2022, arXiv 2203.15556)."""
FEW_TOKENS_A_PARAMETER = 5
BATCH_FACTOR, RATE_FACTOR = 4.0, 3.0
"""How far a setting may be from the law's before it is named."""
FEW_ROWS = 1.1
"""Up to which share of the tokenizer's vocabulary a model may have rows for."""
MUCH_WARMUP = 0.1
SMALL_MICRO_BATCH = 16_384
"""Tokens of a micro-batch below which a card's matmuls were measured to be short of work."""
SECONDS_AT_RISK = 3600.0
HALF_AN_HOUR = 1800.0


@dataclass(frozen=True)
class Suggestion:
    """One thing to change."""

    option: str
    text: str
    """What to do."""
    why: str
    source: str
    """Where the reason stands: a paper, or a page of docs/."""


def suggestions(config: TrainConfig, plan: Plan, uses: list[SourceUse], largest: dict[str, int]) -> list[Suggestion]:
    """All that apply, the weightiest first. largest: micro-batch that fits, by --checkpoint-activations."""
    rules: list[Callable[..., Iterator[Suggestion]]] = [
        of_size, of_learning_rate, of_batch, of_warmup, of_micro_batch, of_vocabulary, of_empty_rows, of_heads,
        of_widths, of_saves, of_held_out,
    ]  # fmt: skip
    return [one for rule in rules for one in rule(config, plan, uses, largest)]


def tokens_of(config: TrainConfig, plan: Plan) -> int:
    return plan.total_samples * config.data.seq_len


def outside_vocabulary(config: TrainConfig) -> int:
    """Parameters that a token meets, embedding and head aside: those that laws of size count."""
    model = config.model
    matrices = (1 if model.tie_embeddings else 2) * model.vocab_size * model.d_model
    return max(1, parameter_counts(model).active - matrices)


def good_learning_rate(parameters: float, tokens: float) -> float:
    """AdamW's peak rate: 1.79 N^-0.713 D^0.307 (Li et al. 2025, arXiv 2503.04715)."""
    return 1.79 * parameters**-0.713 * tokens**0.307


def good_batch(tokens: float) -> float:
    """Tokens of a step: 0.58 D^0.571 (Li et al. 2025, arXiv 2503.04715)."""
    return 0.58 * tokens**0.571


LAW = "Li et al. 2025, arXiv 2503.04715"


def of_size(config: TrainConfig, plan: Plan, *_: Any) -> Iterator[Suggestion]:
    active, tokens = parameter_counts(config.model).active, tokens_of(config, plan)
    if tokens < FEW_TOKENS_A_PARAMETER * active:
        better = math.sqrt(active * tokens / TOKENS_A_PARAMETER)
        yield Suggestion(
            "--d-model",
            f"a model of about {rounded(better)} parameters on {rounded(TOKENS_A_PARAMETER * better)} tokens, or more "
            "tokens for this one",
            f"{tokens / active:.2g} tokens a parameter: the same FLOPs give a lower loss near {TOKENS_A_PARAMETER}",
            "Hoffmann et al. 2022, arXiv 2203.15556",
        )


def of_learning_rate(config: TrainConfig, plan: Plan, *_: Any) -> Iterator[Suggestion]:
    if config.optimizer.optimizer != "adamw" or config.run.init_from or config.run.branch_from:
        return
    rate = config.optimizer.learning_rate
    good = good_learning_rate(outside_vocabulary(config), tokens_of(config, plan))
    if not good / RATE_FACTOR <= rate <= good * RATE_FACTOR:
        yield Suggestion(
            "--learning-rate",
            f"towards {good:.1e}, in place of {rate:.1e}",
            "the best peak rate for this size and number of tokens, as 3,700 models have it; one that is too "
            + ("high diverges" if rate > good else "low learns slowly"),
            LAW,
        )


def of_batch(config: TrainConfig, plan: Plan, *_: Any) -> Iterator[Suggestion]:
    seq_len, tokens = config.data.seq_len, tokens_of(config, plan)
    batch, good = plan.sequences_per_step * seq_len, good_batch(tokens)
    if not good / BATCH_FACTOR <= batch <= good * BATCH_FACTOR:
        sequences = max(1, round(good / seq_len))
        sequences = 1 << round(math.log2(sequences))
        if sequences == plan.sequences_per_step:
            return
        larger, updates = sequences > plan.sequences_per_step, plural(plan.total_steps, "update")
        yield Suggestion(
            "--global-batch-size",
            f"{plural(sequences, 'sequence')}, {sequences * seq_len:,} tokens a step, in place of {batch:,}",
            f"the best batch for {rounded(tokens)} tokens is near {rounded(good)}; "
            + ("smaller ones are noisy, and slower" if larger else f"larger ones leave {updates}"),
            LAW,
        )


def of_warmup(config: TrainConfig, plan: Plan, *_: Any) -> Iterator[Suggestion]:
    warmup, total, beta2 = config.schedule.warmup_steps, plan.total_steps, config.optimizer.beta2
    least = math.ceil(2 / (1 - beta2))
    good = max(min(least, total // 10), total // 50)
    share = "all" if warmup >= total else f"{warmup / total:.0%}"
    if warmup > MUCH_WARMUP * total and good < warmup:
        yield Suggestion(
            "--warmup-steps",
            f"{good} in place of {warmup}",
            f"{share} of the run passes below the peak rate; 2% is usual, and AdamW needs {least}",
            "Ma and Yarats 2021, arXiv 1910.04209",
        )
    elif warmup < least <= 0.05 * total:
        yield Suggestion(
            "--warmup-steps",
            f"{good} in place of {warmup}",
            f"with beta2 {beta2:g} AdamW's second moment is settled after 2 / (1 - beta2) = {least} steps",
            "Ma and Yarats 2021, arXiv 1910.04209",
        )


def of_micro_batch(config: TrainConfig, plan: Plan, _: Any, largest: dict[str, int]) -> Iterator[Suggestion]:
    size, mode = config.run.micro_batch_size, config.run.checkpoint_activations
    if not plan.on_card:
        return
    if mode != "none" and size <= largest["none"]:
        yield Suggestion(
            "--checkpoint-activations",
            f"none in place of {mode}",
            f"up to {largest['none']} sequences fit without running anything again",
            "docs/architecture.md",
        )
    of_rank = plan.sequences_per_step // plan.ranks
    wanted = max(1, SMALL_MICRO_BATCH // config.data.seq_len)
    larger = min(largest[mode], of_rank, wanted)
    if size * config.data.seq_len < SMALL_MICRO_BATCH and larger >= 2 * size:
        larger = max(n for n in range(size, larger + 1) if n == larger or of_rank % n == 0 and n > larger // 2)
        yield Suggestion(
            "--batch-size",
            f"{split_as(config, larger)}: the same step in fewer micro-batches",
            f"{size * config.data.seq_len:,} tokens are too few to fill a card: 102M reached 35% of an H200's peak in "
            "4,096, 46% in 65,536",
            "docs/peers.md",
        )


def of_vocabulary(config: TrainConfig, plan: Plan, *_: Any) -> Iterator[Suggestion]:
    model = config.model
    matrix, total = model.vocab_size * model.d_model, parameter_counts(model).total
    if not model.tie_embeddings and matrix > 0.15 * total:
        yield Suggestion(
            "--tie-embeddings",
            f"one matrix for embedding and head, {rounded(matrix)} parameters less",
            f"the two hold {2 * matrix / total:.0%} of the parameters",
            "Press and Wolf 2017, arXiv 1608.05859",
        )
    elif matrix > 0.5 * total and model.vocab_size > 8192:
        yield Suggestion(
            "--vocab-size",
            "a tokenizer of a smaller vocabulary (train-tokenizer --vocab-size)",
            f"{matrix / total:.0%} of the parameters are embedding; the best vocabulary grows with the rest of the "
            "model, a little slower",
            "Tao et al. 2024, arXiv 2407.13623; docs/vocabularies.md",
        )


def of_empty_rows(config: TrainConfig, plan: Plan, uses: list[SourceUse], _: Any) -> Iterator[Suggestion]:
    """Of a preset's vocabulary, say, that is not the tokenizer's. A few rows more make the head's sides even."""
    known = [use.vocab_size for use in uses if use.vocab_size is not None]
    model = config.model
    if not config.run.init_from and known and len(known) == len(uses) and model.vocab_size > FEW_ROWS * max(known):
        empty = (1 if model.tie_embeddings else 2) * (model.vocab_size - max(known)) * model.d_model
        yield Suggestion(
            "--vocab-size",
            f"{max(known)} in place of {model.vocab_size}, or a tokenizer of as many tokens",
            f"the other rows of the embedding, {rounded(empty)} parameters, are of no token of these files",
            "docs/vocabularies.md",
        )


def of_heads(config: TrainConfig, plan: Plan, *_: Any) -> Iterator[Suggestion]:
    """Of attention on cards whose cuDNN is the fastest for it."""
    model, seq_len = config.model, config.data.seq_len
    if plan.card is None or plan.card.capability[0] not in (9, 10) or config.run.precision == "fp32":
        return
    if model.head_dim % 8 or model.head_dim > 128:
        yield Suggestion(
            "--head-dim", "64 or 128", f"cuDNN's attention takes no heads of {model.head_dim}", "docs/architecture.md"
        )
        return
    attends = 1 - 6 * parameter_counts(model).in_matmuls / flops_per_token(model, seq_len, plan.pairs_per_token)
    if model.head_dim == 64 and attends > 0.2 and model.n_heads % 2 == 0 and model.n_kv_heads % 2 == 0:
        yield Suggestion(
            "--head-dim",
            f"128, with --n-heads {model.n_heads // 2} --n-kv-heads {model.n_kv_heads // 2}",
            f"attention is {attends:.0%} of the FLOPs, and cuDNN does heads of 128 1.3 times as fast",
            "docs/data/attention.json",
        )
    whole = 128 * max(1, round(seq_len / 128))
    if seq_len % 128 and not config.data.document_mask:
        yield Suggestion(
            "--seq-len", f"{whole} in place of {seq_len}", "cuDNN's attention takes lengths in whole 128s",
            "docs/architecture.md",
        )  # fmt: skip


def of_widths(config: TrainConfig, plan: Plan, *_: Any) -> Iterator[Suggestion]:
    for name in ("d_model", "d_ff"):
        width = getattr(config.model, name)
        if plan.on_card and width % 64:
            yield Suggestion(
                f"--{name.replace('_', '-')}",
                f"{64 * max(1, round(width / 64))} in place of {width}",
                "tensor cores work on tiles, and what is left of one costs as much as all of it",
                "NVIDIA, Matrix Multiplication Background",
            )


def of_saves(config: TrainConfig, plan: Plan, *_: Any) -> Iterator[Suggestion]:
    if plan.pace is None:
        return
    a_step = plan.flops_per_token * plan.sequences_per_step * config.data.seq_len / (plan.pace.flops * plan.ranks)
    every = config.run.checkpoint_every
    if every * a_step > SECONDS_AT_RISK and min(every, plan.total_steps) * a_step > SECONDS_AT_RISK:
        fewer = max(1, round(HALF_AN_HOUR / a_step))
        fewer = fewer if fewer < 20 else round(fewer, 1 - len(str(fewer)))
        yield Suggestion(
            "--checkpoint-every",
            f"{fewer} in place of {every}",
            f"a step takes about {a_step:.3g} s, so a crash costs up to {every * a_step / 3600:.1f} hours",
            "docs/save-delay.md",
        )


def of_held_out(config: TrainConfig, plan: Plan, uses: list[SourceUse], _: Any) -> Iterator[Suggestion]:
    if not config.data.val_tokens:
        there = next((path for use in uses if (path := held_out_path(use.path)).is_file()), None)
        yield Suggestion(
            "--val-tokens",
            f"{there or 'a held-out file, as tokenize-corpus writes'}, with --val-every",
            "the training loss does not show what is learnt by heart",
            "README.md",
        )


def rounded(number: float) -> str:
    """12M, 1.3B: two digits."""
    for unit, size in (("T", 1e12), ("B", 1e9), ("M", 1e6), ("k", 1e3)):
        if number >= size:
            return f"{float(f'{number / size:.2g}'):g}{unit}"
    return f"{number:.2g}"

