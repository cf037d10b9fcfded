"""One run as several processes: who takes part, what they add up, and who is named when one of them dies, hangs or is
slow. Everything that knows of more than one rank is here, in `watch` and in `agreed_stop`; alone, a World does nothing.

A step has one exchange, a sum over the ranks of what each has added up. All else goes through the launcher's key-value
store: each rank writes a beat there every second, and looks for its neighbour's.
"""

import json
import os
import socket
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from datetime import timedelta
from pathlib import Path
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from llmtrain.storage.errors import RankLost, StopRequested, UsageError
from llmtrain.training.agreed_stop import AgreedStop
from llmtrain.training.config import RunConfig, world_size
from llmtrain.training.grid import Grid
from llmtrain.training.notify import LEEWAY, LONG
from llmtrain.training.together import Together
from llmtrain.training.watch import Watch

MEETING = 600.0
"""Seconds within which all ranks have to be there; boxes do not boot at the same time."""

T = TypeVar("T")


class World:
    """The ranks of a run, seen from one of them. `World()` is a process alone.

    rank, size: which of how many. local: which on its machine, and so which card.
    """

    def __init__(self, rank: int = 0, size: int = 1, local: int = 0) -> None:
        self.rank, self.size, self.local = rank, size, local
        self.grid = Grid(copies=size)
        self.mesh: DeviceMesh | None = None
        """All ranks, with a dimension for each number of the grid that is above 1."""
        self._data: dist.ProcessGroup | None = None
        self.together = Together()
        """All ranks, for what they do together or not at all."""
        self.agreed_stop = AgreedStop()
        self._shared = 0
        self._store: dist.Store | None = None
        self._watch: Watch | None = None

    @property
    def first(self) -> bool:
        """Whether this is the rank that speaks, writes and decides for all."""
        return self.rank == 0

    @property
    def alone(self) -> bool:
        return self.size == 1

    # How they share the work.

    def arrange(self, grid: Grid, device: torch.device) -> None:
        """Takes its place in the grid, as all ranks do. Raises RankLost."""
        self.grid = grid
        if self.alone:
            return
        sizes = {"stage": grid.stages, "copy": grid.copies, "shard": grid.shards}
        names = tuple(name for name, size in sizes.items() if size > 1)
        try:
            self.mesh = init_device_mesh(device.type, tuple(sizes[name] for name in names), mesh_dim_names=names)
            of_data = tuple(name for name in names if name != "stage")
            if len(of_data) == 2:
                self._data = self.mesh[of_data]._flatten("data").get_group()
            elif of_data:
                self._data = self.mesh.get_group(of_data[0])
        except RuntimeError as error:
            raise self._lost(error) from error

    def first_and_last(self) -> dist.ProcessGroup | None:
        """The first and the last rank of this rank's pipeline, on these two; asked for by all ranks at once."""
        mine = None
        for first in range(self.data_ranks):
            ends = [first, self.size - self.data_ranks + first]
            group = dist.new_group(ends)
            mine = group if self.rank in ends else mine
        return mine

    def group(self, name: str) -> dist.ProcessGroup:
        """The ranks that differ from this one in their "stage", "copy" or "shard" alone."""
        assert self.mesh is not None
        return self.mesh.get_group(name)

    @property
    def data_rank(self) -> int:
        """Which of the `data_ranks` parts of the data this rank takes."""
        return self.rank % self.data_ranks

    @property
    def data_ranks(self) -> int:
        return self.grid.copies * self.grid.shards

    # What is added up.

    def add_gradients(self, gradients: Tensor, sums: Tensor, sharded: int = 0) -> None:
        """Adds both up over the ranks of a stage, in place, behind the work issued so far and before what is issued
        next; of the gradients the first `sharded` elements are added up over the shards already. Raises RankLost."""
        assert self._watch is not None
        self._watch.before_sum()
        if sharded and self.grid.copies > 1:
            self._add(gradients[:sharded], over=self.group("copy"))
        if self.data_ranks > 1:
            self._add(gradients[sharded:], sums, over=self._data)
        self._watch.after_sum()

    def take_highest(self, tensor: Tensor) -> None:
        """Raises each number to the highest of the ranks of a stage, in place; as `add_gradients`."""
        if self.data_ranks > 1:
            self._add(tensor, over=self._data, operation=dist.ReduceOp.MAX)

    def _add(
        self, *tensors: Tensor, over: dist.ProcessGroup | None = None, operation: Any = dist.ReduceOp.SUM
    ) -> None:
        """`over`: all ranks where it is None."""
        try:
            with self.waiting():
                for tensor in tensors:
                    dist.all_reduce(tensor, operation, over)
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
            with self.waiting():
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

    def fill(self, work: Callable[[Together], T]) -> T:
        """What `work` gives, which reads weights and moments: on rank 0 alone where all ranks have the same, so that
        the others need not see its disk; on each, of its own part, where they have not."""
        if self.grid.parts == 1:
            return self.from_first(lambda: work(Together()))
        return work(self.together)

    def require_shared(self, run_dir: Path) -> None:
        """Raises UsageError where a rank does not see the folder that rank 0 has locked: checkpoints are written and
        read by all ranks that have parts of the model."""
        lock = run_dir / "lock"
        of_first = self.together.by_first(lambda: lock.read_text())

        def look() -> None:
            if not lock.exists() or lock.read_text() != of_first:
                raise UsageError(
                    f"{run_dir}: rank {self.rank} on {socket.gethostname()} sees another folder than rank 0, but with "
                    "parts of the model on each rank all write checkpoints: name one on a file system that they share"
                )

        self.together.each(look)

    def writers(self) -> Together | None:
        """Those that write checkpoints, for a thread of its own; None where this rank has no part of its own."""
        stage, copy, shard = self.grid.place(self.rank)
        if copy > 0:
            return None
        if self.grid.parts == 1:
            return Together()
        store = self._another_client()
        return Together(stage * self.grid.shards + shard, self.grid.parts, store, "save", self._lost)

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
            with self.waiting():
                return self._store.get(key).decode()
        except RuntimeError as error:
            raise self._lost(error) from error

    # How it ends.

    def alive(self, within: float | None = None) -> None:
        """This rank goes on, and says so again `within` seconds; None: as soon as --rank-timeout wants it."""
        if self._watch is not None:
            self._watch.alive(within)

    @contextmanager
    def waiting(self, waits: bool = True) -> Iterator[None]:
        """Inside the block this rank waits for others, or with False does not. Of ranks that wait for one another and
        do not go on, one that does not wait is named."""
        if self._watch is None:
            yield
            return
        before, self._watch.waits = self._watch.waits, waits
        try:
            yield
        finally:
            self._watch.waits = before

    @contextmanager
    def exchange(self) -> Iterator[None]:
        """Inside the block an exchange with a rank that is gone becomes the line that names it, or says so where the
        store has gone with it. What a rank's own computing raises comes with a cause, and stays as it is."""
        try:
            yield
        except RuntimeError as error:
            if error.__cause__ is not None or self._watch is None:
                raise
            raise self._lost(error) from error

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
        """For the train line: what ranks take for a step until they wait for the others, or where they have a model
        together what `time_layers` says, median and most, in ms; and a line that names one that is slow, where one
        is. Nothing on other ranks than 0."""
        if self._watch is None or not self.first:
            return {}, ""
        return self._watch.pace()

    def time_layers(self, layers: nn.ModuleDict, alike: Sequence[int]) -> None:
        """Where ranks have a model together, and so wait for each other all the time, what counts as a rank's pace is
        from now on the forward of those of its layers that are `alike`, as if all ranks had as many; a rank without
        any has none. Elsewhere this does nothing."""
        if self._watch is not None and self.grid.parts > 1:
            own = [layers[str(layer)] for layer in alike if str(layer) in layers]
            self._watch.time_layers(own, len(alike) / self.grid.stages)

    def _lost(self, error: RuntimeError) -> RankLost:
        """The error to raise in place of one that a sum or the store has given."""
        assert self._watch is not None
        reason, step = str(error).splitlines()[0], self._watch.step + 1
        failed = f"the sum over the ranks failed in step {step}: {reason}: see the logs of the other ranks"
        return RankLost(self._watch.find_lost() or failed)

    def cause_of(self, error: BaseException) -> RankLost | None:
        """The rank that is lost, where that is why `error` was met in the middle of a step; None where it is not."""
        if self.grid.parts == 1 or self._watch is None:
            return None
        text = self._watch.find_lost()
        return RankLost(text) if text else None

    def join(self, run: RunConfig, device: torch.device) -> None:
        """Meets the other ranks. Raises UsageError, RankLost."""
        os.environ.setdefault("NCCL_NVLS_ENABLE", "0")  # multicast over NVLink, for who asks for it
        address, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
        attempt = _attempt()
        patience = timedelta(seconds=LONG)
        try:
            meeting = timedelta(seconds=MEETING)
            store, _, _ = next(dist.rendezvous("env://", self.rank, self.size, timeout=meeting))
            store.set_timeout(patience)
            self._store = dist.PrefixStore(f"llmtrain/{attempt}", store)
            self.agreed_stop = AgreedStop(self.rank, self._store, self._lost)
            self.together = Together(self.rank, self.size, self._store, "all", self._lost)
            self._watch = Watch(self.rank, self.size, self._another_client(), run, device)
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

    def _another_client(self) -> dist.Store:
        """Of the store, for another thread: one that waits holds up whoever else asks through it."""
        address, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
        store = dist.TCPStore(address, port, None, False, timedelta(seconds=LONG), wait_for_workers=False)
        return dist.PrefixStore(f"llmtrain/{_attempt()}", store)

    def leave(self, error: BaseException | None) -> None:
        """Says how this rank ends."""
        if self._watch is None:
            return
        self._watch.leave(error)
        if error is None or isinstance(error, StopRequested):
            with suppress(RuntimeError):
                dist.destroy_process_group()


def _attempt() -> str:
    """Under which the ranks of this start speak in the launcher's store, which outlives them."""
    return os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")


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

