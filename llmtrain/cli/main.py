"""The `llmtrain` command: a lazy group, and the one place where an error becomes a line and an exit code."""

import difflib
import errno
import faulthandler
import importlib
import io
import os
import select
import signal
import sys
import traceback
from contextlib import suppress
from typing import Any

import click

from llmtrain import __version__
from llmtrain.cli.options import ExampleGroup
from llmtrain.storage.errors import (
    STOP_SIGNALS,
    InternalError,
    LlmtrainError,
    StopRequested,
    StorageFailure,
    UsageError,
    write_error,
)
from llmtrain.storage.interrupts import interrupts

# Command -> (module, which holds it as `command`; its line in `llmtrain --help`). Nothing is imported for the list.
COMMANDS = {
    "train-tokenizer": ("llmtrain.cli.train_tokenizer", "Train a byte-level BPE tokenizer on text files."),
    "tokenize-corpus": ("llmtrain.cli.tokenize_corpus", "Turn text files into a token file."),
    "plan": ("llmtrain.cli.plan", "Say what a run will cost before it starts, on any card."),
    "train": ("llmtrain.cli.train", "Train a language model on token files, or go on with a run."),
    "watch": ("llmtrain.cli.watch", "Show how a run stands, and follow it."),
    "service": ("llmtrain.cli.service", "Write a systemd unit that keeps a run going."),
    "generate": ("llmtrain.cli.generate", "Continue a prompt with a trained model."),
    "evaluate": ("llmtrain.cli.evaluate", "Losses of a model on token files and text, and its answers to questions."),
    "lm-eval": ("llmtrain.cli.lm_eval", "Score a model by the tasks of lm-evaluation-harness."),
    "export": ("llmtrain.cli.export", "Write a trained model for transformers, vLLM or llama.cpp."),
    "import": ("llmtrain.cli.import_model", "Take over a model of others, to go on training from."),
    "inspect": ("llmtrain.cli.inspect", "Say what a token file, a checkpoint or a run holds."),
    "compare": ("llmtrain.cli.compare", "Say whether a run beats another, by more than chance."),
    "report": ("llmtrain.cli.report", "Draw runs as one HTML page, or as pictures."),
    "verify": ("llmtrain.cli.verify", "Check all checksums of a token file, a checkpoint or a run."),
    "sweep": ("llmtrain.cli.sweep", "Measure training throughput and memory over many shapes."),
    "bench": ("llmtrain.cli.bench", "Measure a training step, take it apart by kernel, or measure one of its ops."),
    "doctor": ("llmtrain.cli.doctor", "Say what is right or wrong with this machine for a run, and what to do."),
    "completion": ("llmtrain.cli.completion", "Print what makes bash, zsh or fish complete commands and options."),
}

EPILOG = """Example:

    llmtrain train-tokenizer --input data/text
    llmtrain tokenize-corpus --input data/text
    llmtrain train --config 31m --val-tokens data/corpus.val.u16 --val-every 500
    llmtrain generate --prompt "Once upon a time"
"""

COMPLETION = "_LLMTRAIN_COMPLETE"
"""The variable by which a shell asks for completions; `llmtrain completion` prints the script that does."""


class LazyGroup(ExampleGroup):
    """A group that imports the module of a command only when that command is asked for."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        return list(COMMANDS)

    def get_command(self, ctx: click.Context, name: str) -> click.Command | None:
        if name not in COMMANDS:
            return None
        command = importlib.import_module(COMMANDS[name][0]).command
        interrupts.check()
        assert isinstance(command, click.Command)
        return command

    def resolve_command(self, ctx: click.Context, args: list[str]) -> Any:
        if args[0] not in COMMANDS and (near := difflib.get_close_matches(args[0], COMMANDS, 1)):
            ctx.fail(f"No such command {args[0]!r}. Did you mean {near[0]!r}?")
        return super().resolve_command(ctx, args)

    def shell_complete(self, ctx: click.Context, incomplete: str) -> list[Any]:
        from click.shell_completion import CompletionItem

        found = [CompletionItem(name, help=line) for name, (_, line) in COMMANDS.items() if name.startswith(incomplete)]
        return found + click.Command.shell_complete(self, ctx, incomplete)

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        with formatter.section("Commands"):
            formatter.write_dl([(name, line) for name, (_, line) in COMMANDS.items()])


def switch_debug_on(ctx: click.Context, param: click.Parameter, value: bool) -> None:
    # In the environment, so that worker processes show their tracebacks too.
    if value:
        os.environ["LLMTRAIN_DEBUG"] = "1"


@click.group(
    cls=LazyGroup, epilog=EPILOG, context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 120}
)
@click.option(
    "--debug", is_flag=True, is_eager=True, expose_value=False, callback=switch_debug_on,
    help="Show the traceback of an error (also LLMTRAIN_DEBUG=1).",
)  # fmt: skip
@click.version_option(__version__, prog_name="llmtrain", message="%(prog)s %(version)s")
def cli() -> None:
    """Pretrain small language models on one box: text in, a trained model out.

    Exit codes: 0 finished, 2 wrong usage, 65 bad data, 66 input missing, 69 another process of the run is gone, 70
    internal error, 71 the machine computes wrong, 73 output cannot be created, 74 I/O error or disk full, 75 stopped on
    request (--resume goes on), 78 the configuration does not fit what is on disk, 79 training diverged.
    """


def main() -> None:
    """The console script."""
    for descriptor in range(3):
        # A closed one would be given to the next file that is opened, and what is printed would end up in that.
        with suppress(OSError):
            os.fstat(descriptor)
            continue
        os.open(os.devnull, os.O_RDWR)  # the lowest that is free
    sys.stdout, sys.stderr = sys.stdout or open(1, "w", closefd=False), sys.stderr or open(2, "w", closefd=False)
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")  # a file's name may be what the terminal cannot show
    faulthandler.enable(2)  # a watchdog's SIGABRT, and a fault in C code, leave the stack of every thread
    interrupts.install()  # a command with something to save has handlers of its own
    try:
        code = complete() if COMPLETION in os.environ else run(sys.argv[1:])
    finally:
        for number in STOP_SIGNALS:  # it is done: a signal while torch is taken down must not hide the code
            signal.signal(number, signal.SIG_IGN)
    sys.exit(code)


def run(args: list[str]) -> int:
    """Runs the command line and returns its exit code; an error is one line on stderr."""
    # torch's CPU threads (libgomp) by default spin for milliseconds at every barrier. Where another process wants the
    # cores too, that is all they do: a training step was seen to take ten times as long. Read when torch is imported.
    os.environ.setdefault("GOMP_SPINCOUNT", "1000")
    try:
        with interrupts.raising():
            code = invoke(args)
            sys.stdout.flush()
        return code
    except click.ClickException as error:
        command = error.ctx.command_path if isinstance(error, click.UsageError) and error.ctx else "llmtrain"
        return report(error, f"{said(error)} See '{command} --help'.", UsageError.exit_code)
    except LlmtrainError as error:
        return report(error, str(error), error.exit_code)
    except (KeyboardInterrupt, click.Abort) as error:
        return report(error, "interrupted", StopRequested.exit_code)
    except OSError as error:
        if isinstance(error, BrokenPipeError) and reader_of_stdout_is_gone():
            # `llmtrain ... | head` has read enough. The interpreter's own flush at exit must not fail on it once more.
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
            return StorageFailure.exit_code
        if error.filename or error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EIO):
            failure = write_error(error, error.filename or "standard output")
            return report(error, str(failure), failure.exit_code)
        return report(error, internal(error), InternalError.exit_code)
    except Exception as error:
        if isinstance(error, ValueError) and "embedded null" in str(error):  # only a configuration file can hold one
            return report(error, "a path holds a NUL character, as no file has: correct it", UsageError.exit_code)
        if isinstance(error, MemoryError | RuntimeError) and out_of_memory(error):
            reason = str(error).split("\n")[0]
            line = f"out of memory ({reason}): make the batch, the context or the model smaller"
            return report(error, line, UsageError.exit_code)
        return report(error, internal(error), InternalError.exit_code)


def said(error: click.ClickException) -> str:
    """click's own words; of an argument that is missing how it is given, too."""
    line = error.format_message()
    if isinstance(error, click.MissingParameter) and error.ctx and error.ctx.command.epilog:
        example = next(line for line in error.ctx.command.epilog.splitlines() if line.startswith("    "))
        line = f"{line.rstrip('.')}, as in `{example.strip()}`."
    return line


def complete() -> int:
    """Answers a shell. What it cannot be told is no completion, rather than an error in the middle of a line."""
    from click.shell_completion import shell_complete

    try:
        with interrupts.raising():
            return shell_complete(cli, {}, "llmtrain", COMPLETION, os.environ[COMPLETION])
    except (Exception, KeyboardInterrupt):
        return 1


def out_of_memory(error: MemoryError | RuntimeError) -> bool:
    # torch has an error of its own for a card; of the processor's memory it says so in words alone.
    return isinstance(error, MemoryError) or "out of memory" in str(error) or "can't allocate memory" in str(error)


def invoke(args: list[str]) -> int:
    # Not cli.main(): click would make its own exit codes of an interrupt, a closed pipe and an error.
    try:
        with cli.make_context("llmtrain", args or ["--help"]) as ctx:
            cli.invoke(ctx)
        return 0
    except click.exceptions.Exit as finished:
        return finished.exit_code


def internal(error: Exception) -> str:
    return f"internal error: {type(error).__name__}: {error}; `llmtrain --debug COMMAND ...` shows the traceback"


def report(error: BaseException, line: str, code: int) -> int:
    interrupts.end()
    if os.environ.get("LLMTRAIN_DEBUG", "0") not in ("", "0"):
        traceback.print_exception(error)
    print("llmtrain: error:", " ".join(line.split()), file=sys.stderr)
    return code


def reader_of_stdout_is_gone() -> bool:
    poll = select.poll()
    poll.register(sys.stdout.fileno(), 0)
    return any(event & select.POLLERR for _, event in poll.poll(0))
