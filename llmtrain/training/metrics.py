"""What a run says: RUN/metrics.jsonl for programs, a line on the console for people."""

import math
import os
import resource
import sys
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.live import Live
from rich.text import Text

from llmtrain.storage.errors import LlmtrainError
from llmtrain.storage.journal import JsonLines
from llmtrain.training.plan import Plan

MAX_HELD = 100_000
"""Lines that wait for the disk, about 600 bytes each."""


class Throughput:
    """Tokens and seconds of training alone: what evaluations and saves take is left out by `pause` and `resume`."""

    def __init__(self) -> None:
        self.seconds = 0.0
        self.tokens = 0
        self.steps = 0
        self._since: float | None = None

    def resume(self) -> None:
        self._since = time.perf_counter()

    def pause(self) -> None:
        if self._since is not None:
            self.seconds += time.perf_counter() - self._since
            self._since = None

    def add(self, tokens: int) -> None:
        self.tokens += tokens
        self.steps += 1

    def take(self) -> tuple[float, float]:
        """(tokens a second, ms a step) since the last call; the device must have been waited for. Starts anew."""
        running = self._since is not None
        self.pause()
        seconds = max(self.seconds, 1e-9)
        rates = self.tokens / seconds, 1e3 * seconds / max(self.steps, 1)
        self.seconds, self.tokens, self.steps = 0.0, 0, 0
        if running:
            self.resume()
        return rates


def memory() -> dict[str, float]:
    """Peak GiB of the device's allocator (0 on the CPU) and peak resident MiB of this process."""
    peak = torch.cuda.max_memory_allocated() / 2**30 if torch.cuda.is_initialized() else 0.0
    scale = 2**20 if sys.platform == "darwin" else 2**10
    return {"peak_gib": peak, "host_rss_mib": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / scale}


def journal_of(run_dir: Path, rank: int) -> Path:
    """RUN/metrics.jsonl; of other ranks than 0, whose lines differ in times and memory, a file of their own."""
    return run_dir / (f"ranks/rank-{rank:05d}.jsonl" if rank else "metrics.jsonl")


class _Console(Console):
    def on_broken_pipe(self) -> None:
        """rich would end the process with exit code 1."""
        raise  # the BrokenPipeError that it is handling


class RunLog:
    """Writes RUN/metrics.jsonl and the console. On a terminal the newest train line stays in place at the bottom;
    elsewhere each is a line of its own."""

    def __init__(
        self, run_dir: Path, attempt: int, plan: Plan, console: Console | None = None, rank: int = 0
    ) -> None:
        self.journal = JsonLines(journal_of(run_dir, rank))
        self.attempt = attempt
        self.plan = plan
        self._held: list[dict[str, Any]] = []
        self._lock = threading.Lock()
        self.console = console or _Console(soft_wrap=True, highlight=False, quiet=rank > 0)
        self.live = Live(console=self.console, auto_refresh=False) if self.console.is_terminal else None
        if self.live:
            self._show(lambda live: live.start())

    def line(self, text: str) -> None:
        """A line for people only."""
        self._show(lambda _: self.console.print(Text(text)))

    def _show(self, draw: Callable[[Any], None]) -> None:
        """The console is for whoever looks. A run goes on when nobody does any more: the terminal was closed, the
        reader of the pipe is gone, the disk of the log is full. metrics.jsonl says so."""
        if self.console.quiet:
            return
        try:
            draw(self.live)
        except OSError as error:
            self.console.quiet = True
            with suppress(OSError, ValueError):  # what is still in the buffer must not fail once more at exit
                os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
            self.write("event", 0, 0, event="console", text=f"the console is gone, nothing is printed ({error})")

    def write(self, kind: str, step: int, tokens: int, **fields: Any) -> None:
        """A line for programs. A disk that does not take it is no reason to end the run: the line is held until it
        does, and `sync` sees to it that no checkpoint is published without it. Raises StorageFailure where very many
        are held."""
        line = {"kind": kind, "step": step, "tokens": tokens, "time": time.time(), "attempt": self.attempt, **fields}
        with self._lock:
            first = not self._held
            self._held.append(line)
            try:
                self._write_held()
                return
            except LlmtrainError as error:
                if len(self._held) > MAX_HELD:
                    raise
                reason = str(error).removesuffix(" and run again")
        if first:
            self.line(f"step {step}: {reason}; lines are held until it takes them")

    def _write_held(self) -> None:
        while self._held:
            self.journal.append(self._held[0])
            del self._held[0]

    def sync(self) -> None:
        """Every line so far is on the disk on return. From any thread. Raises CannotCreate, StorageFailure."""
        with self._lock:
            self._write_held()
        self.journal.sync()

    def event(self, step: int, tokens: int, name: str, text: str, **fields: Any) -> None:
        """Something that happened: to both."""
        self.write("event", step, tokens, event=name, text=text, **fields)
        self.line(f"step {step}: {text}")

    def train(
        self,
        step: int,
        tokens: int,
        epoch: float,
        figures: dict[str, float],
        lr: float,
        rate: float,
        flops: tuple[float, float],
    ) -> str:
        """A train line; `figures` are of this very step, `rate` is tokens a second since the line before, `flops` what
        a token cost since then: as counted, and what was run again beyond that. Returns what it says to people."""
        peak = self.plan.peak_flops
        achieved = rate * flops[0]
        mfu = achieved / peak if peak else None
        hfu = rate * sum(flops) / peak if peak else None
        ppl = math.exp(min(figures["lm_loss"], 700.0))
        fields = {**figures, "ppl": ppl, "lr": lr, "epoch": epoch, "tok_per_s": rate, "mfu": mfu, "hfu": hfu}
        self.write("train", step, tokens, **fields, tflops=achieved / 1e12, **memory())
        left = (self.plan.total_samples - self.plan.samples(step)) * (tokens / max(1, self.plan.samples(step)))
        share = f"mfu {mfu:.1%}" if mfu is not None else f"{achieved / 1e12:.3g} TFLOP/s"
        text = (
            f"epoch {epoch:.2f} step {step}/{self.plan.total_steps} loss {figures['lm_loss']:.4f} ppl {ppl:.2f} "
            f"aux {figures['aux_loss']:.4f} lr {lr:.2e} grad {figures['grad_norm']:.2f} tok/s {rate:,.0f} {share} "
            f"eta {duration(left / rate)}" + (f" skipped {figures['skipped']}" if figures["skipped"] else "")
        )
        if self.live:
            # Wrapped where the terminal is narrow: what is cut off at its edge would be the rate and the time left.
            drawn = Text(text, no_wrap=False, overflow="fold")
            self._show(lambda live: live.update(drawn, refresh=True))
        else:
            self.line(text)
        return text

    def close(self) -> None:
        """Ends the use of both; `sync` first what must be on the disk."""
        if self.live:
            self._show(lambda live: live.stop())
        self.journal.close()


def duration(seconds: float) -> str:
    """A length of time for people: 45s, 12m30s, 3h05m, 2d04h."""
    seconds = round(seconds)
    if seconds < 60:
        return f"{seconds}s"
    if seconds < 3600:
        return f"{seconds // 60}m{seconds % 60:02d}s"
    if seconds < 86400:
        return f"{seconds // 3600}h{seconds % 3600 // 60:02d}m"
    return f"{seconds // 86400}d{seconds % 86400 // 3600:02d}h"
