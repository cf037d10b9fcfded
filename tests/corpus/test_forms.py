"""Documents come back as they went in, whatever form and compression an input has, and damage is told by its reason."""

import gzip
import os
import random
import shutil
import subprocess
import sys
from pathlib import Path

import pyarrow as pa
import pytest
import zstandard
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from pyarrow import parquet

from llmtrain.corpus.documents import Document, bad_data
from llmtrain.corpus.inputs import find_inputs, total_size
from llmtrain.corpus.reading import Reading, read_documents
from llmtrain.corpus.streams import Progress
from llmtrain.storage.errors import UsageError
from tests.corpus.forms import STORED, json_lines, store, write_parquet


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("forms")


def read(path: Path | str, document: str = "file", field: str = "text", format: str = "auto") -> list[Document]:
    """The documents, after a look at what must hold of them and of a reading that begins in their middle."""
    inputs, reading, progress = find_inputs([str(path)], format=format), Reading(document, field), Progress()
    found = list(read_documents(inputs, reading, progress))
    assert [one.ordinal for one in found] == list(range(len(found)))
    assert all(not one.data for one in found if one.damage)
    if not any(one.damage for one in found):
        assert progress.bytes == total_size(inputs)
    for start in {0, len(found) // 2, len(found)}:
        assert list(read_documents(inputs, reading, start=(0, start))) == found[start:]
    return found


def datas(path: Path | str, *how: str) -> list[bytes]:
    found = read(path, *how)
    assert not [one.damage for one in found if one.damage]
    return [one.data for one in found]


TEXTS = st.lists(
    st.one_of(st.text(max_size=30), st.sampled_from(["x" * 3000, "\ufeff", "a\r\nb\n", "{}"])), max_size=10
)
CUTS = st.lists(st.integers(0, 5000), max_size=3)
MANY = settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])


@MANY
@given(TEXTS, st.sampled_from(sorted(STORED)), CUTS, st.sampled_from(["text", "a.b"]))
def test_json_lines_come_back(folder: Path, documents: list[str], suffix: str, cuts: list[int], field: str):
    path = store(folder / "x.jsonl", json_lines(documents, field), suffix, cuts)
    assert datas(path, "file", field) == [one.encode() for one in documents]


@MANY
@given(TEXTS, st.sampled_from(["text", "a.b"]), st.integers(1, 5))
def test_parquet_comes_back(folder: Path, documents: list[str], field: str, rows: int):
    path = write_parquet(folder / "x.parquet", documents, field, rows)
    assert datas(path, "file", field) == [one.encode() for one in documents]


@MANY
@given(st.binary(max_size=3000), st.sampled_from([".gz", ".zst"]), CUTS, st.booleans())
def test_a_compressed_file_is_one_document(folder: Path, data: bytes, suffix: str, cuts: list[int], named: bool):
    path = store(folder / "x.txt", data, suffix, cuts)
    if not named:  # what it is shows without the name too
        path = path.rename(folder / "x.txt")
    assert datas(path) == [data.removeprefix(b"\xef\xbb\xbf")]


@MANY
@given(TEXTS, st.sampled_from(sorted(STORED)), CUTS)
def test_lines_come_back(folder: Path, documents: list[str], suffix: str, cuts: list[int]):
    lines = [one.replace("\n", " ").replace("\r", " ").encode() for one in ["first", *documents]]
    path = store(folder / "x.txt", b"\xef\xbb\xbf" + b"".join(line + b"\n" for line in lines), suffix, cuts)
    found = read(path, "line")
    assert [one.data for one in found] == lines
    assert sum(one.size for one in found) == 3 + sum(len(line) + 1 for line in lines)


def test_more_than_a_buffer_of_everything(folder: Path):
    text = random.Random(0).randbytes(700_000).hex()
    for suffix in STORED:
        assert datas(store(folder / "big.txt", text.encode() * 3, suffix, [1_000_000])) == [text.encode() * 3]
        path = store(folder / "big.jsonl", json_lines([text, "a", text * 2]), suffix, [1_000_000])
        assert datas(path) == [text.encode(), b"a", text.encode() * 2]
    path = write_parquet(folder / "big.parquet", [text, "a", text * 2])
    assert datas(path) == [text.encode(), b"a", text.encode() * 2]


def test_what_grows_a_thousandfold_stays_small_in_memory(folder: Path):
    for suffix in (".gz", ".zst"):
        path = store(folder / "zeros.txt", (b"0" * (1 << 20) + b"\n") * 100, suffix)
        script = (
            "import sys\n"
            "from llmtrain.corpus.inputs import find_inputs\n"
            "from llmtrain.corpus.reading import Reading, read_documents\n"
            "def peak(): return int(open('/proc/self/status').read().split('VmHWM:')[1].split()[0])\n"
            "before = peak()\n"
            "n = sum(len(one.data) for one in read_documents(find_inputs(sys.argv[1:]), Reading('line')))\n"
            "print(n, peak() - before)"
        )
        out = subprocess.run([sys.executable, "-c", script, path], capture_output=True, text=True, check=True).stdout
        size, grown = map(int, out.split())
        assert size == 100 << 20 and grown < 80_000  # KiB


def test_members_without_end_and_padding_between_them(folder: Path):
    path = folder / "many.txt.gz"
    path.write_bytes(b"".join(gzip.compress(b"%d\n" % number) for number in range(3000)) + bytes(1000))
    assert datas(path, "line") == [b"%d" % number for number in range(3000)]
    path = folder / "many.txt.zst"
    skipped = b"\x50\x2a\x4d\x18\x03\x00\x00\x00abc"
    path.write_bytes(skipped + b"".join(STORED[".zst"](b"%d\n" % number) + skipped for number in range(3000)))
    assert datas(path, "line") == [b"%d" % number for number in range(3000)]


def test_a_frame_with_a_window_of_two_gigabytes(folder: Path):
    path = folder / "long.txt.zst"
    parameters = zstandard.ZstdCompressionParameters.from_level(1, window_log=31, enable_ldm=True)
    writer = zstandard.ZstdCompressor(compression_params=parameters).compressobj()
    path.write_bytes(writer.compress(b"text") + writer.flush())
    assert datas(path) == [b"text"]


def places(path: Path, *how: str) -> list[tuple[str, str]]:
    """Reason and place of each damage."""
    (input,) = find_inputs([str(path)])
    return [(one.damage.reason, input.place(one.place)) for one in read(path, *how) if one.damage]


def test_each_damaged_line_of_json_has_its_reason(folder: Path):
    path = folder / "bad.jsonl"
    bad = [b"{", b"[1]", b'"text"', b'{"id": 1}', b'{"text": null}', b'{"text": 5}', b'{"text": "\xff"}']
    bad += [b'{"text": "\\ud800"}', b"[" * 100_000, b'{"text": %s}' % (b"9" * 5000), b'{"text": "a"} {}']
    path.write_bytes(b'\xef\xbb\xbf{"text": "first"}\n\n \r\n' + b"\n".join(bad) + b'\n{"text": ""}\n{"text": "last"}')
    reasons = ["bad_json", *["missing_field"] * 5, "invalid_utf8", "invalid_utf8", *["bad_json"] * 3]
    assert places(path) == [(reason, f"line {number}") for number, reason in enumerate(reasons, 4)]
    assert [one.data for one in read(path) if not one.damage] == [b"first", b"", b"last"]


def test_a_field_with_a_dot_in_its_name_comes_before_a_nested_one(folder: Path):
    path = folder / "dots.jsonl"
    path.write_text('{"a.b": "flat", "a": {"b": "deep"}}\n{"a": {"b": "deep"}}\n')
    assert datas(path, "file", "a.b") == [b"flat", b"deep"]


def test_columns_of_every_kind_of_text(folder: Path):
    for kind in (pa.string(), pa.large_string(), pa.string_view(), pa.binary(), pa.large_binary()):
        parquet.write_table(pa.table({"text": pa.array(["\u00e9", "b"]).cast(kind)}), folder / "kinds.parquet")
        assert datas(folder / "kinds.parquet") == ["\u00e9".encode(), b"b"]
    words = pa.array(["a", None, "a"]).dictionary_encode()
    parquet.write_table(pa.table({"text": words}), folder / "kinds.parquet")
    assert [one.data for one in read(folder / "kinds.parquet")] == [b"a", b"", b"a"]
    assert places(folder / "kinds.parquet") == [("missing_field", "row 2")]


@pytest.mark.parametrize(
    ("field", "detail"), [("content", "there are: id, text"), ("text.x", "there are"), ("id", "no text but int64")]
)
def test_every_row_lacks_a_column_that_is_not_there(folder: Path, field: str, detail: str):
    path = write_parquet(folder / "lacks.parquet", ["a", "b", None, "c"])
    found = read(path, "file", field)
    assert len(found) == 4 and all(one.damage and one.damage.reason == "missing_field" for one in found)
    assert found[0].damage and detail in found[0].damage.detail


def test_a_column_whose_name_another_has_too_is_none(folder: Path):
    path = folder / "twice.parquet"
    columns = [pa.array(["a", "b"]), pa.array(["c", "d"])]
    parquet.write_table(pa.Table.from_arrays(columns, names=["text", "text"]), path)
    found = read(path)
    assert [one.damage.reason for one in found if one.damage] == ["missing_field"] * 2
    assert found[0].damage and "2 columns are called 'text'" in found[0].damage.detail


def test_what_its_name_says_and_its_content_does_not(folder: Path):
    for suffix, reason in ((".gz", "not_gzip"), (".zst", "not_zstd"), (".parquet", "not_parquet")):
        path = folder / f"wrong{suffix}"
        path.write_bytes(b"<html>404 Not Found</html>")
        unit = "row 1" if suffix == ".parquet" else "byte 0"
        assert places(path) == places(path, "line") == [(reason, unit)]
    shutil.copy(store(folder / "right", b"text", ".gz"), folder / "wrong.zst")
    assert places(folder / "wrong.zst") == [("not_zstd", "byte 0")]
    for suffix, head in ((".gz", b"\x1f\x8b"), (".zst", b"\x28\xb5\x2f\xfd"), (".parquet", b"PAR1")):
        for size in range(len(head) + 1):
            (folder / f"short{suffix}").write_bytes(head[:size])
            assert [reason for reason, _ in places(folder / f"short{suffix}")] == ["truncated"]


@MANY
@given(st.integers(0, 10**6), st.sampled_from([".gz", ".zst"]), st.lists(st.integers(0, 3000), min_size=3, max_size=9))
def test_whole_documents_before_the_damage_are_kept(folder: Path, cut: int, suffix: str, cuts: list[int]):
    lines = [b"%d %s\n" % (number, random.Random(number).randbytes(30).hex().encode()) for number in range(50)]
    whole = b"".join(lines)
    ends = [*sorted(place % (len(whole) + 1) for place in cuts), len(whole)]
    members = [STORED[suffix](whole[a:b]) for a, b in zip([0, *ends], ends, strict=False)]
    data = b"".join(members)
    path = folder / f"cut.txt{suffix}"
    path.write_bytes(data[: cut % len(data)])
    found = read(path, "line")
    unbroken = kept = 0
    for member, end in zip(members, ends, strict=True):
        unbroken += len(member)
        kept = end if unbroken <= cut % len(data) else kept
    if not found or not found[-1].damage:  # between two members nothing shows
        assert b"\n".join(one.data for one in found) == whole[:kept].removesuffix(b"\n")
        return
    assert [one.data + b"\n" for one in found[:-1]] == lines[: len(found) - 1]
    assert len(found) - 1 >= whole[:kept].count(b"\n")
    assert found[-1].damage and found[-1].damage.reason == "truncated"
    assert read(path)[0].damage == found[-1].damage and len(read(path)) == 1


def test_rubbish_behind_the_last_member_is_damage(folder: Path):
    for suffix in (".gz", ".zst"):
        path = store(folder / "more.txt", b"a\nb\nc", suffix)
        path.write_bytes(path.read_bytes() + b"rubbish")
        assert [(one.data, bool(one.damage)) for one in read(path, "line")] == [
            (b"a", False),
            (b"b", False),
            (b"", True),
        ]


def damaged(data: bytes, rng: random.Random) -> bytes:
    """Cut off, with bits turned, or with a stretch lost, put in or written over."""
    begin, length, new = rng.randrange(len(data)), rng.randrange(1, 60), bytearray(data)
    kind = rng.randrange(5)
    if kind == 0:
        del new[begin:]
    elif kind == 1:
        for _ in range(rng.choice([1, 1, 3, 20])):
            new[rng.randrange(len(new))] ^= 1 << rng.randrange(8)
    elif kind == 2:
        del new[begin : begin + length]
    elif kind == 3:
        new[begin:begin] = rng.randbytes(length)
    else:
        new[begin : begin + length] = rng.randbytes(min(length, len(new) - begin))
    return bytes(new)


def intact(folder: Path) -> list[tuple[Path, str]]:
    """One sound input of each form, and what a document is in it."""
    documents = [f"document {number} " + "w\u00f6rds " * (number % 7 * 9) for number in range(40)]
    lines = "".join(one + "\n" for one in documents).encode()
    made = [(write_parquet(folder / "a.parquet", documents, rows=7), "file")]
    for suffix in STORED:
        made.append((store(folder / "a.jsonl", json_lines(documents), suffix, [300, 900]), "file"))
        made.append((store(folder / "a.txt", lines, suffix, [300, 900]), "line"))
        made.append((store(folder / "b.txt", lines, suffix, [300, 900]), "file"))
    return made


def test_200_damaged_inputs_of_each_form_end_in_documents_and_reasons(folder: Path):
    for path, document in intact(folder):
        sound = path.read_bytes()
        (input,) = find_inputs([str(path)])
        reasons = set()
        for number in range(200):
            path.write_bytes(damaged(sound, random.Random(f"{path.name} {number}")))
            for one in read(path, document):  # reads three times, with equal ends
                if one.damage:
                    reasons.add(one.damage.reason)
                    line = str(bad_data(input, input.place(one.place), one.damage))
                    assert "\n" not in line and len(line) < 700 and "--on-bad skip" in line
        assert bool(reasons) == (path.suffix != ".txt")


def test_a_missing_package_is_named_with_its_extra(folder: Path, monkeypatch: pytest.MonkeyPatch):
    write_parquet(folder / "x.parquet", ["a"])
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    with pytest.raises(UsageError, match=r"x.parquet: .*pip install 'llmtrain\[parquet\]'"):
        read(folder / "x.parquet")
    if sys.version_info < (3, 14):
        store(folder / "x.txt", b"a", ".zst")
        monkeypatch.setitem(sys.modules, "zstandard", None)
        with pytest.raises(UsageError, match=r"x.txt.zst: .*pip install 'llmtrain\[zstd\]'"):
            read(folder / "x.txt.zst")


def test_the_form_goes_by_the_name_unless_it_is_said(folder: Path):
    for name, format, compression in (
        ("a.JSONL", "jsonl", ""), ("a.ndjson.gz", "jsonl", "gzip"), ("a.parquet", "parquet", ""), ("a.c", "text", ""),
        ("a.json", "text", ""), ("jsonl", "text", ""), ("a.txt.zstd", "text", "zstd"), ("a.gz", "text", "gzip"),
    ):  # fmt: skip
        (folder / name).write_bytes(b"")
        (found,) = find_inputs([str(folder / name)])
        assert (found.format, found.compression) == (format, compression)
    (folder / "a.json").write_bytes(b'{"text": "a"}')
    assert datas(folder / "a.json", "file", "text", "jsonl") == [b"a"]
    assert datas(folder / "a.json", "file", "text") == [b'{"text": "a"}']


def test_what_cannot_be_asked_for(folder: Path):
    (folder / "a.parquet.gz").write_bytes(b"")
    with pytest.raises(UsageError, match="Parquet inside gzip cannot be read"):
        find_inputs([str(folder / "a.parquet.gz")])
    with pytest.raises(UsageError, match="Parquet of unknown size cannot be read"):
        find_inputs(["-"], format="parquet")
    (folder / "plain.txt").write_bytes(b"")
    with pytest.raises(UsageError, match="field body: plain text has no fields.*--format jsonl"):
        find_inputs([str(folder / "plain.txt")], text_field="body")


def test_a_pipe_that_gives_a_byte_at_a_time(folder: Path):
    for data in (b"\xef\xbb\xbfa\nb", STORED[".gz"](b"\xef\xbb\xbfa\nb"), STORED[".zst"](b"a\nb")):
        reader, writer = os.pipe()
        feed = "import sys, time\nfor b in bytes.fromhex(sys.argv[1]): sys.stdout.buffer.write(bytes([b])); "
        feed += "sys.stdout.flush(); time.sleep(0.002)"
        with subprocess.Popen([sys.executable, "-c", feed, data.hex()], stdout=writer):
            os.close(writer)
            found = read_documents(find_inputs([f"/dev/fd/{reader}"]), Reading("line"))
            assert [one.data for one in found] == [b"a", b"b"]
        os.close(reader)
