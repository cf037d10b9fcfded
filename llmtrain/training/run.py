"""The run, from the plan to the last checkpoint: read `loop` from top to bottom."""

import dataclasses
import time
from collections.abc import Container
from contextlib import nullcontext, suppress
from pathlib import Path

import torch

from llmtrain.corpus.batch_stream import BatchStream
from llmtrain.kernels import choice
from llmtrain.model.flops import parameter_counts
from llmtrain.report.trackers import Trackers, require_installed
from llmtrain.storage.disk import require_room
from llmtrain.storage.errors import LlmtrainError, StopRequested, UsageError
from llmtrain.storage.journal import JsonLines
from llmtrain.storage.lock import RunLock
from llmtrain.storage.units import duration, plural
from llmtrain.training import checkpoint, devices, fit, run_corpus, run_folder, start
from llmtrain.training.arrangement import arrange
from llmtrain.training.card import Card
from llmtrain.training.config import TrainConfig
from llmtrain.training.fit import Unit
from llmtrain.training.health import Health
from llmtrain.training.lifecycle import StopFlag, end_of_killed_run, write_status
from llmtrain.training.metrics import RunLog, Throughput, journal_of
from llmtrain.training.notify import LONG, Supervisor
from llmtrain.training.parallel import World, world_of
from llmtrain.training.plan import Plan, checkpoint_bytes, make_plan
from llmtrain.training.plan_words import describe
from llmtrain.training.replay import Replay
from llmtrain.training.saving import Saver
from llmtrain.training.schedule import learning_rate
from llmtrain.training.start import Started
from llmtrain.training.step import make_deterministic
from llmtrain.training.validate import validate, what_is_read

POLL = 0.2
"""Seconds between two looks at the signals while data is waited for."""
LONG_STEP = 20.0
"""Seconds of silence that a person begins to wonder about."""


def train(config: TrainConfig, resume: bool, supervisor: Supervisor | None = None) -> None:
    """Trains to the end, or to a signal (StopRequested). Raises LlmtrainErrors; what can be checked before the first
    step is checked before anything is written."""
    run_folder.check_run_dir(config.run.run_dir, resume)
    require_installed(config.run.tensorboard, config.run.wandb)
    if config.run.deterministic:
        make_deterministic()
    with world_of(config.run, devices.pick_device) as (world, device):
        _train(config, resume, supervisor or Supervisor(), world, device)


def _train(config: TrainConfig, resume: bool, supervisor: Supervisor, world: World, device: torch.device) -> None:
    """The part of one of the ranks."""
    run_dir = config.run.run_dir
    config, order, validation = world.first_goes_first(lambda: run_corpus.open_corpus(config))
    settings, data = config.run, config.data
    devices.check_precision(settings.precision, settings.fp8_scaling, data.seq_len, device, routed=config.model.moe)
    attention = devices.pick_attention(
        settings.attention, settings.precision, config.model, data.seq_len, device, data.document_mask
    )
    room, auto = fit.room(device), settings.batch_size == "auto"
    parallel = arrange(config, attention.name, device, room, world.size, world.least)
    if parallel.grid.stages > 1 and (data.val_choices or data.val_text):
        raise UsageError(
            "--val-choices and --val-text want rows of all lengths, and the stages of --parallel pipeline exchange one "
            "shape: leave them out, and evaluate the checkpoints with `llmtrain evaluate`"
        )
    world.arrange(parallel.grid, device)
    room = dataclasses.replace(room, shards=parallel.grid.shards, ranks=parallel.grid.ranks)
    config = start.settle_batch_size(config, attention, device, room, resume, world.data_ranks)
    name = devices.device_name(device)
    plan = make_plan(config, order, device, name, attention, room, parallel)
    start.check_memory(config, plan, device)
    made = run_folder.make_folder(run_dir)
    lock = RunLock(run_dir / "lock") if world.first else nullcontext()
    with lock, StopFlag() as stop, choice.forced(settings.attention, "attention"):
        supervisor.watch(stop)
        run_folder.check_run_dir(run_dir, resume)  # again: another process may have come and gone since
        if world.first:
            checkpoint.clear_leftovers(run_dir)
        try:
            run = start.start(config, order, validation, device, attention, resume, room, auto, world)
        except BaseException as error:
            if world.first:
                run_folder.unmake_folder(run_dir, made)
                if isinstance(error, LlmtrainError):
                    end_of_killed_run(run_dir, error)
            raise
        if run.config != config:  # --batch-size auto had to go down
            plan = make_plan(run.config, order, device, name, attention, room, parallel)
        world.open_log()
        _run(run, plan, stop, supervisor)


def _run(run: Started, plan: Plan, stop: StopFlag, supervisor: Supervisor) -> None:
    """Trains with a log, and leaves in status.json how it ended."""
    run_dir = run.config.run.run_dir
    rank, attempt = run.world.rank, _attempt(journal_of(run_dir, run.world.rank))
    view, card = run.config.run.console, Card(run.device)
    log = RunLog(run_dir, attempt, plan, rank=rank, stop=stop, view=view, card=card)
    try:
        try:
            _begin(run, plan, log)
            loop(run, plan, log, stop, supervisor)
        except (RuntimeError, MemoryError) as error:
            if not fit.out_of_memory(error):
                if (lost := run.world.cause_of(error)) is not None:
                    raise lost from error
                raise
            raise fit.ran_out(run.config, run.attention.name, run.device, plan.room, run.at_step) from error
        log.sync()
    except BaseException as error:
        code = error.exit_code if isinstance(error, LlmtrainError) else 70
        reason = str(error) if isinstance(error, LlmtrainError) else f"{type(error).__name__}: {error}"
        # What ends the run may well be what keeps this from being written; it is the first that has to be told.
        with suppress(LlmtrainError):
            state = "stopped" if isinstance(error, StopRequested) else "failed"
            _write_status(run, log, state, reason, code)
            log.sync()
        raise
    finally:
        log.close()


def _write_status(run: Started, log: RunLog, state: str, reason: str, code: int | None = None) -> None:
    log.state.state = state
    if run.world.first:
        write_status(run.config.run.run_dir, state, reason, run.at_step, code)


def _attempt(path: Path) -> int:
    """1 for the first process that writes lines to `path`, and one more for each that follows."""
    lines = JsonLines.read(path) if path.exists() else iter(())
    attempts = (line.get("attempt") for line in lines)
    return 1 + max((attempt for attempt in attempts if type(attempt) is int), default=0)


def _counts(line: dict, at_step: int) -> bool:
    """Whether a line of metrics.jsonl belongs to a run that stands at `at_step`."""
    step = line.get("step")
    return line.get("kind") == "event" or (type(step) is int and step <= at_step)


def _begin(run: Started, plan: Plan, log: RunLog) -> None:
    """Puts the run directory in order and says the plan."""
    settings, at, samples = run.config.run, run.at_step, plan.samples(run.at_step)
    notes = run.world.from_first(lambda: run_folder.prepare_run_dir(run.config, run.order)) + run.notes
    if at < plan.total_steps:
        needed = checkpoint_bytes(run.config) + checkpoint.BESIDE_TENSORS
        require_room(run.config.run.run_dir / "checkpoints", needed, "a checkpoint")
    checkpoints = len(checkpoint.list_steps(run.config.run.run_dir))
    # Without a checkpoint nothing goes on: what lies there of step 0 may be another configuration's.
    log.journal.rewrite(lambda line: _counts(line, at if checkpoints else -1))
    for line in describe(run.config, plan, run.order, devices.device_name(run.device), checkpoints):
        log.line(line)
    tokens = samples * run.config.data.seq_len
    environment = start.environment(run.device, run.attention.label())
    of_run: dict[str, float] = {
        "total_steps": plan.total_steps,
        "total_tokens": plan.total_samples * run.config.data.seq_len,
        "parameters": parameter_counts(run.config.model).total,
    }
    if run.device.type == "cuda":
        of_run["card_gib"] = plan.room.total / 2**30
    if run.world.first:
        log.trackers = Trackers(settings.run_dir, log.attempt, at, settings.tensorboard, settings.wandb)
    log.event(at, tokens, "start", f"starts at step {at} of {plan.total_steps}", environment=environment, **of_run)
    _say_trial(run, plan, log, tokens)
    for note in notes:
        log.event(at, tokens, "note", note)
    _write_status(run, log, "running", f"since step {at}")


def _say_trial(run: Started, plan: Plan, log: RunLog, tokens: int) -> None:
    """What fits, where that was not known before."""
    if not run.trial["auto"] and run.device.type == "cpu":
        return
    *failed, size = run.trial["tried"]
    text = f"micro-batches of {size} fit" + ", as --batch-size auto found" * run.trial["auto"]
    if failed:
        text += f"; of {', '.join(map(str, failed))} did not"
    if "peak_bytes" in run.trial:
        unit = Unit(plan.memory.held)
        text += f": at the peak {unit(run.trial['peak_bytes'])}, tried in {run.trial['seconds']:.1f} s"
    log.event(run.at_step, tokens, "trial", text, **run.trial)


def _evaluated(log: RunLog, at_step: int) -> list[str]:
    """The held-out sources that have their line of `at_step`."""
    lines = JsonLines.read(log.journal.path)
    return [line.get("source", "") for line in lines if line.get("kind") == "eval" and line.get("step") == at_step]


def _say_first_step(run: Started, log: RunLog, tokens: int, began: float) -> float:
    """The seconds that it took."""
    if run.device.type == "cuda":
        torch.cuda.synchronize()
    seconds = time.perf_counter() - began
    text = f"first step after {seconds:.1f} s"
    if run.step.why_not_captured:
        text += f"; not captured in CUDA graphs, so slower: {run.step.why_not_captured}"
    log.event(run.at_step, tokens, "first_step", text, seconds=seconds)
    return seconds


def _seconds_in_silence(run: Started, seconds: float, micro_batches: int) -> float:
    """Of a step of so many seconds, those in which a rank says nothing."""
    return seconds if run.step.in_one_go else seconds / micro_batches


def _say_pace(run: Started, plan: Plan, log: RunLog, micro_batches: int, seconds: float) -> None:
    """A step on a CPU may take many minutes, and shows nothing before it is done."""
    if run.device.type == "cpu" and micro_batches * seconds > LONG_STEP:
        left = (plan.total_samples - plan.samples(run.at_step)) / run.config.run.micro_batch_size
        log.line(
            f"step {run.at_step}: the first of {micro_batches} micro-batches took {seconds:.1f} s, so a step about "
            f"{duration(micro_batches * seconds)}, the run {duration(left * seconds)}"
        )


def loop(run: Started, plan: Plan, log: RunLog, stop: StopFlag, supervisor: Supervisor) -> None:
    """Trains from run.at_step to the plan's end."""
    settings, seq_len, step = run.config.run, run.config.data.seq_len, run.step
    first = run.at_step + 1
    world = run.world
    throughput = Throughput()
    health = Health(run, plan)
    replay = Replay(run, log)
    waited = 0.0
    pairs, own_tokens = 0.0, 0  # that attended since the last train line, and of how many tokens of this rank

    def alive(within: float | None = None) -> None:
        supervisor.alive(within)
        world.alive(within)

    def tokens() -> int:
        return plan.samples(run.at_step) * seq_len

    def look() -> None:
        text, fields = health.check()
        if text:
            log.event(run.at_step, tokens(), "skipped", text, **fields)

    def save() -> None:
        throughput.pause()
        alive(LONG)  # the save before may still be written
        saver.save()
        throughput.resume()

    def evaluate(done: Container[str] = ()) -> bool:
        """Writes the eval lines of this step; False where a signal came before the last one."""

        def goes_on() -> bool:
            alive(LONG)
            return not world.agreed_stop.is_asked_for(stop, run.at_step)

        throughput.pause()
        alive(LONG)
        for held_out in run.validation:
            if held_out.name in done:
                continue
            if run.at_step == 0:
                log.line(f"step 0: evaluates {held_out.name} on {what_is_read(held_out, run.config)}")
            found = validate(step, held_out, run.config, run.device, goes_on, world)
            if found is None:
                world.agreed_stop.put_at(run.at_step)
                return False
            for name, figures in found.items():
                if name not in done:
                    log.evaluation(run.at_step, tokens(), name, figures)
        throughput.resume()
        return True

    def by() -> str:
        return world.agreed_stop.by or stop.name

    def stopped() -> StopRequested:
        return StopRequested(
            f"stopped by {by()} at step {run.at_step} of {plan.total_steps}, saved in "
            f"{checkpoint.folder_of(settings.run_dir, run.at_step)}: --resume goes on"
        )

    def finish(text: str) -> None:
        log.line(text)
        _write_status(run, log, "finished", "all steps are done", 0)

    every = settings.val_every
    if run.at_step in (0, plan.total_steps) or (every and run.at_step % every == 0):
        # An attempt that was killed here has left some undone.
        if not evaluate(world.from_first(lambda: _evaluated(log, run.at_step))) and run.at_step == plan.total_steps:
            raise stopped()
    if run.at_step == plan.total_steps:
        return finish(f"the run is finished: {plan.total_steps} steps are done")

    began = time.perf_counter()
    stream = BatchStream(
        run.order,
        start=plan.samples(run.at_step),
        stop=plan.total_samples,
        sequences_per_step=plan.sequences_per_step,
        batch_size=settings.micro_batch_size,
        device=run.device,
        document_mask=run.config.data.document_mask,
        rank=world.data_rank,
        ranks=world.data_ranks,
        attention_windows=run.config.model.windows,
    )
    with Saver(run, plan, log) as saver, stream:
        throughput.resume()
        while run.at_step < plan.total_steps:
            samples = plan.samples(run.at_step + 1) - plan.samples(run.at_step)
            lr = learning_rate(run.at_step, plan.total_steps, run.config.optimizer, run.config.schedule)
            micro_batches = plan.micro_batches(run.at_step, settings.micro_batch_size)
            verifies = replay.due(run.at_step + 1)
            if verifies:
                replay.begin()
            for i in range(micro_batches):
                alive()
                while not (stops := world.agreed_stop.is_due(stop, run.at_step, i > 0)) and not stream.ready(POLL):
                    pass
                if stops:
                    # A step that has begun is dropped: the first micro-batch of the next one overwrites its gradients.
                    alive(LONG)
                    look()
                    saver.finish(f"stopped by {by()} at step {run.at_step} of {plan.total_steps}")
                    raise stopped()
                batch = next(stream)
                step.micro_step(batch.ids, batch.targets, first=i == 0, doc_start=batch.doc_start)
                pairs += batch.pairs
                own_tokens += batch.sequences * seq_len
                if verifies:
                    replay.keep(batch)
                if i == 0 and run.at_step + 1 == first and micro_batches > 1 and not step.in_one_go:
                    _say_pace(run, plan, log, micro_batches, time.perf_counter() - began)
            step.optimizer_step(lr)
            run.at_step += 1
            world.at(run.at_step)
            throughput.add(samples * seq_len)
            if verifies:
                throughput.pause()
                alive(LONG)
                replay.check(lr, tokens())
                throughput.resume()
            saver.look()

            last = run.at_step == plan.total_steps
            if run.at_step == first:
                seconds = _say_first_step(run, log, tokens(), began)
                silence = _seconds_in_silence(run, seconds, micro_batches)
                supervisor.ready(silence)
                world.ready(silence)
            if run.at_step % settings.log_every == 0 or run.at_step == first or last:
                figures = step.metrics()
                flops = plan.flops(pairs / own_tokens if own_tokens else plan.pairs_per_token)
                pairs, own_tokens = 0.0, 0
                rate, step_ms = throughput.take()
                data_ms = 1e3 * (stream.wait_seconds - waited)
                waited = stream.wait_seconds
                epoch = plan.samples(run.at_step) / run.order.samples_per_epoch
                pace, slow = world.pace()
                timed = {**figures, "step_ms": step_ms, "data_ms": data_ms, **pace}
                supervisor.status(log.train(run.at_step, tokens(), epoch, timed, lr, rate, flops))
                if slow:
                    log.event(run.at_step, tokens(), "slow_rank", slow, **pace)
                look()
            if every and run.at_step % every == 0 and not last:
                evaluate()
            if run.at_step % settings.checkpoint_every == 0 or last:
                save()
        evaluated = evaluate()
        alive(LONG)
        saver.finish(f"all {plan.total_steps} steps are done")
    if not evaluated:
        raise stopped()
    finish(f"finished: {plural(plan.total_steps, 'step')}, {tokens():,} tokens")
