"""A terminal that a program is put into, and what a person would see on it."""

import fcntl
import os
import pty
import re
import select
import struct
import termios
import threading
import time
from types import TracebackType

import pyte


class Terminal:
    """A pseudo-terminal, for the length of a `with` block; `name` is the device that a program opens."""

    def __init__(self, columns: int, lines: int) -> None:
        self._master, self._slave = pty.openpty()
        fcntl.ioctl(self._slave, termios.TIOCSWINSZ, struct.pack("HHHH", lines, columns, 0, 0))
        self.name = os.ttyname(self._slave)
        self.raw = b""
        self._screen = pyte.HistoryScreen(columns, lines, history=5000)
        self._stream = pyte.ByteStream(self._screen)
        self._lock = threading.Lock()
        self._over = False
        self._thread = threading.Thread(target=self._read, daemon=True)

    def __enter__(self) -> "Terminal":
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._over = True
        self._thread.join()
        os.close(self._slave)
        os.close(self._master)

    def _read(self) -> None:
        while not self._over:
            if select.select([self._master], [], [], 0.05)[0]:
                data = os.read(self._master, 65536)
                with self._lock:
                    self.raw += data
                    self._stream.feed(data)

    @property
    def slave(self) -> int:
        """The terminal's descriptor, for a program that is started with it."""
        return self._slave

    @property
    def screen(self) -> str:
        """What stands on the screen."""
        with self._lock:
            return "\n".join(line.rstrip() for line in self._screen.display).rstrip()

    @property
    def all(self) -> str:
        """The same, and what has scrolled away before it."""
        with self._lock:
            columns = range(self._screen.columns)
            above = ["".join(line[x].data for x in columns).rstrip() for line in self._screen.history.top]
        return "\n".join([*above, self.screen])

    @property
    def cursor_hidden(self) -> bool:
        with self._lock:
            return bool(self._screen.cursor.hidden)

    def type(self, keys: bytes) -> None:
        os.write(self._master, keys)

    def shows(self, pattern: str, seconds: float = 60) -> str:
        """The screen, once it shows the pattern."""
        end = time.monotonic() + seconds
        while not re.search(pattern, screen := self.screen):
            assert time.monotonic() < end, f"never shown: {pattern}\n{self.all}"
            time.sleep(0.01)
        return screen

    def frame(self, pattern: str) -> list[str]:
        """The lines of a frame that shows the pattern, as `frame_of` has them, once it is drawn whole."""
        return frame_of(self.shows(rf"(?s)╭[^╰]*{pattern}[^╰]*╰[^╯]*╯"))


def frame_of(screen: str) -> list[str]:
    """The lines of the last frame on a screen, its border included. Fails where there is none, or more than one."""
    lines = screen.splitlines()
    tops = [i for i, line in enumerate(lines) if line.startswith("╭")]
    bottoms = [i for i, line in enumerate(lines) if line.startswith("╰")]
    assert len(tops) == 1 and len(bottoms) == 1, screen
    return lines[tops[0] : bottoms[0] + 1]
