import hashlib
import json
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from llmtrain.storage import manifest
from llmtrain.storage.atomic import write_json
from llmtrain.storage.errors import BadData, InputMissing

VALUE = {"format": 1, "tiny": 1e-05, "name": "café\n", "files": [{"path": "a", "bytes": 220_000_000}], "yes": True}

leaves = st.none() | st.booleans() | st.integers(-(2**70), 2**70) | st.floats(allow_nan=False, allow_infinity=False)
json_values = st.recursive(
    leaves | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=4), inner, max_size=3),
    max_leaves=8,
)
json_objects = st.dictionaries(st.text(max_size=6).filter(lambda name: name != "sha256"), json_values, max_size=5)


def test_a_sealed_manifest_comes_back_with_its_hash_last(tmp_path: Path):
    write_json(tmp_path / "m.json", manifest.seal(VALUE))
    value = manifest.read_sealed(tmp_path / "m.json")
    assert list(value) == [*VALUE, "sha256"]
    assert {name: value[name] for name in VALUE} == VALUE


def test_the_seal_is_the_sha256_of_canonical_json_that_any_program_can_make():
    body = json.dumps(VALUE, sort_keys=True, separators=(",", ":"), ensure_ascii=True)
    assert manifest.seal(VALUE)["sha256"] == hashlib.sha256(body.encode()).hexdigest()


@given(json_objects)
@settings(max_examples=100, deadline=None)
def test_every_json_object_can_be_sealed(tmp_path_factory: pytest.TempPathFactory, value: dict):
    path = tmp_path_factory.getbasetemp() / "any.json"
    path.write_bytes(json.dumps(manifest.seal(value), indent=1).encode() + b"\n")
    read = manifest.read_sealed(path)
    del read["sha256"]
    assert read == value


def test_names_that_are_numbers_and_tuples_are_sealed_as_json_holds_them(tmp_path: Path):
    write_json(tmp_path / "m.json", manifest.seal({"shape": (2, 3), "by_step": {2: "a", 10: "b"}}))
    value = manifest.read_sealed(tmp_path / "m.json")
    assert value["shape"] == [2, 3] and value["by_step"] == {"2": "a", "10": "b"}


def test_a_manifest_with_any_bit_flipped_is_refused(in_memory: Path):
    path = in_memory / "m.json"
    write_json(path, manifest.seal(VALUE))
    data = path.read_bytes()
    for bit in range(len(data) * 8):
        altered = bytearray(data)
        altered[bit // 8] ^= 1 << bit % 8
        path.write_bytes(altered)
        with pytest.raises(BadData, match="m.json: "):
            manifest.read_sealed(path)


@given(value=json_objects, choice=st.integers(0))
@settings(max_examples=150, deadline=None)
def test_any_manifest_with_any_bit_flipped_is_refused(
    tmp_path_factory: pytest.TempPathFactory, value: dict, choice: int
):
    path = tmp_path_factory.getbasetemp() / "flipped.json"
    data = bytearray(json.dumps(manifest.seal(value), indent=1).encode() + b"\n")
    bit = choice % (len(data) * 8)
    data[bit // 8] ^= 1 << bit % 8
    path.write_bytes(data)
    with pytest.raises(BadData):
        manifest.read_sealed(path)


def test_a_manifest_cut_anywhere_is_refused(in_memory: Path):
    path = in_memory / "m.json"
    write_json(path, manifest.seal(VALUE))
    data = path.read_bytes()
    for size in range(len(data)):
        path.write_bytes(data[:size])
        with pytest.raises(BadData):
            manifest.read_sealed(path)


@pytest.mark.parametrize(
    "text",
    [
        "",
        "[]",
        "3",
        "null",
        "{",
        "{}",
        '{"sha256": null}',
        '{"sha256": "00"}',
        '{"a": NaN, "sha256": ""}',
        '{"a": 1e999, "sha256": ""}',
        '{"a": "\\ud800"}',
        "[" * 100_000,
        '{"a":' * 100_000,
        "9" * 10_000,
        "\x00" * 100,
        "\ufeff{}",
    ],
)
def test_what_is_no_manifest_is_bad_data_in_one_line(tmp_path: Path, text: str):
    (tmp_path / "m.json").write_text(text)
    with pytest.raises(BadData) as caught:
        manifest.read_sealed(tmp_path / "m.json")
    assert "m.json: " in str(caught.value) and "\n" not in str(caught.value)


def test_bytes_that_are_no_text_are_bad_data(tmp_path: Path):
    (tmp_path / "m.json").write_bytes(b'{"a": "\xff\xfe"}')
    with pytest.raises(BadData):
        manifest.read_json(tmp_path / "m.json")


def test_files_that_are_not_there_are_missing_input(tmp_path: Path):
    for read in (manifest.read_sealed, manifest.read_json, manifest.sha256_file):
        with pytest.raises(InputMissing, match="none.json"):
            read(tmp_path / "none.json")
        with pytest.raises(InputMissing):
            read(tmp_path)


@pytest.mark.parametrize("size", [0, 1, 3_000_000])
def test_the_hash_of_a_file_is_that_of_its_bytes(tmp_path: Path, size: int):
    data = bytes(i % 251 for i in range(size))
    (tmp_path / "x").write_bytes(data)
    assert manifest.sha256_file(tmp_path / "x") == hashlib.sha256(data).hexdigest()
