"""How a run ends: signals ask for it, status.json says it."""

import json
import os
import signal
import time
from contextlib import suppress
from pathlib import Path
from types import FrameType, TracebackType

from llmtrain.storage import atomic
from llmtrain.storage.errors import STOP_SIGNALS, LlmtrainError, StopRequested
from llmtrain.storage.interrupts import interrupts

STDOUT = 1


def _write(text: str) -> None:
    with suppress(OSError):
        os.write(STDOUT, text.encode())


class StopFlag:
    """Inside the block TERM, INT, HUP (a closed terminal), USR1 and USR2 (Slurm) raise a flag that every phase polls; a
    second one ends the process at once, with the last checkpoint whole as it always is. A HUP that was ignored before
    (nohup) stays so, and a second one is nothing: a closing terminal sends several."""

    def __init__(self) -> None:
        self.signal: int | None = None
        self.said_by_others = False
        """Whether the first signal is announced by who draws on the terminal, amid whose frame a line would be lost."""
        self._before: dict[int, object] = {}

    def __enter__(self) -> "StopFlag":
        interrupts.hold()
        for number in STOP_SIGNALS:
            if number != signal.SIGHUP or signal.getsignal(number) is not signal.SIG_IGN:
                self._before[number] = signal.signal(number, self._raise_flag)
        if (waiting := interrupts.take()) is not None:
            self._raise_flag(waiting, None)
        return self

    def _raise_flag(self, number: int, frame: FrameType | None) -> None:
        # Not print(): the signal may have come in the middle of one.
        on_terminal = os.isatty(STDOUT)
        if self.signal is not None:
            if number == signal.SIGHUP:
                return
            _write("\n" * on_terminal)
            os._exit(128 + number)
        self.signal = number
        # What runs now, such as a micro-batch on a CPU, may take minutes.
        if not self.said_by_others:
            _write("\n" * on_terminal + f"{self.words}\n")

    def __bool__(self) -> bool:
        return self.signal is not None

    @property
    def name(self) -> str:
        """Of the signal that came, such as SIGTERM."""
        return signal.Signals(self.signal).name if self.signal is not None else "none"

    @property
    def words(self) -> str:
        """What a person is told when the first signal comes."""
        return f"{self.name}: saves and stops as soon as it can; once more ends at once"

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)  # type: ignore[arg-type]
        interrupts.release()


def end_of_killed_run(run_dir: Path, error: LlmtrainError) -> None:
    """Of a run whose last process was killed, so that status.json still says that it is running: why it did not go on
    now. What another end left there stays. For the holder of the lock."""
    with suppress(LlmtrainError, OSError, ValueError, KeyError):
        status = json.loads((run_dir / "status.json").read_text())
        if status["state"] == "running":
            state = "stopped" if isinstance(error, StopRequested) else "failed"
            write_status(run_dir, state, str(error), status["step"], error.exit_code)


def write_status(run_dir: Path, state: str, reason: str, step: int, exit_code: int | None = None) -> None:
    """RUN/status.json: state is running, finished, stopped or failed; reason is for a person."""
    status = {"state": state, "reason": reason, "step": step, "exit_code": exit_code}
    atomic.write_json(run_dir / "status.json", {**status, "pid": os.getpid(), "time": time.time()})
