"""Kills `tokenize-corpus` with -9 at random moments and runs it again until it ends, over and over: a new token file,
one that is appended to, one share of two, and standard input, with either engine and one to three workers. The output
has to be byte-equal to an undisturbed run's, and nothing else may be left in the folder.

    python scripts/faults/tokenize_kills.py [--kills 500] [--seed 0] [--output docs/data/tokenize-kills.json]
"""

import argparse
import itertools
import json
import math
import os
import platform
import random
import select
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from contextlib import closing, suppress
from pathlib import Path
from typing import Any

import llmtrain
from llmtrain.corpus.tokenizer import train
from llmtrain.storage.errors import InputMissing
from llmtrain.storage.journal import JsonLines

# Forks a process for each line that says options and standard input: the modules are loaded once. Small blocks and a
# commit after each: as many different states as there can be.
PROGRAM = """
import json, os, sys, traceback
from pathlib import Path
from llmtrain.corpus.config import TokenizeConfig
from llmtrain.corpus.tokenize import tokenize
for line in sys.stdin:
    options, stdin = json.loads(line)
    pid = os.fork()
    if not pid:
        try:
            os.dup2(os.open(stdin, os.O_RDONLY), 0)
            os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
            config = TokenizeConfig(output=Path("out/corpus.u16"), document="line", on_bad="skip", **options)
            tokenize(config, block_bytes=9000, commit_seconds=0)
        except BaseException:
            traceback.print_exc()
            os._exit(1)
        os._exit(0)
    print(pid, flush=True)
    print(os.waitpid(pid, 0)[1], flush=True)
"""

ENVIRONMENT = os.environ | {"PYTHONPATH": str(Path(llmtrain.__file__).parents[1])}

KINDS: dict[str, dict[str, Any]] = {
    "new": {"inputs": ["text", "more"], "holdout": 0.05},
    "append": {"inputs": ["more"], "holdout": 0.05, "append": True},
    "shard": {"inputs": ["text", "more"], "holdout": 0.05, "shard": "2/2"},
    "stdin": {"inputs": ["text/0.txt", "-", "more"], "holdout": 0.05},
}


def make_inputs(folder: Path) -> None:
    """Lines of words, with empty ones and some that are not UTF-8 in between; the same each time."""
    words = random.Random(5)
    vocabulary = ["".join(words.choices("abcdefghijklmnopqrstuvwxyzé中 ", k=words.randint(2, 9))) for _ in range(900)]
    texts = []
    for name in ("text", "more"):
        (folder / name).mkdir()
        for number in range(4):
            lines = [" ".join(words.choices(vocabulary, k=words.randint(0, 30))).encode() for _ in range(300)]
            lines[words.randrange(300)] = b"\xff not UTF-8"
            (folder / name / f"{number}.txt").write_bytes(b"\n".join(lines) + b"\n")
            texts.append(b"\n".join(lines).decode(errors="ignore"))
    (folder / "tokenizer.json").write_bytes(train(texts, 700))


class Commands:
    """Runs one command at a time in `folder`."""

    def __init__(self, folder: Path) -> None:
        self.folder, self._pid = folder, 0
        self._server = subprocess.Popen(
            [sys.executable, "-c", PROGRAM], cwd=folder, env=ENVIRONMENT, stdin=subprocess.PIPE, stdout=subprocess.PIPE
        )

    def start(self, options: dict[str, Any], stdin: str = os.devnull) -> None:
        assert self._server.stdin and self._server.stdout
        self._server.stdin.write(json.dumps([options, stdin]).encode() + b"\n")
        self._server.stdin.flush()
        self._pid = int(self._server.stdout.readline())

    def ended(self) -> bool:
        return bool(select.select([self._server.stdout], [], [], 0)[0])

    def finish(self) -> bool:
        """Whether it came to its end, and was not killed. Raises SystemExit where it failed; its own message is
        above."""
        assert self._server.stdout
        status = int(self._server.stdout.readline())
        if status not in (0, signal.SIGKILL):
            raise SystemExit(f"the command ended with status {status}")
        return not status

    def kill(self) -> bool:
        """Whether it was in time."""
        with suppress(ProcessLookupError):
            os.kill(self._pid, signal.SIGKILL)
        return not self.finish()

    def close(self) -> None:
        assert self._server.stdin
        self._server.stdin.close()
        self._server.wait()


def files(folder: Path) -> dict[str, bytes]:
    """What is in the folder, below it too."""
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def prepare(commands: Commands, kind: str, engine: str) -> None:
    """The folder as it is before the command that gets killed."""
    shutil.rmtree(commands.folder / "out", ignore_errors=True)
    (commands.folder / "out").mkdir()
    if kind == "append":
        commands.start({"inputs": ["text"], "holdout": 0.05, "engine": engine})
        commands.finish()


def kill_again_and_again(folder: Path, kills: int, seed: int, engines: tuple[str, ...]) -> dict[str, Any]:
    """Kills so many times, each kind as often. Raises SystemExit where the output differs, a command fails, or a kill
    costs what was in the journal before it."""
    make_inputs(folder)
    chance = random.Random(seed)
    stdin = str(folder / "more" / "3.txt")
    runs = dict.fromkeys(KINDS, 0)
    at_work = resumed = further = 0
    both = list(itertools.product(engines, KINDS))
    with closing(Commands(folder)) as commands:
        for number, (engine, kind) in enumerate(both):
            prepare(commands, kind, engine)
            begin = time.perf_counter()
            commands.start(KINDS[kind] | {"engine": engine, "workers": 1}, stdin)
            commands.finish()
            wanted, seconds = files(folder / "out"), time.perf_counter() - begin
            work = next(name for name in wanted if name.endswith(".u16") and ".val" not in name)
            journal = folder / "out" / f".{work}.partial" / "journal"
            to_kill = (kills + number) // len(both)
            # The last kill comes in the middle of a run, so one that was killed is brought to its end in any case.
            while to_kill:
                prepare(commands, kind, engine)
                while True:
                    size, before = _size(journal), position(journal)
                    commands.start(KINDS[kind] | {"engine": engine, "workers": chance.randint(1, 3)}, stdin)
                    if chance.random() < 0.2:
                        time.sleep(chance.uniform(0, seconds))  # any moment, the start included
                    elif to_kill:
                        # A moment while it writes, or publishes: when it has come further than it was.
                        while not commands.ended() and position(journal) <= before:
                            time.sleep(0.003)
                        time.sleep(chance.uniform(0, 0.4) ** 1.5)
                    if not to_kill:
                        commands.finish()
                        break
                    if not commands.kill():
                        break
                    to_kill -= 1
                    after = position(journal)
                    published = files(folder / "out").get(f"{work}.json") == wanted[f"{work}.json"]
                    if after < before and not (published and not journal.exists()):
                        raise SystemExit(f"{kind} with {engine}: came to {before} and is at {after} after a kill")
                    at_work += journal.exists()
                    resumed += size > 0
                    further += after > before
                found = files(folder / "out")
                if found != wanted:
                    names = sorted(found.keys() | wanted.keys())
                    different = [name for name in names if found.get(name) != wanted.get(name)]
                    raise SystemExit(f"{kind} with {engine}: differ or are left over: {', '.join(different)}")
                runs[kind] += 1
    return {
        "kills": kills, "kills_with_a_journal": at_work, "kills_of_a_resumed_run": resumed,
        "kills_that_left_more_than_was_there": further, "finished_runs": runs,
    }  # fmt: skip


def position(journal: Path) -> tuple[float, ...]:
    """How far its last whole line says that the command has come: (input, document); nothing without a journal, beyond
    all inputs where it is being published."""
    found: tuple[float, ...] = ()
    try:
        for line in JsonLines.read(journal):
            found = tuple(line["at"]) if "at" in line else (math.inf,) if "publish" in line else found
    except InputMissing:  # not begun, or published while we look
        return ()
    return found


def _size(path: Path) -> int:
    try:
        return path.stat().st_size
    except FileNotFoundError:  # not begun, or published while we look
        return 0


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kills", type=int, default=500)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--output", type=Path, default=Path("docs/data/tokenize-kills.json"))
    options = parser.parse_args()
    begin = time.perf_counter()
    with tempfile.TemporaryDirectory() as folder:
        done = kill_again_and_again(Path(folder), options.kills, options.seed, ("tokenizers", "gigatoken"))
    versions = {"llmtrain": llmtrain.__version__, "python": platform.python_version(), "kernel": platform.release()}
    seconds = round(time.perf_counter() - begin, 1)
    result = {"seed": options.seed, **done, "different_outputs": 0, "seconds": seconds, "versions": versions}
    options.output.write_text(json.dumps(result, indent=1) + "\n")
    print(json.dumps(result))


if __name__ == "__main__":
    main()
