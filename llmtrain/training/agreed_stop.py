"""A stop of all ranks after the same step, whichever of them a signal met."""

import json
import socket
from collections.abc import Callable

import torch.distributed as dist

from llmtrain.storage.errors import RankLost
from llmtrain.training.lifecycle import StopFlag

AHEAD = 2
"""Steps from the one at whose begin a stop is asked for to the stop. A rank that begins step n + 2 has the sum of step
n behind it, so it can see what was said before that sum by any other."""


class AgreedStop:
    """The stop, seen from one rank; `AgreedStop()` is of a process alone, which stops at once.

    store: in which the ranks agree. lost: makes the error of a store that has failed.
    """

    def __init__(
        self, rank: int = 0, store: dist.Store | None = None,
        lost: Callable[[RuntimeError], RankLost] = lambda error: RankLost(str(error)),
    ) -> None:  # fmt: skip
        self.by = ""
        """The signal that it comes from, and which rank that went to."""
        self._rank, self._store, self._lost = rank, store, lost
        self._step: int | None = None
        self._proposed = False

    def is_due(self, stop: StopFlag, at_step: int, begun: bool) -> bool:
        """Whether the run stops here, which all ranks are told of the same step, AHEAD of where a signal met one of
        them. begun: the step has, which then is carried through. Raises RankLost."""
        if self._store is None:
            return bool(stop)
        return not begun and self.is_asked_for(stop, at_step) and at_step >= (self._step or 0)

    def is_asked_for(self, stop: StopFlag, at_step: int) -> bool:
        """Whether any rank was told to. To be asked before step at_step + 1 begins. Raises RankLost."""
        if self._store is None:
            return bool(stop)
        if self._step is not None:
            return True
        try:
            if stop and not self._proposed:
                self._proposed = True
                by = f"{stop.name}, which rank {self._rank} on {socket.gethostname()} got,"
                self._store.compare_set("stop", "", json.dumps({"step": at_step + AHEAD, "by": by}))
            if self._store.check(["stop"]):
                self._read(self._store)
        except RuntimeError as error:
            raise self._lost(error) from error
        return self._step is not None

    def put_at(self, step: int) -> None:
        """For ranks that have all come to know at this step that a stop was asked for: no step more. Raises
        RankLost."""
        if self._store is None:
            return
        try:
            self._read(self._store)
        except RuntimeError as error:
            raise self._lost(error) from error
        self._step = step

    def _read(self, store: dist.Store) -> None:
        said = json.loads(store.get("stop"))
        self._step, self.by = said["step"], said["by"]
