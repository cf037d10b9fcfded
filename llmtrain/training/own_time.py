"""What a rank computes itself, in ms a step: its waits for other ranks are left out."""

import statistics
import time
from collections import deque
from collections.abc import Iterable

import torch
from torch import nn

Mark = float | torch.cuda.Event


class OwnTime:
    """Stretches of each step but the first, by the clock, on a card by events on its stream, so nobody waits for it.

    All but `ms` is for the main thread, `ms` for one other.
    """

    def __init__(self, on_card: bool) -> None:
        self.steps = 0
        """That have ended: on a card, that it has reached the end of."""
        self._on_card = on_card
        self._first = True
        self._began: Mark | None = None
        self._stretches: list[tuple[Mark, Mark]] = []  # of this step
        self._ended: deque[tuple[list[tuple[Mark, Mark]], Mark]] = deque()
        self._latest: deque[float] = deque(maxlen=16)

    def begin(self) -> None:
        """A stretch begins."""
        self._began = self._mark()

    def end(self) -> None:
        """The stretch ends, where one has begun."""
        if self._began is not None:
            self._stretches.append((self._began, self._mark()))
            self._began = None

    def end_step(self) -> None:
        # The first is like no other: much in it is made for the first time.
        self._ended.append(([] if self._first else self._stretches, self._mark()))
        self._stretches, self._first = [], False

    def ms(self) -> float | None:
        """The median of the latest steps, each the sum of its stretches; None where none has any."""
        while self._ended and _reached(self._ended[0][1]):
            stretches, _ = self._ended.popleft()
            self.steps += 1
            if stretches:
                self._latest.append(sum(_between(one, other) for one, other in stretches))
        return statistics.median(self._latest) if self._latest else None

    def _mark(self) -> Mark:
        if not self._on_card:
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event


def _reached(mark: Mark) -> bool:
    return isinstance(mark, float) or mark.query()


def _between(one: Mark, other: Mark) -> float:
    if isinstance(one, float):
        assert isinstance(other, float)
        return 1e3 * (other - one)
    assert not isinstance(other, float)
    return one.elapsed_time(other)


def time_forward(modules: Iterable[nn.Module], own: OwnTime) -> None:
    """From now on the forward of each is a stretch: what it computes, between the hooks that FSDP has on it, one of
    which waits for its gather."""
    for module in modules:
        module.register_forward_pre_hook(lambda *_: own.begin())
        module.register_forward_hook(lambda *_: own.end(), prepend=True)
