"""Which way the ranks of a run share the work, and why."""

from collections.abc import Callable
from dataclasses import dataclass

import torch

from llmtrain.storage.errors import UsageError
from llmtrain.training.config import TrainConfig
from llmtrain.training.fit import Room, Unit, memory_of, needs
from llmtrain.training.grid import Grid
from llmtrain.training.stages import check_micro_batches, stages_of, words


@dataclass(frozen=True)
class Arrangement:
    mode: str
    """"" of a process alone, else ddp, fsdp or pipeline."""
    grid: Grid
    why: str
    gathers_once: bool = False
    """Whether weights that are shared out are gathered once a step."""

    def line(self) -> str:
        """Of the plan."""
        grid = self.grid
        if self.mode == "ddp":
            return f"ddp, {grid.copies} ranks with the whole model each: {self.why}"
        copies = f", {grid.copies} such copies" if grid.copies > 1 else ""
        once = ", gathered once a step" * (self.gathers_once and grid.shards > 1)
        if self.mode == "pipeline":
            shards = f", {grid.shards} share out the weights of each stage{once}" if grid.shards > 1 else ""
            return f"pipeline, {grid.stages} ranks have the layers{shards}{copies}, without CUDA graphs: {self.why}"
        return f"fsdp, {grid.shards} ranks share out the weights{once}{copies}, without CUDA graphs: {self.why}"


ALONE = Arrangement("", Grid(), "")


def arrange(
    config: TrainConfig, attention: str, device: torch.device, room: Room, ranks: int,
    least: Callable[[int], int] = lambda number: number,
) -> Arrangement:  # fmt: skip
    """The same on every rank: `least` gives the smallest of the ranks' numbers. Raises UsageError where what is asked
    cannot be."""
    run = config.run
    if ranks == 1:
        return ALONE
    if run.parallel == "pipeline":
        return _pipelines(config, ranks)
    copies, once = Grid(copies=ranks), not run.reshard_after_forward
    if run.parallel == "ddp":
        return Arrangement("ddp", copies, "as asked")
    refused = _not_sharded(config)
    if run.parallel == "fsdp":
        if refused:
            raise UsageError(f"--parallel fsdp: {refused}")
        return Arrangement("fsdp", _shards(config, ranks), "as asked", once)
    memory = memory_of(config, 1 if run.batch_size == "auto" else run.batch_size, attention, device)
    fits = needs(memory, device) <= room.free
    unit = Unit(memory.held)
    taken, free = f"{unit(memory.held)} a rank", f"the {unit(room.free)} that are free"
    if least(int(fits)):
        return Arrangement("ddp", copies, f"it takes {taken}, which fit into {free}")
    why = f"ddp takes {taken}, more than is free on all" if fits else f"ddp takes {taken}, which do not fit into {free}"
    if refused:
        return Arrangement("ddp", copies, f"{why}, but {refused}")
    return Arrangement("fsdp", _shards(config, ranks), why, once)


def _not_sharded(config: TrainConfig, otherwise: str = "--parallel ddp") -> str:
    """What of the run fsdp does not do; "": nothing. otherwise: what does it."""
    if config.run.precision in ("fp8", "mxfp8"):
        return f"it gathers weights in bf16 or FP32, not --precision {config.run.precision}: use bf16 or {otherwise}"
    return ""


def _shards(config: TrainConfig, ranks: int) -> Grid:
    shards = config.run.shard_ranks or ranks
    if ranks % shards:
        raise UsageError(f"--shard-ranks {shards} does not divide the {ranks} ranks: give a number that does, or 0")
    return Grid(copies=ranks // shards, shards=shards)


def _pipelines(config: TrainConfig, ranks: int) -> Arrangement:
    run = config.run
    shards = max(1, run.shard_ranks)
    stages = run.pipeline_ranks or ranks // shards
    if stages < 2 or ranks % (stages * shards):
        asked = [f"--pipeline-ranks {stages}"] if run.pipeline_ranks or shards == 1 else []
        asked += [f"--shard-ranks {shards}"] if shards > 1 else []
        raise UsageError(
            f"{' with '.join(asked)} does not divide the {ranks} ranks into pipelines of two or more: give a number "
            "that does, or 0"
        )
    if shards > 1:
        if refused := _not_sharded(config, "--shard-ranks 0"):
            raise UsageError(f"--shard-ranks {shards}: {refused}")
        if run.pipeline_schedule == "zero-bubble":
            raise UsageError(
                f"--pipeline-schedule zero-bubble: weights' gradients that are put off come too late for --shard-ranks "
                f"{shards}, which adds them up behind each block's backward: use interleaved or --shard-ranks 0"
            )
    if run.batch_size == "auto":
        raise UsageError(
            "--batch-size auto: a pipeline's stages need several micro-batches of a step at once, so their size is for "
            "you to choose: give a number"
        )
    grid = Grid(stages, ranks // (stages * shards), shards)
    check_micro_batches(run.micro_batches(grid.copies * grid.shards), stages, run.pipeline_schedule)
    cut = stages_of(config, stages)
    told = f"{run.pipeline_schedule}, {words(cut, stages, run.pipeline_schedule)}"
    return Arrangement("pipeline", grid, told, not run.reshard_after_forward)
