"""Saves beside the training: the loop waits for a copy of the state, a thread writes that copy.

On a card not even for the copy: it runs while the next micro-steps do, which only read the weights, and the next update
waits for its end on the device. One save at a time: there is one copy.
"""

import time
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any

from llmtrain.storage.errors import CannotCreate, LlmtrainError, RankLost, StorageFailure
from llmtrain.training import checkpoint
from llmtrain.training.lifecycle import write_status
from llmtrain.training.metrics import RunLog
from llmtrain.training.plan import Plan
from llmtrain.training.snapshot import Snapshot
from llmtrain.training.start import Started


@dataclass
class _Written:
    folder: Path
    seconds: float
    notes: list[str]


@dataclass
class _Save:
    """One that is under way."""

    step: int
    tokens: int
    held_up: float
    """Seconds that the loop spent on it: waiting for the save before, the copy or its launch."""
    written: Future[_Written]


class Saver:
    """Saves a run as it goes on, and says in its log what became of each. At the end of the block the last has ended.

    A save that fails is an event; the checkpoints before it stay, and the next interval tries again. Only after
    --max-save-failures of them in a row is it the run's end.
    """

    def __init__(self, run: Started, plan: Plan, log: RunLog) -> None:
        self._run, self._plan, self._log = run, plan, log
        self._settings = run.config.run
        # Of ranks that hold the same, one writes it, so that the others need not see its disk.
        self._together = run.world.writers()
        self._snapshot = Snapshot(run.step.flat, run.step.optimizer) if self._together is not None else None
        self._thread = ThreadPoolExecutor(1, "save")
        self._under_way: _Save | None = None
        self._failed = 0
        self._reason = ""
        self._sound = {run.at_step: True} if run.at_step else {}
        self.saved_at = run.at_step if run.at_step else -1
        """Step of the newest checkpoint; -1: there is none."""

    def __enter__(self) -> "Saver":
        return self

    def save(self) -> None:
        """Begins to save the run as it stands, after the save before has ended. Raises StorageFailure where too many
        have failed, Diverged where the one before held what is not finite, and CannotCreate where the run's folder is
        gone."""
        since = time.perf_counter()
        self.wait()
        self._end_after_too_many()
        self._begin(since)

    def _begin(self, since: float) -> None:
        at = self._run.at_step
        if self.saved_at == at or self._snapshot is None:
            return
        self._log.journal.require_in_place()
        samples = self._plan.samples(at)
        state = self._run.state(samples)
        self._run.step.reader = self._snapshot.take()
        written = self._thread.submit(self._write, at, state)
        held_up = time.perf_counter() - since
        self._under_way = _Save(at, samples * self._run.config.data.seq_len, held_up, written)

    def look(self) -> None:
        """Says what became of a save, if it has ended. Raises as `save` does."""
        save, step = self._under_way, self._run.step
        # Not before the update after it is through too: how long that waited belongs to the line.
        if save and save.written.done() and step.reader is None and (step.held is None or step.held[1].query()):
            self.wait()
            self._end_after_too_many()

    def wait(self) -> None:
        """Returns when no save is under way. Raises Diverged where it held what is not finite."""
        save, self._under_way = self._under_way, None
        if save is None:
            return
        wait([save.written])  # signals are heard meanwhile
        held = self._run.step.take_held()
        try:
            done = save.written.result()
        except (CannotCreate, StorageFailure) as error:
            self._failed += 1
            self._reason = str(error).removesuffix(" and run again")
            newest = f"the newest is of step {self.saved_at}" if self.saved_at >= 0 else "there is none yet"
            self._log.event(
                save.step, save.tokens, "save_failed",
                f"not saved, failure {self._failed} of the {self._settings.max_save_failures} in a row that end the "
                f"run ({newest}): {self._reason}",
            )  # fmt: skip
            return
        self._failed = 0
        self.saved_at = save.step
        host = 1e3 * save.held_up
        delay = host + (held or 0.0)
        self._log.event(
            save.step, save.tokens, "checkpoint",
            f"saved {done.folder} in {done.seconds:.2f} s, training waited {delay:.1f} ms",
            seconds=done.seconds, delay_ms=delay, host_ms=host, device_ms=held,
        )  # fmt: skip
        for note in done.notes:
            self._log.event(save.step, save.tokens, "note", note)

    def finish(self, why: str) -> None:
        """Returns when the run as it stands is saved. Raises StorageFailure, with `why` it was to be saved and what is
        lost, where it cannot be, and Diverged where it is not finite."""
        self.wait()
        self._begin(time.perf_counter())
        self.wait()
        if self.saved_at != self._run.at_step and self._snapshot is not None:
            raise StorageFailure(f"{why}, but it cannot be saved: {self._reason}; {self._lost()}")

    def _end_after_too_many(self) -> None:
        if self._failed >= self._settings.max_save_failures:
            raise StorageFailure(f"{self._reason}; {self._failed} saves in a row failed; {self._lost()}")

    def _lost(self) -> str:
        at, newest = self._run.at_step, self.saved_at
        if newest < 0:
            return f"the {at} steps so far are lost, there is no checkpoint: --resume begins anew"
        return f"steps {newest + 1} to {at} are lost: --resume goes on from step {newest}"

    def _write(self, at: int, state: dict[str, Any]) -> _Written:
        """The part of the thread."""
        since = time.perf_counter()
        assert self._snapshot is not None and self._together is not None
        self._snapshot.wait()
        self._log.sync()  # the lines of a step must be there before the checkpoint that makes them count
        settings = self._settings
        folder = checkpoint.save(settings.run_dir, at, self._snapshot, state, self._together)
        if not self._together.first:
            return _Written(folder, time.perf_counter() - since, [])
        self._sound[at] = True
        with suppress(LlmtrainError):  # it only tells of the checkpoint, which is there
            write_status(settings.run_dir, "running", f"saved at step {at}", at)
        notes = []
        try:
            if self._snapshot.counts()["skipped_in_a_row"] == 0:  # in a bad row those from before it are all kept
                notes = checkpoint.rotate(
                    settings.run_dir, settings.keep_checkpoints, settings.keep_every, self._sound, self._run.trusted
                )
        except LlmtrainError as error:  # the checkpoint is there
            notes = [f"{error} (an old checkpoint stays)"]
        return _Written(folder, time.perf_counter() - since, notes)

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        # An exchange in the middle of a step fails by torch's own RuntimeErrors.
        if isinstance(error, RankLost | RuntimeError) and self._together is not None:
            self._together.give_up()  # on the part of one that is lost
        with suppress(LlmtrainError):  # what ends the block is told, not what happens then
            self.wait()
        self._thread.shutdown()
        if self._snapshot is not None:
            self._snapshot.close()
