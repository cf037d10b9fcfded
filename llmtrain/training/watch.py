"""Which rank of a run is dead, stuck or slow: a thread of each writes a beat into the launcher's key-value store every
second, looks for its neighbour's, and ends the process where the run cannot go on."""

import faulthandler
import json
import os
import socket
import statistics
import threading
import time
from collections.abc import Sequence
from contextlib import suppress
from datetime import timedelta
from typing import Any, TextIO

import torch
import torch.distributed as dist
from torch import nn

from llmtrain.storage.errors import Diverged, LlmtrainError, RankLost, StopRequested, write_error
from llmtrain.training.config import RunConfig, under_torchrun
from llmtrain.training.lifecycle import write_status
from llmtrain.training.notify import LONG
from llmtrain.training.own_time import OwnTime, time_forward

BEAT = 1.0
"""Seconds between two signs of life of a rank."""
LAST = 30.0
"""Seconds that rank 0 waits in the end for the others to end."""
STORE_GONE = "the store of the ranks is gone, and with it the launcher or rank 0"
SLOW, SLOW_MS = 1.2, 2.0
"""A rank that computes so many times as long as the median one, and so many ms longer, holds up all of them."""


class Watch(threading.Thread):
    """Writes this rank's beats and reads the others'. Ends the process where the run cannot go on: what waits for a
    rank that is gone waits for ever."""

    def __init__(self, rank: int, size: int, store: dist.Store, run: RunConfig, device: torch.device) -> None:
        super().__init__(name="ranks", daemon=True)
        self.rank, self.size, self.store = rank, size, store
        self.run_dir, self.device = run.run_dir, device
        self.patience = self.silence = float(run.rank_timeout)
        self.step = 0
        self.waits = False
        """Whether the main thread is where it waits for other ranks."""
        self.path = run.run_dir / "ranks" / f"rank-{rank:05d}.log"
        self._log: TextIO | None = None
        self._over = threading.Event()
        self._due = time.monotonic() + LONG
        self._last = time.monotonic()
        self._beats = 0
        self._own = OwnTime(device.type == "cuda")
        self._layers: int | None = None  # whose forward is timed; None: all that comes before a sum is
        self._even = 0.0  # the layers of a rank, if all had as many
        self._said_slow = -1
        self._slow: tuple[int, int] = (-1, 0)
        who = {"host": socket.gethostname(), "pid": os.getpid(), "log": str(self.path.absolute())}
        store.set(f"who/{rank}", json.dumps(who))

    # The main thread's part.

    def open_log(self) -> None:
        try:
            self.path.parent.mkdir(exist_ok=True)
            self._log = self.path.open("a", buffering=1)
            self._log.write(f"{time.strftime('%F %T')} process {os.getpid()} on {socket.gethostname()}\n")
        except OSError as error:
            raise write_error(error, self.path) from error

    def alive(self, within: float | None) -> None:
        self._last = time.monotonic()
        self._due = self._last + max(within or 0.0, self.patience)

    def before_sum(self) -> None:
        if self._layers is None:
            self._own.end()
        self._own.end_step()

    def after_sum(self) -> None:
        if self._layers is None:
            self._own.begin()

    def time_layers(self, layers: Sequence[nn.Module], even: float) -> None:
        self._layers, self._even = len(layers), even
        time_forward(layers, self._own)

    def leave(self, error: BaseException | None) -> None:
        self._over.set()
        with suppress(RuntimeError):
            if error is None or isinstance(error, StopRequested):
                self.store.set(f"gone/{self.rank}", "")
                if self.rank == 0:  # whose process may be the one that holds the store
                    self.store.wait([f"gone/{i}" for i in range(self.size)], timedelta(seconds=LAST))
            elif not isinstance(error, RankLost):
                text = str(error) if isinstance(error, LlmtrainError) else f"{type(error).__name__}: {error}"
                self._say_failed(f"{self._named(self.rank)} has failed: {text}", error)
            else:
                self._say_failed(str(error), error)
            if self._log is not None and error is not None:
                self._log.write(f"{type(error).__name__}: {error}\n")
        self.join(2 * BEAT)

    def find_lost(self) -> str:
        """Which rank it is that a sum has failed for: one that says so, or one whose beats have ended; or that the
        store is gone in which to look; "": none."""
        before = self._read_beats()
        end = time.monotonic() + 4 * BEAT
        while time.monotonic() < end:
            try:
                if self.store.check(["failed"]):
                    return str(json.loads(self.store.get("failed"))["text"])
            except RuntimeError:
                return f"{STORE_GONE}, in step {self.step + 1}"
            time.sleep(BEAT / 10)
        after = self._read_beats()
        dead = [rank for rank in range(self.size) if before.get(rank) == after.get(rank)]
        return f"{self._named(dead[0])} has died in step {self.step + 1}" if after and dead else ""

    # The thread's part.

    def run(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.set_device(self.device)  # a thread begins on card 0
        left = (self.rank - 1) % self.size
        seen, since, store_lost = "", time.monotonic(), 0.0
        pause = 0.0  # the first beat at once: small steps may be over, and a rank lost, before another would come
        while not self._over.wait(pause):
            pause = BEAT
            now = time.monotonic()
            try:
                self._beat()
                if self.store.check(["failed"]):
                    said = json.loads(self.store.get("failed"))
                    return self._end(said["text"], said["code"], told=False)
                if now > self._due:
                    return self._fail(self._stuck(now - self._last))
                beat = self._read(f"beat/{left}")
                if beat != seen:
                    seen, since = beat, now
                elif beat and now - since > self.silence and not self.store.check([f"gone/{left}"]):
                    text = f"has given no sign of life for {now - since:.0f} s, it is dead or frozen"
                    return self._fail(f"{self._named(left)} {text}, at step {json.loads(beat)['step']}")
                store_lost = 0.0
            except RuntimeError as error:
                if self._over.is_set():
                    return
                store_lost = store_lost or now
                if now - store_lost > 5 * BEAT:
                    reason = str(error).splitlines()[0]
                    text = f"{STORE_GONE}: {reason}"
                    return self._end(text, RankLost.exit_code)

    def _beat(self) -> None:
        ms = self._own.ms()
        if ms is not None and self._layers is not None:
            ms *= self._even / self._layers
        self._beats += 1
        beat = {"n": self._beats, "sums": self._own.steps, "step": self.step, "ms": ms}
        beat |= {"timed": self._layers != 0, "waits": self.waits or self._device_waits()}
        self.store.set(f"beat/{self.rank}", json.dumps(beat))

    def _device_waits(self) -> bool:
        """Whether a card has something left to do, which where nobody goes on is to wait for the others: the host of
        one that waits runs ahead of it, and halts anywhere; that of one that hangs has given its card nothing more."""
        if self._layers is None or self.device.type != "cuda":
            return False
        return not torch.cuda.default_stream(self.device).query()

    def _read(self, key: str) -> str:
        return self.store.get(key).decode() if self.store.check([key]) else ""

    def _read_beats(self) -> dict[int, dict[str, Any]]:
        with suppress(RuntimeError):
            texts = {rank: self._read(f"beat/{rank}") for rank in range(self.size)}
            return {rank: json.loads(text) for rank, text in texts.items() if text}
        return {}

    def _named(self, rank: int) -> str:
        with suppress(RuntimeError, ValueError):
            if who := self._read(f"who/{rank}"):
                who = json.loads(who)
                return f"rank {rank} on {who['host']} (process {who['pid']}, log {who['log']})"
        return f"rank {rank}"

    def _stuck(self, seconds: float) -> str:
        """The line for a run that does not go on, though this rank's thread does: who is behind the others?"""
        beats = self._read_beats()
        fewest = min((beat["sums"] for beat in beats.values()), default=0)
        behind = [rank for rank, beat in beats.items() if beat["sums"] == fewest]
        where = f"for {seconds:.0f} s, in step {self.step + 1}"
        absent = [rank for rank in range(self.size) if rank not in beats]
        if beats and absent:
            return f"{self._named(absent[0])} has given no sign of life yet: nobody has gone on {where}"
        if len(behind) > 1:
            # Ranks that share a model out wait for each other before the sum too. Of those that look here at the same
            # time each must go on giving signs of life, or they take one another for dead.
            for _ in range(4):
                self._over.wait(BEAT)
                self._beat()
            latest = self._read_beats()
            silent = [rank for rank in behind if rank != self.rank and latest.get(rank) == beats[rank]]
            if silent:
                return f"{self._named(silent[0])} is dead or frozen: nobody has gone on {where}"
            behind = [rank for rank in behind if not latest.get(rank, beats[rank])["waits"]]
        if len(behind) in (0, len(beats)):
            return f"no rank has gone on {where}: none is behind the others, so see to the network between them"
        more = f" and {len(behind) - 1} more" if len(behind) > 1 else ""
        return f"{self._named(behind[0])}{more} has not gone on {where}, and the others wait for it"

    def pace(self) -> tuple[dict[str, float], str]:
        beats = self._read_beats()
        ms = {rank: beat["ms"] for rank, beat in beats.items() if beat["ms"] is not None}
        if len(beats) < self.size or len(ms) < sum(beat["timed"] for beat in beats.values()):
            return {}, ""
        median = statistics.median_low(ms.values())
        slowest = max(ms, key=lambda rank: ms[rank])
        figures = {"rank_ms": median, "slowest_rank_ms": ms[slowest], "slowest_rank": slowest}
        if ms[slowest] < SLOW * median + SLOW_MS:
            self._slow = (-1, 0)
            return figures, ""
        # Twice in a row: once may be a page of the disk.
        self._slow = (slowest, self._slow[1] + 1 if self._slow[0] == slowest else 1)
        if self._slow[1] < 2 or self._said_slow == slowest:
            return figures, ""
        self._said_slow = slowest
        of = "until it waits for the others" if self._layers is None else f"for the forward of {self._even:g} layers"
        text = f"{self._named(slowest)} is slow: {ms[slowest]:.1f} ms a step {of}, "
        return figures, text + f"{median:.1f} ms is the median: all go at its pace"

    def _say_failed(self, text: str, error: BaseException | None = None) -> None:
        code = error.exit_code if isinstance(error, LlmtrainError) else RankLost.exit_code
        self.store.compare_set("failed", "", json.dumps({"text": text, "code": code}))

    def _fail(self, text: str) -> None:
        self._say_failed(text)
        said = json.loads(self.store.get("failed"))
        self._end(said["text"], said["code"], told=True)

    def _end(self, text: str, code: int, told: bool = True) -> None:
        """Ends the process, whose main thread waits for what does not come."""
        line = f"llmtrain: error: {' '.join(text.split())}: the run ends, --resume goes on\n"
        with suppress(OSError):
            if self._log is not None:
                self._log.write(line)
                faulthandler.dump_traceback(self._log)
        if told or self.rank == 0:
            with suppress(OSError):
                os.write(2, line.encode())
            with suppress(LlmtrainError, OSError, ValueError, KeyError):
                # Of several that end, the first knows why; the store may have gone with it.
                if json.loads((self.run_dir / "status.json").read_text())["state"] == "running":
                    write_status(self.run_dir, "failed", text, self.step, code)
        agreed = code == Diverged.exit_code and under_torchrun()
        os._exit(0 if agreed else RankLost.exit_code)
