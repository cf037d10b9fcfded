"""Remote files: found by URL, read as a stream through connections that break, never with a secret in what is shown."""

import gzip
import http.server
import io
import random
import sys
import threading
from collections.abc import Iterator

import fsspec
import pyarrow as pa
import pytest
from pyarrow import parquet

from llmtrain.corpus import remote
from llmtrain.corpus.inputs import Input, find_inputs
from llmtrain.corpus.reading import Reading, read_documents
from llmtrain.corpus.remote import shown_url
from llmtrain.storage.errors import InputMissing, LlmtrainError, StorageFailure, UsageError

BIG = random.Random(1).randbytes(1_500_000).hex().encode()


@pytest.fixture(autouse=True)
def no_waiting(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(remote.time, "sleep", lambda seconds: None)


def rows(texts: list[str]) -> bytes:
    file = io.BytesIO()
    parquet.write_table(pa.table({"text": texts}), file, row_group_size=2)
    return file.getvalue()


FILES = {
    "a/plain.txt": b"\xef\xbb\xbfplain",
    "a/big.txt": BIG,
    "a/lines.jsonl.gz": gzip.compress(b'{"text": "one"}\n') + gzip.compress(b'{"text": "two"}\n'),
    "a/sub/rows.parquet": rows(["three", "four", "five"]),
    "a/.hidden": b"hidden",
    "a/.git/config": b"hidden too",
    "b.txt": b"b",
}


class Server(http.server.ThreadingHTTPServer):
    """FILES, with byte ranges where `ranges`; `times` connections break when they have sent `breaks` bytes."""

    ranges = True
    breaks = times = 0

    def url(self, name: str) -> str:
        return f"http://127.0.0.1:{self.server_address[1]}/{name}"


class Handler(http.server.BaseHTTPRequestHandler):
    server: Server

    def do_HEAD(self) -> None:
        self.answer(False)

    def do_GET(self) -> None:
        self.answer(True)

    def answer(self, body: bool) -> None:
        name = self.path.strip("/").split("?")[0]
        if name not in FILES:
            self.send_error(403 if name == "closed" else 404)
            return
        data, wanted = FILES[name], self.headers.get("Range") if self.server.ranges else None
        begin, end = 0, len(data)
        if wanted:
            first, last = wanted.removeprefix("bytes=").split("-")
            begin, end = int(first), min(int(last) + 1, end)
            self.send_response(206)
            self.send_header("Content-Range", f"bytes {begin}-{end - 1}/{len(data)}")
        else:
            self.send_response(200)
        self.send_header("Content-Length", str(end - begin))
        self.send_header("Accept-Ranges", "bytes" if self.server.ranges else "none")
        self.send_header("ETag", '"v1"')
        self.end_headers()
        if body:
            if self.server.times and end - begin > self.server.breaks:
                self.server.times -= 1
                self.wfile.write(data[begin : begin + self.server.breaks])
                self.close_connection = True
            else:
                self.wfile.write(data[begin:end])

    def log_message(self, *args: object) -> None:
        pass


@pytest.fixture
def server() -> Iterator[Server]:
    with Server(("127.0.0.1", 0), Handler) as server:
        thread = threading.Thread(target=server.serve_forever, args=(0.02,))
        thread.start()
        yield server
        server.shutdown()
        thread.join()


@pytest.fixture
def memory() -> Iterator[str]:
    system = fsspec.filesystem("memory")
    for name, data in FILES.items():
        system.pipe(f"/corpus/{name}", data)
    yield "memory://corpus"
    system.rm("/corpus", recursive=True)


def texts(*urls: str) -> list[bytes]:
    found = list(read_documents(find_inputs(urls), Reading()))
    assert not any(one.damage for one in found)
    return [one.data for one in found]


def test_a_folder_means_what_is_below_it_sorted_and_without_hidden_names(memory: str):
    found = find_inputs([f"{memory}/a"])
    assert [one.name.partition("corpus/")[2] for one in found] == [
        "a/big.txt", "a/lines.jsonl.gz", "a/plain.txt", "a/sub/rows.parquet",
    ]  # fmt: skip
    assert [one.size for one in found] == [len(FILES[one.name.partition("corpus/")[2]]) for one in found]
    assert all(one.version for one in found)
    assert texts(f"{memory}/a") == [BIG, b"one", b"two", b"plain", b"three", b"four", b"five"]


def test_patterns_single_files_and_each_file_once(memory: str):
    assert texts(f"{memory}/a/*.txt", f"{memory}/b.txt", f"{memory}/a/plain.txt") == [BIG, b"plain", b"b"]
    assert texts(f"{memory}/**/*.parquet") == [b"three", b"four", b"five"]


@pytest.mark.parametrize("ranges", [True, False])
def test_http_files(server: Server, ranges: bool):
    server.ranges = ranges
    names = ["a/plain.txt", "a/lines.jsonl.gz", "a/big.txt"] + ["a/sub/rows.parquet"] * ranges
    expected = [b"plain", b"one", b"two", BIG] + [b"three", b"four", b"five"] * ranges
    inputs = find_inputs([server.url(name) for name in names])
    assert [one.version for one in inputs] == ['"v1"'] * len(names)
    assert [one.data for one in read_documents(inputs, Reading())] == expected


@pytest.mark.parametrize("ranges", [True, False])
@pytest.mark.parametrize("breaks", [0, 1, 2_000_000])
def test_a_connection_that_breaks_is_made_anew_where_it_broke(server: Server, ranges: bool, breaks: int):
    server.ranges, server.breaks, server.times = ranges, breaks, 3
    assert texts(server.url("a/big.txt")) == [BIG]
    assert server.times == 0
    if ranges:
        server.times = 2
        assert texts(server.url("a/sub/rows.parquet")) == [b"three", b"four", b"five"]


def test_a_connection_that_breaks_for_ever_is_one_error(server: Server):
    server.breaks, server.times = 100, 1 << 30
    for name in ("a/big.txt", "a/sub/rows.parquet"):
        with pytest.raises(StorageFailure, match=rf"{name}: cannot be read \(.*\): check the network"):
            texts(server.url(name))


def test_what_is_not_there(server: Server, memory: str):
    for url in (server.url("none.txt"), f"{memory}/none.txt", f"{memory}/*.none", "http://127.0.0.1:1/x", "nope://x/y"):
        with pytest.raises(LlmtrainError, match="^[a-z]+://.*: ") as told:
            find_inputs([url])
        assert "\n" not in str(told.value)
        kind = StorageFailure if ":1/" in url else UsageError if url.startswith("nope") else InputMissing
        assert type(told.value) is kind
    with pytest.raises(InputMissing, match="permission denied: check the account"):
        find_inputs([server.url("closed")])
    with pytest.raises(UsageError, match="a chain of file systems is not read"):
        find_inputs(["simplecache::memory://corpus/b.txt"])


def test_a_missing_package_is_named_with_its_extra(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setitem(sys.modules, "s3fs", None)
    with pytest.raises(UsageError, match=r"s3://bucket/key: .*pip install 'llmtrain\[remote\]'"):
        find_inputs(["s3://bucket/key"])


def test_secrets_of_a_url_are_not_shown(server: Server):
    assert shown_url("https://me:pw@host:1/x.gz?download=1") == "https://host:1/x.gz?download=1"
    assert shown_url("https://host/x.gz?X-Amz-Signature=1&a=2") == "https://host/x.gz"
    assert shown_url("s3://bucket/a b/*.parquet") == "s3://bucket/a b/*.parquet"
    (found,) = find_inputs([server.url("a/lines.jsonl.gz") + "?token=secret"])
    assert found.name == server.url("a/lines.jsonl.gz") and (found.format, found.compression) == ("jsonl", "gzip")
    assert [one.data for one in read_documents([found], Reading())] == [b"one", b"two"]


def test_reading_begins_again_anywhere(memory: str):
    inputs: list[Input] = find_inputs([f"{memory}/a"])
    found = list(read_documents(inputs, Reading()))
    for number, one in enumerate(found):
        assert list(read_documents(inputs, Reading(), start=(one.file, one.ordinal))) == found[number:]
