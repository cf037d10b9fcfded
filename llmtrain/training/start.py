"""From a configuration to a run that is ready for its next step, or one line that says why not."""

import functools
import gc
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from llmtrain import __version__
from llmtrain.corpus.order import SampleOrder
from llmtrain.kernels import choice
from llmtrain.kernels.attention import Backend
from llmtrain.model.memory import MemoryPlan
from llmtrain.model.transformer import Transformer
from llmtrain.storage.errors import ConfigMismatch, LlmtrainError
from llmtrain.training import checkpoint, devices, fit, origin
from llmtrain.training.config import TrainConfig, eight_bit
from llmtrain.training.flat import FlatParameters
from llmtrain.training.muon import optimizer_of
from llmtrain.training.parallel import World
from llmtrain.training.plan import Plan, steps_of_run
from llmtrain.training.run_corpus import corpus_identity
from llmtrain.training.stages import layers_alike
from llmtrain.training.step import COMPUTE_DTYPES, TrainStep
from llmtrain.training.tables import refuse_another_run, to_tables
from llmtrain.training.together import Together
from llmtrain.training.validate import HeldOut

if TYPE_CHECKING:
    from llmtrain.training.pipeline import Place


def environment(device: torch.device, attention: str) -> dict[str, Any]:
    """What bit-equality rests on beside the configuration. attention: the backend."""
    return {
        "llmtrain": __version__,
        "torch": torch.__version__,
        "cuda": torch.version.cuda,
        "device": devices.device_name(device),
        "threads": torch.get_num_threads(),
        "deterministic": torch.are_deterministic_algorithms_enabled(),
        "attention": attention,
    }


@dataclass
class Started:
    """A run that is ready: its parts, and where it stands."""

    config: TrainConfig
    order: SampleOrder
    validation: list[HeldOut]
    device: torch.device
    attention: Backend
    step: TrainStep
    at_step: int
    """Updates done so far."""
    corpus: list[dict[str, Any]]
    notes: list[str]
    """What a person should know of the start: a damaged checkpoint, another version."""
    world: World
    """The ranks that share the run; alone where there is one."""
    trial: dict[str, Any]
    """Of the trial of the step: whether the micro-batch is --batch-size auto's, sizes tried, seconds, bytes."""
    trusted: int | None = None
    """With --verify-every: the last step up to which every step that was run again gave the same bits."""

    def state(self, samples: int) -> dict[str, Any]:
        """state.json, the optimizer's counts aside."""
        return {
            "samples": samples,
            "tokens": samples * self.config.data.seq_len,
            "config": to_tables(self.config),
            "corpus": self.corpus,
            "environment": environment(self.device, self.attention.label(choice.ran)),
        }


def check_memory(config: TrainConfig, plan: Plan, device: torch.device) -> None:
    """Raises UsageError for what cannot fit whatever a trial would say: what every step needs on a card; all of a step
    on a CPU, where there is no trial, swap included."""
    certain = plan.memory.peak if device.type == "cpu" else sum(plan.memory.fixed.values())
    if certain > plan.room.total:
        raise fit.refusal(config, plan.attention.name, device, plan.room)


def settle_batch_size(
    config: TrainConfig, attention: Backend, device: torch.device, room: fit.Room, resume: bool, ranks: int = 1
) -> TrainConfig:
    """With a number for --batch-size auto. A run that goes on keeps the one it had on the same device, so that its bits
    stay the same, unless that one is predicted not to fit any more."""
    if config.run.batch_size != "auto":
        return config
    before = _size_before(config.run.run_dir, devices.device_name(device)) if resume else None
    chosen = fit.auto_size(config, attention.name, device, room, ranks)
    if before is not None and before <= fit.fitting(config, attention.name, device, room, before):
        chosen = before
    return fit.with_batch_size(config, chosen)


def _size_before(run_dir: Path, device: str) -> int | None:
    """batch_size of the newest checkpoint, where it was made on `device`."""
    folder = checkpoint.newest_whole(run_dir)
    try:
        state = checkpoint.read_state(folder) if folder else None
    except LlmtrainError:
        return None  # damaged: it will be set aside
    return state["config"]["run"]["batch_size"] if state and state["environment"]["device"] == device else None


def start(
    config: TrainConfig,
    order: SampleOrder,
    validation: list[HeldOut],
    device: torch.device,
    attention: Backend,
    resume: bool,
    room: fit.Room,
    auto: bool = False,
    world: World | None = None,
) -> Started:
    """Builds the step, tries it out, and fills it, from the newest checkpoint that verifies or from the seed.

    auto: a micro-batch that turns out not to fit is made smaller. Raises what `fit.refusal` does."""
    world = world or World()
    corpus = corpus_identity(list(order.sources))
    place = place_of(config, world)
    model = Transformer(config.model, device="meta") if place is None else place.part(config.model)
    model.checkpoint_activations = config.run.checkpoint_activations
    if world.grid.shards > 1:  # who try a step out together try the same one
        config, auto = fit.with_batch_size(config, world.least(config.run.micro_batch_size)), False
    with fit.or_refused(config, attention.name, device, room):
        flat = parameters_of(config, model, device, world, place)
        optimizer = optimizer_of(flat, config.optimizer, config.model)
    build = TrainStep if place is None else place.step
    parts = (functools.partial(build, model, flat, optimizer), attention, device, room)
    config, train_step, trial = fitting_step(config, *parts, auto, world.data_ranks)
    if (least := world.least(config.run.micro_batch_size)) < config.run.micro_batch_size:
        del train_step
        config, train_step, trial = fitting_step(fit.with_batch_size(config, least), *parts, False, world.size)
    world.time_layers(model.layers, layers_alike(config.model))
    if not world.alone and place is None:
        train_step.add_up = functools.partial(world.add_gradients, sharded=flat.n_sharded)
        train_step.take_highest = world.take_highest

    def check(state: dict[str, Any]) -> None:
        refuse_another_run(state["config"], config)
        if state["corpus"] != corpus:
            raise ConfigMismatch(
                f"{', '.join(config.data.tokens)}: is not the corpus that this run was started on: name that one with "
                "--tokens, or start in another --run-dir"
            )

    def restore(together: Together) -> tuple[dict[str, Any] | None, list[str]]:
        if not resume:
            return None, []
        return checkpoint.restore_newest(config.run.run_dir, flat, optimizer, check, together)

    def begin(together: Together) -> tuple[int, dict[str, Any] | None, list[str]]:
        begun: list[tuple[int, dict[str, Any] | None, list[str]]] = []
        steps = steps_of_run(config, order)
        together.each(lambda: begun.append(origin.begin(config, flat, optimizer, corpus, steps)))
        return begun[0]

    if world.grid.parts > 1:
        world.require_shared(config.run.run_dir)
    state, notes = world.fill(restore)
    at_step = 0
    if state is None and (config.run.init_from is not None or config.run.branch_from is not None):
        at_step, counts, notes = world.fill(begin)
        if counts is None:
            optimizer.reset()
        else:
            optimizer.set_counts(counts)
    elif state is None:
        flat.master.zero_()
        flat.init_weights(model, config.run.seed)
        optimizer.reset()
    else:
        optimizer.set_counts(state["optimizer"])
        at_step = state["step"]
        now = environment(device, attention.label())
        for name, value in state["environment"].items():
            if now.get(name) != value:
                notes.append(f"{name} is {now.get(name)}, was {value}: losses may differ in their last bits from here")
        if (before := state["config"]["run"]["batch_size"]) != config.run.batch_size:
            notes.append(
                f"batch_size is {config.run.batch_size}, was {before}: losses may differ in their last bits from here"
            )
    if world.grid.parts == 1:
        world.copy_from_first(*(stretch.buffer for stretch in optimizer.large.values()))
    flat.refresh_narrow()
    return Started(config, order, validation, device, attention, train_step, at_step, corpus, notes, world, trial)


def place_of(config: TrainConfig, world: World) -> "Place | None":
    """What this rank has of a pipeline; None where there is none. Raises RankLost."""
    if world.grid.stages == 1:
        return None
    from llmtrain.training.pipeline import Place  # who has one card need not wait for torch's schedules

    run = config.run
    micro_batches = run.micro_batches(world.data_ranks)
    return Place.of(
        world, config.model, config.data.seq_len, run.checkpoint_activations, run.pipeline_schedule, micro_batches,
        run.reshard_after_forward,
    )  # fmt: skip


def parameters_of(
    config: TrainConfig, model: Transformer, device: torch.device, world: World, place: "Place | None" = None
) -> FlatParameters:
    """All parameters on `device`, or this rank's shard of them, or those of its stages or its shard of these."""
    precision = config.run.precision
    dtype = COMPUTE_DTYPES[precision]
    if world.grid.shards > 1 and place is None:
        from llmtrain.training.sharded import ShardedParameters  # who has one card need not wait for FSDP's import

        assert world.mesh is not None
        return ShardedParameters(
            model, device, dtype, world.mesh["shard"], waiting=world.waiting,
            reshard_after_forward=config.run.reshard_after_forward,
        )  # fmt: skip
    build = FlatParameters if place is None else place.parameters
    return build(model, device, dtype, eight_bit=eight_bit(config.run), mx=precision == "mxfp8")


def fitting_step(
    config: TrainConfig,
    build: Callable[..., TrainStep],
    attention: Backend,
    device: torch.device,
    room: fit.Room,
    auto: bool,
    ranks: int = 1,
) -> tuple[TrainConfig, TrainStep, dict[str, Any]]:
    """The step that `build` makes, after a trial of all that a run does at its largest shapes, and its configuration:
    with `auto` another micro-batch than it came with, where that one did not fit. The third: what the trial says of
    itself."""
    tried = []
    while True:
        size = config.run.micro_batch_size
        tried.append(size)
        since = time.perf_counter()
        try:
            with fit.or_refused(config, attention.name, device, room):
                data = config.data
                step = build(size, data.seq_len, document_mask=data.document_mask)
                memory = fit.memory_of(config, size, attention.name, device, room.shards, room.ranks)
                try_out(step, memory, data.evaluates)
        except LlmtrainError:
            if not auto or size == 1:
                raise
        else:
            figures = {"auto": auto, "tried": tried, "seconds": time.perf_counter() - since}
            if device.type == "cuda":
                figures |= {"peak_bytes": torch.cuda.max_memory_allocated(), "held_bytes": torch.cuda.memory_reserved()}
            return config, step, figures | {"planned_bytes": memory.peak, "planned_held_bytes": memory.held}
        gc.collect()  # beyond the except block, which holds on to the tensors of the frames that failed
        if device.type == "cuda":
            torch.cuda.empty_cache()
        most = min(size - 1, int(size * fit.DOWN))
        of_rank = -(-config.run.sequences_per_step // ranks)
        config = fit.with_batch_size(config, fit.even(of_rank, max(1, most)))


def try_out(step: TrainStep, memory: MemoryPlan, evaluates: bool) -> None:
    """Takes the memory of a whole step, and of an evaluation. A CPU, on which a step may take minutes, is only asked
    for as much at once, which it refuses where a limit is in the way."""
    if step.ids.device.type == "cpu":
        torch.empty(memory.peak - sum(memory.fixed.values()), dtype=torch.uint8)
        return
    beside = torch.empty(memory.fixed["copy to verify"], dtype=torch.uint8, device=step.ids.device)
    step.try_out(evaluates)
    torch.cuda.synchronize()
    del beside  # the allocator keeps it for who needs it
