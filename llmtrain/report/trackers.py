"""TensorBoard and Weights & Biases beside a run: for each a process of its own that follows RUN/metrics.jsonl.

So nothing they do can hold up the run or end it: importing, a network that hangs, a fault in their code. A process ends
when the run's does, however that ends, after it has handed on the last line. `report/tracking.py` is what it runs.
"""

import importlib.util
import os
import subprocess
import time
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

from llmtrain.storage.errors import UsageError
from llmtrain.storage.processes import python_module

GRACE = 10.0
"""Seconds that the end of a run waits for its last lines to be handed on."""
LOG = "trackers.log"
"""In the run directory: what the process and the libraries print."""


def require_installed(tensorboard: bool, wandb: str) -> None:
    """Raises UsageError where a package that was asked for is missing. Imports none."""
    for asked, name in ((tensorboard, "tensorboard"), (bool(wandb), "wandb")):
        if asked and importlib.util.find_spec(name) is None:
            raise UsageError(f"--{name}: {name} is missing: pip install 'llmtrain[{name}]'")


class Tracker:
    """One of the processes, from the run's side."""

    def __init__(self, run_dir: Path, name: str, options: Sequence[str]) -> None:
        """Starts it. Raises OSError."""
        self.name = name
        self._unread = b""
        command, environment = python_module("llmtrain.report.tracking", str(run_dir.absolute()), name, *options)
        with open(run_dir / LOG, "ab") as log:
            self._process = subprocess.Popen(
                command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=log, env=environment,
                start_new_session=True,
            )  # fmt: skip
        assert self._process.stdin is not None and self._process.stdout is not None
        self._stdin, self._stdout = self._process.stdin, self._process.stdout
        os.set_blocking(self._stdout.fileno(), False)

    def said(self) -> list[str]:
        """What the process has said since the last call. Waits for nothing."""
        with suppress(OSError):
            while data := os.read(self._stdout.fileno(), 65536):
                self._unread += data
        *lines, self._unread = self._unread.split(b"\n")
        return [line.decode(errors="replace") for line in lines]

    def ended(self) -> bool:
        return self._process.poll() is not None

    def fault(self) -> str:
        """How a process that has ended did so, "" where all was well."""
        code = self._process.returncode
        return f"nothing more is sent to {self.name}: its process ended with {code}, see {LOG}" if code else ""

    def tell_the_end(self) -> None:
        with suppress(OSError):
            self._stdin.close()

    def let_go(self) -> str:
        """Leaves it to itself."""
        self._process.returncode = 0  # no complaint that it still runs
        return f"the last lines are still on their way to {self.name} (process {self._process.pid}, see {LOG})"


class Trackers:
    """Those that a run asked for."""

    def __init__(
        self,
        run_dir: Path | None = None,
        attempt: int = 1,
        at_step: int = 0,
        tensorboard: bool = False,
        wandb: str = "",
    ) -> None:
        """Starts them. Where lines of earlier attempts have been handed on, those of `attempt`, which begins at
        `at_step`, follow."""
        self._running: list[Tracker] = []
        self._failures: list[str] = []
        asked: dict[str, list[str]] = {"tensorboard": []} if tensorboard else {}
        asked |= {"wandb": [f"--project={wandb}"]} if wandb else {}
        for name, options in asked.items():
            assert run_dir is not None
            try:
                self._running.append(Tracker(run_dir, name, [*options, f"--attempt={attempt}", f"--step={at_step}"]))
            except OSError as error:
                self._failures.append(f"nothing is sent to {name}: {error}")

    def trouble(self) -> list[str]:
        """What has gone wrong since the last call, a line each. Waits for nothing."""
        found, self._failures = self._failures, []
        for tracker in list(self._running):
            ended = tracker.ended()  # before its last words are read
            found += tracker.said()
            if ended:
                self._running.remove(tracker)
                found += filter(None, [tracker.fault()])
        return found

    def close(self) -> list[str]:
        """Tells them that the run is over and waits, for GRACE seconds at most, until they have done their part.
        Returns what went wrong."""
        for tracker in self._running:
            tracker.tell_the_end()
        end = time.monotonic() + GRACE
        found = self.trouble()
        while self._running and time.monotonic() < end:
            time.sleep(0.02)
            found += self.trouble()
        found += [tracker.let_go() for tracker in self._running]
        self._running = []
        return found
