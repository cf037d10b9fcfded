"""A stop signal while a command has nothing to save yet: it ends as by Ctrl-C, but never in the middle of an import."""

import os
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

from llmtrain.storage.errors import STOP_SIGNALS

RETRY = 0.05
"""Seconds to the next look whether the import is over."""
IMPORTING = "<frozen importlib._bootstrap>"


class Interrupts:
    """Raises KeyboardInterrupt at the first signal, so that what is half-written is removed; only within `raising`,
    where somebody is there to take it. Amid an import it waits for the end of that: the exception may be swallowed
    there, or leave a module half-loaded that fails later with another error. A second signal ends the process at once,
    as if nobody had handled it; a second HUP is nothing, as a closing terminal sends several."""

    def __init__(self) -> None:
        self._came: int | None = None
        self._held = True
        self._raised = self._over = False

    def install(self) -> None:
        """A signal that is ignored (nohup has HUP so) stays so."""
        signal.signal(signal.SIGALRM, self._look_again)
        for number in STOP_SIGNALS:
            if signal.getsignal(number) is signal.SIG_DFL:
                signal.signal(number, self._handle)

    @contextmanager
    def raising(self) -> Iterator[None]:
        """The command itself: a signal is raised in the block, waits before it, and is nothing after it. One that comes
        in the last moment is raised out of the block's end."""
        try:
            self.release()
            self.check()
            yield
        finally:
            self.end()

    def check(self) -> None:
        """Raises what waits, at a place where no import runs."""
        if self._came is not None and not self._raised:
            self._raised = True
            raise KeyboardInterrupt

    def hold(self) -> None:
        """From here on signals are only remembered: the caller puts in handlers of its own, then asks `take`."""
        self._held = True

    def take(self) -> int | None:
        """The signal that waits, which is the caller's from here on."""
        if self._raised:
            return None
        number, self._came = self._came, None
        return number

    def release(self) -> None:
        """The caller's handlers are gone."""
        self._held = False

    def end(self) -> None:
        """From here on a signal is nothing: the command is done, and its exit code stands."""
        self._over = True
        signal.setitimer(signal.ITIMER_REAL, 0)  # while Python is taken down an alarm has nobody to hear it, and kills

    def _handle(self, number: int, frame: FrameType | None) -> None:
        if self._over:
            return
        if self._came is None:
            self._came = number
            self._look_again(number, frame)
        elif number != signal.SIGHUP:
            signal.signal(number, signal.SIG_DFL)
            os.kill(os.getpid(), number)
            os._exit(128 + number)  # process 1 of a container has no default action

    def _look_again(self, number: int, frame: FrameType | None) -> None:
        if self._came is None or self._raised or self._over:
            return
        if self._held or _importing(frame):
            signal.setitimer(signal.ITIMER_REAL, RETRY)
        else:
            self.check()


def _importing(frame: FrameType | None) -> bool:
    while frame is not None:
        if frame.f_code.co_filename == IMPORTING:
            return True
        frame = frame.f_back
    return False


interrupts = Interrupts()
"""Those of this process."""
