"""Many processes of the command at the price of one start: torch is imported once, and each is forked from there."""

import itertools
import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from contextlib import suppress
from pathlib import Path
from types import TracebackType

ROOT = Path(__file__).parents[2]

# Nothing of torch may have run before the fork: its threads do not come along.
SERVER = """
import importlib, json, os, signal, sys
import llmtrain.cli.train, llmtrain.training.run
for name in sys.argv[1:]:
    importlib.import_module(name)
from llmtrain.cli.main import main
signal.signal(signal.SIGHUP, signal.SIG_DFL)  # where the tests run under nohup it is ignored, and a run leaves that so

def start(ask, environment, name):
    pid = os.fork()
    if pid == 0:
        os.setsid()
        os.chdir(ask["cwd"])
        for number, path in ((0, os.devnull), (1, name + ".out"), (2, name + ".err")):
            os.dup2(os.open(path, os.O_RDWR | os.O_CREAT | os.O_APPEND, 0o666), number)
        os.environ.update(environment)
        sys.argv = ["llmtrain", *ask["arguments"]]
        try:
            exec(ask["before"], {})
            main()
        except SystemExit as end:
            code = end.code
        except BaseException:
            import traceback
            traceback.print_exc()
            code = 1
        sys.stdout.flush()
        os._exit(code)
    return pid

for line in sys.stdin:
    ask = json.loads(line)
    pids = [start(ask, environment, name) for name, environment in ask["processes"].items()]
    print(*pids, flush=True)
    print(*[os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) for pid in pids], flush=True)
"""


class Process:
    """One `llmtrain` that was forked."""

    def __init__(self, server: subprocess.Popen, pid: int, out: Path, err: Path) -> None:
        self._server, self.pid, self._out, self._err = server, pid, out, err
        self.ended = False

    @property
    def out(self) -> str:
        return self._out.read_text() if self._out.exists() else ""

    @property
    def err(self) -> str:
        return self._err.read_text() if self._err.exists() else ""

    def says(self, words: str, seconds: float = 60) -> None:
        """Returns when the words stand in its output."""
        end = time.monotonic() + seconds
        while words not in self.out:
            assert time.monotonic() < end and self.alive(), (words, self.out, self.err)
            time.sleep(0.005)

    def send(self, number: int) -> None:
        os.kill(self.pid, number)

    def alive(self) -> bool:
        """Whether it still runs."""
        return Path(f"/proc/{self.pid}").exists()

    def kill(self) -> None:
        """With SIGKILL, unless it has ended."""
        with suppress(ProcessLookupError):
            self.send(signal.SIGKILL)

    def end(self, seconds: float = 60) -> int:
        """Its exit code, as subprocess has it; killed where it takes longer."""
        killer = threading.Timer(seconds, os.kill, (self.pid, signal.SIGKILL))
        killer.start()
        try:
            return int(self._server.stdout.readline())
        finally:
            self.ended = True
            killer.cancel()


class Ranks:
    """The processes of one run."""

    def __init__(self, server: subprocess.Popen, ranks: list[Process]) -> None:
        self._server, self.ranks = server, ranks

    def __getitem__(self, rank: int) -> Process:
        return self.ranks[rank]

    def end(self, seconds: float = 60) -> list[int]:
        """The exit code of each; those are killed that take longer."""
        killers = [threading.Timer(seconds, _kill, (process.pid,)) for process in self.ranks]
        for killer in killers:
            killer.start()
        try:
            return list(map(int, self._server.stdout.readline().split()))
        finally:
            for process in self.ranks:
                process.ended = True
            for killer in killers:
                killer.cancel()


def _kill(pid: int) -> None:
    with suppress(ProcessLookupError):
        os.kill(pid, signal.SIGKILL)


class Forks:
    """Inside the block `start` forks processes; one at a time, each waited for with `end` before the next.

    imports: modules that the processes import at a price, beside those of every run."""

    def __init__(self, *imports: str) -> None:
        self._imports = imports

    def __enter__(self) -> "Forks":
        # The level as the command sets it, which is read where torch is imported.
        environment = {**os.environ, "PYTHONPATH": str(ROOT), "TORCH_CPP_LOG_LEVEL": "ERROR"}
        command = [sys.executable, "-c", SERVER, *self._imports]
        self._server = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=environment
        )
        self._latest: list[Process] = []
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._settle()
        self._server.stdin.close()
        self._server.kill()
        self._server.wait()
        self._server.stdout.close()

    def _settle(self) -> None:
        """Ends what a test that failed has left running: the server would wait for it, and answer the next test with
        its exit code."""
        if any(not process.ended for process in self._latest):
            for process in self._latest:
                process.kill()
            self._server.stdout.readline()
        self._latest = []

    def start(self, cwd: Path, name: str, *arguments: object, before: str = "", **environment: str) -> Process:
        """`llmtrain arguments` in `cwd`, its output in files NAME.out and NAME.err there; `before` is Python to run
        first, such as what slows it down where the test wants to meet it."""
        return self._start(cwd, {name: environment}, arguments, before)[0]

    def start_ranks(
        self, cwd: Path, name: str, ranks: int, *arguments: object, before: str = "", **environment: str
    ) -> "Ranks":
        """As many processes as torchrun would start, with its variables; the output of rank N in NAME.N.out."""
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            shared = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free.getsockname()[1]), "WORLD_SIZE": str(ranks)}
        of_ranks = {
            f"{name}.{i}": {"RANK": str(i), "LOCAL_RANK": str(i), **shared, **environment} for i in range(ranks)
        }
        return Ranks(self._server, self._start(cwd, of_ranks, arguments, before))

    def _start(
        self, cwd: Path, processes: dict[str, dict[str, str]], arguments: tuple[object, ...], before: str
    ) -> list[Process]:
        self._settle()
        outputs = [(cwd / f"{name}.out", cwd / f"{name}.err") for name in processes]
        for path in itertools.chain(*outputs):
            path.unlink(missing_ok=True)
        ask = {"cwd": str(cwd), "arguments": list(map(str, arguments)), "before": before, "processes": processes}
        self._server.stdin.write(json.dumps(ask) + "\n")
        self._server.stdin.flush()
        pids = map(int, self._server.stdout.readline().split())
        self._latest = [Process(self._server, pid, *paths) for pid, paths in zip(pids, outputs, strict=True)]
        return self._latest
