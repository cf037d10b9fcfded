"""Whether the machine computes what it should: a step that is run again from the same state gives the same bits.

With deterministic arithmetic nothing else can come out. So a difference is the machine's: a fault of the processor, of
its memory or of a driver, which damages weights without a word.
"""

from collections.abc import Iterator

import torch
from torch import Tensor

from llmtrain.corpus.batches import Batch
from llmtrain.storage.errors import HardwareFault
from llmtrain.training.checkpoint import list_steps
from llmtrain.training.metrics import RunLog
from llmtrain.training.start import Started

DIFFERENCES = 2
"""Steps that may differ in one process; at the second the run ends. Only one step in many is looked at: where two of
them were hit, about as many times --verify-every of the others were."""
PIECE = 1 << 21
"""Elements that are hashed at a time: a few numbers of 8 bytes for each are all it takes of memory."""


class Replay:
    """Runs every `verify_every`-th step again: `begin` before it, `keep` its micro-batches, then `check`.

    Two runs that agree are right. If they differ, that is an event, and the step is run once more: what two of the
    three agree on is taken. HardwareFault ends the run when no two agree, and at the second such event of a process.
    From the first on Started.trusted stays, so that the checkpoint before the last step that was verified is kept.
    """

    def __init__(self, run: Started, log: RunLog) -> None:
        self._run, self._log, self._step = run, log, run.step
        self._every = run.config.run.verify_every
        optimizer = run.step.optimizer
        self._state = [*(stretch.buffer for stretch in optimizer.large.values()), *optimizer.small]
        self._before = [torch.empty_like(tensor) for tensor in self._state] if self._every else []
        self._batches: list[Batch] = []
        self._differed: list[int] = []
        if self._every and run.at_step:
            run.trusted = run.at_step

    def due(self, step: int) -> bool:
        """Whether step number `step` is one to verify."""
        return bool(self._every) and step % self._every == 0

    def begin(self) -> None:
        """Copies the state that the next step begins with."""
        self._batches.clear()
        for tensor, copy in zip(self._state, self._before, strict=True):
            copy.copy_(tensor)

    def keep(self, batch: Batch) -> None:
        """One more micro-batch of the step."""
        self._batches.append(batch)

    def check(self, lr: float, tokens: int) -> None:
        """After the step: runs it again. tokens: position of the run, for the event."""
        at = self._run.at_step
        results = [self._fingerprint(), self._again(lr)]
        world, differs = self._run.world, results[0] != results[1]
        rank = world.least(world.rank if differs else world.size)
        if rank == world.size:
            if not self._differed:
                self._run.trusted = at
            return
        agreed = world.least(int(self._again(lr) in results)) == 1
        self._differed.append(at)
        names = [name for (name, _), a, b in zip(self._tensors(), *results, strict=True) if a != b]
        third = "agreed with one of the two, which is taken" if agreed else "agreed with neither"
        which = f"{names[0]} first" if names else f"those of rank {rank}"
        what = f"{len(names)} of {len(results[0])} tensors differ, {which}; a third run {third}"
        text = f"the step, run again from the same state, gave other bits: {what}"
        self._log.event(at, tokens, "mismatch", text, tensors=names)
        if not agreed or len(self._differed) == DIFFERENCES:
            raise self._fault()

    def _again(self, lr: float) -> list[int]:
        for tensor, copy in zip(self._state, self._before, strict=True):
            tensor.copy_(copy)
        self._step.flat.refresh_narrow()
        for i, batch in enumerate(self._batches):
            self._step.micro_step(batch.ids, batch.targets, first=i == 0, doc_start=batch.doc_start)
        self._step.optimizer_step(lr)
        return self._fingerprint()

    def _tensors(self) -> Iterator[tuple[str, Tensor]]:
        """All that a step leaves, by name."""
        for kind, stretch in self._step.optimizer.large.items():
            for name, view in self._step.flat.views(stretch).items():
                yield f"{kind} of {name}", view
        yield "losses and gradient norm", self._step.last
        for small in self._step.optimizer.small:
            yield "counts", small

    def _fingerprint(self) -> list[int]:
        """A hash of each tensor. Waits for the device."""
        return torch.stack([bit_hash(tensor) for _, tensor in self._tensors()]).tolist()

    def _fault(self) -> HardwareFault:
        """The end of the run, and what is left to go on from."""
        trusted, steps = self._run.trusted, list_steps(self._run.config.run.run_dir)
        before = max((step for step in steps if trusted is not None and step <= trusted), default=None)
        kept = "no checkpoint is from before"
        if before is not None:
            kept = f"the checkpoint of step {before} is from before, later ones may be damaged: move them away"
        return HardwareFault(
            f"step {' and step '.join(map(str, self._differed))}, run again from the same state, gave other bits: this "
            "machine computes wrong, by its processor, memory or driver: see `dmesg` and `nvidia-smi -q`, and --resume "
            f"on another; {kept}"
        )


def bit_hash(tensor: Tensor) -> Tensor:
    """A number (0-d int64, on the tensor's device) that rests on every bit of a contiguous tensor of 4- or 8-byte
    numbers: the sum, modulo 2^64, of its 4-byte words, each times an odd number that its place is mixed to. A change of
    one word always changes it, as a difference below 2^32 times an odd number is not 0."""
    words = tensor.detach().reshape(-1).view(torch.int32)
    total = torch.zeros((), dtype=torch.int64, device=tensor.device)
    for begin in range(0, len(words), PIECE):
        piece = words[begin : begin + PIECE].to(torch.int64)
        place = torch.arange(begin + 1, begin + 1 + len(piece), device=piece.device) * -0x61C8864680B583EB
        total += (piece * ((place ^ (place >> 30)) * -0x40A7B892E31B1A47 | 1)).sum()
    return total
