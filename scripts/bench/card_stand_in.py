"""A card's stand-in on a machine without one: Triton compiles what is launched, by its own ptxas, and runs nothing.

Tensors are on the meta device, which holds shapes, strides and dtypes but no numbers, and say that they are on a card.
So the product's own code chooses tiles, options and signatures as it does there.
"""

import os
import subprocess
import tempfile
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import triton
from torch import Tensor
from triton.backends.compiler import GPUTarget
from triton.runtime import driver, jit

META = torch.device("meta")


@dataclass(frozen=True)
class Limits:
    """What a kind of card has for one program."""

    capability: tuple[int, int]
    most_shared: int
    """Bytes of shared memory, of the CUDA programming guide's table by compute capability."""


KINDS = {
    "a100": Limits((8, 0), 163 << 10),
    "rtx3090": Limits((8, 6), 99 << 10),
    "rtx4090": Limits((8, 9), 99 << 10),
    "h200": Limits((9, 0), 227 << 10),
    "b200": Limits((10, 0), 227 << 10),
    "rtx5090": Limits((12, 0), 99 << 10),
}
MOST_THREADS = 1024
REGISTERS = 65536
"""Of a processor, handed out to a warp in pieces of 256."""

assert os.environ.get("TRITON_INTERPRET") != "1", "the interpreter compiles nothing: unset TRITON_INTERPRET"


@dataclass
class Compiled:
    """A kernel as it was compiled for a launch, or why it was not."""

    name: str
    constants: dict[str, Any]
    where: str
    """Who launched it first."""
    warps: int = 0
    stages: int = 0
    most_registers: int | None = None
    """The limit it was compiled with."""
    shared: int = 0
    registers: int = 0
    spilled: int = 0
    """Bytes a thread keeps in local memory."""
    error: str | None = None

    def __str__(self) -> str:
        constants = " ".join(f"{k}={v}" for k, v in self.constants.items())
        limit = f" maxnreg={self.most_registers}" if self.most_registers else ""
        options = f"warps={self.warps} stages={self.stages}{limit}"
        return f"{self.name}  {options}  {constants}"


def _resources(cubin: bytes) -> tuple[int, int]:
    """(registers, bytes of local memory) a thread of the one kernel in it."""
    tool = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "cuobjdump"
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        said = subprocess.run([tool, "-res-usage", file.name], check=True, capture_output=True, text=True)
    line = next(line for line in (said.stdout + said.stderr).splitlines() if "REG:" in line and "STACK:" in line)
    figures = dict(word.split(":") for word in line.split() if word.count(":") == 1 and not word.endswith(":"))
    return int(figures["REG"]), int(figures["STACK"]) + int(figures["LOCAL"])


@dataclass
class Card:
    """What was compiled while it stood in, in order; the same code for other shapes is one entry."""

    capability: tuple[int, int]
    compiled: list[Compiled] = field(default_factory=list)
    where: str = ""
    """Said of what is launched from here on."""
    shown: Callable[[Compiled], None] = lambda one: None

    def _add(self, one: Compiled) -> None:
        self.compiled.append(one)
        self.shown(one)

    @property
    def wrong(self) -> list[Compiled]:
        return [one for one in self.compiled if one.error is not None]


class _Driver:
    """What Triton asks of its driver for a launch."""

    def __init__(self, card: Card, limits: Limits) -> None:
        self.card, self.limits, self.utils = card, limits, self
        self.latest: Compiled | None = None

    def get_current_target(self) -> GPUTarget:
        major, minor = self.limits.capability
        return GPUTarget("cuda", 10 * major + minor, 32)

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, device: int) -> int:
        return 0

    def get_device_properties(self, device: int) -> dict[str, int]:
        return {"max_shared_mem": self.limits.most_shared}

    def launcher_cls(self, source: Any, metadata: Any) -> Callable[..., None]:
        """Made once for each code, before its memory is looked at."""
        names = source.fn.arg_names
        constants = {
            names[path[0]]: value for path, value in source.constants.items() if len(path) == 1 and value is not None
        }
        self.latest = Compiled(
            source.fn.__name__, constants, self.card.where, metadata.num_warps, metadata.num_stages,
            getattr(metadata, "maxnreg", None), metadata.shared,
        )  # fmt: skip
        return lambda *arguments: None

    def load_binary(self, name: str, cubin: bytes, shared: int, device: int) -> tuple[int, int, int, int, int]:
        one = self.latest
        assert one is not None
        one.registers, one.spilled = _resources(cubin)
        of_a_warp = -(-32 * one.registers // 256) * 256
        most = min(MOST_THREADS, REGISTERS // of_a_warp * 32)
        if one.warps * 32 <= most:  # what does not fit comes back as an error
            self.card._add(one)
            self.latest = None
        return 0, 0, one.registers, one.spilled // 4, most


def _reason(error: BaseException) -> str:
    """One line: of an error in a kernel's source the innermost, where Triton says the line."""
    while error.__cause__ is not None:
        error = error.__cause__
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return f"{type(error).__name__}: {' '.join(lines)[-300:]}"


def _products() -> list[Any]:
    """Eight-bit and grouped products, which torch has no shapes of on the meta device, or asks the card's of."""

    def scaled(a: Tensor, b: Tensor, *scales: Any, out_dtype: Any = None, output_dtype: Any = None, out: Any = None,
               **options: Any) -> Tensor:  # fmt: skip
        return torch.empty(len(a), b.shape[1], dtype=out_dtype or output_dtype, device=META) if out is None else out

    def grouped(a: Tensor, b: Tensor, *scales: Any, offs: Tensor, out_dtype: Any = None, **options: Any) -> Tensor:
        return torch.empty(len(a), b.shape[2], dtype=out_dtype or a.dtype, device=META)

    return [
        mock.patch.object(torch, "_scaled_mm", scaled),
        mock.patch.object(torch, "_scaled_grouped_mm", grouped),
        mock.patch.object(torch.nn.functional, "scaled_mm", scaled, create=True),
        mock.patch.object(torch.nn.functional, "grouped_mm", grouped, create=True),
    ]


@contextmanager
def card_stands_in(kind: str = "h200") -> Iterator[Card]:
    """Inside, kernels that are launched on tensors of the meta device are compiled; those that cannot be, or that
    need more than the card has, are recorded, and the code that launched them goes on. kind: of KINDS."""
    limits = KINDS[kind]
    card = Card(limits.capability)
    stand_in = _Driver(card, limits)
    launch = jit.JITFunction.run

    def run(self: Any, *args: Any, grid: Any, warmup: bool, **kwargs: Any) -> Any:
        try:
            return launch(self, *args, grid=grid, warmup=warmup, **kwargs)
        except Exception as error:
            one, stand_in.latest = stand_in.latest, None
            if one is None:
                bound = dict(zip(self.arg_names, args, strict=False)) | kwargs
                constants = {p.name: bound[p.name] for p in self.params if p.is_constexpr and p.name in bound}
                options = (kwargs.get(name, 0) for name in ("num_warps", "num_stages", "maxnreg"))
                one = Compiled(self.fn.__name__, constants, card.where, *options)
            one.error = _reason(error)
            if str(one) not in {str(other) for other in card.wrong}:
                card._add(one)
            return None

    before = driver._active
    with ExitStack() as stack:
        driver.set_active(stand_in)
        stack.callback(driver.set_active, before)
        stack.enter_context(mock.patch.object(jit.JITFunction, "run", run))
        stack.enter_context(mock.patch.object(Tensor, "is_cuda", property(lambda self: self.is_meta), create=True))
        stack.enter_context(
            mock.patch.object(Tensor, "data_ptr", lambda self: self.storage_offset() * self.itemsize, create=True)
        )
        of_card = mock.patch.object(torch.cuda, "get_device_capability", lambda device=None: limits.capability)
        stack.enter_context(of_card)
        for patch in _products():
            stack.enter_context(patch)
        yield card
