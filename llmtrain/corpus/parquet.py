"""Documents out of Parquet: one a row, of which one column is the text, or two are prompt and completion.

Needs pyarrow (extra `parquet`).
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from llmtrain.corpus.documents import MISSING_FIELD, Document, document_of
from llmtrain.corpus.inputs import Input, shown
from llmtrain.corpus.streams import TRUNCATED, Broken, Damage, Progress, open_stored
from llmtrain.storage.errors import LlmtrainError, UsageError

MAGIC = b"PAR1"

# Text that is decoded at once, going by the mean of a row group's rows; and what is read of a column at once.
BATCH_BYTES = 4 << 20
MOST_ROWS = 4096
BUFFER_BYTES = 1 << 20


def parquet_documents(
    file: int, input: Input, fields: Sequence[str], progress: Progress, start: int = 0
) -> Iterator[Document]:
    """One document a row, from row `start` on, counted from 0; `place` is the row's number from 1, `size` what its text
    has in bytes. Row groups before `start` are not read, and none is ever whole in memory.

    Each of `fields` (see Reading) is a column; where there is no such column, a column and fields of nested structs
    joined by dots.
    """
    ordinal, before, size = 0, progress.bytes, input.size or 0
    with open_stored(input) as stored:
        try:
            table = _open(input, stored)
            columns = [_column(table.schema_arrow, field) for field in fields]
            missing = next((why for _, why in columns if why), "")
            none = Damage(MISSING_FIELD, missing or f"nothing in column {' or '.join(map(repr, fields))}")
            groups = _rows(table)
            total = sum(groups)
            for group, rows in enumerate(groups):
                # A group whose last row alone comes before `start` may be the damaged one where the input ended.
                if not rows or ordinal + rows < start:
                    ordinal += rows
                    continue
                paths = [path for path, _ in columns]
                for texts in iter([(None,)] * rows) if missing else _texts(table, group, rows, paths):
                    if ordinal >= start:
                        progress.bytes = before + size * (ordinal + 1) // total
                        whole = [text for text in texts if text is not None]
                        if len(whole) < len(texts):
                            yield Document(file, ordinal, ordinal + 1, 0, b"", none)
                        else:
                            yield document_of(file, ordinal, ordinal + 1, whole)
                    ordinal += 1
        except Broken as broken:
            if ordinal >= start:
                yield Document(file, ordinal, ordinal + 1, 0, b"", broken.damage)
    progress.bytes = before + size


def _open(input: Input, stored: Any) -> Any:
    try:
        from pyarrow import parquet
    except ImportError as error:
        raise UsageError(f"{shown(input.name)}: Parquet needs a package: pip install 'llmtrain[parquet]'") from error
    if not MAGIC.startswith(stored.read(len(MAGIC))):
        raise Broken("not_parquet", "its name says Parquet and its content does not")
    with _damage_told():
        return parquet.ParquetFile(stored, buffer_size=BUFFER_BYTES, pre_buffer=False)


def _rows(table: Any) -> list[int]:
    """Rows of each row group."""
    with _damage_told():
        rows = [table.metadata.row_group(number).num_rows for number in range(table.metadata.num_row_groups)]
    if min(rows, default=0) < 0 or sum(rows) != table.metadata.num_rows:
        raise Broken(TRUNCATED, "its Parquet index is damaged (the rows do not add up)")
    return rows


def _column(schema: Any, field: str) -> tuple[list[str], str]:
    """The names that lead to the column, and why it holds no text, if so."""
    from pyarrow import types

    path = [field] if field in schema.names else field.split(".")
    kind: Any = None
    names = schema.names
    for name in path:
        if name not in names:
            return path, f"no column {field!r} (there are: {', '.join(schema.names[:8])[:200]})"
        if names.count(name) > 1:
            return path, f"{names.count(name)} columns are called {name!r}, so which is meant is not known"
        kind = schema.field(name).type if kind is None else kind.field(name).type
        names = [kind.field(number).name for number in range(kind.num_fields)] if types.is_struct(kind) else []
    if types.is_dictionary(kind):
        kind = kind.value_type
    tests = (types.is_string, types.is_large_string, types.is_string_view, types.is_binary, types.is_large_binary)
    return path, "" if any(test(kind) for test in tests) else f"column {field!r} is no text but {kind}"


def _texts(table: Any, group: int, rows: int, paths: Sequence[list[str]]) -> Iterator[tuple[bytes | None, ...]]:
    """The texts of each row of a group. Strings are not decoded: whether they are UTF-8 is looked at later."""
    import pyarrow
    from pyarrow import compute

    with _damage_told():
        mean = table.metadata.row_group(group).total_byte_size // rows + 1
        batches = table.iter_batches(
            max(1, min(BATCH_BYTES // mean, MOST_ROWS)), [group], [".".join(path) for path in paths], use_threads=False
        )
    given = 0
    while True:
        with _damage_told():
            batch = next(batches, None)
            if batch is None:
                break
            texts = []
            for path in paths:
                array = batch.column(path[0])
                for name in path[1:]:
                    array = compute.struct_field(array, name)
                if pyarrow.types.is_dictionary(array.type):
                    array = array.dictionary_decode()
                texts.append(array.cast(pyarrow.large_binary()).to_pylist())
        given += batch.num_rows
        yield from zip(*texts, strict=True)
    if given != rows:
        raise Broken(TRUNCATED, "its Parquet data end too early")


@contextmanager
def _damage_told() -> Iterator[None]:
    """Makes Broken of what pyarrow says of damaged bytes, which is any of its errors and several of Python's own."""
    try:
        yield
    except (Broken, LlmtrainError):
        raise
    except Exception as error:
        if isinstance(error, OSError) and error.errno is not None:
            raise  # of the disk, not of the bytes
        reason = " ".join(str(error).split())[:200].rstrip(".")
        raise Broken(TRUNCATED, f"its Parquet data are damaged ({reason})") from error
