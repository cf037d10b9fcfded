"""A stop signal while the command still imports: one line and 75 as later on, a second one ends it at once."""

import ast
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.training.conftest import write_corpus

TINY = [
    "train", "--d-model", "16", "--n-layers", "1", "--n-heads", "2", "--n-kv-heads", "1", "--head-dim", "8", "--d-ff",
    "16", "--seq-len", "16", "--batch-size", "2", "--total-steps", "2", "--warmup-steps", "1", "--device", "cpu",
    "--precision", "fp32", "--tokens", "corpus.u16", "--run-dir", "run",
]  # fmt: skip

# The command, to which signals are sent when a module is first looked for.
STRUCK = """
import os, signal, sys
import llmtrain.__main__ as program

at, *numbers = sys.argv.pop(1).split(",")

class Finder:
    def find_spec(name, path=None, target=None):
        if name == at and numbers:
            sent = [int(number) for number in numbers]
            numbers.clear()
            print("HERE", flush=True)
            for number in sent:
                os.kill(os.getpid(), number)

sys.meta_path.insert(0, Finder)
program.main()
"""

# A command in place of `plan` whose import takes what is raised in it for a want of the module.
SWALLOWS = """
try:
    import nowhere
except BaseException:
    pass
{then}
import click
@click.command()
def command():
    print("BEGAN")
"""

# The command again and again, each time in a child that is sent a signal one line further on in the named files; says
# after each line how it ended. The last child is one in which that line never came.
WALKED = """
import os, signal, sys, tempfile
import llmtrain.cli.main as program

number, files, args = int(sys.argv[1]), tuple(sys.argv[2].split(",")), sys.argv[3:]
sys.argv = ["llmtrain", *args]


def strike_at(line):
    def trace(frame, event, argument):
        if not frame.f_code.co_filename.endswith(files):
            return None
        trace.left -= event == "line"
        if trace.left == 0 and event == "line":
            trace.left = -1
            os.kill(os.getpid(), number)
        return trace
    trace.left = line
    return trace


for line in range(1, 10_000):
    output = tempfile.TemporaryFile()
    if not (child := os.fork()):
        for descriptor in (1, 2):
            os.dup2(output.fileno(), descriptor)
        tracer = strike_at(line)
        sys.settrace(tracer)
        try:
            program.main()
        finally:
            sys.settrace(None)
            os.write(2, b"" if tracer.left < 0 else b"NEVER")
        assert False
    code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    output.seek(0)
    error = output.read().decode()
    print(repr((line, code, error)))
    if "NEVER" in error:
        break
"""


def strike(folder: Path, at: str, *numbers: int, args: list[str] = TINY) -> subprocess.CompletedProcess[str]:
    told = ",".join([at, *(str(int(number)) for number in numbers)])
    environment = os.environ | {"PYTHONPATH": os.pathsep.join([str(folder), str(Path(__file__).parents[2])])}
    done = subprocess.run(
        [sys.executable, "-c", STRUCK, told, *args],
        cwd=folder, env=environment, capture_output=True, text=True, timeout=120,
    )  # fmt: skip
    assert done.stdout.startswith("HERE\n"), (done.stdout, done.stderr)
    return done


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    write_corpus(tmp_path / "corpus.u16", 2000)
    return tmp_path


@pytest.mark.parametrize("at", ["llmtrain.training.config", "numpy.linalg", "torch.nn", "llmtrain.training.step"])
def test_a_signal_amid_an_import_stops_a_run_before_it_begins(folder: Path, at: str):
    done = strike(folder, at, signal.SIGTERM)
    assert (done.returncode, done.stdout, done.stderr) == (75, "HERE\n", "llmtrain: error: interrupted\n")
    assert not (folder / "run").exists()


@pytest.mark.parametrize("at", ["numpy.linalg", "torch.nn"])
def test_two_signals_amid_an_import_end_it_at_once_and_silently(folder: Path, at: str):
    done = strike(folder, at, signal.SIGTERM, signal.SIGUSR1)
    assert (done.returncode, done.stdout, done.stderr) == (-signal.SIGUSR1, "HERE\n", "")
    assert not (folder / "run").exists()


@pytest.mark.parametrize(
    ("numbers", "code"), [([signal.SIGINT], 75), ([signal.SIGHUP] * 2, 75), ([signal.SIGUSR1, signal.SIGINT], -2)]
)
def test_an_import_does_not_swallow_a_signal(tmp_path: Path, numbers: list[int], code: int):
    (tmp_path / "swallows.py").write_text(SWALLOWS.format(then=""))
    done = strike(tmp_path, "nowhere", *numbers, args=commanded(tmp_path))
    assert (done.returncode, done.stdout) == (code, "HERE\n")
    assert done.stderr == ("llmtrain: error: interrupted\n" if code == 75 else "")


def test_an_import_within_the_work_is_carried_through_too(tmp_path: Path):
    (tmp_path / "library.py").write_text(SWALLOWS.format(then="print('LOADED', flush=True)"))
    (tmp_path / "swallows.py").write_text(
        "import click, time\n@click.command()\ndef command():\n    import library\n    time.sleep(60)\n"
    )
    began = time.monotonic()
    done = strike(tmp_path, "nowhere", signal.SIGTERM, args=commanded(tmp_path))
    assert (done.returncode, done.stdout) == (75, "HERE\nLOADED\n") and time.monotonic() - began < 30
    assert done.stderr == "llmtrain: error: interrupted\n"


def test_a_signal_amid_an_import_that_fails_leaves_the_word_to_that_failure(tmp_path: Path):
    (tmp_path / "swallows.py").write_text(SWALLOWS.format(then="1 / 0"))
    done = strike(tmp_path, "nowhere", signal.SIGTERM, args=commanded(tmp_path))
    assert (done.returncode, done.stderr.count("\n")) == (70, 1) and "ZeroDivisionError" in done.stderr


def commanded(folder: Path) -> list[str]:
    """The arguments by which `swallows.py` in the folder is the command."""
    (folder / "sitecustomize.py").write_text(
        "from llmtrain.cli import main\nmain.COMMANDS = {'swallows': ('swallows', 'Import.')}\n"
    )
    return ["swallows"]


def test_a_run_takes_over_a_signal_that_waits():
    body = """
import os, signal
from llmtrain.storage.interrupts import interrupts
from llmtrain.training.lifecycle import StopFlag
interrupts.install()
interrupts.hold()
os.kill(os.getpid(), signal.SIGTERM)
with StopFlag() as stop:
    assert stop and stop.name == "SIGTERM"
    import time; time.sleep(0.2)
interrupts.check()
"""
    environment = os.environ | {"PYTHONPATH": str(Path(__file__).parents[2])}
    done = subprocess.run([sys.executable, "-c", body], env=environment, capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stderr) == (0, "") and done.stdout.count("SIGTERM: saves and stops") == 1


@pytest.mark.parametrize(("args", "code"), [(["completion", "bash"], 0), (["verify", "nothing"], 66), (["nothing"], 2)])
def test_at_whatever_line_a_signal_comes_the_code_is_that_of_a_stop_or_of_the_end(
    tmp_path: Path, args: list[str], code: int
):
    environment = os.environ | {"PYTHONPATH": str(Path(__file__).parents[2])}
    done = subprocess.run(
        [sys.executable, "-c", WALKED, str(int(signal.SIGTERM)), "cli/main.py,storage/interrupts.py", *args],
        cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=120,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    ends = [ast.literal_eval(line) for line in done.stdout.splitlines()]
    assert "NEVER" in ends[-1][2]
    codes = [code for _, code, _ in ends]
    caught = codes.index(75)
    assert caught > 0 and set(codes[:caught]) == {-signal.SIGTERM}  # nobody handles it yet
    over = codes.index(code)
    assert set(codes[caught:over]) == {75} and set(codes[over:]) == {code}
    assert all("Traceback" not in error for _, _, error in ends)
    assert all(error.endswith("llmtrain: error: interrupted\n") for _, _, error in ends[caught:over])
