"""Checksums of files, JSON objects that carry their own, and TOML."""

import hashlib
import json
import tomllib
from typing import Any

from llmtrain.storage.atomic import PathLike, json_bytes
from llmtrain.storage.errors import BadData, read_error
from llmtrain.storage.reading import open_file


def sha256_file(path: PathLike) -> str:
    """The sha256 of the file's bytes in hex. Raises InputMissing, StorageFailure."""
    try:
        with open_file(path) as file:
            return hashlib.file_digest(file, "sha256").hexdigest()
    except OSError as error:
        raise read_error(error, path) from error


def seal(value: dict) -> dict:
    """`value`, as JSON holds it (names are strings, tuples are lists, no NaN), with a last field `sha256`: the hash
    of the canonical JSON of what precedes it. For `write_json`, and back by `read_sealed`."""
    assert "sha256" not in value, "sealed already"
    value = json.loads(json_bytes(value))
    return {**value, "sha256": canonical_sha256(value)}


def read_sealed(path: PathLike) -> dict:
    """What `write_json(path, seal(value))` wrote, its `sha256` included; equal down to the last bit, since a flipped
    one can leave the same value (1e-05 and 1E-05). Raises InputMissing, StorageFailure, and BadData where the file
    is torn or altered."""
    data = _read(path)
    value = _parse(data, path)
    try:
        body = {key: item for key, item in value.items() if key != "sha256"}
        whole = json_bytes(seal(body)) == data
    except (ValueError, RecursionError):
        whole = False
    if not whole:
        raise BadData(f"{path}: is torn or was altered: its own sha256 does not fit: use another copy")
    return value


def read_json(path: PathLike) -> dict:
    """The JSON object in the file. Raises InputMissing, StorageFailure, and BadData where it is none."""
    return _parse(_read(path), path)


def read_toml(path: PathLike) -> dict[str, Any]:
    """The tables of a TOML file, which may be a pipe. Raises InputMissing, StorageFailure, and BadData where it is
    none."""
    try:
        with open(path, encoding="utf-8") as file:
            return tomllib.loads(file.read())
    except OSError as error:
        raise read_error(error, path) from None
    except (ValueError, RecursionError) as error:  # no UTF-8, no TOML, a number of 5,000 digits, brackets without end
        raise BadData(f"{path}: is not TOML: {error}: correct it") from None


def canonical_sha256(value: dict) -> str:
    """Of the JSON of `value`, keys sorted, no spaces, ASCII: any program that reads JSON can make the same bytes."""
    return hashlib.sha256(json.dumps(value, sort_keys=True, separators=(",", ":")).encode()).hexdigest()


def _read(path: PathLike) -> bytes:
    try:
        with open_file(path) as file:
            return file.read()
    except OSError as error:
        raise read_error(error, path) from error


def _parse(data: bytes, path: PathLike) -> dict:
    try:
        value = json.loads(data)
    except (ValueError, RecursionError):
        raise BadData(f"{path}: is no JSON, perhaps torn: make it again or use another copy") from None
    if not isinstance(value, dict):
        raise BadData(f"{path}: holds no JSON object: make it again or use another copy")
    return value
