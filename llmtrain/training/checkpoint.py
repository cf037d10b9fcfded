"""A checkpoint: everything a run goes on from, in a folder that exists whole or not at all.

    RUN/checkpoints/step-00001000/model.safetensors      FP32 masters, by parameter name
                                  optimizer.safetensors  its moments: exp_avg.NAME, exp_avg_sq.NAME, momentum.NAME
                                  ema.safetensors        an average of the weights, where one is kept
                                  state.json             position, counts, configuration, versions
                                  MANIFEST.json          size and sha256 of each file, pieces of each tensor; sealed

A save writes into `step-N.partial` and renames it; the manifest is written last. A reader trusts only what verifies:
a damaged newest checkpoint is set aside as `*.corrupt` and the one before it is used. Nothing else in the folder is
looked at.
"""

import math
import os
import re
import stat
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor

from llmtrain.model.config import ModelConfig
from llmtrain.model.transformer import Transformer
from llmtrain.storage import atomic, tensors
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
from llmtrain.training.flat import FlatParameters, Stretch
from llmtrain.training.optimizer import AdamW
from llmtrain.training.snapshot import Snapshot
from llmtrain.training.step import COMPUTE_DTYPES

Weights = Literal["last", "ema"]
FORMAT = 1
MODEL, OPTIMIZER, STATE, MANIFEST = "model.safetensors", "optimizer.safetensors", "state.json", "MANIFEST.json"
EMA = "ema.safetensors"
STEP_NAME = re.compile(r"step-(\d{8,})")
DTYPE_NAMES = {torch.float32: "F32", torch.float64: "F64"}
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


def _bytes(tensor: Tensor) -> memoryview:
    """The memory of a contiguous CPU tensor."""
    return tensor.detach().view(-1).view(torch.uint8).numpy().data


def _by_file(flat: FlatParameters, large: Mapping[str, Stretch]) -> dict[str, dict[str, Tensor]]:
    """File -> name in it -> part of one of the buffers, which are on the CPU; nothing is copied."""
    files: dict[str, dict[str, Tensor]] = {}
    for kind, stretch in large.items():
        file, prefix = {"weight": (MODEL, ""), "ema": (EMA, "")}.get(kind, (OPTIMIZER, f"{kind}."))
        files.setdefault(file, {}).update({prefix + name: view for name, view in flat.views(stretch).items()})
    return files


def not_finite(large: Mapping[str, Stretch]) -> str | None:
    """The name of the first buffer that holds a NaN or an infinity."""
    # A norm makes no copy as isfinite would, and keeps NaN.
    norms = ((name, float(torch.linalg.vector_norm(one.buffer, math.inf))) for name, one in large.items())
    return next((name for name, norm in norms if not math.isfinite(norm)), None)


def save(run_dir: Path, step: int, snapshot: Snapshot, state: dict[str, Any]) -> Path:
    """Writes the checkpoint of `step`, of which `snapshot` has taken a copy, and returns its folder.

    `state` is what state.json holds beside the optimizer's counts. Raises Diverged where a weight or moment is not
    finite, CannotCreate and StorageFailure; the checkpoints that were there stay as they are.
    """
    snapshot.wait()
    if name := not_finite(snapshot.large):
        before = next((f"; the checkpoint of step {s} is from before" for s in list_steps(run_dir) if s < step), "")
        raise Diverged(
            f"after step {step} a {name} is not finite: lower --learning-rate or raise --warmup-steps and start in "
            f"another --run-dir{before}"
        )
    entries = {
        file: {
            name: tensors.TensorEntry(DTYPE_NAMES[view.dtype], tuple(view.shape), _bytes(view))
            for name, view in views.items()
        }
        for file, views in _by_file(snapshot.flat, snapshot.large).items()
    }
    final = folder_of(run_dir, step)
    work = final.with_name(final.name + ".partial")
    with suppress(LlmtrainError):  # of an earlier save whose disk took no removal either
        clear_leftovers(run_dir)
    try:
        final.parent.mkdir(exist_ok=True)
        atomic.remove_tree(work)
        needed = sum(memoryview(entry.data).nbytes for of_file in entries.values() for entry in of_file.values())
        require_room(final.parent, needed + BESIDE_TENSORS, "a checkpoint")
        work.mkdir()
    except OSError as error:
        raise write_error(error, work) from error
    try:
        files: dict[str, dict[str, Any]] = {}
        pieces: dict[str, dict[str, Any]] = {}
        metadata = {"format": "pt", "step": str(step)}
        # Side by side: sha256 is slower than the disk, and one file's hash is one core's work.
        with ThreadPoolExecutor(len(entries)) as pool:
            written = pool.map(lambda file: tensors.write(work / file, entries[file], metadata), entries)
            sizes = dict(zip(entries, written, strict=True))
        for file, of_file in entries.items():
            files[file] = {"bytes": sizes[file][0], "sha256": sizes[file][1]}
            pieces[file.removesuffix(".safetensors")] = {
                name: [{"file": file, "offsets": [0] * len(entry.shape), "shape": list(entry.shape)}]
                for name, entry in of_file.items()
            }
        atomic.write_json(work / STATE, {"format": FORMAT, "step": step, **state, "optimizer": snapshot.counts()})
        files[STATE] = {"bytes": (work / STATE).stat().st_size, "sha256": sha256_file(work / STATE)}
        manifest = {"format": FORMAT, "step": step, "files": files, "tensors": pieces}
        atomic.write_json(work / MANIFEST, seal(manifest))
        atomic.remove_tree(final)  # a damaged one of this step, or it would have been resumed from
        atomic.publish_folder(work, final)
    except BaseException as error:
        with suppress(LlmtrainError):  # the first failure is the one to tell; what stays is cleared by the next save
            atomic.remove_tree(work)
        if isinstance(error, OSError):
            raise write_error(error, work) from error
        raise
    return final


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


def _load_flat(folder: Path, manifest: dict[str, Any], file: str, targets: dict[str, Tensor]) -> None:
    """Reads the tensors of one file into CPU tensors, hashing on the way. Raises BadData."""
    for name, (dtype, shape, _, _) in tensors.read_index(folder / file).items():
        target = targets.get(name)
        if target is None or (dtype, tuple(shape)) != (DTYPE_NAMES[target.dtype], tuple(target.shape)):
            raise BadData(f"{folder / file}: tensor {name} {dtype} {tuple(shape)} is not this model's")
    digest = tensors.read_into(folder / file, {name: _bytes(target) for name, target in targets.items()})
    if digest != manifest["files"][file]["sha256"]:
        raise BadData(f"{folder / file}: is damaged (its sha256 differs): use another checkpoint")


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
    """Fills the masters (and the moments) from a checkpoint, rebuilds the narrow copies and returns state.json, which
    `check` may refuse before anything is read. weights "ema": the masters are filled from the average, for a use
    without the optimizer. An average that the optimizer keeps and the checkpoint lacks begins at the weights.

    Raises BadData where anything does not verify; the buffers' contents are then undefined.
    """
    manifest = read_manifest(folder)
    state = _read_state(folder, manifest)
    check(state)
    kind = "ema" if weights == "ema" else "weight"
    if kind == "ema" and EMA not in manifest["files"]:
        raise InputMissing(f"{folder}: holds no average of the weights: train with --ema-decay, or use --weights last")
    large = {kind: Stretch(0, flat.master)} if optimizer is None else dict(optimizer.large)
    if EMA not in manifest["files"]:
        large.pop("ema", None)
    staged = {kind: Stretch(one.begin, _on_host(one.buffer)) for kind, one in large.items()}
    targets = _by_file(flat, staged)
    with ThreadPoolExecutor(len(targets)) as pool:  # as in `save`
        list(pool.map(lambda file: _load_flat(folder, manifest, file, targets[file]), targets))
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
) -> tuple[dict[str, Any] | None, list[str]]:
    """Loads the newest checkpoint that is sound: (its state, or None where there is none; what had to be said).

    Newer ones that are not are renamed to `*.corrupt`, so that they are neither counted nor met again. What `check`
    raises of the state of a sound one ends it: a checkpoint of another run is no damaged one of this. Raises BadData
    where there are several and none is sound, and leaves them in their place: that is more than a crash does.
    """
    damaged: dict[Path, LlmtrainError] = {}
    state = None
    for step in list_steps(run_dir):
        folder = folder_of(run_dir, step)
        try:
            if (of := read_manifest(folder)["step"]) != step:
                raise BadData(f"{folder}: is a copy of the checkpoint of step {of}")
            state = load(folder, flat, optimizer, check)
            if name := not_finite(optimizer.large):
                raise BadData(f"{folder}: holds a {name} that is not finite")
            break
        except (BadData, StorageFailure) as error:  # what the disk does not give back is as lost as what it alters
            damaged[folder], state = error, None
    if state is None and len(damaged) > 1:
        first = next(iter(damaged.values()))
        raise BadData(
            f"{first} (none of the {len(damaged)} checkpoints is sound): see to the disk, bring one back, or remove "
            f"{run_dir / 'checkpoints'} to begin anew"
        )
    said = [f"{error}; set aside as {_set_aside(folder).name}" for folder, error in damaged.items()]
    return state, said


def _set_aside(folder: Path) -> Path:
    aside = folder.with_name(folder.name + ".corrupt")
    atomic.remove_tree(aside)
    try:
        os.rename(folder, aside)
    except OSError as error:
        raise write_error(error, folder, "set aside") from error
    atomic.fsync_folder(folder.parent)
    return aside


def newest_whole(run_dir: Path) -> Path | None:
    """The folder of the newest checkpoint whose manifest and sizes hold."""
    folders = (folder_of(run_dir, step) for step in list_steps(run_dir))
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
