"""Documents out of JSON Lines: one object a line, of which one field is the text, or two are prompt and completion."""

import json
from collections.abc import Iterator, Sequence
from typing import Any

from llmtrain.corpus.documents import BAD_JSON, INVALID_UTF8, MISSING_FIELD, Document, document_of
from llmtrain.corpus.streams import Broken, Damage, Text


def json_documents(file: int, text: Text, fields: Sequence[str]) -> Iterator[Document]:
    """One document a line that is not blank; `place` is the line's number from 1, `size` what its text has in bytes.

    Each of `fields` (see Reading) is a key of the object; where the object has no such key, keys of nested objects
    joined by dots.
    """
    ordinal = number = 0
    try:
        for number, line in enumerate(text.buffered(), 1):
            if line.isspace():
                continue
            found = _texts(line, fields)
            if isinstance(found, Damage):
                yield Document(file, ordinal, number, 0, b"", found)
            else:
                yield document_of(file, ordinal, number, found)
            ordinal += 1
    except Broken as broken:
        yield Document(file, ordinal, number + 1, 0, b"", broken.damage)


def _texts(line: bytes, fields: Sequence[str]) -> list[bytes] | Damage:
    try:
        record = json.loads(line.decode())
    except UnicodeDecodeError:
        return Damage(INVALID_UTF8, "not UTF-8")
    except json.JSONDecodeError as error:
        return Damage(BAD_JSON, f"not JSON ({error.msg} at column {error.colno})")
    except (ValueError, RecursionError) as error:  # a number of 5,000 digits, brackets without end
        return Damage(BAD_JSON, f"not JSON that can be read ({error})")
    texts = []
    for field in fields:
        value = _value(record, field)
        if not isinstance(value, str):
            return Damage(MISSING_FIELD, _no_text(record, field, value))
        texts.append(value)
    try:
        return [text.encode() for text in texts]
    except UnicodeEncodeError:
        return Damage(INVALID_UTF8, "half a surrogate pair, which no UTF-8 can hold")


def _value(record: Any, field: str) -> Any:
    if isinstance(record, dict) and field in record:
        return record[field]
    for name in field.split("."):
        if not isinstance(record, dict) or name not in record:
            return None
        record = record[name]
    return record


def _no_text(record: Any, field: str, value: Any) -> str:
    if not isinstance(record, dict):
        return f"no object but {type(record).__name__}"
    if value is not None:
        return f"field {field!r} is no text but {type(value).__name__}"
    names = ", ".join(list(record)[:8])
    return f"no text in field {field!r} (there are: {names[:200]})"
