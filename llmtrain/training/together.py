"""Ranks that do a thing together or not at all: what one of them fails at, all fail at, with the same line."""

import json
import threading
import time
from collections.abc import Callable
from typing import Any, TypeVar

import torch.distributed as dist

from llmtrain.storage import errors
from llmtrain.storage.errors import LlmtrainError, RankLost
from llmtrain.training.notify import LONG

T = TypeVar("T")
LOOKS = (0.005, 0.5)
"""Seconds between two looks for what another rank says, the first ones and the last: many ranks may ask one store."""


class Together:
    """Ranks that meet through the launcher's store, seen from one of them; `Together()` is one alone.

    index, count: which of how many. name: that no other such group has. lost: makes the error of a rank that does not
    come. Each group needs a client of the store for itself: one that waits holds up whoever else asks through it.
    """

    def __init__(
        self, index: int = 0, count: int = 1, store: dist.Store | None = None, name: str = "",
        lost: Callable[[RuntimeError], RankLost] = lambda error: RankLost(str(error)),
    ) -> None:  # fmt: skip
        self.index, self.count = index, count
        self._store, self._name, self._lost = store, name, lost
        self._round = 0
        self._given_up = threading.Event()

    def give_up(self) -> None:
        """Ends what waits for the others in another thread, with RankLost."""
        self._given_up.set()

    @property
    def first(self) -> bool:
        """Whether this is the one that acts where one has to."""
        return self.index == 0

    def each(self, work: Callable[[], T]) -> list[T]:
        """Every one does `work`. The first gets what it gave to each, in order, through JSON; the others get nothing.
        Raises, on all, the LlmtrainError that the first of those that failed has met; RankLost."""
        if self.count == 1:
            return [work()]
        mine = _outcome(work)
        told, _ = self._meet(mine)
        return [one["value"] for one in told]

    def by_first(self, work: Callable[[], T]) -> T:
        """The first does `work`; all get what it gave, through JSON. Raises, on all, the LlmtrainError that it met."""
        if self.count == 1:
            return work()
        told, outcome = self._meet(_outcome(work) if self.first else {"value": None})
        return (told[0] if self.first else outcome)["value"]  # type: ignore[no-any-return]

    def _meet(self, mine: dict[str, Any]) -> tuple[list[dict[str, Any]], dict[str, Any]]:
        """What each has said, on the first alone, and what the first or the first that failed has."""
        assert self._store is not None
        key, self._round = f"together/{self._name}/{self._round}", self._round + 1
        try:
            if not self.first:
                self._store.set(f"{key}/{self.index}", json.dumps(mine))
                outcome = self._get(f"{key}/outcome")
                told = []
            else:
                told = [mine]
                for index in range(1, self.count):
                    told.append(self._get(f"{key}/{index}"))
                    self._store.delete_key(f"{key}/{index}")
                outcome = next((one for one in told if "error" in one), mine)
                self._store.set(f"{key}/outcome", json.dumps(outcome))
        except RuntimeError as error:
            raise self._lost(error) from error
        if "error" in outcome:
            raise getattr(errors, outcome["error"])(outcome["text"])
        return told, outcome

    def _get(self, key: str) -> dict[str, Any]:
        assert self._store is not None
        pause, end = LOOKS[0], time.monotonic() + LONG
        while not self._store.check([key]):
            if self._given_up.wait(pause) or time.monotonic() > end:
                raise RankLost("what ranks do together was not done: another has not come to it")
            pause = min(2 * pause, LOOKS[1])
        return json.loads(self._store.get(key))  # type: ignore[no-any-return]


def _outcome(work: Callable[[], Any]) -> dict[str, Any]:
    try:
        return {"value": work()}
    except LlmtrainError as error:
        return {"error": type(error).__name__, "text": str(error)}
