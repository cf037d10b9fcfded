import hashlib
import json
import math
import os
import random
import threading
import tracemalloc
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors import safe_open
from safetensors.numpy import load_file, save_file

from llmtrain.storage import tensors
from llmtrain.storage.atomic import atomic_file
from llmtrain.storage.errors import BadData, InputMissing, LlmtrainError, StorageFailure
from llmtrain.storage.manifest import sha256_file
from llmtrain.storage.tensors import TensorEntry
from tests.storage.processes import killed_at_each_line, killed_while_it_writes, small_disk

DTYPES = {"F32": "f4", "F64": "f8", "F16": "f2", "I64": "i8", "I32": "i4", "U16": "u2", "U8": "u1", "BOOL": "?"}


def entry(dtype: str, array: np.ndarray) -> TensorEntry:
    return TensorEntry(dtype, array.shape, memoryview(array))


def some_arrays(seed: int = 0) -> dict[str, tuple[str, np.ndarray]]:
    rng = np.random.default_rng(seed)
    return {
        "flags": ("BOOL", rng.integers(0, 2, 7).astype("?")),
        "embedding.weight": ("F32", rng.standard_normal((1000, 33), dtype="f4")),
        "empty": ("F32", np.zeros((0, 3), "f4")),
        "count": ("I64", np.array(3)),
        "bytes": ("U8", rng.integers(0, 256, (3, 5, 7), dtype="u1")),
        "norm": ("F16", rng.standard_normal(11).astype("f2")),
    }


def save(path: Path, seed: int = 0) -> dict[str, np.ndarray]:
    arrays = some_arrays(seed)
    tensors.write(path, {name: entry(*item) for name, item in arrays.items()}, {"step": "7", "é": "ü"})
    return {name: array for name, (_, array) in arrays.items()}


def load(path: Path) -> tuple[dict[str, np.ndarray], str]:
    index = tensors.read_index(path)
    arrays = {name: np.empty(shape, DTYPES[dtype]) for name, (dtype, shape, _, _) in index.items()}
    digest = tensors.read_into(path, {name: memoryview(array) for name, array in arrays.items()})
    return arrays, digest


def equal(one: dict[str, np.ndarray], other: dict[str, np.ndarray]) -> bool:
    return set(one) == set(other) and all(
        one[name].dtype == other[name].dtype and np.array_equal(one[name], other[name]) for name in one
    )


def test_the_safetensors_library_reads_what_is_written_and_its_metadata(tmp_path: Path):
    path = tmp_path / "model.safetensors"
    arrays = save(path)
    assert equal(load_file(path), arrays)
    with safe_open(path, "np") as file:
        assert file.metadata() == {"step": "7", "é": "ü"}


def test_what_the_safetensors_library_writes_is_read(tmp_path: Path):
    path = tmp_path / "theirs.safetensors"
    arrays = {name: array for name, (_, array) in some_arrays().items()}
    save_file(arrays, path, metadata={"format": "np"})
    read, digest = load(path)
    assert equal(read, arrays)
    assert digest == sha256_file(path)
    assert tensors.read_header(path)[1] == {"format": "np"}


def test_tensors_come_back_with_size_and_hash_of_the_file(tmp_path: Path):
    path = tmp_path / "model.safetensors"
    arrays = {name: entry(*item) for name, item in some_arrays().items()}
    size, digest = tensors.write(path, arrays)
    assert size == path.stat().st_size
    assert digest == hashlib.sha256(path.read_bytes()).hexdigest() == load(path)[1]
    assert os.listdir(tmp_path) == ["model.safetensors"]


def test_equal_tensors_make_equal_files(tmp_path: Path):
    save(tmp_path / "one")
    save(tmp_path / "two")
    assert (tmp_path / "one").read_bytes() == (tmp_path / "two").read_bytes()


def test_each_tensor_is_aligned_to_its_element_and_lies_where_the_index_says(tmp_path: Path):
    path = tmp_path / "model.safetensors"
    arrays = save(path)
    data = path.read_bytes()
    for name, (dtype, shape, begin, end) in tensors.read_index(path).items():
        assert begin % tensors.ITEM_BYTES[dtype] == 0
        assert shape == arrays[name].shape and data[begin:end] == arrays[name].tobytes()


def test_no_tensors_at_all_make_a_file(tmp_path: Path):
    path = tmp_path / "none.safetensors"
    size, digest = tensors.write(path, {})
    assert tensors.read_index(path) == {} and load_file(path) == {}
    assert (size, tensors.read_into(path, {})) == (path.stat().st_size, digest)


def test_an_open_file_is_written_as_a_path_is(tmp_path: Path):
    save(tmp_path / "one")
    arrays = {name: entry(*item) for name, item in some_arrays().items()}
    with atomic_file(tmp_path / "two") as file:
        tensors.write(file, arrays, {"step": "7", "é": "ü"})
    assert (tmp_path / "one").read_bytes() == (tmp_path / "two").read_bytes()


def test_some_tensors_of_a_file_can_be_read_and_the_hash_is_still_that_of_all(tmp_path: Path):
    path = tmp_path / "model.safetensors"
    rng = np.random.default_rng(0)
    arrays = {f"w{i}": rng.standard_normal(2_000_000, dtype="f4") for i in range(3)}
    _, digest = tensors.write(path, {name: entry("F32", array) for name, array in arrays.items()})
    read = np.zeros(2_000_000, "f4")
    assert tensors.read_into(path, {"w1": memoryview(read)}) == digest
    assert np.array_equal(read, arrays["w1"])


def test_neither_writing_nor_reading_makes_a_second_copy(tmp_path: Path):
    array = np.ones((10_000_000,), "f4")
    tracemalloc.start()
    try:
        tensors.write(tmp_path / "m", {"w": entry("F32", array)})
        tensors.read_into(tmp_path / "m", {"w": memoryview(array)})
        assert tracemalloc.get_traced_memory()[1] < 8 << 20
    finally:
        tracemalloc.stop()


def test_data_that_does_not_fit_its_shape_is_not_written(tmp_path: Path):
    for dtype, shape in [("F32", (3,)), ("F64", (2,)), ("F32", (2, 2))]:
        with pytest.raises(ValueError, match="tensor w: 8 bytes are not"):
            tensors.write(tmp_path / "m", {"w": TensorEntry(dtype, shape, bytes(8))})
    with pytest.raises(ValueError, match="not C-contiguous"):
        tensors.write(tmp_path / "m", {"w": entry("F32", np.ones((4, 4), "f4").T[:2])})
    assert os.listdir(tmp_path) == []


def test_a_buffer_of_another_size_and_a_name_that_is_not_there_are_refused(tmp_path: Path):
    save(tmp_path / "m")
    with pytest.raises(BadData, match="m: holds no tensor head.weight"):
        tensors.read_into(tmp_path / "m", {"head.weight": bytearray(4)})
    with pytest.raises(BadData, match=r"m: tensor norm has 22 bytes, shape \(11,\), where 24 are needed"):
        tensors.read_into(tmp_path / "m", {"norm": bytearray(24)})


def file_of(header: object, data: bytes = bytes(16), length: int | None = None) -> bytes:
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    return (len(text) if length is None else length).to_bytes(8, "little") + text + data


def one(**changes: object) -> dict:
    return {"a": {"dtype": "F32", "shape": [2, 2], "data_offsets": [0, 16], **changes}}


F32_2 = {"dtype": "F32", "shape": [2]}
TWINS = b'{"a":{"dtype":"F32","shape":[4],"data_offsets":[0,16]},"a":{"dtype":"F32","shape":[4],"data_offsets":[0,16]}}'
BAD_FILES = {
    "empty": b"",
    "cut in the length": b"\x05\x00\x00",
    "cut in the header": file_of(one())[:20],
    "cut in the data": file_of(one())[:-1],
    "data too long": file_of(one()) + b"\0",
    "no data": file_of(one(), b""),
    "huge length": file_of(one(), length=2**64 - 1),
    "length beyond the file": file_of(one(), length=10_000),
    "zero length": file_of(b""),
    "length that cuts the json": file_of(one(), length=10),
    "not json": file_of(b"pickled!"),
    "not utf-8": file_of(b'{"\xff\xfe": 1}'),
    "utf-16": file_of(json.dumps(one()).encode("utf-16")),
    "zeros": bytes(4096),
    "a list": file_of([1, 2]),
    "null": file_of(None),
    "deep": file_of(b"[" * 200_000),
    "huge number": file_of(b'{"a":' + b"9" * 10_000 + b"}"),
    "entry no object": file_of({"a": 3}),
    "entry without offsets": file_of({"a": {"dtype": "F32", "shape": [4]}}),
    "entry with more": file_of(one(more=1)),
    "name twice": file_of(TWINS),
    "unknown dtype": file_of(one(dtype="F33")),
    "dtype no text": file_of(one(dtype=["F32"])),
    "dtype of another size": file_of(one(dtype="F64")),
    "shape of another size": file_of(one(shape=[2, 3])),
    "shape no list": file_of(one(shape=4)),
    "shape negative": file_of(one(shape=[-2, -2])),
    "shape not whole": file_of(one(shape=[2.0, 2.0])),
    "shape of truths": file_of(one(shape=[True, 4])),
    "shape overflows 64 bits to the right size": file_of(one(shape=[2**62 + 1, 4])),
    "shape very large": file_of(one(shape=[2**63] * 50_000)),
    "offsets negative": file_of(one(data_offsets=[-16, 0])),
    "offsets backwards": file_of(one(data_offsets=[16, 0])),
    "offsets beyond the file": file_of(one(data_offsets=[16, 32])),
    "offsets three": file_of(one(data_offsets=[0, 16, 16])),
    "offsets not whole": file_of(one(data_offsets=[0.0, 16.0])),
    "offsets NaN": file_of(b'{"a":{"dtype":"F32","shape":[4],"data_offsets":[NaN,16]}}'),
    "overlap": file_of({"a": {**F32_2, "data_offsets": [0, 8]}, "b": {**F32_2, "data_offsets": [4, 12]}}),
    "same place": file_of({"a": {**F32_2, "data_offsets": [0, 8]}, "b": {**F32_2, "data_offsets": [0, 8]}}),
    "gap": file_of({"a": {**F32_2, "data_offsets": [0, 8]}, "b": {**F32_2, "data_offsets": [9, 17]}}, bytes(17)),
    "gap at the start": file_of({"b": {**F32_2, "data_offsets": [8, 16]}}),
    "metadata of numbers": file_of({"__metadata__": {"step": 3}, **one()}),
    "metadata no object": file_of({"__metadata__": "pt", **one()}),
}


@pytest.mark.parametrize("name", BAD_FILES)
def test_a_file_whose_header_lies_is_bad_data_in_one_line(tmp_path: Path, name: str):
    path = tmp_path / "m.safetensors"
    path.write_bytes(BAD_FILES[name])
    for read in (lambda: tensors.read_index(path), lambda: tensors.read_into(path, {})):
        with pytest.raises(BadData) as caught:
            read()
        line = str(caught.value)
        assert line.startswith(f"{path}: ") and "\n" not in line and len(line) < 500


def test_the_table_of_bad_files_is_of_files_that_were_good_but_for_their_fault(tmp_path: Path):
    path = tmp_path / "m.safetensors"
    path.write_bytes(file_of(one()))
    assert tensors.read_index(path)["a"].shape == (2, 2)


def test_a_file_that_is_not_there_is_missing_input(tmp_path: Path):
    for path in (tmp_path / "none", tmp_path):
        with pytest.raises(InputMissing):
            tensors.read_index(path)
        with pytest.raises(InputMissing):
            tensors.read_into(path, {})


@given(st.data())
@settings(max_examples=150, deadline=None)
def test_any_header_gives_tensors_inside_the_file_or_bad_data(tmp_path_factory: pytest.TempPathFactory, data):
    small = st.integers(-2, 20) | st.sampled_from([2**31, 2**63, 2**64 + 8])
    tensor = st.fixed_dictionaries(
        {
            "dtype": st.sampled_from(["F32", "U8", "BF16", "X"]),
            "shape": st.lists(small, max_size=3),
            "data_offsets": st.lists(small, min_size=1, max_size=3).map(sorted),
        }
    )
    header = data.draw(st.dictionaries(st.text(max_size=3), tensor, max_size=3))
    path = tmp_path_factory.getbasetemp() / "any.safetensors"
    path.write_bytes(file_of(header, bytes(data.draw(st.integers(0, 24)))))
    try:
        index = tensors.read_index(path)
    except BadData:
        return
    for dtype, shape, begin, end in index.values():
        assert 8 <= begin <= end <= path.stat().st_size
        assert end - begin == math.prod(shape) * tensors.ITEM_BYTES[dtype]


def test_any_flipped_bit_or_cut_is_refused_or_changes_the_hash(in_memory: Path):
    path = in_memory / "m.safetensors"
    arrays = {"w": entry("F32", np.arange(12, dtype="f4")), "b": entry("U8", np.arange(3, dtype="u1"))}
    _, digest = tensors.write(path, arrays, {"step": "1"})
    data = path.read_bytes()
    damaged = [data[:size] for size in range(len(data))]
    for bit in range(0, len(data) * 8, 3):
        altered = bytearray(data)
        altered[bit // 8] ^= 1 << bit % 8
        damaged.append(bytes(altered))
    refused = 0
    for content in damaged:
        path.write_bytes(content)
        try:
            assert tensors.read_into(path, {}) != digest
        except BadData:
            refused += 1
    assert refused > len(data) // 2


def test_a_file_cut_while_it_is_read_is_bad_data(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    path = tmp_path / "m"
    tensors.write(path, {"w": entry("F32", np.ones(3_000_000, "f4"))})
    fill = tensors._fill

    def cutting(file, chunk, path):
        if chunk.nbytes == tensors._CHUNK:
            os.truncate(path, 6 << 20)
        fill(file, chunk, path)

    monkeypatch.setattr(tensors, "_fill", cutting)
    threads = threading.active_count()
    with pytest.raises(BadData, match="was cut while it was read"):
        tensors.read_into(path, {})
    assert threading.active_count() == threads


def test_a_writer_killed_anywhere_leaves_the_previous_file_or_the_new_one(in_memory: Path):
    path = in_memory / "model.safetensors"
    old = save(path, seed=1)
    new = {name: array for name, (_, array) in some_arrays(2).items()}
    came_new = 0
    for _ in killed_at_each_line(lambda: save(path, seed=2), every=3):
        read, digest = load(path)
        assert digest == sha256_file(path)
        assert equal(read, old) or equal(read, new)
        came_new += equal(read, new)
        save(path, seed=1)
    assert came_new > 0
    assert equal(load(path)[0], new)
    assert os.listdir(in_memory) == ["model.safetensors"]


WRITER = """
import sys
from llmtrain.storage import tensors
for n in range(10**9):
    data = bytes([n % 256]) * (1 << 20)
    tensors.write(sys.argv[1], {f"w{i}": tensors.TensorEntry("U8", (1 << 20,), data) for i in range(8)})
"""


def test_readers_beside_a_writer_that_is_killed_see_one_whole_version(tmp_path: Path):
    path = tmp_path / "model.safetensors"
    buffers = {f"w{i}": bytearray(1 << 20) for i in range(8)}

    def look() -> int:
        tensors.read_into(path, buffers)
        seen = {bytes(buffer[::65536]) for buffer in buffers.values()}
        assert len(seen) == 1 and len(set(seen.pop())) == 1
        return buffers["w0"][0]

    dice = random.Random(0)
    for _ in range(4):
        killed_while_it_writes(WRITER, path, look, dice)
        assert tensors.read_into(path, buffers) == sha256_file(path)


def test_a_full_disk_keeps_the_previous_file_and_takes_the_next_when_there_is_room(tmp_path: Path):
    with small_disk(tmp_path / "disk", "2m") as disk:
        old = save(disk / "m")
        threads = threading.active_count()
        with pytest.raises(StorageFailure, match="disk is full"):
            tensors.write(disk / "m", {"w": entry("U8", np.ones(8 << 20, "u1"))})
        assert threading.active_count() == threads
        assert os.listdir(disk) == ["m"] and equal(load(disk / "m")[0], old)
        assert equal(save(disk / "m", seed=3), load(disk / "m")[0])


def test_a_disk_that_fails_to_sync_is_a_storage_failure(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    def failing(descriptor: int) -> None:
        raise OSError(5, "Input/output error")

    monkeypatch.setattr(os, "fsync", failing)
    with pytest.raises(LlmtrainError, match="I/O error") as caught:
        save(tmp_path / "m")
    assert caught.value.exit_code == 74
    assert os.listdir(tmp_path) == []


def test_a_hint_that_the_file_system_refuses_does_no_harm(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    def refusing(*arguments: int) -> None:
        raise OSError(22, "Invalid argument")

    monkeypatch.setattr(os, "posix_fadvise", refusing)
    assert equal(save(tmp_path / "m"), load(tmp_path / "m")[0])
