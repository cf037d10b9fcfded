"""Where a run is shown: lines that stay in the scrollback and, on a terminal, a frame below them that is drawn anew.

Nothing of the terminal is changed that would have to be put right again: the cursor is not hidden and the screen is the
ordinary one. So it is sound after any end, a kill -9 included.
"""

import os
import sys
from collections.abc import Callable
from contextlib import suppress

from rich.console import Console
from rich.live import Live
from rich.text import Text

Frame = Callable[[int, int, bool], Text]
"""Columns, lines, whether only ASCII can be shown -> the picture."""

LEAST_COLUMNS, LEAST_LINES = 40, 8
"""Of a terminal on which a frame is drawn: on a smaller one lines say more."""
PRINTED_LINES = 20
"""Of a frame that goes to a file or a pipe."""


class _Console(Console):
    def on_broken_pipe(self) -> None:
        """rich would end the process with exit code 1."""
        raise  # the BrokenPipeError that it is handling

    def show_cursor(self, show: bool = True) -> bool:
        """Left as it is: a process that is killed could not show it again."""
        return False


class Terminal:
    """The console is for whoever looks. What it stands for goes on when nobody does any more: the terminal was closed,
    the reader of the pipe is gone, the disk of the log is full. `lost` then says why, and nothing more is shown."""

    def __init__(
        self, frame: Frame | None = None, console: Console | None = None, quiet: bool = False, live: bool = True
    ) -> None:
        """frame: None where only lines are wanted. live: whether it is drawn again and again, where that can be."""
        self.console = console or _Console(highlight=False, quiet=quiet)
        self.lost = ""
        self.failure: OSError | None = None
        self._frame = frame
        can_draw = self.console.is_terminal and not self.console.is_dumb_terminal and not self.console.quiet
        self._live: Live | None = None
        if frame is not None and live and can_draw:
            self._live = Live(console=self.console, auto_refresh=False, vertical_overflow="crop")
            self._try(self._live.start)

    @property
    def draws(self) -> bool:
        """Whether there is a frame."""
        return self._live is not None

    def line(self, text: str) -> None:
        """A line, whole however long it is; above the frame, where there is one. From any thread."""
        self._try(lambda: self.console.print(Text(text), soft_wrap=True))

    def draw(self) -> None:
        """Draws the frame as it is now. From any thread."""
        if self._live and self._frame:
            live, width, height = self._live, self.console.width, self.console.height
            if width < LEAST_COLUMNS or height < LEAST_LINES:
                drawn = Text("")
            else:
                # Of the lines above the last ones stay in sight.
                drawn = self._frame(width, height - 2, self._ascii_only)
            self._try(lambda: live.update(drawn, refresh=True))

    def print_frame(self) -> None:
        """The frame as lines like any other."""
        if self._frame:
            drawn = self._frame(self.console.width, PRINTED_LINES, self._ascii_only)
            self._try(lambda: self.console.print(drawn))

    @property
    def _ascii_only(self) -> bool:
        return not self.console.encoding.startswith("utf")

    def close(self) -> None:
        """Ends the drawing; the last frame stays."""
        live, self._live = self._live, None
        if live:
            self._try(live.stop)

    def _try(self, show: Callable[[], object]) -> None:
        if self.console.quiet:
            return
        try:
            show()
        except OSError as error:
            self.console.quiet = True
            self.lost, self.failure = str(error), error
            with suppress(OSError, ValueError):  # what is still in the buffer must not fail once more at exit
                os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
