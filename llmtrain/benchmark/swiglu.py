"""SwiGLU's product and the rotation of q and k against eager and the compiler: milliseconds and ULPs."""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from llmtrain.benchmark.op import Arm, Budget, Case, Judgement, Timed, judge, reason
from llmtrain.benchmark.peers import COMPILED, Peer, compiled_peers
from llmtrain.benchmark.timing import Work
from llmtrain.kernels import rotary_qkv, rotary_tables, swiglu

DIRECTIONS = ("forward", "forward + backward")
SEEDS = 5
THETA = 10000.0

Op = Callable[[Tensor], tuple[Tensor, ...]]
"""One tensor in, the outputs: under autograd."""


def eager_swiglu(gate_up: Tensor) -> tuple[Tensor, ...]:
    """As a model in plain torch has it: in the dtype of the rows."""
    gate, up = gate_up.chunk(2, -1)
    return (torch.nn.functional.silu(gate) * up,)


def eager_rotary(cos: Tensor, sin: Tensor, n_heads: int, n_kv_heads: int) -> Op:
    """The split and the rotation in plain torch, multiplied in FP32 by FP32 tables and rounded once."""

    def rotated(x: Tensor) -> Tensor:
        first, second = x.chunk(2, -1)
        c, s = cos[:, None], sin[:, None]
        return torch.cat([first * c - second * s, second * c + first * s], -1).to(x.dtype)

    def op(qkv: Tensor) -> tuple[Tensor, ...]:
        heads = qkv.unflatten(-1, (n_heads + 2 * n_kv_heads, -1))
        q, k, v = heads.split([n_heads, n_kv_heads, n_kv_heads], 2)
        return rotated(q), rotated(k), v

    return op


def make_case(
    name: str,
    shape: dict[str, Any],
    x: Callable[[int], Tensor],
    ops: dict[str, Op],
    exact: Op,
    nbytes: int,
    directions: Sequence[str] = DIRECTIONS,
) -> Case:
    """`x` makes the input of a seed, `ops` are ours and the eager one, which is also compiled; `exact` takes FP64.

    The budget is one ULP of every output and of the gradient. `nbytes`: of the forward; the backward moves as many and
    reads the input again.
    """

    def outputs(op: Op, given: Tensor) -> dict[str, Tensor]:
        given = given.detach().requires_grad_()
        made = op(given)
        (gradient,) = torch.autograd.grad(made, given, [torch.cos(3 * y.detach()) for y in made])
        return {f"y{i}" if len(made) > 1 else "y": y.detach() for i, y in enumerate(made)} | {"dx": gradient}

    def rows(compiled: bool) -> list[Timed]:
        peers = {arm: Peer(op) for arm, op in ops.items()}
        if compiled:
            peers |= compiled_peers(ops["eager"])
        there = {arm: peer.function for arm, peer in peers.items() if peer.function is not None}
        judged = {arm: Judgement() for arm in peers}
        for seed in range(SEEDS):
            given = x(seed)
            for arm, op in there.items():
                try:
                    found = outputs(op, given)
                    truth = exact_outputs(given, found)
                    judged[arm] |= judge(found, truth, {key: Budget(ulps=1.0) for key in truth})
                except Exception as error:  # a peer may fail in any way
                    judged[arm] |= Judgement(lacks=(f"failed: {reason(error)}",))
        given = x(0).requires_grad_()
        return [timed(direction, given, peers, judged) for direction in directions]

    def exact_outputs(given: Tensor, found: dict[str, Tensor]) -> dict[str, Tensor]:
        """Of the very gradients that the arm was given: those follow from its own outputs."""
        wide = given.detach().double().requires_grad_()
        made = exact(wide)
        names = [key for key in found if key != "dx"]
        (gradient,) = torch.autograd.grad(made, wide, [torch.cos(3 * found[key]).double() for key in names])
        return {key: y.detach() for key, y in zip(names, made, strict=True)} | {"dx": gradient}

    def timed(direction: str, given: Tensor, peers: dict[str, Peer], judged: dict[str, Judgement]) -> Timed:
        def build(peer: Peer) -> Callable[[], Work]:
            def work() -> Work:
                op = peer.function
                assert op is not None
                gradients = [torch.randn_like(y) for y in op(given)]

                def both() -> object:
                    return torch.autograd.grad(op(given), given, gradients)

                return Work((lambda: op(given)) if direction == "forward" else both, (given, *gradients))

            return work

        def judgement(arm: str) -> Judgement:
            forward = [name for name in judged[arm].errors if name != "dx"]
            return judged[arm].of(*forward) if direction == "forward" else judged[arm]

        arms = {
            arm: Arm(build(peer), judgement(arm), ours=arm == "ours", compiled=arm in COMPILED, absent=peer.absent)
            for arm, peer in peers.items()
        }
        backward = nbytes + given.numel() * given.element_size() if name == "swiglu" else nbytes
        return Timed(direction, arms, nbytes if direction == "forward" else nbytes + backward)

    return Case(name, shape, rows)


def swiglu_case(rows: int, d_ff: int, device: torch.device, directions: Sequence[str] = DIRECTIONS) -> Case:
    def x(seed: int) -> Tensor:
        generator = torch.Generator(device).manual_seed(seed)
        return (2 * torch.randn(rows, 2 * d_ff, device=device, generator=generator)).bfloat16()

    ops: dict[str, Op] = {"ours": lambda gate_up: (swiglu(gate_up),), "eager": eager_swiglu}
    return make_case("swiglu", {"T": rows, "d_ff": d_ff}, x, ops, eager_swiglu, 3 * 2 * rows * d_ff, directions)


def rotary_case(
    batch: int, seq_len: int, n_heads: int, n_kv_heads: int, head_dim: int, device: torch.device,
    directions: Sequence[str] = DIRECTIONS,
) -> Case:  # fmt: skip
    cos, sin = rotary_tables(seq_len, head_dim, THETA, device)
    width = (n_heads + 2 * n_kv_heads) * head_dim

    def x(seed: int) -> Tensor:
        generator = torch.Generator(device).manual_seed(seed)
        return torch.randn(batch, seq_len, width, device=device, generator=generator).bfloat16()

    ops: dict[str, Op] = {
        "ours": lambda qkv: rotary_qkv(qkv, cos, sin, n_heads, n_kv_heads),
        "eager": eager_rotary(cos, sin, n_heads, n_kv_heads),
    }
    exact = eager_rotary(cos.double(), sin.double(), n_heads, n_kv_heads)
    shape = {"T": batch * seq_len, "heads": f"{n_heads}+{n_kv_heads} of {head_dim}"}
    nbytes = 2 * 2 * batch * seq_len * (n_heads + n_kv_heads) * head_dim  # v stays where it is
    return make_case("rotary", shape, x, ops, exact, nbytes, directions)
