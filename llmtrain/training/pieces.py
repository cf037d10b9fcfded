"""The tensors of a checkpoint as files: each rank that writes has one of each kind, with the parts that it holds.

    model.safetensors               of one rank
    model-00002-of-00004.safetensors   the second of four's; MANIFEST.json says which rows of which tensors are in it

A part is some rows of a tensor, or all of them. Who reads takes what it wants from whatever files hold it, so a
checkpoint fits any number of ranks and any way to share a model among them.
"""

import os
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from llmtrain.storage import tensors
from llmtrain.storage.errors import BadData
from llmtrain.training.flat import FlatParameters, Stretch

MODEL, OPTIMIZER, EMA = "model.safetensors", "optimizer.safetensors", "ema.safetensors"
DTYPE_NAMES = {torch.float32: "F32", torch.float64: "F64"}
AT_ONCE = 8
"""Files that are read side by side: sha256 is slower than the disk, and one file's hash is one core's work."""

Pieces = dict[str, dict[str, list[dict[str, Any]]]]
"""Kind of file -> name of a tensor -> its pieces: file, offsets and shape. As MANIFEST.json has them."""


def file_name(name: str, index: int, count: int) -> str:
    """The file of writer `index` of `count`."""
    stem, _, suffix = name.partition(".")
    return name if count == 1 else f"{stem}-{index + 1:05d}-of-{count:05d}.{suffix}"


def of_buffer(kind: str) -> tuple[str, str]:
    """The file that holds the tensors of a buffer, and what their names begin with there."""
    return {"weight": (MODEL, ""), "ema": (EMA, "")}.get(kind, (OPTIMIZER, f"{kind}."))


def kind_of(file: str) -> str:
    """The name that the manifest has for files such as this one."""
    return file.removesuffix(".safetensors")


def _bytes(tensor: Tensor) -> memoryview:
    """The memory of a contiguous CPU tensor."""
    return tensor.detach().view(-1).view(torch.uint8).numpy().data


def _own(flat: FlatParameters, large: Mapping[str, Stretch]) -> dict[str, dict[str, tuple[str, Tensor]]]:
    """File -> name in it -> (parameter, view) of what this rank writes."""
    files: dict[str, dict[str, tuple[str, Tensor]]] = {}
    for kind, stretch in large.items():
        file, prefix = of_buffer(kind)
        of_file = files.setdefault(file, {})
        for name, view in flat.views(stretch).items():
            if view.numel() and name not in flat.saved_elsewhere:
                of_file[prefix + name] = name, view
    return {file: of_file for file, of_file in files.items() if of_file}


def bytes_of(flat: FlatParameters, large: Mapping[str, Stretch]) -> int:
    """What `write` will write, headers aside."""
    return sum(view.nbytes for of_file in _own(flat, large).values() for _, view in of_file.values())


def write(
    folder: Path, flat: FlatParameters, large: Mapping[str, Stretch], index: int, count: int, step: int
) -> dict[str, Any]:
    """Writes the files of writer `index` of `count` from buffers on the CPU; on the disk on return. Gives `files` and
    `tensors` as the manifest has them. Raises CannotCreate, StorageFailure."""
    own = _own(flat, large)
    entries = {
        file: {
            name: tensors.TensorEntry(DTYPE_NAMES[view.dtype], tuple(view.shape), _bytes(view))
            for name, (_, view) in of_file.items()
        }
        for file, of_file in own.items()
    }
    metadata = {"format": "pt", "step": str(step)}
    names = {file: file_name(file, index, count) for file in entries}
    files: dict[str, dict[str, Any]] = {}
    found: Pieces = {}
    # Side by side, as sha256 is slower than the disk.
    with ThreadPoolExecutor(max(1, len(entries))) as pool:
        written = pool.map(lambda file: tensors.write(folder / names[file], entries[file], metadata), entries)
        for file, (size, digest) in zip(entries, written, strict=True):
            files[names[file]] = {"bytes": size, "sha256": digest}
    for file, of_file in own.items():
        found[kind_of(file)] = {
            name: [
                {
                    "file": names[file],
                    "offsets": [flat.spans[parameter].row, *[0] * (view.dim() - 1)],
                    "shape": list(view.shape),
                }
            ]
            for name, (parameter, view) in of_file.items()
        }
    return {"files": files, "tensors": found}


def merged(written: list[dict[str, Any]]) -> dict[str, Any]:
    """What all writers gave, as one."""
    files: dict[str, Any] = {}
    found: Pieces = {}
    for one in written:
        files |= one["files"]
        for kind, of_kind in one["tensors"].items():
            for name, pieces in of_kind.items():
                found.setdefault(kind, {}).setdefault(name, []).extend(pieces)
    for of_kind in found.values():
        for pieces in of_kind.values():
            pieces.sort(key=lambda piece: piece["offsets"])
    return {"files": files, "tensors": found}


def read(folder: Path, manifest: dict[str, Any], flat: FlatParameters, large: Mapping[str, Stretch]) -> None:
    """Fills buffers on the CPU with what this rank has of the tensors, hashing each file that it reads. Raises BadData
    where something is missing, damaged or of another shape."""
    wanted: dict[str, dict[str, tuple[int, Tensor]]] = {}  # file -> name in it -> (row of the piece, rows to fill)
    for kind, stretch in large.items():
        file, prefix = of_buffer(kind)
        for name, view in flat.views(stretch).items():
            pieces = manifest["tensors"].get(kind_of(file), {}).get(prefix + name, [])
            span, filled = flat.spans[name], 0
            end = 0
            for piece in pieces:
                begin, rows = piece["offsets"][0], piece["shape"][0]
                first, last = max(begin, span.row), min(begin + rows, span.row + span.shape[0])
                if piece["shape"][1:] != list(view.shape[1:]) or any(piece["offsets"][1:]) or begin != end:
                    break
                end = begin + rows
                if first < last:
                    filled += last - first
                    of_file = wanted.setdefault(piece["file"], {})
                    of_file[prefix + name] = first - begin, view[first - span.row : last - span.row]
            if end != span.rows or filled != span.shape[0]:
                shape = [span.rows, *view.shape[1:]]
                raise BadData(f"{folder}: tensor {prefix + name} is not this model's, whose shape is {tuple(shape)}")
    with ThreadPoolExecutor(min(len(wanted), AT_ONCE, 2 * (os.cpu_count() or 1)) or 1) as pool:
        list(pool.map(lambda file: _read_file(folder, manifest, file, wanted[file]), wanted))


def _read_file(folder: Path, manifest: dict[str, Any], file: str, wanted: dict[str, tuple[int, Tensor]]) -> None:
    path = folder / file
    index = tensors.read_index(path)
    begins = {}
    for name, (row, rows) in wanted.items():
        dtype, shape = (index[name].dtype, index[name].shape) if name in index else ("none", ())
        if dtype != DTYPE_NAMES[rows.dtype] or shape[1:] != tuple(rows.shape[1:]) or shape[0] < row + len(rows):
            raise BadData(f"{path}: tensor {name} {dtype} {shape} is not this model's")
        if shape[0] != len(rows):
            begins[name] = row * rows[0].nbytes
    digest = tensors.read_into(path, {name: _bytes(rows) for name, (_, rows) in wanted.items()}, begins)
    if digest != manifest["files"][file]["sha256"]:
        raise BadData(f"{path}: is damaged (its sha256 differs): use another checkpoint")
