"""One run as several processes: who takes part, what they add up, how they agree to stop, and who is named when one
of them dies, hangs or is slow. Everything that knows of more than one rank is here; alone, a World does nothing.

A step has one exchange, a sum over the ranks of what each has added up. All else goes through the launcher's key-value
store: each rank writes a beat there every second, and looks for its neighbour's.
"""

import faulthandler
import json
import os
import socket
import statistics
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from datetime import timedelta
from typing import Any, TextIO, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from llmtrain.storage.errors import Diverged, LlmtrainError, RankLost, StopRequested, UsageError, write_error
from llmtrain.training.config import RunConfig, under_torchrun, world_size
from llmtrain.training.lifecycle import StopFlag, write_status
from llmtrain.training.notify import LEEWAY, LONG

MEETING = 600.0
"""Seconds within which all ranks have to be there; boxes do not boot at the same time."""
BEAT = 1.0
"""Seconds between two signs of life of a rank."""
LAST = 30.0
"""Seconds that rank 0 waits in the end for the others to end."""
AHEAD = 2
"""Steps from the one at whose begin a stop is asked for to the stop. A rank that begins step n + 2 has the sum of step
n behind it, so it can see what was said before that sum by any other."""
SLOW, SLOW_MS = 1.2, 2.0
"""A rank that computes so many times as long as the median one, and so many ms longer, holds up all of them."""


T = TypeVar("T")


class World:
    """The ranks of a run, seen from one of them. `World()` is a process alone.

    rank, size: which of how many. local: which on its machine, and so which card.
    """

    def __init__(self, rank: int = 0, size: int = 1, local: int = 0) -> None:
        self.rank, self.size, self.local = rank, size, local
        self.stopped_by = ""
        """The signal that the agreed stop comes from, and which rank it went to."""
        self._stop_at: int | None = None
        self._proposed = False
        self._shared = 0
        self._store: dist.Store | None = None
        self._watch: _Watch | None = None

    @property
    def first(self) -> bool:
        """Whether this is the rank that speaks, writes and decides for all."""
        return self.rank == 0

    @property
    def alone(self) -> bool:
        return self.size == 1

    # What is added up.

    def add_gradients(self, *tensors: Tensor) -> None:
        """Adds each tensor up over the ranks, in place, behind the work issued so far and before what is issued next.
        Raises RankLost."""
        assert self._watch is not None
        self._watch.before_sum(tensors[0].is_cuda)
        self._add(*tensors)
        self._watch.after_sum(tensors[0].is_cuda)

    def take_highest(self, tensor: Tensor) -> None:
        """Raises each number to the highest of all ranks, in place; as `add_gradients`."""
        try:
            dist.all_reduce(tensor, dist.ReduceOp.MAX)
        except RuntimeError as error:
            raise self._lost(error) from error

    def _add(self, *tensors: Tensor) -> None:
        try:
            for tensor in tensors:
                dist.all_reduce(tensor)
        except RuntimeError as error:
            raise self._lost(error) from error

    def totals(self, device: torch.device, *numbers: float) -> list[float]:
        """Each number, added up over the ranks. Waits for the device."""
        if self.alone:
            return list(numbers)
        tensor = torch.tensor(numbers, dtype=torch.float64, device=device)
        self._add(tensor)
        return [float(x) for x in tensor.tolist()]

    def any(self, device: torch.device, said: bool) -> bool:
        """Whether any rank says so. Waits for the device."""
        return self.totals(device, float(said))[0] > 0

    def copy_from_first(self, *tensors: Tensor) -> None:
        """Overwrites each tensor with that of rank 0."""
        if self.alone:
            return
        try:
            for tensor in tensors:
                dist.broadcast(tensor, 0)
        except RuntimeError as error:
            raise self._lost(error) from error

    # What is said.

    def from_first(self, make: Callable[[], T]) -> T:
        """What `make` gives on rank 0, on every rank; it passes through JSON."""
        if self.alone:
            return make()
        assert self._store is not None
        key, self._shared = f"shared/{self._shared}", self._shared + 1
        if self.first:
            value = make()
            self._store.set(key, json.dumps(value))
            return value
        return json.loads(self._get(key))  # type: ignore[no-any-return]

    def first_goes_first(self, work: Callable[[], T]) -> T:
        """What `work` gives. Rank 0 has done it, and left what it leaves on the disk, when the others begin."""
        if self.first:
            done = work()
            self.from_first(lambda: True)
            return done
        self.from_first(lambda: True)
        return work()

    def least(self, number: int) -> int:
        """The smallest of the numbers that the ranks have."""
        if self.alone:
            return number
        assert self._store is not None
        key, self._shared = f"shared/{self._shared}", self._shared + 1
        self._store.set(f"{key}/{self.rank}", str(number))
        return min(int(self._get(f"{key}/{rank}")) for rank in range(self.size))

    def _get(self, key: str) -> str:
        assert self._store is not None
        try:
            return self._store.get(key).decode()
        except RuntimeError as error:
            raise self._lost(error) from error

    # How it ends.

    def must_stop(self, stop: StopFlag, at_step: int, begun: bool) -> bool:
        """Whether the run stops here, which all ranks are told of the same step, AHEAD of where a signal met one of
        them. begun: the step has, which then is carried through. Alone: at once."""
        if self.alone:
            return bool(stop)
        return not begun and self.asked_to_stop(stop, at_step) and at_step >= (self._stop_at or 0)

    def asked_to_stop(self, stop: StopFlag, at_step: int) -> bool:
        """Whether any rank was. To be asked before step at_step + 1 begins."""
        if self.alone:
            return bool(stop)
        assert self._store is not None
        if self._stop_at is not None:
            return True
        try:
            if stop and not self._proposed:
                self._proposed = True
                by = f"{stop.name}, which rank {self.rank} on {socket.gethostname()} got,"
                self._store.compare_set("stop", "", json.dumps({"step": at_step + AHEAD, "by": by}))
            if self._store.check(["stop"]):
                said = json.loads(self._store.get("stop"))
                self._stop_at, self.stopped_by = said["step"], said["by"]
        except RuntimeError as error:
            raise self._lost(error) from error
        return self._stop_at is not None

    def stop_at(self, step: int) -> None:
        """For ranks that have all come to know at this step that a stop was asked for: no step more."""
        if self._store is not None:
            self._stop_at = step
            self.stopped_by = json.loads(self._get("stop"))["by"]

    def alive(self, within: float | None = None) -> None:
        """This rank goes on, and says so again `within` seconds; None: as soon as --rank-timeout wants it."""
        if self._watch is not None:
            self._watch.alive(within)

    def ready(self, micro_batch: float) -> None:
        """The first step is done; its micro-batches took so many seconds each."""
        if self._watch is not None:
            self._watch.patience = max(self._watch.patience, LEEWAY * micro_batch)

    def open_log(self) -> None:
        """From now on what concerns this rank alone is written to RUN/ranks. Raises CannotCreate, StorageFailure."""
        if self._watch is not None:
            self._watch.open_log()

    def at(self, step: int) -> None:
        """The step that this rank stands at, for what is said of it."""
        if self._watch is not None:
            self._watch.step = step

    def pace(self) -> tuple[dict[str, float], str]:
        """For the train line: what ranks take for a step until they wait for the others, median and most, in ms; and
        a line that names one that is slow, where one is. Nothing on other ranks than 0."""
        if self._watch is None or not self.first:
            return {}, ""
        return self._watch.pace()

    def _lost(self, error: RuntimeError) -> RankLost:
        """The error to raise in place of one that a sum or the store has given."""
        assert self._watch is not None
        return RankLost(self._watch.find_lost(str(error).splitlines()[0]))

    def join(self, run: RunConfig, device: torch.device) -> None:
        """Meets the other ranks. Raises UsageError, RankLost."""
        os.environ.setdefault("NCCL_NVLS_ENABLE", "0")  # multicast over NVLink, for who asks for it
        address, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
        attempt = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
        patience = timedelta(seconds=LONG)
        try:
            meeting = timedelta(seconds=MEETING)
            store, _, _ = next(dist.rendezvous("env://", self.rank, self.size, timeout=meeting))
            store.set_timeout(patience)
            self._store = dist.PrefixStore(f"llmtrain/{attempt}", store)
            # A client of its own: one that waits holds up whoever else asks through it.
            beside = dist.TCPStore(address, port, None, False, patience, wait_for_workers=False)
            beside_store = dist.PrefixStore(f"llmtrain/{attempt}", beside)
            self._watch = _Watch(self, beside_store, run, device)
            self._watch.start()
            dist.init_process_group(
                "nccl" if device.type == "cuda" else "gloo",
                store=dist.PrefixStore(f"ranks/{attempt}", store),
                rank=self.rank,
                world_size=self.size,
                timeout=patience,
                device_id=device if device.type == "cuda" else None,
            )
        except RuntimeError as error:
            raise RankLost(
                f"rank {self.rank} cannot meet the other {self.size - 1} at {address}:{port}: "
                f"{str(error).splitlines()[0]}"
            ) from error
        self.totals(device, 0.0)  # makes the connections

    def leave(self, error: BaseException | None) -> None:
        """Says how this rank ends."""
        if self._watch is None:
            return
        self._watch.leave(error)
        if error is None or isinstance(error, StopRequested):
            with suppress(RuntimeError):
                dist.destroy_process_group()


class _Watch(threading.Thread):
    """Writes this rank's beats and reads the others'. Ends the process where the run cannot go on: what waits for a
    rank that is gone waits for ever."""

    def __init__(self, world: World, store: dist.Store, run: RunConfig, device: torch.device) -> None:
        super().__init__(name="ranks", daemon=True)
        self.world, self.store, self.run_dir, self.device = world, store, run.run_dir, device
        self.patience = self.silence = float(run.rank_timeout)
        self.step = 0
        self.path = run.run_dir / "ranks" / f"rank-{world.rank:05d}.log"
        self._log: TextIO | None = None
        self._over = threading.Event()
        self._due = time.monotonic() + LONG
        self._last = time.monotonic()
        self._beats = 0
        self._sums = 0  # that this rank has reached: its device, on a card
        self._events: deque[tuple[torch.cuda.Event | None, torch.cuda.Event]] = deque()
        self._after: torch.cuda.Event | None = None
        self._since: float | None = None
        self._own: deque[float] = deque(maxlen=16)
        self._said_slow = -1
        self._slow: tuple[int, int] = (-1, 0)
        who = {"host": socket.gethostname(), "pid": os.getpid(), "log": str(self.path.absolute())}
        store.set(f"who/{world.rank}", json.dumps(who))

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

    def before_sum(self, on_card: bool) -> None:
        if on_card:
            event = torch.cuda.Event(enable_timing=True)
            event.record()
            self._events.append((self._after, event))
        else:
            self._sums += 1
            if self._since is not None:
                self._own.append(1e3 * (time.perf_counter() - self._since))

    def after_sum(self, on_card: bool) -> None:
        if on_card:
            self._after = torch.cuda.Event(enable_timing=True)
            self._after.record()
        else:
            self._since = time.perf_counter()

    def leave(self, error: BaseException | None) -> None:
        self._over.set()
        with suppress(RuntimeError):
            if error is None or isinstance(error, StopRequested):
                self.store.set(f"gone/{self.world.rank}", "")
                if self.world.first:  # whose process may be the one that holds the store
                    self.store.wait([f"gone/{i}" for i in range(self.world.size)], timedelta(seconds=LAST))
            elif not isinstance(error, RankLost):
                text = str(error) if isinstance(error, LlmtrainError) else f"{type(error).__name__}: {error}"
                self._say_failed(f"{self._named(self.world.rank)} has failed: {text}", error)
            else:
                self._say_failed(str(error), error)
            if self._log is not None and error is not None:
                self._log.write(f"{type(error).__name__}: {error}\n")
        self.join(2 * BEAT)

    def find_lost(self, reason: str) -> str:
        """Which rank it is that a sum has failed for: one that says so, or one whose beats have ended."""
        before = self._read_beats()
        end = time.monotonic() + 4 * BEAT
        while time.monotonic() < end:
            with suppress(RuntimeError):
                if self.store.check(["failed"]):
                    return str(json.loads(self.store.get("failed"))["text"])
            time.sleep(BEAT / 10)
        after = self._read_beats()
        dead = [rank for rank in range(self.world.size) if before.get(rank) == after.get(rank)]
        if not after or not dead:
            return f"the sum over the ranks failed in step {self.step + 1}: {reason}: see the logs of the other ranks"
        return f"{self._named(dead[0])} has died in step {self.step + 1}"

    # The thread's part.

    def run(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.set_device(self.device)  # a thread begins on card 0
        left = (self.world.rank - 1) % self.world.size
        seen, since, store_lost = "", time.monotonic(), 0.0
        while not self._over.wait(BEAT):
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
                    text = f"the store of the ranks is gone, and with it the launcher or rank 0: {reason}"
                    return self._end(text, RankLost.exit_code)

    def _beat(self) -> None:
        while self._events and self._events[0][1].query():
            before, event = self._events.popleft()
            self._sums += 1
            if before is not None:
                self._own.append(before.elapsed_time(event))
        own = statistics.median(self._own) if self._own else None
        self._beats += 1
        beat = {"n": self._beats, "sums": self._sums, "step": self.step, "ms": own}
        self.store.set(f"beat/{self.world.rank}", json.dumps(beat))

    def _read(self, key: str) -> str:
        return self.store.get(key).decode() if self.store.check([key]) else ""

    def _read_beats(self) -> dict[int, dict[str, Any]]:
        with suppress(RuntimeError):
            texts = {rank: self._read(f"beat/{rank}") for rank in range(self.world.size)}
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
        reached = {rank: beat["sums"] for rank, beat in beats.items()}
        behind = [rank for rank, sums in reached.items() if sums == min(reached.values())]
        where = f"for {seconds:.0f} s, in step {self.step + 1}"
        if len(behind) == len(reached):
            return f"no rank has gone on {where}: all have reached the same sum, so see to the network between them"
        more = f" and {len(behind) - 1} more" if len(behind) > 1 else ""
        return f"{self._named(behind[0])}{more} has not gone on {where}, and the others wait for it"

    def pace(self) -> tuple[dict[str, float], str]:
        ms = {rank: beat["ms"] for rank, beat in self._read_beats().items() if beat["ms"] is not None}
        if len(ms) < self.world.size:
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
        text = f"{self._named(slowest)} is slow: {ms[slowest]:.1f} ms a step until it waits for the others, "
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
        if told or self.world.first:
            with suppress(OSError):
                os.write(2, line.encode())
            with suppress(LlmtrainError, OSError, ValueError, KeyError):
                # Of several that end, the first knows why; the store may have gone with it.
                if json.loads((self.run_dir / "status.json").read_text())["state"] == "running":
                    write_status(self.run_dir, "failed", text, self.step, code)
        agreed = code == Diverged.exit_code and under_torchrun()
        os._exit(0 if agreed else RankLost.exit_code)


@contextmanager
def world_of(run: RunConfig, pick_device: Callable[[str], torch.device]) -> Iterator[tuple[World, torch.device]]:
    """The ranks that this process belongs to, as torchrun's variables say, and its device. At the end of the block the
    others are told how it ended. Raises UsageError, CannotCreate, RankLost."""
    size = world_size()
    if size == 1:
        yield World(), pick_device(run.device)
        return
    try:
        world = World(int(os.environ["RANK"]), size, int(os.environ["LOCAL_RANK"]))
    except (KeyError, ValueError):
        raise UsageError(
            f"WORLD_SIZE is {size}, but RANK and LOCAL_RANK do not say which of them this is: start it with torchrun"
        ) from None
    device = pick_device(run.device)
    if device.type == "cuda":
        cards = torch.cuda.device_count()
        if world.local >= cards > 1:
            raise UsageError(
                f"rank {world.rank} is number {world.local} on its machine, which has {cards} cards: start one process "
                "for each"
            )
        device = torch.device("cuda", world.local if cards > 1 else 0)  # Slurm may show each process its own alone
        torch.cuda.set_device(device)  # before all else: what is made on another card stays there
    try:
        world.join(run, device)
        yield world, device
    except BaseException as error:
        world.leave(error)
        raise
    world.leave(None)

