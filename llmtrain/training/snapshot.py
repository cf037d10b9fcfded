"""What a checkpoint holds, copied to the host's memory so that training goes on while it is written."""

from typing import Any

import torch

from llmtrain.storage.errors import UsageError
from llmtrain.storage.units import in_bytes
from llmtrain.training.flat import FlatParameters, Stretch
from llmtrain.training.optimizer import AdamW


class Snapshot:
    """The optimizer's large state, weights among it, and its small one after a step, in memory that is allocated once.

    `large`: as the optimizer's, on the CPU. On a card they are pinned and the copy runs on a stream of
    its own. Raises UsageError where so much memory cannot be pinned.
    """

    def __init__(self, flat: FlatParameters, optimizer: AdamW) -> None:
        self.flat = flat
        self._optimizer = optimizer
        self._on_card = flat.master.is_cuda
        self._copied: torch.cuda.Event | None = None
        sources = [stretch.buffer for stretch in optimizer.large.values()]
        # Written once, so that the pages are there before the first save has to wait for them.
        self._host = torch.empty(sum(map(len, sources)), dtype=flat.master.dtype).fill_(0)
        copies = self._host.split(list(map(len, sources)))
        self.large = {
            name: Stretch(stretch.begin, copy)
            for (name, stretch), copy in zip(optimizer.large.items(), copies, strict=True)
        }
        self._small = [torch.zeros_like(s, device="cpu", pin_memory=self._on_card) for s in optimizer.small]
        self._pairs = [
            *zip(sources, copies, strict=True),
            *zip(optimizer.small, self._small, strict=True),
        ]
        if self._on_card:
            self._stream = torch.cuda.Stream(flat.master.device)
            # torch's own pinned allocator rounds up to a power of two: 8 GiB for the 4.2 GB of a billion weights.
            code = int(torch.cuda.cudart().cudaHostRegister(self._host.data_ptr(), self._host.nbytes, 0))
            if code:
                raise UsageError(
                    f"{in_bytes(self._host.nbytes)} of host memory for saves cannot be pinned (CUDA error {code}): "
                    "free host memory, or make the model smaller"
                )

    def take(self) -> torch.cuda.Event | None:
        """Copies the state as the work issued so far leaves it. On a card it returns at once, with the event of the
        copy's end: until then nothing may write what is copied. The copy before must have been used up."""
        if not self._on_card:
            for source, copy in self._pairs:
                copy.copy_(source)
            return None
        self._stream.wait_stream(torch.cuda.current_stream())
        # Who waits for it on the host sleeps, which leaves the core to the loop.
        self._copied = torch.cuda.Event(blocking=True)
        with torch.cuda.stream(self._stream):
            for source, copy in self._pairs:
                copy.copy_(source, non_blocking=True)
            self._copied.record()
        return self._copied

    def wait(self) -> None:
        """Returns when the copy is there."""
        if self._copied is not None:
            self._copied.synchronize()

    def counts(self) -> dict[str, Any]:
        """The optimizer's, of the copy."""
        return self._optimizer.counts(self._small)

    def close(self) -> None:
        """Ends its use."""
        if self._on_card:
            self.wait()
            torch.cuda.cudart().cudaHostUnregister(self._host.data_ptr())


class WeightsAlone:
    """As a Snapshot, of weights alone that lie on the CPU and that nothing writes: those of a model from elsewhere."""

    def __init__(self, flat: FlatParameters) -> None:
        self.flat = flat
        self.large = {"weight": Stretch(0, flat.master)}

    def wait(self) -> None:
        pass

    def counts(self) -> dict[str, Any]:
        return {}
