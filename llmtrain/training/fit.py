"""What fits into the device's memory: how much there is, the largest micro-batch, the line for one that is too large.

A prediction (model/memory.py) with a margin chooses; on a card a trial of the whole step, before step 0, has the last
word (start.py). On a CPU the prediction does: a trial would take as long as a step there, and a machine that is short
of memory swaps where a card fails.
"""

import dataclasses
import os
import resource
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from llmtrain.model.memory import MemoryPlan, evaluation_memory, state_bytes, training_memory
from llmtrain.storage.errors import LlmtrainError, MemoryTaken, UsageError
from llmtrain.training.config import TrainConfig, of_pipeline, world_size
from llmtrain.training.stages import memory_of_rank

GIB = 2**30
MARGIN = {"cuda": (1.08, GIB), "cpu": (1.2, GIB // 2)}
"""What a prediction may miss: (factor, bytes more). On a card the bytes are the allocator's rounding, kernels and
workspaces; tests hold docs/data/peers.json and baseline.json to it."""
OWN = GIB
"""What of a card's memory this process may hold itself before it takes any: CUDA's context."""
CPU_TOKENS = 8192
"""Tokens of a micro-batch beyond which a CPU gains nothing, and answers a signal later."""
WANT_OF_MEMORY = (
    "can't allocate memory",
    "Storage size calculation overflowed",
    "CUDA error: out of memory",
    "CUBLAS_STATUS_ALLOC",
)
CGROUPS, OWN_CGROUP = Path("/sys/fs/cgroup"), Path("/proc/self/cgroup")
DOWN = 0.9
"""What --batch-size auto goes on with after a trial that failed, as a share of the size that did."""


@dataclass(frozen=True)
class Room:
    """Memory of the device, in bytes."""

    total: int
    """What there is, other processes' part included."""
    free: int
    """What this process could have taken when it began."""
    shards: int = 1
    """Ranks that have the model together, each with such a device; of a pipeline, a stage of it."""
    ranks: int = 0
    """Of the run; 0: as many as there are."""


def out_of_memory(error: BaseException) -> bool:
    """torch raises OutOfMemoryError for the card alone; its CPU allocator and CUDA's libraries raise RuntimeErrors. One
    met while a CUDA graph was captured may be hidden behind the capture's own error."""
    if isinstance(error, torch.OutOfMemoryError | MemoryError):
        return True
    if isinstance(error, RuntimeError) and any(words in str(error) for words in WANT_OF_MEMORY):
        return True
    return error.__context__ is not None and out_of_memory(error.__context__)


def room(device: torch.device) -> Room:
    """What the card has, or the machine: less where a limit of this process or of its control group says so."""
    if device.type == "cuda":
        free, total = torch.cuda.mem_get_info(device)
        return Room(total, free + torch.cuda.memory_reserved(device))
    physical = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    total = free = physical
    if (path := Path("/proc/meminfo")).exists():
        kib = {(words := line.split())[0].rstrip(":"): int(words[1]) for line in path.read_text().splitlines()}
        total, free = 1024 * (kib["MemTotal"] + kib["SwapTotal"]), 1024 * kib["MemAvailable"]
    for limit in _limits():
        total, free = min(total, limit.total), min(free, limit.free)
    return Room(total, max(0, free))


def _limits() -> Iterator[Room]:
    """Limits of the address space (ulimit -v) and of the control groups (systemd's MemoryMax=, containers)."""
    soft, _ = resource.getrlimit(resource.RLIMIT_AS)
    if soft != resource.RLIM_INFINITY and (statm := Path("/proc/self/statm")).exists():
        left = soft - int(statm.read_text().split()[0]) * os.sysconf("SC_PAGE_SIZE")
        yield Room(left, left)  # what the process takes without a model is no room for one
    try:
        named = next(x for x in OWN_CGROUP.read_text().splitlines() if x.startswith("0::"))
    except (OSError, StopIteration):
        return
    own = CGROUPS / named[3:].lstrip("/")
    for group in (own, *own.parents):
        if not group.is_relative_to(CGROUPS):
            return
        try:
            limit, used = (group / "memory.max").read_text().strip(), int((group / "memory.current").read_text())
            cached = next(x for x in (group / "memory.stat").read_text().splitlines() if x.startswith("inactive_file "))
        except (OSError, ValueError, StopIteration):
            continue
        if limit != "max":
            yield Room(int(limit), int(limit) - used + int(cached.split()[1]))


def memory_of(
    config: TrainConfig, batch_size: int, attention: str, device: torch.device, shards: int = 1, ranks: int = 0
) -> MemoryPlan:
    """The plan of a micro-batch of `batch_size` sequences; attention: the backend; shards: as Room has them. Of a
    pipeline that of a whole step, on the rank that needs most; ranks: of the run, 0: as many as there are."""
    run, shape = config.run, (config.model, batch_size, config.data.seq_len)
    plan = training_memory(
        *shape,
        precision=run.precision,
        fp8_scaling=run.fp8_scaling,
        checkpoint_activations=run.checkpoint_activations,
        attention=attention,
        device=device,
        document_mask=config.data.document_mask,
        verify=bool(run.verify_every),
        optimizer=config.optimizer.optimizer,
        average=bool(config.optimizer.ema_decay),
        references=device.type != "cuda",
        shards=shards,
        reshard_after_forward=run.reshard_after_forward,
    )
    if device.type == "cpu":
        saved = state_bytes(config.model, config.optimizer.optimizer, bool(config.optimizer.ema_decay), shards)
        copied = sum(saved.values())
        plan = dataclasses.replace(plan, fixed={**plan.fixed, "copy for saves": copied})
    elif config.data.evaluates:
        # Captured graphs hold on to what the step takes at its peak: an evaluation comes on top.
        beside = evaluation_memory(*shape, precision=run.precision, attention=attention, device=device)
        plan = dataclasses.replace(plan, evaluation=beside)
    ranks = ranks or world_size()
    if (stages := of_pipeline(dataclasses.asdict(run), ranks)) > 1:
        return memory_of_rank(plan, config, batch_size, 4 if run.precision == "fp32" else 2, stages, ranks // stages)
    return plan


def needs(memory: MemoryPlan, device: torch.device) -> int:
    """Bytes that have to be free for it, with what a prediction may miss."""
    factor, more = MARGIN[device.type]
    return int(memory.held * factor) + more


def largest(fits: Callable[[int], bool], highest: int) -> int:
    """The largest number from 1 to `highest` that fits, 0 where 1 does not; what is below one that fits does, too."""
    low, high = 0, highest + 1
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if fits(middle) else (low, middle)
    return low


def even(sequences: int, most: int) -> int:
    """The micro-batch, at most `most`, that does `sequences` in the fewest micro-batches with the fewest empty rows."""
    return -(-sequences // -(-sequences // most))


def auto_size(config: TrainConfig, attention: str, device: torch.device, there: Room, ranks: int = 1) -> int:
    """What --batch-size auto begins with: the largest that is predicted to fit; 1 where none is."""
    highest = of_rank = -(-config.run.sequences_per_step // ranks)
    if device.type != "cuda":
        highest = min(highest, max(1, CPU_TOKENS // config.data.seq_len))
    return even(of_rank, max(1, fitting(config, attention, device, there, highest)))


def fitting(config: TrainConfig, attention: str, device: torch.device, there: Room, highest: int) -> int:
    """The largest micro-batch, at most `highest`, that is predicted to fit; 0 where none is."""

    def fits(size: int) -> bool:
        return needs(memory_of(config, size, attention, device, there.shards, there.ranks), device) <= there.free

    return largest(fits, highest)


def with_batch_size(config: TrainConfig, batch_size: int) -> TrainConfig:
    """The same run, its steps split into micro-batches of `batch_size`."""
    whole = config.run.sequences_per_step
    run = dataclasses.replace(config.run, batch_size=batch_size, accumulate=1, global_batch_size=whole)
    return dataclasses.replace(config, run=run)


def refusal(config: TrainConfig, attention: str, device: torch.device, there: Room) -> LlmtrainError:
    """The error for a micro-batch that does not fit: what it needs by part, what there is, what to ask for instead.

    MemoryTaken where it would fit if other processes held no memory of the card: that may pass.
    """
    size = config.run.micro_batch_size
    memory = memory_of(config, size, attention, device, there.shards, there.ranks)
    place = "card" if device.type == "cuda" else "machine"
    asked = f"--batch-size {size} x --seq-len {config.data.seq_len}"
    unit = Unit(memory.held)
    text = (
        f"{asked} does not fit: it takes about {unit(memory.held)} ({unit.each(by_part(memory))}), of the {place}'s "
        f"{unit(there.total)} {unit(there.free)} are free"
    )
    advice = smaller_ways(config, attention, device, there)
    if device.type == "cuda" and there.free < needs(memory, device) <= there.total - OWN:
        return MemoryTaken(f"{text}, as other processes hold the rest: wait for them (nvidia-smi), or {advice[0]}")
    return UsageError(f"{text}: {', or '.join(advice)}")


def smaller_ways(config: TrainConfig, attention: str, device: torch.device, there: Room) -> list[str]:
    """What to ask for in place of a micro-batch that does not fit; one at least."""
    run, size = config.run, config.run.micro_batch_size
    memory, whole = memory_of(config, size, attention, device, there.shards, there.ranks), config.run.sequences_per_step
    if smaller := fitting(config, attention, device, there, min(whole, int(size * DOWN))):
        smaller = even(whole, smaller)
        keeps = f"a step keeps its {whole * config.data.seq_len:,} tokens"
        advice = [f"give {split_as(config, smaller)} or --batch-size auto ({keeps})"]
    else:
        advice = ["make the model or --seq-len smaller"]
    ways: list[tuple[str, dict[str, Any]]] = [("--reshard-after-forward", {"reshard_after_forward": True})]
    ways += [(f"--checkpoint-activations {mode}", {"checkpoint_activations": mode}) for mode in ("selective", "full")]
    for option, change in ways:
        sparing = dataclasses.replace(config, run=dataclasses.replace(run, **change))
        more = memory_of(sparing, size, attention, device, there.shards, there.ranks)
        if more.held < memory.held and needs(more, device) <= there.free:
            advice.append(f"keep it with {option}")
            break
    return advice


def split_as(config: TrainConfig, batch_size: int) -> str:
    """The options that split the step of `config` into micro-batches of `batch_size`."""
    whole = config.run.sequences_per_step
    if config.run.global_batch_size is not None:
        return f"--batch-size {batch_size}"
    if whole % batch_size == 0:
        return f"--batch-size {batch_size} --accumulate {whole // batch_size}"
    return f"--batch-size {batch_size} --accumulate 1 --global-batch-size {whole}"


class Unit:
    """GiB, or MiB for what is below one: one unit for all the numbers of a line."""

    def __init__(self, size: float) -> None:
        self.name, self.size, self.digits = ("GiB", GIB, 2) if size >= GIB else ("MiB", 2**20, 1)

    def number(self, size: float) -> str:
        return f"{size / self.size:,.{self.digits}f}"

    def __call__(self, size: float) -> str:
        return f"{self.number(size)} {self.name}"

    def each(self, parts: dict[str, int]) -> str:
        """Those that do not round to nothing."""
        return ", ".join(f"{name} {self.number(size)}" for name, size in parts.items() if self.number(size).strip("0."))


def by_part(memory: MemoryPlan) -> dict[str, int]:
    """What adds up to `memory.held`."""
    phase = memory.peak_phase
    activations = sum(memory.activations.values())
    parts = {**memory.fixed, "activations": activations, phase: memory.passing[phase]}
    return {**parts, "evaluation": memory.evaluation}


@contextmanager
def or_refused(config: TrainConfig, attention: str, device: torch.device, there: Room) -> Iterator[None]:
    """Inside the block a want of memory becomes one line."""
    try:
        yield
    except (RuntimeError, MemoryError) as error:
        if not out_of_memory(error):
            raise
        raise refusal(config, attention, device, there) from error


def ran_out(config: TrainConfig, attention: str, device: torch.device, there: Room, at_step: int) -> LlmtrainError:
    """The error for a run that wants memory after its start. On a card the trial has shown that all fits."""
    if device.type == "cpu":
        return refusal(config, attention, device, there)
    return MemoryTaken(
        f"the card's memory ran out after step {at_step}, though all had fitted before the first: another process took "
        "it (see nvidia-smi): --resume goes on when it is free"
    )
