"""The command as a process: its help is fast and light, and every way to fail is one line and one exit code."""

import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import click
import pytest
from click.testing import CliRunner

from llmtrain import __version__
from llmtrain.cli.main import COMMANDS, cli
from llmtrain.storage import errors
from tests.cli.examples import ALL, parse

EVERY = [*COMMANDS, "bench step", "bench profile"]

# A command that fails as told, hooked into the real group in a process of its own.
FAILING = """
import os, signal, sys
import click
from llmtrain.cli import main as program
from llmtrain.storage import errors

@click.command()
@click.option("--width", type=int)
def command(width):
    {body}

module = type(sys)("failing")
module.command = command
sys.modules["failing"] = module
program.COMMANDS = {{"fail": ("failing", "Fail.")}}
sys.exit(program.run(sys.argv[1:]))
"""


def run(*args: str, stdout: int = subprocess.PIPE, **environment: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, *args]
    env = os.environ | environment
    return subprocess.run(command, stdout=stdout, stderr=subprocess.PIPE, text=True, timeout=60, env=env)


def fail(body: str, *args: str, **environment: str) -> subprocess.CompletedProcess[str]:
    return run("-c", FAILING.format(body=body), *args, **environment)


def test_the_version_is_that_of_the_package():
    done = run("-m", "llmtrain", "--version")
    assert (done.returncode, done.stdout) == (0, f"llmtrain {__version__}\n")


def test_no_command_shows_the_help():
    done = run("-m", "llmtrain")
    assert done.returncode == 0 and done.stdout.startswith("Usage: llmtrain")
    assert all(f"  {name}" in done.stdout for name in COMMANDS)


@pytest.fixture(scope="module")
def bytecode(tmp_path_factory: pytest.TempPathFactory) -> str:
    """Where modules are kept compiled, as they are for a user; an environment may forbid it and would be measured."""
    return str(tmp_path_factory.mktemp("bytecode"))


@pytest.mark.parametrize("command", ["", *EVERY])
def test_help_is_fast_and_imports_neither_torch_nor_numpy(command: str, bytecode: str):
    look = "import sys; from llmtrain.cli.main import run; code = run(sys.argv[1:]); "
    look += "print(sorted({'torch', 'numpy', 'tokenizers', 'rich', 'triton'} & set(sys.modules)), code)"
    done = run("-c", look, *command.split(), "--help")
    assert done.stdout.splitlines()[-1] == "[] 0", done.stderr

    def seconds() -> float:
        """Of processor time, which is what an idle machine's clock would show: the command waits for nothing."""
        before = os.times()
        environment = {"PYTHONDONTWRITEBYTECODE": "", "PYTHONPYCACHEPREFIX": bytecode}
        assert run("-m", "llmtrain", *command.split(), "--help", **environment).returncode == 0
        after = os.times()
        return after.children_user - before.children_user + after.children_system - before.children_system

    # The better of two: the first one may have to compile the modules.
    assert min(seconds() for _ in range(2)) < 0.4


@pytest.mark.parametrize("name", ALL)
def test_a_command_carries_its_own_name_and_examples_that_are_taken(name: str):
    said = CliRunner().invoke(cli, [*name.split(), "--help"], prog_name="llmtrain", terminal_width=200).output
    assert said.startswith(f"Usage: llmtrain {name} ")
    examples = [line.strip() for line in said.partition("Example:")[2].splitlines() if line.strip()]
    assert any(f"llmtrain {name} " in example for example in examples) or isinstance(ALL[name], click.Group)
    for example in examples:
        parse(example.removeprefix('eval "$(').removesuffix(')"'))


@pytest.mark.parametrize("name", ["", *ALL])
def test_examples_can_be_pasted_from_a_narrow_terminal(name: str):
    said = CliRunner().invoke(cli, [*name.split(), "--help"], prog_name="llmtrain", terminal_width=80).output
    shown = said.partition("Example:\n")[2]
    assert shown.strip() and all(len(line) <= 80 for line in said.splitlines())
    examples = [line.strip() for line in shown.replace("\\\n", "").splitlines() if line.strip()]
    for example in examples:
        parse(example.removeprefix('eval "$(').removesuffix(')"'))


@pytest.mark.parametrize("name", ALL)
def test_headings_of_help_are_words(name: str):
    said = CliRunner().invoke(cli, [*name.split(), "--help"], prog_name="llmtrain").output
    headings = re.findall(r"(?m)^(\w[^:]*):$", said)
    assert "Options" in headings and not [h for h in headings if re.search("[a-z][A-Z][a-z]", h.replace("SwiGLU", ""))]


def test_a_group_without_a_command_shows_its_help():
    done = run("-m", "llmtrain", "bench")
    assert (done.returncode, done.stderr) == (0, "") and done.stdout.startswith("Usage: llmtrain bench")


def test_a_mistyped_command_is_told_its_neighbour():
    for typed, meant in (("trian", "train"), ("tokenise-corpus", "tokenize-corpus")):
        done = run("-m", "llmtrain", typed)
        assert done.returncode == 2 and f"Did you mean '{meant}'?" in done.stderr


def test_a_missing_argument_is_told_by_an_example():
    done = run("-m", "llmtrain", "watch")
    assert (done.returncode, done.stdout, done.stderr.count("\n")) == (2, "", 1)
    assert "'RUN'" in done.stderr and "as in `llmtrain watch runs/default`" in done.stderr


def test_the_readme_has_a_row_for_every_command():
    readme = (Path(__file__).parents[2] / "README.md").read_text(encoding="utf-8")
    assert re.findall(r"(?m)^\| \[`llmtrain (.*)`\]\(docs/commands/\1\.md\) \|", readme) == list(COMMANDS)


def test_wrong_usage_is_one_line_and_exit_2():
    for args in (["trian"], ["--frobnicate"]):
        done = run("-m", "llmtrain", *args)
        assert (done.returncode, done.stdout, done.stderr.count("\n")) == (2, "", 1)
        assert done.stderr.startswith("llmtrain: error: No such ") and "llmtrain --help" in done.stderr
    done = fail("pass", "fail", "--width", "wide")
    assert (done.returncode, done.stderr.count("\n")) == (2, 1)
    assert "--width" in done.stderr and "See 'llmtrain fail --help'." in done.stderr


def test_an_error_is_its_line_and_its_exit_code():
    for name in ("UsageError", "Diverged"):  # tests/storage/test_errors.py has the code of each
        done = fail(f"raise errors.{name}('a.u16 is torn:\\n  make it again')", "fail")
        assert (done.returncode, done.stdout) == (getattr(errors, name).exit_code, "")
        assert done.stderr == "llmtrain: error: a.u16 is torn: make it again\n"


def test_any_other_exception_is_an_internal_error_in_one_line():
    done = fail("raise KeyError('loss')", "fail")
    assert (done.returncode, done.stderr.count("\n")) == (70, 1)
    assert "internal error: KeyError: 'loss'" in done.stderr and "--debug" in done.stderr


def test_debug_shows_the_traceback():
    for done in (fail("raise KeyError('loss')", "--debug", "fail"), fail("1 / 0", "fail", LLMTRAIN_DEBUG="1")):
        assert done.returncode == 70 and "Traceback (most recent call last)" in done.stderr
        assert done.stderr.splitlines()[-1].startswith("llmtrain: error: internal error: ")
    assert "Traceback" not in fail("1 / 0", "fail", LLMTRAIN_DEBUG="0").stderr


def test_an_interrupt_exits_75():
    done = fail("os.kill(os.getpid(), signal.SIGINT); import time; time.sleep(30)", "fail")
    assert (done.returncode, done.stderr) == (75, "llmtrain: error: interrupted\n")


def test_an_interrupt_while_modules_are_loaded_leaves_no_traceback():
    # It comes when the first module that the command needs is looked for.
    finder = "type('Finder', (), {'find_spec': lambda *_: os.kill(os.getpid(), signal.SIGINT)})"
    body = f"import os, signal, sys, llmtrain.__main__ as program; sys.meta_path.insert(0, {finder}); program.main()"
    done = run("-c", body)
    assert (done.returncode, done.stderr) == (-signal.SIGINT, "")


def test_a_command_may_exit_as_it_likes():
    assert fail("sys.exit(41)", "fail").returncode == 41
    assert fail("click.get_current_context().exit(42)", "fail").returncode == 42


def test_a_closed_pipe_behind_stdout_is_quiet():
    reader, writer = os.pipe()
    os.close(reader)
    script = FAILING.format(body="print('x' * 100_000); print('y' * 100_000)")
    for args in (["-c", script, "fail"], ["-m", "llmtrain", "--help"]):
        done = run(*args, stdout=writer)
        assert (done.returncode, done.stderr) == (74, "")
    os.close(writer)


def test_a_broken_pipe_elsewhere_is_not_hidden():
    done = fail("raise BrokenPipeError(32, 'a worker died')", "fail")
    assert done.returncode == 70 and "a worker died" in done.stderr


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs /dev/full")
def test_a_full_disk_behind_stdout_is_an_input_output_error():
    with open("/dev/full", "w") as full:
        done = run("-m", "llmtrain", "--help", stdout=full.fileno())
    assert (done.returncode, done.stderr.count("\n")) == (74, 1)
    assert "standard output" in done.stderr and "disk is full" in done.stderr


def test_threads_that_wait_leave_the_cores_to_others_unless_told_otherwise():
    show = "print(os.environ['GOMP_SPINCOUNT'])"
    assert int(fail(show, "fail").stdout) <= 1000
    assert fail(show, "fail", GOMP_SPINCOUNT="7").stdout == "7\n"


@pytest.mark.parametrize("error", ["MemoryError('no')", "RuntimeError('CUDA error: out of memory')"])
def test_a_want_of_memory_is_one_line_that_says_what_to_make_smaller(error: str):
    done = run("-c", FAILING.format(body=f"raise {error}"), "fail")
    assert done.returncode == 2 and done.stderr.count("\n") == 1
    assert "out of memory" in done.stderr and "smaller" in done.stderr


@pytest.mark.parametrize("closed", ["<&- >&- 2>&-", ">&-", "2>&-"])
def test_closed_standard_streams_are_no_obstacle(closed: str, tmp_path: Path):
    (tmp_path / "c.u16").write_bytes(b"\1\0" * 40)
    command = f"exec {sys.executable} -m llmtrain inspect c.u16 {closed}"
    environment = os.environ | {"PYTHONPATH": str(Path(__file__).parents[2])}
    done = subprocess.run(["sh", "-c", command], cwd=tmp_path, env=environment, capture_output=True)
    assert (done.returncode, done.stderr) == (0, b"")
