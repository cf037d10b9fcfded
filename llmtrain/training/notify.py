"""What a supervisor is told of a run: systemd's notify protocol, lines in datagrams to the socket NOTIFY_SOCKET.

A hang is what a watchdog is for, and a compile is none: so each word says by when the next one comes, and it is the
training loop that says it. Only the wish for more time to stop comes from a thread, and only until the loop is overdue.
"""

import os
import socket
import threading
import time
from collections.abc import MutableMapping
from contextlib import suppress
from types import TracebackType

from llmtrain.storage.errors import LlmtrainError, StopRequested
from llmtrain.training.lifecycle import StopFlag

LONG = 1800.0
"""Seconds without a word that are no hang while a run starts, compiles, reads a batch of an evaluation, or saves."""
LEEWAY = 4.0
"""How often as long as the first step's micro-batches one of a later step may take."""
EXTENSION = 10.0
"""Seconds for which a stop is extended at a time."""
EXTENDS_EVERY = 1.0
"""Seconds between two extensions."""


class Supervisor:
    """Says to systemd, or to whoever speaks its protocol, that the run has started, lives, and ends. Without one, which
    is as `Supervisor()` is made, all of it does nothing.

    A `with` block is the life of the process: its end is announced, and is a clean one where nothing but a stop was
    raised."""

    def __init__(self, address: str = "", watchdog: float = 0.0) -> None:
        """address: of a datagram socket, an abstract one with @ in front. watchdog: seconds, 0 where there is none."""
        self._address = "\0" + address[1:] if address.startswith("@") else address
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) if address else None
        if self._socket is not None:
            self._socket.settimeout(0.2)  # a supervisor that does not read must not hold up the run
        self._watchdog = watchdog
        self._within = watchdog
        self._is_ready = False
        self._next_word = 0.0
        self._due = time.monotonic() + LONG
        self._over = threading.Event()
        self._thread: threading.Thread | None = None

    @classmethod
    def of(cls, environment: MutableMapping[str, str]) -> "Supervisor":
        """The one that `environment` names. Its names are removed: processes started from here are not meant."""
        address = environment.pop("NOTIFY_SOCKET", "")
        pid, microseconds = (environment.pop(name, "") for name in ("WATCHDOG_PID", "WATCHDOG_USEC"))
        watched = microseconds.isdecimal() and pid in ("", str(os.getpid()))
        return cls(address if address[:1] in ("/", "@") else "", int(microseconds) / 1e6 if watched else 0.0)

    def _send(self, *lines: str) -> None:
        if self._socket is not None:
            with suppress(OSError):
                self._socket.sendto("\n".join(lines).encode(errors="replace"), self._address)

    def status(self, text: str) -> None:
        """A line for whoever looks at the service."""
        self._send("STATUS=" + " ".join(text.split()))

    def alive(self, within: float | None = None) -> None:
        """The run is no hang, and its next word comes `within` seconds; None: as soon as the supervisor wants it.
        Sends only as often as is needed, so it may be called at any rate."""
        now = time.monotonic()
        within = max(within or self._watchdog or LONG, 0.0 if self._is_ready else LONG)
        self._due = now + within
        if within == self._within and now < self._next_word:
            return
        # What was allowed may be long, and how long the run then stays in it is not known: never sleep through half.
        self._next_word = now + within / 4
        if not self._is_ready:
            self._send(f"EXTEND_TIMEOUT_USEC={round(within * 1e6)}")
        elif self._watchdog:
            allowed = () if within == self._within else (f"WATCHDOG_USEC={round(within * 1e6)}",)
            self._send(*allowed, "WATCHDOG=1")
        self._within = within

    def ready(self, micro_batch: float) -> None:
        """The first step is done; its micro-batches took so many seconds each. A watchdog that is too short for this
        model on this machine is made longer."""
        self._is_ready = True
        if self._watchdog:
            self._watchdog = max(self._watchdog, LEEWAY * micro_batch)
        self._send("READY=1")
        self.alive()

    def watch(self, stop: StopFlag) -> None:
        """From now on a stop that `stop` says was asked for gets the time that it needs, until the run is overdue."""
        if self._socket is not None:
            self._thread = threading.Thread(target=self._extend, args=(stop,), name="notify", daemon=True)
            self._thread.start()

    def _extend(self, stop: StopFlag) -> None:
        said = False
        while not self._over.wait(EXTENDS_EVERY):
            if stop and not said:
                said = True
                self._say_end()
                self.status(f"{stop.name}: saves and stops")
            if stop and time.monotonic() < self._due:
                self._send(f"EXTEND_TIMEOUT_USEC={round(EXTENSION * 1e6)}")

    def _say_end(self) -> None:
        # A service that ends well before it was ready would count as failed, and be started again. In two messages:
        # of one, systemd takes the last such word alone.
        self._send("READY=1")
        self._send("STOPPING=1")

    def __enter__(self) -> "Supervisor":
        self._send(f"EXTEND_TIMEOUT_USEC={round(LONG * 1e6)}", "STATUS=starts")
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._over.set()
        if self._thread is not None:
            self._thread.join()
        if isinstance(error, LlmtrainError):
            self.status(str(error))
        if error is None or isinstance(error, StopRequested | KeyboardInterrupt):
            self._say_end()
        if self._socket is not None:
            self._socket.close()
