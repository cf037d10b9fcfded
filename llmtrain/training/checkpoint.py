"""A checkpoint: everything a run goes on from, in a folder that exists whole or not at all.

    RUN/checkpoints/step-00001000/model.safetensors      FP32 masters, by parameter name
                                  optimizer.safetensors  its moments: exp_avg.NAME, exp_avg_sq.NAME, momentum.NAME
                                  ema.safetensors        an average of the weights, where one is kept
                                  state.json             position, counts, configuration, versions
                                  MANIFEST.json          size and sha256 of each file, pieces of each tensor; sealed

Ranks that hold parts of the model write `model-00002-of-00004.safetensors` and the like, see `pieces`. A save writes
into `step-N.partial` and renames it; the manifest is written last. A reader trusts only what verifies: a damaged newest
checkpoint is set aside as `*.corrupt` and the one before it is used. Nothing else in the folder is looked at.
"""

import math
import os
import re
import stat
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor

from llmtrain.model.config import ModelConfig
from llmtrain.model.transformer import Transformer
from llmtrain.storage import atomic
from llmtrain.storage.disk import require_room
from llmtrain.storage.errors import (
    BadData,
    ConfigMismatch,
    Diverged,
    InputMissing,
    LlmtrainError,
    StorageFailure,
    read_error,
    write_error,
)
from llmtrain.storage.manifest import read_json, read_sealed, seal, sha256_file
from llmtrain.training import pieces
from llmtrain.training.flat import FlatParameters, Stretch
from llmtrain.training.optimizer import AdamW
from llmtrain.training.pieces import EMA, MODEL, OPTIMIZER
from llmtrain.training.snapshot import Snapshot, WeightsAlone
from llmtrain.training.step import COMPUTE_DTYPES
from llmtrain.training.together import Together

__all__ = ["EMA", "MANIFEST", "MODEL", "OPTIMIZER", "STATE"]

Weights = Literal["last", "ema"]
FORMAT = 1
STATE, MANIFEST = "state.json", "MANIFEST.json"
STEP_NAME = re.compile(r"step-(\d{8,})")
BESIDE_TENSORS = 1 << 20
"""Bytes that are asked for beyond those of the tensors: headers, state.json, the manifest."""


def folder_of(run_dir: Path, step: int) -> Path:
    return run_dir / "checkpoints" / f"step-{step:08d}"


def list_steps(run_dir: Path) -> list[int]:
    """Steps that have a folder under their final name, newest first. Other names are nobody's business. Raises as
    `_entries_of`."""
    matches = (STEP_NAME.fullmatch(entry.name) for entry in _entries_of(run_dir / "checkpoints") if entry.is_dir())
    steps = {int(match[1]): match.string for match in matches if match}
    return sorted((step for step, name in steps.items() if folder_of(run_dir, step).name == name), reverse=True)


def _entries_of(folder: Path) -> list[Path]:
    """What is in a folder; empty where there is none. Raises InputMissing where it may not be seen, StorageFailure."""
    try:
        return list(folder.iterdir()) if folder.is_dir() else []
    except OSError as error:
        raise read_error(error, folder) from error


def not_finite(large: Mapping[str, Stretch]) -> str | None:
    """The name of the first buffer that holds a NaN or an infinity."""
    # A norm makes no copy as isfinite would, and keeps NaN.
    filled = ((name, one.buffer) for name, one in large.items() if len(one.buffer))  # a head by itself has no momentum
    norms = ((name, float(torch.linalg.vector_norm(buffer, math.inf))) for name, buffer in filled)
    return next((name for name, norm in norms if not math.isfinite(norm)), None)


def save(
    run_dir: Path,
    step: int,
    snapshot: Snapshot | WeightsAlone,
    state: dict[str, Any],
    together: Together | None = None,
) -> Path:
    """Writes the checkpoint of `step`, of which `snapshot` has taken a copy, and returns its folder.

    `state` is what state.json holds beside the optimizer's counts. together: the ranks that write it, each what it has;
    all return when it is there. Raises, on all, Diverged where a weight or moment is not finite, CannotCreate and
    StorageFailure; the checkpoints that were there stay as they are.
    """
    together = together or Together()
    snapshot.wait()
    final = folder_of(run_dir, step)
    work = final.with_name(final.name + ".partial")

    def check() -> int:
        if name := not_finite(snapshot.large):
            before = next((f"; the checkpoint of step {s} is from before" for s in list_steps(run_dir) if s < step), "")
            raise Diverged(
                f"after step {step} a {name} is not finite: lower --learning-rate or raise --warmup-steps and start in "
                f"another --run-dir{before}"
            )
        return pieces.bytes_of(snapshot.flat, snapshot.large)

    def write() -> dict[str, Any]:
        with _writing(work):
            return pieces.write(work, snapshot.flat, snapshot.large, together.index, together.count, step)

    needed = together.each(check)
    together.by_first(lambda: _make_folder(run_dir, work, sum(needed)))
    try:
        written = together.each(write)
        together.by_first(lambda: _publish(work, final, step, written, {**state, "optimizer": snapshot.counts()}))
    except BaseException:
        if together.first:  # all have said by now how it went
            with suppress(LlmtrainError):  # the first failure is the one to tell; what stays is cleared by the next
                atomic.remove_tree(work)
        raise
    return final


@contextmanager
def _writing(path: Path) -> Iterator[None]:
    """In the block, what the system refuses becomes ours."""
    try:
        yield
    except OSError as error:
        raise write_error(error, path) from error


def _make_folder(run_dir: Path, work: Path, needed: int) -> None:
    """The empty folder of a save in work, where there is room for so many bytes of tensors."""
    with suppress(LlmtrainError):  # of an earlier save whose disk took no removal either
        clear_leftovers(run_dir)
    with _writing(work):
        work.parent.mkdir(exist_ok=True)
        atomic.remove_tree(work)
        require_room(work.parent, needed + BESIDE_TENSORS, "a checkpoint")
        work.mkdir()


def _publish(work: Path, final: Path, step: int, written: list[dict[str, Any]], state: dict[str, Any]) -> None:
    """Writes state.json and the manifest of what all have written, and gives the folder its name."""
    of_all = pieces.merged(written)
    with _writing(work):
        atomic.write_json(work / STATE, {"format": FORMAT, "step": step, **state})
        of_state = {"bytes": (work / STATE).stat().st_size, "sha256": sha256_file(work / STATE)}
        manifest = {"format": FORMAT, "step": step, "files": {**of_all["files"], STATE: of_state}}
        atomic.write_json(work / MANIFEST, seal({**manifest, "tensors": of_all["tensors"]}))
        atomic.remove_tree(final)  # a damaged one of this step, or it would have been resumed from
        atomic.publish_folder(work, final)


def clear_leftovers(run_dir: Path) -> None:
    """Removes what killed and failed saves and removals left. Only for the holder of the run's lock."""
    folder = run_dir / "checkpoints"
    for entry in _entries_of(folder):
        if re.fullmatch(STEP_NAME.pattern + r"\.partial", entry.name):
            atomic.remove_tree(entry)
    atomic.remove_trash(folder)


def rotate(
    run_dir: Path, keep: int, keep_every: int, sound: dict[int, bool], trusted: int | None = None
) -> list[str]:
    """Removes all but the newest `keep` sound checkpoints, those whose step `keep_every` divides (0: none) and the
    newest of step `trusted` or before. One that is not sound is never counted. Returns what is wrong with those that
    are not, each once.

    `sound` remembers, for as long as a process lives, which steps' checkpoints are: those that it wrote or loaded, and
    by this function every other that had to be counted, which is read and hashed once."""
    said = []
    counted = 0
    steps = list_steps(run_dir)
    verified = next((step for step in steps if trusted is not None and step <= trusted), None)
    for step in steps:
        folder = folder_of(run_dir, step)
        if counted < keep:
            try:
                if sound.get(step):
                    read_manifest(folder)  # somebody may have been at it since
                elif step not in sound:
                    _check_sound(folder, step)
                    sound[step] = True
            except LlmtrainError as error:
                sound[step] = False
                said.append(f"{error}; it is not counted as a checkpoint")
            counted += sound[step]
        elif step != verified and not (keep_every and step % keep_every == 0) and _manifest_holds(folder):
            atomic.remove_tree(folder)
    return said


def _check_sound(folder: Path, step: int) -> None:
    """Raises BadData where the folder is not a checkpoint of `step` with every byte as it was written."""
    if (of := read_manifest(folder)["step"]) != step:
        raise BadData(f"{folder}: is a copy of the checkpoint of step {of}: give it another name")
    for _ in verify(folder):
        pass


def read_manifest(folder: Path) -> dict[str, Any]:
    """MANIFEST.json, whole and fitting the sizes of the files beside it. Raises BadData, ConfigMismatch where it is of
    another format, InputMissing where something may not be read, StorageFailure."""
    if _size(folder / MANIFEST) is None:
        raise BadData(f"{folder}: has no {MANIFEST}: it is no whole checkpoint")
    manifest = read_sealed(folder / MANIFEST)
    if manifest.get("format") != FORMAT:
        raise ConfigMismatch(f"{folder}: has format {manifest.get('format')}, this llmtrain reads {FORMAT}: update it")
    for name, entry in manifest["files"].items():
        size = _size(folder / name)
        if size != entry["bytes"]:
            raise BadData(
                f"{folder / name}: holds {'no' if size is None else size} bytes, its manifest says {entry['bytes']}: "
                "use another checkpoint"
            )
    return manifest


def _size(path: Path) -> int | None:
    """Bytes of a file; None where there is none. Raises InputMissing where it may not be seen, StorageFailure."""
    try:
        of_path = path.stat()
        return of_path.st_size if stat.S_ISREG(of_path.st_mode) else None
    except FileNotFoundError:
        return None
    except OSError as error:
        raise read_error(error, path) from error


def _manifest_holds(folder: Path) -> bool:
    try:
        read_manifest(folder)
    except LlmtrainError:
        return False
    return True


def verify(folder: Path) -> Iterator[tuple[str, int]]:
    """Hashes every file of a checkpoint against its manifest, yielding (name, bytes) of each. Raises BadData."""
    for name, entry in read_manifest(folder)["files"].items():
        if sha256_file(folder / name) != entry["sha256"]:
            raise BadData(f"{folder / name}: is damaged (its sha256 differs): use another checkpoint")
        yield name, entry["bytes"]


def read_state(folder: Path) -> dict[str, Any]:
    """state.json of a checkpoint whose manifest holds. Raises BadData."""
    return _read_state(folder, read_manifest(folder))


def _read_state(folder: Path, manifest: dict[str, Any]) -> dict[str, Any]:
    if sha256_file(folder / STATE) != manifest["files"][STATE]["sha256"]:
        raise BadData(f"{folder / STATE}: is damaged (its sha256 differs): use another checkpoint")
    return read_json(folder / STATE)


def _on_host(buffer: Tensor) -> Tensor:
    """The buffer itself, or where it is on a card one on the CPU to read into."""
    return buffer if buffer.device.type == "cpu" else torch.zeros_like(buffer, device="cpu")


def load(
    folder: Path,
    flat: FlatParameters,
    optimizer: AdamW | None = None,
    check: Callable[[dict[str, Any]], None] = lambda state: None,
    weights: Weights = "last",
) -> dict[str, Any]:
    """Fills the masters (and the moments), or the rows of them that are here, from a checkpoint, rebuilds the narrow
    copies and returns state.json, which `check` may refuse before anything is read. weights "ema": the masters are
    filled from the average, for a use without the optimizer. An average that the optimizer keeps and the checkpoint
    lacks begins at the weights.

    Raises BadData where anything does not verify; the buffers' contents are then undefined.
    """
    manifest = read_manifest(folder)
    state = _read_state(folder, manifest)
    if optimizer is not None and pieces.kind_of(OPTIMIZER) not in manifest["tensors"]:
        raise ConfigMismatch(f"{folder}: holds weights without an optimizer: begin a run with them by --init-from")
    check(state)
    kind = "ema" if weights == "ema" else "weight"
    has_average = pieces.kind_of(EMA) in manifest["tensors"]
    if kind == "ema" and not has_average:
        raise InputMissing(f"{folder}: holds no average of the weights: train with --ema-decay, or use --weights last")
    large = {kind: Stretch(0, flat.master)} if optimizer is None else dict(optimizer.large)
    if not has_average:
        large.pop("ema", None)
    staged = {kind: Stretch(one.begin, _on_host(one.buffer)) for kind, one in large.items()}
    pieces.read(folder, manifest, flat, staged)
    for kind, stretch in staged.items():
        large[kind].buffer.copy_(stretch.buffer)
    if optimizer is not None:
        optimizer.set_counts(state["optimizer"])
        if "ema" not in large:
            optimizer.begin_average()
    flat.refresh_narrow()
    return state


def restore_newest(
    run_dir: Path,
    flat: FlatParameters,
    optimizer: AdamW,
    check: Callable[[dict[str, Any]], None] = lambda state: None,
    together: Together | None = None,
) -> tuple[dict[str, Any] | None, list[str]]:
    """Loads the newest checkpoint that is sound: (its state, or None where there is none; what had to be said).

    Newer ones that are not are renamed to `*.corrupt`, so that they are neither counted nor met again. What `check`
    raises of the state of a sound one ends it: a checkpoint of another run is no damaged one of this. Raises BadData
    where there are several and none is sound, those set aside before counted, and leaves them in their place: that is
    more than a crash does.
    together: ranks that load each its own part of one checkpoint, which is sound where all say so.
    """
    together = together or Together()
    damaged: dict[Path, LlmtrainError] = {}
    states: list[dict[str, Any]] = []

    def attempt(folder: Path, step: int) -> None:
        if (of := read_manifest(folder)["step"]) != step:
            raise BadData(f"{folder}: is a copy of the checkpoint of step {of}")
        state = load(folder, flat, optimizer, check)
        if name := not_finite(optimizer.large):
            raise BadData(f"{folder}: holds a {name} that is not finite")
        states.append(state)

    for step in together.by_first(lambda: list_steps(run_dir)):
        folder = folder_of(run_dir, step)
        try:
            together.each(lambda folder=folder, step=step: attempt(folder, step))  # type: ignore[misc]
            break
        except (BadData, StorageFailure) as error:  # what the disk does not give back is as lost as what it alters
            damaged[folder] = error
            states.clear()
    aside = together.by_first(lambda: len(list((run_dir / "checkpoints").glob("step-*.corrupt"))))
    if damaged and not states and len(damaged) + aside > 1:
        first = next(iter(damaged.values()))
        raise BadData(
            f"{first} (none of the {len(damaged) + aside} checkpoints is sound): see to the disk, bring one back, or "
            f"remove {run_dir / 'checkpoints'} to begin anew"
        )

    def set_aside() -> list[str]:
        return [f"{error}; set aside as {_set_aside(folder).name}" for folder, error in damaged.items()]

    return (states[0] if states else None), together.by_first(set_aside)


def _set_aside(folder: Path) -> Path:
    aside = folder.with_name(folder.name + ".corrupt")
    atomic.remove_tree(aside)
    try:
        os.rename(folder, aside)
    except OSError as error:
        raise write_error(error, folder, "set aside") from error
    atomic.fsync_folder(folder.parent)
    return aside


def newest_first(run_dir: Path) -> Iterator[int]:
    """The steps of `list_steps`, each once. They are listed anew each time: while one is read, a run that goes on may
    remove all that there were and have made others. Raises as `list_steps`."""
    seen: set[int] = set()
    while left := [step for step in list_steps(run_dir) if step not in seen]:
        seen.add(left[0])
        yield left[0]


def newest_whole(run_dir: Path) -> Path | None:
    """The folder of the newest checkpoint whose manifest and sizes hold."""
    folders = (folder_of(run_dir, step) for step in newest_first(run_dir))
    return next((folder for folder in folders if _manifest_holds(folder)), None)


def load_model(
    folder: Path, device: torch.device | str = "cpu", precision: str = "fp32", weights: Weights = "last"
) -> tuple[Transformer, ModelConfig, dict[str, Any]]:
    """The model of a checkpoint for inference, its configuration and state.json. Raises InputMissing, BadData."""
    if not folder.is_dir():
        raise InputMissing(f"{folder}: no such checkpoint: check the path")
    state = read_state(folder)
    try:
        config = ModelConfig(**state["config"]["model"])
    except (KeyError, TypeError, ValueError) as error:
        raise BadData(f"{folder / STATE}: describes a model that this llmtrain does not know ({error})") from None
    model = Transformer(config, device="meta")
    flat = FlatParameters(model, device, COMPUTE_DTYPES[precision], with_gradients=False)
    load(folder, flat, weights=weights)
    return model, config, state
