"""What there is to know of a run from its directory, its curves aside."""

import itertools
from collections import deque
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from math import prod
from pathlib import Path
from typing import Any

from llmtrain.report.curves import read_settings
from llmtrain.report.follow import look
from llmtrain.report.history import History, read_history
from llmtrain.report.state import RunState
from llmtrain.storage.errors import LlmtrainError
from llmtrain.storage.journal import JsonLines
from llmtrain.storage.manifest import read_json

MOST_SAMPLES = 12
"""Of a run, the newest."""
SAMPLE = 4000
"""Characters of one."""


@dataclass(frozen=True)
class Run:
    """A run directory that was read."""

    name: str
    path: Path
    history: History
    settings: dict[str, Any]
    """"section.name" -> value."""
    state: str
    """As `report/state.py` lists them."""
    reason: str
    environments: list[dict[str, Any]]
    """Of each attempt: versions, device and the like."""
    samples: list[dict[str, Any]] = field(default_factory=list)
    """`step`, `prompt`, `text` and `how`."""
    total_steps: int | None = None
    parameters: int | None = None
    checkpoint_bytes: int | None = None


def read_run(run_dir: Path, name: str) -> Run:
    """Whatever there is; only metrics.jsonl has to be. Raises as `read_history`."""
    history = read_history(run_dir)
    settings: dict[str, Any] = {}
    with suppress(LlmtrainError):
        settings = read_settings(run_dir)
    state = RunState(name)
    look(run_dir, state)
    starts = history.events["start"].kept if "start" in history.events else []
    environments = [one["environment"] for one in starts if isinstance(one.get("environment"), dict)]
    parameters, size = newest_checkpoint(run_dir)

    def said(name: str) -> int | None:
        return next((one[name] for one in reversed(starts) if type(one.get(name)) is int), None)

    total = said("total_steps") or settings.get("schedule.total_steps")
    return Run(
        name, run_dir, history, settings, state.state, state.reason, environments, read_samples(run_dir),
        total if type(total) is int else None, said("parameters") or parameters, size,
    )  # fmt: skip


def newest_checkpoint(run_dir: Path) -> tuple[int | None, int | None]:
    """(parameters, bytes) of the newest checkpoint whose manifest can be read."""
    for path in sorted(run_dir.glob("checkpoints/step-????????/MANIFEST.json"), reverse=True)[:3]:
        with suppress(LlmtrainError, KeyError, TypeError, AttributeError):
            manifest = read_json(path)
            pieces = itertools.chain.from_iterable(manifest["tensors"]["model"].values())
            return sum(prod(piece["shape"]) for piece in pieces), sum(f["bytes"] for f in manifest["files"].values())
    return None, None


def read_samples(run_dir: Path) -> list[dict[str, Any]]:
    """The newest texts of RUN/samples.jsonl, which `generate --keep` writes, newest first."""
    path = run_dir / "samples.jsonl"
    if not path.exists():
        return []
    newest: deque[dict[str, Any]] = deque(maxlen=MOST_SAMPLES)
    with suppress(LlmtrainError):  # a folder of this name, say
        for line in JsonLines.read(path):
            if type(line.get("step")) is int and isinstance(line.get("text"), str):
                texts = {name: str(line.get(name) or "")[:SAMPLE] for name in ("prompt", "text", "how")}
                newest.append({"step": line["step"], **texts})
    return list(reversed(newest))


def names_of(run_dirs: Sequence[Path]) -> list[str]:
    """What tells them apart: the last part of each path, or the whole path where two end alike."""
    last = [path.absolute().name for path in run_dirs]
    return last if len(set(last)) == len(last) else [str(path) for path in run_dirs]
