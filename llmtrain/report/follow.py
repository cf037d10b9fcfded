"""A run followed by its files alone: the lines that are new, and whether its process is still there."""

import json
import os
import socket
from contextlib import suppress
from io import FileIO
from pathlib import Path
from typing import Any

from llmtrain.report.state import FAILED, FINISHED, GONE, RUNNING, STARTING, STOPPED, UNKNOWN, RunState
from llmtrain.storage import lock
from llmtrain.storage.atomic import PathLike
from llmtrain.storage.errors import BadData, InputMissing, LlmtrainError
from llmtrain.storage.manifest import read_json
from llmtrain.storage.reading import open_file


class Lines:
    """The lines of a journal that others append to, and rewrite where a run goes on from a checkpoint."""

    def __init__(self, path: PathLike) -> None:
        self.path = path
        self._file: FileIO | None = None
        self._at = 0
        """Behind the last line that was read."""

    def new(self) -> tuple[bool, list[dict[str, Any]]]:
        """Whether the file is another one than at the last call, so that all that was read counts no more; and the
        lines since then. Without a file there are none; what is no JSON object is skipped. Raises StorageFailure,
        BadData."""
        anew = self._file is not None and self._is_another()
        if anew:
            self.close()
        if self._file is None:
            try:
                self._file, self._at = open_file(self.path), 0
            except InputMissing:
                return anew, []
        os.lseek(self._file.fileno(), self._at, os.SEEK_SET)
        data = self._file.readall() or b""
        whole = data.rfind(b"\n") + 1  # a line may be half written
        self._at += whole
        return anew, [line for raw in data[:whole].splitlines() if (line := _object(raw)) is not None]

    def _is_another(self) -> bool:
        assert self._file is not None
        own = os.fstat(self._file.fileno())
        try:
            return not os.path.samestat(own, os.stat(self.path)) or own.st_size < self._at
        except OSError:
            return True

    def close(self) -> None:
        if self._file is not None:
            self._file.close()
            self._file = None


def _object(raw: bytes) -> dict[str, Any] | None:
    with suppress(ValueError, RecursionError):
        if isinstance(line := json.loads(raw), dict):
            return line
    return None


def require_run(run_dir: Path) -> None:
    """Raises InputMissing, BadData where there is no run directory."""
    if not os.path.isdir(run_dir):  # which is no error where the name is too long
        raise InputMissing(f"{run_dir}: no such folder: name a run directory")
    if not any((run_dir / name).exists() for name in ("lock", "config.toml", "metrics.jsonl", "status.json")):
        raise BadData(f"{run_dir}: is no run directory (no config.toml, no metrics.jsonl): name another")


def look(run_dir: Path, state: RunState) -> None:
    """Brings `state` up to what status.json and the lock of the run directory say."""
    try:
        status = read_json(run_dir / "status.json")
    except LlmtrainError:  # there is none yet, or none any more
        status = {}
    held = lock.holder(run_dir / "lock")
    dead = held is not None and lock.is_dead(held)
    state.state, state.reason, state.process = _judged(status, held, dead)


def _judged(status: dict[str, Any], held: dict[str, Any] | None, dead: bool) -> tuple[str, str, str]:
    """(state, reason, process). held: who the lock names; dead: whether that process is known to be no more."""
    said, reason = status.get("state"), str(status.get("reason", ""))
    lives = held is not None and not dead
    process = _process(held) if lives else ""
    if said == RUNNING and lives:
        return RUNNING, "", process
    if said == RUNNING:
        pid = held["pid"] if held is not None else status.get("pid")
        return GONE, f"process {pid} is gone, so it was killed or the machine went down: --resume goes on", ""
    if said not in (FINISHED, STOPPED, FAILED):
        return (STARTING, "", process) if lives else (UNKNOWN, "nothing is known of it: no status.json", "")
    if held is not None and lives and held["pid"] != status.get("pid"):
        return STARTING, "", process  # another process has begun to go on with it
    return said, reason, ""


def _process(held: dict[str, Any] | None) -> str:
    if held is None:
        return ""
    return f"process {held['pid']}" + (f" on {held['host']}" if held["host"] != socket.gethostname() else "")
