"""RMSNorm against its peers: the error of each against FP64, and the time of its forward and its backward."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from llmtrain.benchmark.op import Arm, Budget, Case, Judgement, Timed, judge, reason
from llmtrain.benchmark.peers import COMPILED, Peer, compiled_peers, imported
from llmtrain.benchmark.timing import Work
from llmtrain.kernels import rmsnorm
from llmtrain.kernels.rmsnorm_routes import backward_route

EPS = 1e-6
BUDGET = {
    "y": Budget(atol=1e-2, rtol=1e-2),
    "h": Budget(atol=1e-2, rtol=1e-2),
    "dx": Budget(atol=1e-2, rtol=1e-2),
    "dw": Budget(atol=1e-4, rtol=1e-4, dtype=torch.float32),
}
ROUNDING = 2.0**-22 / BUDGET["dw"].rtol
"""Two units in FP32's last place, in tolerances of dw: errors are not told apart below that, as those of one row."""
SEEDS = 5
FAMILIES = ("normal", "same sign", "outliers")
DIRECTIONS = ("forward", "backward", "forward + backward", "2 forward + backward")
"""The last is a step of a checkpointed block."""
JUDGED_BY = {"forward": ("y", "h"), "backward": ("dx", "dw")}
"""Outputs of a direction, where those are not all."""
SMALL_ROWS = 1024
"""Fewer rows than this are also timed without torch.compile in the process."""

Norm = Callable[[Tensor, Tensor, Tensor | None], Any]
"""(x, weight, residual or None) -> y, or (y, h) with a residual; under autograd."""


@dataclass(frozen=True)
class Shape:
    rows: int
    """Tokens."""
    width: int
    heads: int = 0
    """Not 0: x is (rows, heads, width), a view of a packed qkv where `strided`."""
    strided: bool = False
    residual: bool = False

    @property
    def n_rows(self) -> int:
        return self.rows * max(1, self.heads)

    @property
    def nbytes(self) -> int:
        """Of one bf16 tensor of rows."""
        return 2 * self.n_rows * self.width

    def named(self) -> dict[str, Any]:
        form = "residual" if self.residual else f"{self.heads} heads" if self.heads else "plain"
        return {"T": self.rows, "H": self.width, "form": form + (", strided" if self.strided else "")}


@dataclass(frozen=True)
class Inputs:
    x: Tensor
    weight: Tensor
    residual: Tensor | None
    dy: Tensor
    dh: Tensor | None

    @property
    def leaves(self) -> list[Tensor]:
        return [self.x, self.weight]

    def with_own_leaves(self) -> "Inputs":
        """The same numbers. A leaf's place in a graph belongs to the stream that it was first used on, and lasts as
        long as a graph that holds it: a forward that is kept for many backwards must not lend its own to one that is
        captured on another stream, which would be asked to wait for the first."""
        x, weight = (leaf.detach().requires_grad_() for leaf in self.leaves)
        return replace(self, x=x, weight=weight)

    @property
    def gradients(self) -> list[Tensor]:
        return [self.dy] if self.dh is None else [self.dy, self.dh]


def make_inputs(
    shape: Shape, device: torch.device, seed: int = 0, family: str = "normal", weight_dtype: torch.dtype = torch.float32
) -> Inputs:
    """Random bf16 rows. Of "same sign" no sum cancels; of "outliers" some channels are 30 times as large."""
    generator = torch.Generator(device).manual_seed(seed)
    lead = (shape.rows, shape.heads) if shape.heads else (shape.rows,)

    def randn(*size: int) -> Tensor:
        values = torch.randn(*size, device=device, generator=generator)
        if family == "same sign":
            values = values.abs_()
        elif family == "outliers":
            values[..., :: max(1, shape.width // 8)] *= 30
        return values.bfloat16()

    x = randn(*lead, shape.width)
    if shape.strided:
        x = torch.cat([x, x[:, :8]], 1)[:, : shape.heads]
    weight = 1 + 0.3 * torch.randn(shape.width, device=device, generator=generator)
    rest = [randn(*lead, shape.width) if wanted else None for wanted in (True, shape.residual, shape.residual)]
    assert rest[0] is not None
    return Inputs(x.requires_grad_(), weight.to(weight_dtype).requires_grad_(), rest[1], rest[0], rest[2])


def eager(x: Tensor, weight: Tensor, residual: Tensor | None, root: Callable[[Tensor], Tensor] = torch.rsqrt) -> Any:
    """The op in plain torch with FP32 statistics; `root` is 1 / sqrt in either of its forms."""
    h = x if residual is None else x + residual
    wide = h.float()
    y = (wide * root(wide.square().mean(-1, keepdim=True) + EPS) * weight.float()).to(x.dtype)
    return y if residual is None else (y, h)


def exact(inputs: Inputs) -> dict[str, Tensor]:
    """Every output in FP64, from the rows as they are rounded."""
    h = inputs.x.detach() if inputs.residual is None else inputs.x.detach() + inputs.residual
    wide, g, w = h.double(), inputs.dy.double(), inputs.weight.detach().double()
    rstd = torch.rsqrt(wide.square().mean(-1, keepdim=True) + EPS)
    found = {} if inputs.residual is None else {"h": h.double()}
    normed = wide.mul_(rstd)
    found["y"] = normed * w
    found["dw"] = (g * normed).flatten(0, -2).sum(0)
    g *= w
    found["dx"] = g.sub_(normed * (g * normed).mean(-1, keepdim=True)).mul_(rstd)
    if inputs.dh is not None:
        found["dx"] += inputs.dh.double()
    return found


def outputs(norm: Norm, inputs: Inputs) -> dict[str, Tensor]:
    """What `norm` makes of the inputs, gradients included."""
    given = norm(inputs.x, inputs.weight, inputs.residual)
    found = {"y": given} if inputs.residual is None else {"y": given[0], "h": given[1]}
    dx, dw = torch.autograd.grad(list(found.values()), inputs.leaves, inputs.gradients)
    return {name: tensor.detach() for name, tensor in found.items()} | {"dx": dx, "dw": dw}


def judge_norms(norms: dict[str, Norm], shape: Shape, device: torch.device, seeds: int = SEEDS) -> dict[str, Judgement]:
    """The worst of `seeds` inputs; an arm that fails is judged by that when it is timed."""
    worst = {name: Judgement() for name in norms}
    for seed in range(seeds):
        inputs = make_inputs(shape, device, seed)
        truth = exact(inputs)
        for name, norm in norms.items():
            try:
                worst[name] |= judge(outputs(norm, inputs), truth, BUDGET)
            except Exception as error:  # a peer may fail in any way
                worst[name] |= Judgement(lacks=(f"failed: {reason(error)}",))
    return worst


def ours(deterministic: bool) -> Norm:
    return lambda x, weight, residual: rmsnorm(x, weight, EPS, residual, deterministic)


def aten(x: Tensor, weight: Tensor, residual: Tensor | None) -> Any:
    """torch's own op, whose fused kernel wants the weight in the dtype of the rows."""
    h = x if residual is None else x + residual
    y = torch.nn.functional.rms_norm(h, weight.shape, weight.to(h.dtype), EPS)
    return y if residual is None else (y, h)


def libraries() -> dict[str, Peer]:
    """Norms of other packages, or why they are not there."""

    def liger(module: Any) -> Norm:
        def norm(x: Tensor, weight: Tensor, residual: Tensor | None) -> Any:
            h = x if residual is None else x + residual
            y = module.LigerRMSNormFunction.apply(h, weight, EPS, 0.0, "gemma", False)
            return y if residual is None else (y, h)

        return norm

    def quack(module: Any) -> Norm:
        def norm(x: Tensor, weight: Tensor, residual: Tensor | None) -> Any:
            flat = x.flatten(0, -2)
            if residual is None:
                return module.rmsnorm(flat, weight, eps=EPS).view_as(x)
            y, h = module.rmsnorm(flat, weight, residual=residual.flatten(0, -2), eps=EPS, prenorm=True)
            return y.view_as(x), h.view_as(x)

        return norm

    return {
        "Liger": imported("liger_kernel.ops.rms_norm", liger),
        "QuACK": imported("quack", quack),
        "Transformer Engine": Peer(absent="its wheel of 276 MB is not carried to the card"),
    }


def make_case(
    shape: Shape,
    device: torch.device,
    directions: Sequence[str] = DIRECTIONS[:3],
    arms: Sequence[str] | None = None,
    seeds: int = SEEDS,
) -> Case:
    """One shape; `arms` names the peers wanted (None: all)."""

    def rows(compiled: bool) -> list[Timed]:
        peers = {"eager": Peer(eager), "torch rms_norm": Peer(aten)} | libraries()
        if compiled:
            peers |= compiled_peers(eager)
        peers = {name: peer for name, peer in peers.items() if arms is None or name in arms}
        norms = {"ours": Peer(ours(True)), "ours, any order": Peer(ours(False))} | peers
        if backward_route(shape.n_rows, shape.width, True) == backward_route(shape.n_rows, shape.width, False):
            del norms["ours, any order"]  # it would be the same program
        there = {name: peer.function for name, peer in norms.items() if peer.function is not None}
        judged = judge_norms(there, shape, device, seeds)
        inputs = make_inputs(shape, device)
        return [timed(direction, shape, inputs, norms, judged) for direction in directions]

    return Case("rmsnorm", shape.named(), rows, small=shape.n_rows < SMALL_ROWS)


def timed(direction: str, shape: Shape, inputs: Inputs, norms: dict[str, Peer], judged: dict[str, Judgement]) -> Timed:
    def work(norm: Norm) -> Callable[[], Work]:
        def forward(inputs: Inputs = inputs) -> Any:
            given = norm(inputs.x, inputs.weight, inputs.residual)
            return given if isinstance(given, tuple) else (given,)

        def backward(given: Any, leaves: list[Tensor] = inputs.leaves, again: bool = False) -> Any:
            return torch.autograd.grad(given, leaves, inputs.gradients, retain_graph=again)

        def prepared() -> tuple[Any, list[Tensor]]:
            own = inputs.with_own_leaves()
            return forward(own), own.leaves

        read = (inputs.x, inputs.weight, inputs.dy)
        if direction == "forward":
            return lambda: Work(forward, read)
        if direction == "backward":
            return lambda: Work(lambda kept: backward(kept[0], kept[1], again=True), read, prepare=prepared)
        if direction == "forward + backward":
            return lambda: Work(lambda: backward(forward()), read)
        return lambda: Work(lambda: (forward(), backward(forward())), read)

    arms = {}
    for name, peer in norms.items():
        if direction == "forward" and name == "ours, any order":
            continue
        judgement = judged.get(name, Judgement()).of(*JUDGED_BY.get(direction, tuple(BUDGET)))
        build = work(peer.function) if peer.function else lambda: Work(lambda: None)
        arms[name] = Arm(build, judgement, ours=name.startswith("ours"), compiled=name in COMPILED, absent=peer.absent)
    small = 4 * shape.n_rows + 4 * shape.width
    forward_bytes = (4 if shape.residual else 2) * shape.nbytes + small
    backward_bytes = (4 if shape.residual else 3) * shape.nbytes + small + 4 * shape.width
    nbytes = {
        "forward": forward_bytes,
        "backward": backward_bytes,
        "forward + backward": forward_bytes + backward_bytes,
        "2 forward + backward": 2 * forward_bytes + backward_bytes,
    }[direction]
    return Timed(direction, arms, nbytes)
