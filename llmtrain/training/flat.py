"""A model's parameters as views of a few flat buffers, so that one kernel or one collective serves them all.

Masters and gradients are FP32 (or FP64), narrow copies are in the compute dtype. The blocks' matrices come first, then
the embedding and the head, then vectors: Muon ends at one index, and weight decay, which touches matrices only, at
another.
"""

from dataclasses import dataclass

import torch
from torch import Tensor, nn

from llmtrain.kernels.fp8 import Fp8Weight, Scaling, takes
from llmtrain.kernels.fp8_fine import FineWeight, multiple_for
from llmtrain.kernels.fp8_grouped import Fp8Experts, experts_take
from llmtrain.kernels.mxfp8 import MxWeight
from llmtrain.kernels.mxfp8 import takes as takes_mx
from llmtrain.kernels.rotary import rotary_tables
from llmtrain.model.matrices import is_hidden
from llmtrain.model.transformer import Transformer
from llmtrain.training.config import Fp8Scaling

# Each tensor starts at a multiple of this many elements: 256 bytes in bf16, what cuBLAS and 16-byte loads want.
ALIGNMENT = 128


EIGHT_BIT = ("qkv.weight", "out.weight", "gate_up.weight", "down.weight")
"""Matrices whose products run in eight bits where that is asked for: the router, the head and the lookup do not."""


@dataclass
class Span:
    """Where a parameter, or this rank's rows of it, lies in the flat buffers, in elements."""

    begin: int
    shape: torch.Size
    row: int = 0
    """The first of this rank's rows."""
    rows: int = -1
    """Of the whole parameter; as many as there are here by default."""

    def __post_init__(self) -> None:
        if self.rows < 0:
            self.rows = self.shape[0]

    @property
    def end(self) -> int:
        return self.begin + self.shape.numel()


@dataclass(frozen=True)
class Stretch:
    """A buffer for some of the parameters: flat elements [begin, begin + len(buffer))."""

    begin: int
    buffer: Tensor


class FlatParameters:
    """Takes over the parameters of `model`, which may be on the meta device: afterwards they are on `device`, zero.

    `with_gradients` allocates their gradients too; the compute dtype decides whether narrow copies exist, `eight_bit`
    by which scales the matrices that can also get eight-bit operands, if at all, `mx` whether they get those of MXFP8.
    shard: which of how many parts of the rows of each matrix are here; vectors are always whole.
    """

    of_all_layers = True
    """Whether something of each layer's parameters is here."""
    keeps_narrow = True
    """Whether the copies in the compute dtype lie here, where that is another than the masters'."""
    n_sharded = 0
    """Flat elements, from the first on, whose gradients have been added up over the ranks that share the model out."""

    def __init__(
        self,
        model: Transformer,
        device: torch.device | str,
        compute_dtype: torch.dtype,
        master_dtype: torch.dtype = torch.float32,
        with_gradients: bool = True,
        eight_bit: Fp8Scaling | None = None,
        mx: bool = False,
        shard: tuple[int, int] = (0, 1),
    ) -> None:
        def place(item: tuple[str, nn.Parameter]) -> int:
            name, parameter = item
            return 0 if is_hidden(name, parameter.shape) else 1 if parameter.dim() >= 2 else 2

        self.spans: dict[str, Span] = {}
        self.saved_elsewhere: set[str] = set()
        """Parameters that another rank of the run has too, and writes into checkpoints."""
        self.n_hidden = self.n_decayed = position = 0
        for name, parameter in sorted(model.named_parameters(), key=place):  # stable
            self.spans[name], taken = self._span(name, parameter.shape, position, shard)
            position += -(-taken // ALIGNMENT) * ALIGNMENT
            if parameter.dim() >= 2:
                self.n_decayed = position
            if is_hidden(name, parameter.shape):
                self.n_hidden = position

        self.master = torch.zeros(position, dtype=master_dtype, device=device)
        self.grad = torch.zeros_like(self.master) if with_gradients else None
        narrow = self.keeps_narrow and compute_dtype != master_dtype
        self.narrow = torch.zeros(position, dtype=compute_dtype, device=device) if narrow else None

        modules = dict(model.named_modules())
        self.parameters: dict[str, nn.Parameter] = {}
        for name in self.spans:
            owner, _, attribute = name.rpartition(".")
            self.parameters[name] = self._parameter(name)
            setattr(modules[owner], attribute, self.parameters[name])
        self.eight_bit: dict[str, Fp8Weight | FineWeight] = {}
        self.scaling: Scaling | None = None
        """Scales that have a history: with eight_bit "tensorwise" alone."""
        if eight_bit is not None:
            multiple = multiple_for(eight_bit)
            names = [x for x in self.spans if x.endswith(EIGHT_BIT) and takes(self.parameters[x], multiple)]
            if eight_bit == "tensorwise":
                self.scaling = Scaling(len(names), device)
            for i, name in enumerate(names):
                weight = self.parameters[name]
                one = FineWeight(weight, eight_bit) if self.scaling is None else Fp8Weight(weight, self.scaling, i)
                self.eight_bit[name] = weight.eight_bit = one  # type: ignore[attr-defined]
        self.eight_bit_experts: dict[str, Fp8Experts] = {}
        for name, parameter in self.parameters.items() if eight_bit else ():
            if experts_take(parameter):
                self.eight_bit_experts[name] = parameter.eight_bit = Fp8Experts(parameter)  # type: ignore[attr-defined]
        self.mx: list[MxWeight] = []
        for name, parameter in self.parameters.items() if mx else ():
            if name.endswith(EIGHT_BIT) and takes_mx(parameter):
                assert self.narrow is not None
                parameter.mx = MxWeight(self.view(self.narrow, name))  # type: ignore[attr-defined]
                self.mx.append(parameter.mx)  # type: ignore[attr-defined]
        c = model.config
        model.cos, model.sin = rotary_tables(c.max_seq_len, c.head_dim, c.rope_theta, device)
        model.compute_dtype = compute_dtype

    def _parameter(self, name: str) -> nn.Parameter:
        """The parameter as a view of the buffers."""
        parameter = nn.Parameter(self.view(self.master, name), requires_grad=self.grad is not None)
        if self.grad is not None:
            parameter.grad = self.view(self.grad, name)
            parameter.grad_stale = True  # type: ignore[attr-defined]
        if self.narrow is not None:
            parameter.operand_cache = self.view(self.narrow, name)  # type: ignore[attr-defined]
        return parameter

    def _span(self, name: str, shape: torch.Size, begin: int, shard: tuple[int, int]) -> tuple[Span, int]:
        """Where a parameter goes, and how many elements it takes: of a shard as many as of the largest one."""
        index, count = shard
        if count == 1 or len(shape) < 2:
            if index > 0:
                self.saved_elsewhere.add(name)
            return Span(begin, shape), shape.numel()
        rows = -(-shape[0] // count)  # as torch.chunk has it
        first = min(index * rows, shape[0])
        here = torch.Size((min(rows, shape[0] - first), *shape[1:]))
        return Span(begin, here, first, shape[0]), rows * shape[1:].numel()

    def view(self, flat: Tensor, name: str) -> Tensor:
        """The part of a flat buffer that belongs to a parameter, in its shape."""
        span = self.spans[name]
        return flat[span.begin : span.end].view(span.shape)

    def views(self, stretch: Stretch) -> dict[str, Tensor]:
        """By name, in their shapes, the parts of a stretch that are parameters'."""
        end = stretch.begin + len(stretch.buffer)
        return {
            name: stretch.buffer[span.begin - stretch.begin : span.end - stretch.begin].view(span.shape)
            for name, span in self.spans.items()
            if stretch.begin <= span.begin and span.end <= end
        }

    @torch.no_grad()
    def init_weights(self, model: Transformer, seed: int) -> None:
        """Fills the masters, or the rows of them that are here, with `model`'s initial values."""
        for name, span in self.spans.items():
            whole = model.initial_values(name, torch.Size((span.rows, *span.shape[1:])), seed)
            self.view(self.master, name).copy_(whole[span.row : span.row + span.shape[0]])

    def refresh_narrow(self) -> None:
        """Rebuilds the narrow copies: after every write of the masters that is not the optimizer's own."""
        if self.narrow is not None:
            self.narrow.copy_(self.master)
        if self.scaling is not None:
            self.scaling.follow_history()
        self.refresh_eight_bit()
        self.refresh_mx()

    def free_gathered(self) -> None:
        """Frees the copies of weights that were gathered from other ranks, where there are any, so that they are
        gathered anew: with every write of the masters, the optimizer's too."""

    def refresh_mx(self) -> None:
        """Rounds the matrices to MXFP8 anew: after every write of the narrow copies."""
        for weight in self.mx:
            weight.refresh()

    def refresh_eight_bit(self) -> None:
        """Rebuilds the eight-bit operands from the narrow copies: after every update."""
        if self.scaling is not None:
            self.scaling.quantise_weights(
                [(self._narrow(name), one) for name, one in self.eight_bit.items() if isinstance(one, Fp8Weight)]
            )
        for name, operands in {**self.eight_bit, **self.eight_bit_experts}.items():
            if not isinstance(operands, Fp8Weight):
                operands.refresh(self._narrow(name))

    def _narrow(self, name: str) -> Tensor:
        assert self.narrow is not None
        return self.view(self.narrow, name)

    def grad_norm(self) -> Tensor:
        """The norm of all gradients (0-d FP64)."""
        assert self.grad is not None
        return torch.linalg.vector_norm(self.grad).double()

    def mark_gradients_stale(self) -> None:
        """The next gradient of each parameter overwrites what is there, instead of adding to it."""
        for parameter in self.parameters.values():
            parameter.grad_stale = True  # type: ignore[attr-defined]

    def clear_unwritten_gradients(self) -> None:
        """Zeroes what the first micro-batch left untouched, an expert without tokens say: it would still hold the
        gradient of the step before."""
        for parameter in self.parameters.values():
            if parameter.grad_stale:  # type: ignore[attr-defined]
                assert parameter.grad is not None
                parameter.grad.zero_()
                parameter.grad_stale = False  # type: ignore[attr-defined]
