"""`train-tokenizer` and `tokenize-corpus` as processes: exit codes, one line an error, what a stopped run leaves."""

import errno
import gzip
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import zstandard

import llmtrain
from llmtrain.cli import main

ROOT = Path(llmtrain.__file__).parent.parent
# Fixed text, so that the documents chosen by their content are the same everywhere.
LICENSE = ROOT / "LICENSE"
ENVIRONMENT = os.environ | {"PYTHONPATH": str(ROOT)}


def start(*args: str, **options: object) -> "subprocess.Popen[str]":
    return subprocess.Popen(
        [sys.executable, "-m", "llmtrain", *args], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
        env=ENVIRONMENT, **options,  # type: ignore[call-overload]
    )  # fmt: skip


def run(*args: str, **options: object) -> tuple[int, str, str]:
    process = start(*args, **options)
    out, err = process.communicate(timeout=120)
    return process.returncode, out, err


def refused(code: int, *args: str, **options: object) -> str:
    """The one line of a command that ends with `code`."""
    found, _, err = run(*args, **options)
    assert found == code, err
    assert err.startswith("llmtrain: error: ") and err.count("\n") == 1, err
    return err


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("tokenizer") / "tokenizer.json"
    code, out, err = run("train-tokenizer", "--input", str(LICENSE), "--vocab-size", "400", "--output", str(path))
    assert code == 0 and "400 tokens, learnt from" in out, err
    return path


@pytest.fixture
def here(tmp_path: Path, tokenizer: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The current folder: tokenizer.json, data/text with a few files."""
    (tmp_path / "data" / "text").mkdir(parents=True)
    (tmp_path / "tokenizer.json").write_bytes(tokenizer.read_bytes())
    for number, text in enumerate(LICENSE.read_text().split("\n\n", 2)):
        (tmp_path / "data" / "text" / f"{number}.txt").write_text(text)
    monkeypatch.chdir(tmp_path)
    return tmp_path


def left() -> list[str]:
    return sorted(path.name for path in Path("data").iterdir() if path.name != "text")


def test_the_defaults_work_as_written(here: Path):
    code, out, err = run("train-tokenizer", "--vocab-size", "300")
    assert (code, err) == (0, "")
    code, out, err = run("tokenize-corpus")
    assert (code, err) == (0, "")
    assert [line.split(":")[0] for line in out.splitlines()[:3]] == [f"data/text/{number}.txt" for number in range(3)]
    manifest = json.loads(Path("data/corpus.u16.json").read_text())
    assert manifest["documents"] == 3 and manifest["vocab_size"] == 300
    assert np.fromfile("data/corpus.u16", "<u2").max() < 300
    assert left() == ["corpus.u16", "corpus.u16.docs", "corpus.u16.json"]


def test_the_folder_of_the_output_is_made(here: Path):
    assert run("train-tokenizer", "--vocab-size", "300", "--output", "new/t/tokenizer.json")[0] == 0
    code, out, err = run("tokenize-corpus", "--tokenizer", "new/t/tokenizer.json", "--output", "new/c/x.u16")
    assert (code, err) == (0, "") and "new/c/x.u16: " in out and Path("new/c/x.u16.json").exists()
    code, out, _ = run("tokenize-corpus", "--output", "none/x.u16", "--dry-run")
    assert code == 0 and "would be written" in out and not Path("none").exists()


def test_where_all_inputs_are_in_there_is_nothing_to_sum_up(here: Path):
    assert run("tokenize-corpus")[0] == 0
    code, out, _ = run("tokenize-corpus", "--append")
    assert code == 0 and "3 inputs left out" in out and "in all" not in out


def test_a_folder_named_like_a_module_does_not_confuse_the_workers(here: Path):
    for name in ("numpy.py", "tokenizers.py", "queue.py"):
        Path(name).write_text("raise SystemExit('the wrong module')")
    program = "import sys; sys.path[0:1] = []; from llmtrain.cli.main import run; sys.exit(run(['tokenize-corpus']))"
    done = subprocess.run([sys.executable, "-c", program], env=ENVIRONMENT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def test_training_a_tokenizer_leaves_no_half(here: Path):
    Path("data/text/bad.txt").write_bytes(b"\xff")
    assert "data/text/bad.txt: not UTF-8 at byte 0" in refused(65, "train-tokenizer", "--output", "new.json")
    code, out, _ = run("train-tokenizer", "--output", "new.json", "--on-bad", "skip", "--vocab-size", "16384")
    assert code == 0 and "1 document left out" in out and "too few different words" in out
    Path("new.json").unlink()
    assert "no such file" in refused(66, "train-tokenizer", "--input", "none", "--output", "new.json")
    Path("empty").mkdir()
    assert "no text to learn from" in refused(65, "train-tokenizer", "--input", "empty", "--output", "new.json")
    inside = "tokenizer.json/new.json"
    assert inside in refused(73, "train-tokenizer", "--output", inside, "--on-bad", "skip")
    assert not Path("new.json").exists()


def test_a_sample_of_the_text_gives_the_same_tokenizer_each_time(here: Path):
    lines = "".join(f"line {number} of the text {number * number}\n" for number in range(2000))
    Path("data/text").rename("data/other")
    Path("lines.txt").write_text(lines)
    made = []
    for name in ("a.json", "b.json"):
        code, out, err = run(
            "train-tokenizer", "--input", "lines.txt", "--document", "line", "--sample-bytes", "20000",
            "--vocab-size", "300", "--output", name,
        )  # fmt: skip
        assert code == 0, err
        made.append(Path(name).read_bytes())
    assert made[0] == made[1]
    assert 400 < int(out.split(" documents")[0].split()[-1].replace(",", "")) < 900


def test_each_mistake_is_one_line_and_its_code(here: Path, tokenizer: Path):
    assert "none" in refused(66, "tokenize-corpus", "--input", "none")
    assert "none*.txt" in refused(66, "tokenize-corpus", "--input", "none*.txt")
    assert "none.json" in refused(66, "tokenize-corpus", "--tokenizer", "none.json")
    assert "tokenizer.json" in refused(73, "tokenize-corpus", "--output", "tokenizer.json/corpus.u16")
    Path("empty").mkdir()
    assert "no files in it" in refused(65, "tokenize-corpus", "--input", "empty")
    Path("broken.json").write_bytes(tokenizer.read_bytes()[:-100])
    assert "broken.json" in refused(65, "tokenize-corpus", "--tokenizer", "broken.json")
    assert "holdout = 1.0" in refused(2, "tokenize-corpus", "--holdout", "1")
    assert "holdout = nan" in refused(2, "tokenize-corpus", "--holdout", "nan")
    assert "workers = 0" in refused(2, "tokenize-corpus", "--workers", "0")
    assert "--on-bad" in refused(2, "tokenize-corpus", "--on-bad", "ask")
    assert "vocab_size = 70000" in refused(2, "train-tokenizer", "--vocab-size", "70000")
    assert left() == []


def test_a_tokenizer_that_does_not_fit_u16_is_told_another_name(here: Path, tokenizer: Path):
    spec = json.loads(tokenizer.read_bytes())
    spec["model"]["vocab"] |= {f"word {number}": number for number in range(400, 70_000)}
    Path("wide.json").write_text(json.dumps(spec))
    assert "--output data/corpus.u32" in refused(2, "tokenize-corpus", "--tokenizer", "wide.json")
    assert left() == []


def test_a_disk_that_is_full_leaves_nothing(
    here: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    real = os.write

    def write(descriptor: int, data: bytes | memoryview) -> int:
        if isinstance(data, memoryview):  # ids, and not the journal
            raise OSError(errno.ENOSPC, "No space left on device")
        return real(descriptor, data)

    monkeypatch.setattr(os, "write", write)
    assert main.run(["tokenize-corpus"]) == 74
    err = capsys.readouterr().err
    assert err.startswith("llmtrain: error: data/corpus.u16: ") and err.count("\n") == 1
    assert left() == []


def test_where_workers_cannot_be_given_memory_that_is_one_line(here: Path):
    def limit_file_size() -> None:
        import resource

        resource.setrlimit(resource.RLIMIT_FSIZE, (4096, 4096))

    line = refused(74, "tokenize-corpus", preexec_fn=limit_file_size)
    assert "memory that is shared with the workers: cannot be written: " in line and "ulimit -f" in line
    assert left() == []


def wait_until(true: Callable[[], bool]) -> None:
    end = time.monotonic() + 60
    while not true():
        assert time.monotonic() < end
        time.sleep(0.02)


def alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] != "Z"
    except OSError:
        return False


@pytest.fixture
def long_run(here: Path):
    """A run in its own process group that would take minutes, at work on its second file; its workers' ids."""
    Path("data/text/zz.txt").write_bytes(LICENSE.read_bytes() * 5000)
    process = start("tokenize-corpus", "--workers", "2", "--document", "line", start_new_session=True)
    assert process.stdout is not None
    # A pipe is written in blocks, so the first line of it would come late: wait for ids on the disk.
    children = Path(f"/proc/{process.pid}/task/{process.pid}/children")
    wait_until(lambda: any(path.stat().st_size for path in Path("data").glob(".corpus.u16.partial/corpus.u16")))
    workers = [int(pid) for pid in children.read_text().split()]
    assert len(workers) == 2 and all(map(alive, workers))
    yield process, workers
    if process.poll() is None:
        process.kill()
    process.communicate()


LongRun = tuple["subprocess.Popen[str]", list[int]]


@pytest.mark.parametrize("stop", [signal.SIGTERM, signal.SIGINT, signal.SIGHUP])
def test_a_signal_to_the_group_ends_the_run_with_75_and_what_is_done_is_kept(long_run: LongRun, stop: signal.Signals):
    process, workers = long_run
    os.killpg(process.pid, stop)
    _, err = process.communicate(timeout=60)
    assert process.returncode == 75
    assert err.startswith(f"llmtrain: error: stopped by {stop.name}, saved in ") and err.count("\n") == 1
    assert left() == [".corpus.u16.partial"] and not any(map(alive, workers))
    # What was asked, and how far it came: more than once where the machine is slow.
    assert len(Path("data/.corpus.u16.partial/journal").read_text().splitlines()) >= 2


def test_a_killed_parent_leaves_no_workers_and_the_next_run_no_temporaries(long_run: LongRun):
    process, workers = long_run
    process.kill()
    process.wait()
    wait_until(lambda: not any(map(alive, workers)))
    assert not any(not name.startswith(".") for name in left())
    Path("data/text/zz.txt").unlink()
    # Nothing was in the journal yet, so there is nothing that the input does not fit to.
    code, _, err = run("tokenize-corpus")
    assert code == 0, err
    assert left() == ["corpus.u16", "corpus.u16.docs", "corpus.u16.json"]


def test_a_killed_worker_ends_the_run_with_one_line_and_no_output(long_run: LongRun):
    process, workers = long_run
    os.kill(workers[0], signal.SIGKILL)
    _, err = process.communicate(timeout=60)
    assert process.returncode == 70
    assert "a worker was killed" in err and err.count("\n") == 1
    assert left() in ([], [".corpus.u16.partial"])  # the second where a slow machine had written into the journal
    assert not any(map(alive, workers))


def test_standard_input_in_every_form(here: Path):
    texts = LICENSE.read_text().split("\n\n", 2)
    lines = "".join(json.dumps({"body": {"text": one}}) + "\n" for one in texts).encode()
    jsonl = ["--format", "jsonl", "--text-field", "body.text"]
    plain = ["--document", "==="]
    for data, how in (
        (lines, jsonl), (zstandard.compress(lines), jsonl), (gzip.compress("\n===\n".join(texts).encode()), plain)
    ):  # fmt: skip
        Path("piped").write_bytes(data)
        with open("piped", "rb") as piped:
            code, out, err = run("tokenize-corpus", "--input", "-", "--holdout", "0", *how, stdin=piped)
        assert code == 0 and "-: " in out and "3 documents" in out, err
        manifest = json.loads(Path("data/corpus.u16.json").read_text())
        assert manifest["documents"] == 3 and manifest["inputs"][0]["path"] == "-"


@pytest.mark.parametrize(
    ("code", "line", "args"),
    [
        (2, "plain text has no fields", ["--text-field", "text"]),
        (2, "Parquet of unknown size cannot be read", ["--input", "-", "--format", "parquet"]),
        (2, "no such protocol", ["--input", "nope://bucket/key"]),
        (66, "memory://none: no such file", ["--input", "memory://none"]),
        (65, "bad.jsonl: not JSON (Expecting value at column 1) at line 1: correct it", ["--input", "bad.jsonl"]),
        (65, "bad.gz: its name says gzip and its content does not", ["--input", "bad.gz"]),
        (65, "bad.parquet: its name says Parquet and its content does not", ["--input", "bad.parquet"]),
        (65, "no document that holds text in 3 files", ["--input", "bad.*", "--on-bad", "skip"]),
    ],
)  # fmt: skip
def test_what_cannot_be_read_is_one_line(here: Path, code: int, line: str, args: list[str]):
    for name in ("bad.jsonl", "bad.gz", "bad.parquet"):
        Path(name).write_bytes(b"<html>Not Found</html>")
    assert line in refused(code, "tokenize-corpus", *args)
    assert not list(Path("data").glob("corpus*"))
