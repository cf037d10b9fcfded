"""The parent's end of an arm's process: start it, ask it, end it."""

import json
import os
import select
import subprocess
import sys
import tempfile
import time
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from llmtrain.benchmark.config import Shape

ROOT = Path(__file__).resolve().parents[2]
PATIENCE = 300.0
"""Seconds that one answer of an arm may take."""


class ArmEnded(Exception):
    """An arm's process ended or fell silent; str() says how."""


@dataclass(frozen=True)
class Settings:
    """What all arms of a run share."""

    seconds: float
    """Length of a burst."""
    rounds: int
    device: str
    precision: str
    caches: Path
    """Compile caches, empty when the run begins, so that the first start of an arm is a cold one."""


class ArmProcess:
    """A running peer_arm.py, of the source tree `root`, which builds its model and takes its first steps at once."""

    def __init__(self, arm: str, shape: Shape, steps: int, settings: Settings, root: Path = ROOT) -> None:
        request = {
            "arm": arm,
            "shape": asdict(shape),
            "steps": steps,
            "seconds": settings.seconds,
            "device": settings.device,
            "precision": settings.precision,
            "spawned": time.time(),
        }
        paths = [str(root), *filter(None, [os.environ.get("PYTHONPATH")])]
        caches = {name: str(settings.caches / name) for name in ("TORCHINDUCTOR_CACHE_DIR", "TRITON_CACHE_DIR")}
        # Several arms share a few cores there, and threads that spin for one another would be all that is measured.
        threads = {"OMP_NUM_THREADS": "1"} if settings.device == "cpu" else {}
        self.errors = tempfile.TemporaryFile("w+")
        self.process = subprocess.Popen(
            [sys.executable, str(root / "scripts/bench/peer_arm.py"), json.dumps(request)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self.errors,
            text=True,
            env=os.environ | caches | threads | {"PYTHONPATH": os.pathsep.join(paths)},
        )

    def tell(self, line: str) -> None:
        assert self.process.stdin is not None
        with suppress(BrokenPipeError):  # the answer says why
            self.process.stdin.write(line + "\n")
            self.process.stdin.flush()

    def answer(self) -> dict[str, Any]:
        """The next answer. Raises ArmEnded, with the last line of its stderr, where there is none."""
        assert self.process.stdout is not None
        in_time = select.select([self.process.stdout], [], [], PATIENCE)[0]
        line = self.process.stdout.readline() if in_time else ""
        if line:
            return json.loads(line)
        self.stop()
        self.errors.seek(0)
        last = [text.strip() for text in self.errors if text.strip()][-1:]
        how = f"exit code {self.process.returncode}" if in_time else f"no answer in {PATIENCE:g} s"
        raise ArmEnded(": ".join([how, *last]))

    def stop(self) -> None:
        """End the process: kindly, then at once."""
        assert self.process.stdin is not None
        with suppress(BrokenPipeError, ValueError):
            self.process.stdin.write("quit\n")
            self.process.stdin.close()
        try:
            self.process.wait(timeout=10)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()
