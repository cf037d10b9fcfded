"""What a run says: RUN/metrics.jsonl for programs, a line on the console for people."""

import math
import resource
import sys
import threading
import time
from collections import deque
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.text import Text

from llmtrain.report.dashboard import frame
from llmtrain.report.state import RUNNING, RunState, said
from llmtrain.report.terminal import Terminal
from llmtrain.report.trackers import Trackers
from llmtrain.storage.errors import LlmtrainError
from llmtrain.storage.journal import JsonLines
from llmtrain.storage.units import duration
from llmtrain.training.card import Card
from llmtrain.training.lifecycle import StopFlag
from llmtrain.training.plan import Plan

MAX_HELD = 100_000
"""Lines that wait for the disk, about 600 bytes each."""
REDRAW = 1.0
"""Seconds between two frames of the dashboard. A frame takes some milliseconds of Python, which the training thread may
have to wait for, once a second; drawn by the loop it would be at the one moment, after the sync of a log line,
when the device has nothing to do."""
LAST_FRAME = 5.0
"""Seconds that the end of a run waits for a terminal that takes nothing."""


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


class RunLog:
    """Writes RUN/metrics.jsonl and the console: lines and, on a terminal, the dashboard below them, which a thread
    draws."""

    def __init__(
        self,
        run_dir: Path,
        attempt: int,
        plan: Plan,
        console: Console | None = None,
        rank: int = 0,
        stop: StopFlag | None = None,
        view: str = "auto",
        card: Card | None = None,
    ) -> None:
        """stop: whose coming the dashboard says. view: as RunConfig.console. card: whose temperature and power train
        lines hold."""
        self.journal = JsonLines(journal_of(run_dir, rank))
        self.attempt = attempt
        self.plan = plan
        self.state = RunState(str(run_dir), RUNNING)
        self.trackers = Trackers()
        self._stop, self._card = stop, card
        self._held: list[dict[str, Any]] = []
        self._lock = threading.Lock()
        self._said_lost = False
        self._terminal = Terminal(self._frame if view == "auto" else None, console, quiet=rank > 0)
        self._pending: deque[str] = deque()  # lines that the thread prints
        self._wake, self._over = threading.Event(), threading.Event()
        self._thread: threading.Thread | None = None
        if self._terminal.draws:
            for line in JsonLines.read(self.journal.path):
                self.state.add(line)
            if stop is not None:
                stop.said_by_others = True
            self._thread = threading.Thread(target=self._draw, name="dashboard", daemon=True)
            self._thread.start()

    def _frame(self, width: int, height: int, ascii_only: bool) -> Text:
        return frame(self.state, width, height, ascii_only=ascii_only)

    def _draw(self) -> None:
        """The part of the thread. It alone writes to the terminal, which may take its time or be halted (Ctrl-S)."""
        said_stop = False
        while True:
            self._wake.wait(REDRAW)
            self._wake.clear()
            over = self._over.is_set()
            if self._stop and not said_stop:
                said_stop = True
                self._print(self._stop.words)
            while self._pending:
                self._print(self._pending.popleft())
            try:
                self._terminal.draw()
            except Exception as error:  # a picture that cannot be drawn is no reason to fall silent
                self._terminal.close()
                self._print(f"the dashboard cannot be drawn ({type(error).__name__}: {error}): lines follow")
            if over:
                return self._terminal.close()

    def line(self, text: str) -> None:
        """A line for people only."""
        if self._thread is None:
            return self._print(text)
        self._pending.append(text)
        self._wake.set()

    def _print(self, text: str) -> None:
        self._terminal.line(text)
        if self._terminal.lost and not self._said_lost:
            self._said_lost = True
            text = f"the console is gone, nothing is printed ({self._terminal.lost})"
            self.write("event", 0, 0, event="console", text=text)

    def write(self, kind: str, step: int, tokens: int, **fields: Any) -> None:
        """A line for programs. A disk that does not take it is no reason to end the run: the line is held until it
        does, and `sync` sees to it that no checkpoint is published without it. Raises StorageFailure where very many
        are held."""
        line = {"kind": kind, "step": step, "tokens": tokens, "time": time.time(), "attempt": self.attempt, **fields}
        self.state.add(line)
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
        self.line(said({"kind": "event", "step": step, "text": text}))

    def evaluation(self, step: int, tokens: int, source: str, figures: dict[str, float]) -> None:
        """An eval line: to both."""
        self.write("eval", step, tokens, source=source, **figures)
        self.line(said({"kind": "eval", "step": step, "source": source, **figures}))

    def _say_trackers(self, trouble: list[str]) -> None:
        for text in trouble:
            self.event(self.state.at_step, self.state.train.get("tokens", 0), "tracker", text)

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
        of_card = self._card.now() if self._card else {}
        self.write("train", step, tokens, **fields, tflops=achieved / 1e12, **memory(), **of_card)
        self._say_trackers(self.trackers.trouble())
        left = (self.plan.total_samples - self.plan.samples(step)) * (tokens / max(1, self.plan.samples(step)))
        share = f"mfu {mfu:.1%}" if mfu is not None else f"{achieved / 1e12:.3g} TFLOP/s"
        aux = f"aux {figures['aux_loss']:.4f} " if figures["aux_loss"] else ""
        text = (
            f"epoch {epoch:.2f} step {step}/{self.plan.total_steps} loss {figures['lm_loss']:.4f} ppl {ppl:.2f} "
            f"{aux}lr {lr:.2e} grad {figures['grad_norm']:.2f} tok/s {rate:,.0f} {share} "
            f"eta {duration(left / rate)}" + (f" skipped {figures['skipped']}" if figures["skipped"] else "")
        )
        if not self._terminal.draws:
            self.line(text)
        return text

    def close(self) -> None:
        """Ends the use of all of them; `sync` first what must be on the disk."""
        with suppress(LlmtrainError):
            self._say_trackers(self.trackers.close())
        if self._thread is not None:
            self._over.set()
            self._wake.set()
            self._thread.join(LAST_FRAME)
            if self._stop is not None:
                self._stop.said_by_others = False
        if self._card is not None:
            self._card.close()
        self.journal.close()
