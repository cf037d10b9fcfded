"""What a run will cost, for a person who has not started it: `train`'s plan for any card, without a card, and without
token files where there are none yet. Writes nothing."""

import dataclasses
import math
import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from llmtrain.corpus.batches import check_document_mask
from llmtrain.corpus.order import SampleOrder, Source, amount_of, parse_sources
from llmtrain.corpus.packing import open_packed
from llmtrain.corpus.token_file import TokenFile
from llmtrain.model.cards import Card, card_named, card_of
from llmtrain.model.config import CheckpointActivations
from llmtrain.model.flops import classic_flops_per_token, parameter_counts
from llmtrain.storage.disk import existing_folder, free_bytes
from llmtrain.storage.errors import InputMissing, LlmtrainError, UsageError
from llmtrain.storage.units import in_bytes
from llmtrain.training import advice, checkpoint, devices, fit, pace, plan, plan_words, run_corpus, start
from llmtrain.training.arrangement import arrange
from llmtrain.training.config import TrainConfig, for_ranks
from llmtrain.training.pace import Pace
from llmtrain.training.plan import Plan, SourceUse
from llmtrain.training.plan_config import PlanConfig
from llmtrain.training.step import make_deterministic

VOCABULARY = 16_384
"""Of a run whose token files are not there: what `train-tokenizer` makes."""
MOST_SEQUENCES = 1 << 20
"""Of the largest micro-batch that is looked for."""
MODES: tuple[CheckpointActivations, ...] = ("none", "selective", "full")


@dataclass(frozen=True)
class Forecast:
    """A run that was not started."""

    config: TrainConfig
    """Resolved: every number is there."""
    plan: Plan
    order: SampleOrder | None
    """None where a token file is not there."""
    uses: list[SourceUse]
    device: torch.device
    device_name: str
    largest: dict[str, int]
    """Sequences of the largest micro-batch that fits, by --checkpoint-activations; 0 where none does."""
    assumed: list[str]
    """What was not said and could not be looked up."""
    smaller_ways: list[str]
    """What to ask for where the micro-batch does not fit; empty where it does."""
    suggestions: list[advice.Suggestion]

    @property
    def tokens(self) -> int:
        return self.plan.total_samples * self.config.data.seq_len

    @property
    def seconds(self) -> float | None:
        speed = self.plan.pace
        return self.plan.flops_per_token * self.tokens / (speed.flops * self.plan.ranks) if speed else None


def forecast(config: TrainConfig, asked: PlanConfig) -> Forecast:
    """Raises LlmtrainErrors as `train` does for what cannot be, and for a card or a measurement that is not known."""
    card = elsewhere = named_card(asked.card)
    config = for_ranks(config, asked.ranks)
    if config.run.deterministic:
        make_deterministic()
    device = torch.device("cuda") if card else devices.pick_device(config.run.device)
    name = card.device_name if card else devices.device_name(device)
    if device.type == "cuda" and card is None:
        card = card_of(name)
    room = fit.room(device) if elsewhere is None else fit.Room(elsewhere.memory, elsewhere.memory - fit.OWN)

    config, order, missing, assumed = with_corpus(config)
    config, more = with_length(config, order, asked.total_tokens)
    run = config.run
    devices.check_precision(run.precision, run.fp8_scaling, config.data.seq_len, device, elsewhere, config.model.moe)
    attention = devices.pick_attention(
        config.run.attention, config.run.precision, config.model, config.data.seq_len, device,
        config.data.document_mask, elsewhere,
    )  # fmt: skip
    parallel = arrange(config, attention.name, device, room, asked.ranks)
    room = dataclasses.replace(room, shards=parallel.grid.shards, ranks=parallel.grid.ranks)
    config = start.settle_batch_size(config, attention, device, room, False, asked.ranks)
    speed = expected_pace(asked, card)
    made = plan.make_plan(config, order, device, name, attention, room, parallel, speed)
    uses = plan.source_uses(order, made.total_samples) if order else uses_of_specs(config, made, missing)
    largest: dict[str, int] = {mode: largest_of(config, mode, attention.name, device, room) for mode in MODES}
    size, mode = config.run.micro_batch_size, config.run.checkpoint_activations
    ways = [] if size <= largest[mode] else fit.smaller_ways(config, attention.name, device, room)
    suggested = advice.suggestions(config, made, uses, largest)
    return Forecast(config, made, order, uses, device, name, largest, assumed + more, ways, suggested)


def named_card(name: str | None) -> Card | None:
    try:
        return card_named(name) if name is not None else None
    except ValueError as error:
        raise UsageError(f"--card: {error}") from None


def expected_pace(asked: PlanConfig, card: Card | None) -> Pace | None:
    """What was given or measured; None leaves it to the plan."""
    if asked.measured is not None:
        return pace.measured(asked.measured, card)
    if asked.mfu is None:
        return None
    if card is None:
        raise UsageError(f"--mfu {asked.mfu}: the peak of this device is not known: name a --card, or --measured RUN")
    return pace.given(asked.mfu, card.bf16)


def with_corpus(config: TrainConfig) -> tuple[TrainConfig, SampleOrder | None, list[TokenFile | None], list[str]]:
    """The configuration with what the token files decide, their order where all are there, each file or None where it
    is not, and what was assumed in place of those."""
    specs, assumed = parse_sources(config.data.tokens), []
    files: list[TokenFile | None] = []
    sources = []
    for spec in specs:
        try:
            one = TokenFile.open(spec.path, config.model.vocab_size or None, config.data.eos_id)
        except InputMissing:
            files.append(None)
        else:
            files.append(one)
            sources.append(Source(spec.name, one, spec.weight, spec.budget))
    if not sources and not config.model.vocab_size:
        assumed.append(f"a vocabulary of {VOCABULARY:,}, as train-tokenizer makes (--vocab-size)")
        config = dataclasses.replace(config, model=dataclasses.replace(config.model, vocab_size=VOCABULARY))
    config = run_corpus.resolve(config, sources)
    if len(sources) < len(specs):
        if config.data.document_mask:
            assumed.append("documents as long as the window, as their lengths are not known")
        return config, None, files, assumed
    if config.data.packing == "documents":
        try:
            sources = [dataclasses.replace(s, cut=open_packed(s.file, config.data.seq_len)) for s in sources]
        except LlmtrainError:
            assumed.append("as many windows as without --packing documents, whose index train makes")
    order = SampleOrder(sources, config.data.seq_len, config.run.seed)
    if config.data.document_mask:
        check_document_mask(order)
    return config, order, files, assumed


def with_length(
    config: TrainConfig, order: SampleOrder | None, total_tokens: str | None
) -> tuple[TrainConfig, list[str]]:
    """The configuration with a number of steps where the token files cannot say it, and what was assumed for it."""
    schedule, seq_len = config.schedule, config.data.seq_len
    a_step = config.run.sequences_per_step * seq_len

    def of(tokens: float) -> TrainConfig:
        steps = max(1, math.ceil(tokens / a_step))
        return dataclasses.replace(config, schedule=dataclasses.replace(schedule, total_steps=steps))

    if total_tokens is not None:
        if schedule.total_steps is not None:
            raise UsageError(
                f"--total-tokens {total_tokens}: --total-steps {schedule.total_steps} says it too: give one"
            )
        tokens = amount_of(total_tokens)
        if tokens is None:
            raise UsageError(f"--total-tokens {total_tokens}: is no number of tokens: write 2.5B, 300M or 1000000")
        return of(tokens), []
    budgets = any(spec.budget is not None for spec in parse_sources(config.data.tokens))
    if order is not None or schedule.total_steps is not None or budgets:
        return config, []
    tokens = advice.TOKENS_A_PARAMETER * parameter_counts(config.model).active
    return of(tokens), [
        f"{advice.TOKENS_A_PARAMETER} tokens a parameter, as the token files are not there (--total-tokens)"
    ]


def uses_of_specs(config: TrainConfig, made: Plan, files: list[TokenFile | None]) -> list[SourceUse]:
    """Of each source by its weight alone."""
    specs = parse_sources(config.data.tokens)
    weights = sum(spec.weight for spec in specs)
    uses = []
    for spec, file in zip(specs, files, strict=True):
        taken = round(made.total_samples * config.data.seq_len * spec.weight / weights)
        epochs = taken / file.tokens if file and file.tokens else None
        there = file.tokens if file else None
        uses.append(SourceUse(spec.name, Path(spec.path), there, taken, spec.weight / weights, epochs, spec.budget))
    return uses


def largest_of(
    config: TrainConfig, mode: CheckpointActivations, attention: str, device: torch.device, room: fit.Room
) -> int:
    run = dataclasses.replace(config.run, checkpoint_activations=mode)
    return fit.fitting(dataclasses.replace(config, run=run), attention, device, room, MOST_SEQUENCES)


def token_bytes(found: Forecast) -> tuple[int, int]:
    """(bytes of the token files that are there, bytes that the others will take, if no token is read twice)."""
    there = wanted = 0
    for use in found.uses:
        if use.tokens is None:
            wanted += 2 * use.taken
        else:
            there += 2 * use.tokens
    return there, wanted


def fits_line(found: Forecast) -> str:
    """What the memory would take."""
    seq_len, mode = found.config.data.seq_len, found.config.run.checkpoint_activations
    others = " and ".join(f"{found.largest[other]:,} with {other}" for other in MODES if other != mode)
    sequences = f"{n:,} sequence{'s' * (n != 1)}" if (n := found.largest[mode]) else "not one sequence"
    most = f"{'up to ' * (n > 0)}{sequences} of {seq_len} in a micro-batch"
    line, ways = f"fits        {most}", found.smaller_ways
    if any(found.largest.values()):
        line += f"; --checkpoint-activations would make it {others}"
    else:
        line += ", whatever --checkpoint-activations is"
        more = f"share it among more cards with --ranks {2 * found.plan.parallel.grid.ranks} --parallel fsdp"
        ways = ways + [f"{more} (docs/parallel.md)"] * found.plan.on_card
    return f"{line}: {', or '.join(ways)}" if ways else line


def tokens_line(found: Forecast) -> str:
    there, wanted = token_bytes(found)
    said = [f"{in_bytes(there)} of token files are there"] * bool(there)
    if wanted:
        folder = existing_folder(next(use.path for use in found.uses if use.tokens is None))
        free = free_bytes(folder)
        said.append(f"{in_bytes(wanted)} of token files are to come, 2 bytes a token")
        if free is not None:
            not_enough = ", so THEY WILL NOT FIT: free space or repeat a smaller corpus" * (wanted > free)
            said.append(f"{in_bytes(free)} free{not_enough}")
    return f"tokens      {', '.join(said)}"


def lines(found: Forecast, everything: bool = False) -> Iterator[str]:
    """What a person is told: train's own lines, those of the device's inner life only with `everything`."""
    config, made, order = found.config, found.plan, found.order
    checkpoints = len(checkpoint.list_steps(config.run.run_dir)) if os.path.isdir(config.run.run_dir) else 0
    details = ("device", "attention", "optimizer", "activations", "saving")
    for line in plan_words.describe(config, made, order, found.device_name, checkpoints):
        label = line.split(" ", 1)[0]
        if not everything and label in details:
            continue
        if label == "memory" and order is None:
            yield from (plan_words.source_line(use, config.data.seq_len) for use in found.uses)
        if label == "disk":
            yield tokens_line(found)
        # What to do about the memory stands in the next line, with what fits.
        yield line.removesuffix(plan_words.SMALLER)
        if label == "time" and made.pace is None:
            yield "            --measured takes that of a run, or of `llmtrain bench step`"
        if label == "memory":
            yield fits_line(found)
    if found.assumed:
        yield f"assumed     {'; '.join(found.assumed)}"


def figures(found: Forecast) -> dict[str, Any]:
    """All of it, as JSON takes it: bytes, seconds, joules, FLOPs."""
    config, made = found.config, found.plan
    counts, memory = parameter_counts(config.model), made.memory
    one = plan.checkpoint_bytes(config)
    kept, in_work = plan.checkpoints_kept(config, made.total_steps)
    there, wanted = token_bytes(found)
    seconds = found.seconds
    return {
        "parameters": {"total": counts.total, "active": counts.active, "in_matmuls": counts.in_matmuls},
        "device": {
            "name": found.device_name, "ranks": made.ranks, "precision": config.run.precision,
            "peak_flops": made.peak_flops, "memory_total": made.room.total, "memory_free": made.room.free,
            "attention": made.attention.name,
        },
        "step": {
            "sequences": made.sequences_per_step, "seq_len": config.data.seq_len,
            "tokens": made.sequences_per_step * config.data.seq_len, "batch_size": config.run.micro_batch_size,
            "micro_batches": made.micro_batches(0, config.run.micro_batch_size),
        },
        "run": {
            "steps": made.total_steps, "tokens": found.tokens, "tokens_per_parameter": found.tokens / counts.total,
            "samples": made.total_samples,
        },
        "sources": [{**dataclasses.asdict(use), "path": str(use.path)} for use in found.uses],
        "memory": {
            "held": memory.held, "peak": memory.peak, "fixed": memory.fixed, "activations": memory.activations,
            "passing": memory.passing, "evaluation": memory.evaluation, "fits": not found.smaller_ways,
        },
        "largest_batch_size": found.largest,
        "flops": {
            "per_token": made.flops_per_token, "total": made.flops_per_token * found.tokens,
            "classic_per_token": classic_flops_per_token(config.model, config.data.seq_len),
        },
        "time": None if seconds is None or made.pace is None else {
            "seconds": seconds, "tok_per_s": found.tokens / seconds, "mfu": made.pace.mfu, "from": made.pace.why,
        },
        "energy": None if seconds is None or made.card is None else {
            "joules": pace.energy(seconds, made.ranks, made.card), "watts": made.card.watts,
        },
        "disk": {
            "checkpoint": one, "kept": kept, "in_work": in_work, "checkpoints": (kept + in_work) * one,
            "token_files": there, "token_files_to_come": wanted,
            "free": free_bytes(existing_folder(config.run.run_dir)),
        },
        "assumed": found.assumed,
        "suggestions": [dataclasses.asdict(one) for one in found.suggestions],
    }  # fmt: skip
