"""A layer of experts, rung by rung: loop over experts, grouped matmuls, eight bits, and the passes around them fused.

    python scripts/bench/kernel_ladder.py [--experts 32 --experts 64] [--tokens 2048] [--quick]
    python scripts/bench/kernel_ladder.py --page      # docs/experts.md anew from its JSON, and nothing measured

Each rung is one change to the one before it, so a speed-up has one cause; that of eight bits stands against the fused
bf16 rung and never against the loop. Beside the times: the error of the layer's output in bf16's units in the last
place, those of the gradients against the loop's, whether the grouped product has the loop's bits, and what the gradient
of the weights would be by torch's own grouped matmul. `--smoke` runs the same on a small layer, on the CPU too. Exits 1
where a product is wrong.
"""

import argparse
import dataclasses
import os
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

sys.path.insert(0, str(Path(__file__).resolve().parent))

from experts_page import (  # noqa: E402
    BOTH,
    BY_LOOP,
    BY_OURS,
    FUSED,
    FUSED_FP8,
    GROUPED,
    GROUPED_FP8,
    LOOP,
    draw,
    page,
)
from places import place  # noqa: E402
from precision_page import read  # noqa: E402

from llmtrain.benchmark.machine import describe  # noqa: E402
from llmtrain.benchmark.op import reason  # noqa: E402
from llmtrain.benchmark.tables import data_path, write_table  # noqa: E402
from llmtrain.benchmark.timing import milliseconds  # noqa: E402
from llmtrain.kernels import choice  # noqa: E402
from llmtrain.kernels.experts import routed_experts, router_logits  # noqa: E402
from llmtrain.kernels.fp8_grouped import Fp8Experts  # noqa: E402
from llmtrain.kernels.grouped import GROUPED_MM, deliver_grouped_product, grouped_linear  # noqa: E402
from llmtrain.kernels.routing import Balance, route  # noqa: E402
from llmtrain.kernels.weight import gradient_buffer  # noqa: E402
from llmtrain.storage.atomic import write_bytes  # noqa: E402

AROUND = ("experts", "routing", "fp8")
"""Ops that the last two rungs fuse, and the others leave to torch."""
MOST_ULPS = 8.0
"""Of the output of a bf16 rung."""
BF16_WITHIN, EIGHT_BIT_WITHIN = MOST_ULPS * 2.0**-9, 0.1
"""Relative, in norm: of a bf16 rung's gradients to the loop's, and of gradients and output where eight bits are among
the operands. A unit in the last place is at least 2^-8 of a number, and what is rounded is off by half of it. The
loop's gradients are off by 4e-3 from FP64's, and eight bits by 5 to 7e-2 (smaller layers on a CPU)."""
GRADIENTS = ("dx", "d router", "d gate and up", "d down")


@dataclass(frozen=True)
class Layer:
    tokens: int = 32768
    d_model: int = 1024
    width: int = 320
    k: int = 8
    sequences: int = 16


@dataclass(frozen=True)
class Rung:
    name: str
    grouped: str
    eight_bit: bool = False
    fused: bool = False


RUNGS = (
    Rung(LOOP, choice.REFERENCE),
    Rung(GROUPED, choice.AUTO),
    Rung(GROUPED_FP8, choice.AUTO, eight_bit=True),
    Rung(FUSED, choice.AUTO, fused=True),
    Rung(FUSED_FP8, choice.AUTO, eight_bit=True, fused=True),
)


class Inputs:
    """A layer with random weights and tokens."""

    def __init__(self, layer: Layer, n_experts: int, device: torch.device) -> None:
        generator = torch.Generator(device).manual_seed(n_experts)
        n, d, f = layer.tokens, layer.d_model, layer.width

        def randn(*shape: int, scale: float = 1.0) -> Tensor:
            return torch.randn(shape, generator=generator, device=device) * scale

        def weight(*shape: int) -> Tensor:
            master = randn(*shape, scale=shape[-1] ** -0.5).bfloat16().float().requires_grad_()
            master.operand_cache = master.detach().bfloat16()  # type: ignore[attr-defined]
            master.grad = torch.zeros_like(master)
            return master

        self.layer, self.device = layer, device
        self.x = randn(n, d).bfloat16().view(layer.sequences, -1, d).requires_grad_()
        self.dy = randn(n, d).bfloat16().view_as(self.x)
        self.into = torch.zeros_like(self.dy)
        self.weights = [weight(n_experts, d), weight(n_experts, 2 * f, d), weight(n_experts, d, f)]
        self.balance = Balance(torch.full((layer.sequences,), n // layer.sequences, device=device), 0.01, 1e-3)
        self.eight_bit = [Fp8Experts(w) for w in self.weights[1:]]
        for operands, w in zip(self.eight_bit, self.weights[1:], strict=True):
            operands.refresh(w.operand_cache)  # type: ignore[attr-defined]

    def forward(self, rung: Rung, into: Tensor) -> Tensor:
        for operands, w in zip(self.eight_bit, self.weights[1:], strict=True):
            w.eight_bit = operands if rung.eight_bit else None  # type: ignore[attr-defined]
        with self.forced(rung):
            return routed_experts(self.x, *self.weights, into, self.layer.k, self.balance)[0]

    @contextmanager
    def forced(self, rung: Rung) -> Iterator[None]:
        with ExitStack() as stack:
            if rung.grouped != choice.AUTO:
                stack.enter_context(choice.forced(rung.grouped, "grouped", "grouped_gradient"))
            if not rung.fused:
                stack.enter_context(choice.forced(choice.REFERENCE, *AROUND))
            yield

    def step(self, rung: Rung) -> None:
        self.x.grad = None
        for w in self.weights:
            w.grad_stale = True  # type: ignore[attr-defined]
        with self.forced(rung):
            self.forward(rung, self.into.detach().zero_()).backward(self.dy)

    def gradients(self, rung: Rung) -> dict[str, Tensor]:
        """Of a step: of x, and of each weight, where what an earlier rung left is gone."""
        for w in self.weights:
            assert w.grad is not None
            w.grad.fill_(float("nan"))
        self.step(rung)
        found = [x.grad.clone() for x in (self.x, *self.weights) if x.grad is not None]
        return dict(zip(GRADIENTS, found, strict=True))

    @torch.no_grad()
    def exact(self) -> Tensor:
        """The output in FP64, of the experts that the bf16 logits choose."""
        rows = self.x.reshape(-1, self.layer.d_model)
        routing, _, _ = route(router_logits(rows, self.weights[0]), self.layer.k, None)
        out = torch.zeros(rows.shape, dtype=torch.float64, device=self.device)
        begin = 0
        for e, end in enumerate(routing.ends.tolist()):
            at, copies = routing.tokens[begin:end].long(), routing.order[begin:end].long()
            gate, up = (rows[at].double() @ self.weights[1][e].double().T).chunk(2, -1)
            weight = routing.weights.view(-1)[copies, None].double()
            out.index_add_(0, at, (F.silu(gate) * up * weight) @ self.weights[2][e].double().T)
            begin = end
        return out


def ulps(got: Tensor, exact: Tensor) -> float:
    """The largest error in units of the last place of bf16, at the value or, for smaller ones, at the root mean square:
    below it terms have cancelled that were rounded at their own size."""
    size = exact.abs().clamp_min(exact.square().mean().sqrt())
    unit = torch.exp2(torch.floor(torch.log2(size))) * torch.finfo(got.dtype).eps
    return ((got.double() - exact).abs() / unit).max().item()


def off_by(got: Tensor, exact: Tensor) -> float:
    """The error relative to `exact`, in norm; where there are three dimensions the largest along the first, as that of
    one expert, or of one sequence, would be lost among all."""
    dims = (1, 2) if exact.dim() == 3 else None
    error = torch.linalg.vector_norm(got.double() - exact, dim=dims)
    size = torch.linalg.vector_norm(exact, dim=dims, dtype=torch.float64)
    return (error / size.clamp_min(torch.finfo(torch.float64).tiny)).max().item()  # that of an expert without rows is 0


def rung_records(inputs: Inputs, n_experts: int, samples: int) -> list[dict[str, Any]]:
    exact = inputs.exact()
    records = []
    of_loop: dict[str, Tensor] = {}
    for rung in RUNGS:
        record: dict[str, Any] = {
            "tokens": inputs.layer.tokens, "experts": n_experts, "rung": rung.name, "eight_bit": rung.eight_bit,
        }  # fmt: skip
        try:
            with torch.no_grad():
                y = inputs.forward(rung, torch.zeros_like(inputs.dy)).reshape(exact.shape)
                ran = choice.ran["grouped"] if not rung.eight_bit else "scaled_grouped_mm"
                record |= {
                    "ran": ran,
                    "relative_error": ((y.double() - exact).norm() / exact.norm()).item(),
                    "ulps": ulps(y, exact),
                }
                into = inputs.into
                forward_ms = milliseconds(
                    lambda rung=rung, into=into: inputs.forward(rung, into), inputs.device, samples,
                    graph=rung.grouped == choice.AUTO,
                )  # fmt: skip
            gradients = inputs.gradients(rung)
            of_loop = of_loop or gradients  # the first rung is the loop
            record["gradients"] = {name: off_by(found, of_loop[name]) for name, found in gradients.items()}
            del gradients
            graph = rung.grouped == choice.AUTO
            both = milliseconds(lambda rung=rung: inputs.step(rung), inputs.device, samples, graph=graph)
            record |= {"status": "ok", "forward_ms": forward_ms, "ms": both}
        except Exception as error:  # the other rungs are measured all the same
            record |= {"status": "failed", "reason": reason(error)}
        records.append(record)
        print(" ".join(f"{k}={v:.4g}" if isinstance(v, float) else f"{k}={v}" for k, v in record.items()), flush=True)
    return records


@torch.no_grad()
def product_records(inputs: Inputs, n_experts: int, samples: int) -> list[dict[str, Any]]:
    """The products by themselves: gate and up's, forward and dW, by each implementation."""
    layer, device, weight = inputs.layer, inputs.device, inputs.weights[1]
    rows = inputs.x.reshape(-1, layer.d_model)
    routing, _, _ = route(router_logits(rows, inputs.weights[0]), layer.k, None)
    x, ends = rows[routing.tokens.long()], routing.ends
    flops = 2 * x.shape[0] * weight[0].numel()
    with choice.forced(choice.REFERENCE, "grouped"):
        loop = grouped_linear(x, weight, ends)
    records: list[dict[str, Any]] = []
    on_card = device.type == "cuda"
    at = {"tokens": layer.tokens, "experts": n_experts}
    for name in (choice.REFERENCE, *((choice.TRITON, GROUPED_MM) if on_card else ())):
        record: dict[str, Any] = {**at, "product": "forward", "by": name}
        try:
            with choice.forced(name, "grouped"):
                y = grouped_linear(x, weight, ends)
                graph = name != choice.REFERENCE
                ms = milliseconds(lambda: grouped_linear(x, weight, ends), device, samples, graph=graph)
            record |= {"ms": ms, "tflops": flops / ms / 1e9, "bits_of_the_loop": (y == loop).double().mean().item()}
        except Exception as error:
            record |= {"reason": reason(error)}
        records.append(record)
    dy = loop
    buffer, _ = gradient_buffer(weight)
    assert buffer is not None

    def ours() -> None:
        deliver_grouped_product(weight, dy, rows, ends, x_rows=routing.tokens)

    def by_torch() -> None:
        copies = rows[routing.tokens.long()]
        buffer.add_(F.grouped_mm(dy.T, copies, offs=ends))

    # The loop is run for its bits alone: FP32 accumulation over all rows of an expert, as ours.
    for name, run in (("ours: FP32 in place, rows by index", ours), ("grouped_mm to bf16, then added", by_torch)):
        record = {**at, "product": "dW", "by": name}
        if not on_card and run is by_torch:
            continue
        try:
            weight.grad_stale = True  # type: ignore[attr-defined]
            buffer.zero_()
            run()
            weight.grad_stale = False  # type: ignore[attr-defined]
            bounds = [0, *ends.tolist()]
            error = max(
                off_by(buffer[e], dy[begin:end].double().T @ x[begin:end].double())
                for e, (begin, end) in enumerate(pairwise(bounds))
            )
            ms = milliseconds(run, device, samples)
            record |= {"ms": ms, "tflops": flops / ms / 1e9, "relative_error": error}
        except Exception as error_met:
            record |= {"reason": reason(error_met)}
        records.append(record)

    def all_three() -> None:
        grouped_linear(x, weight, ends)
        grouped_linear(dy, weight, ends, transposed=True)
        deliver_grouped_product(weight, dy, rows, ends, x_rows=routing.tokens)

    for name, forced in ((BY_LOOP, choice.REFERENCE), (BY_OURS, choice.AUTO)):
        record = {**at, "product": BOTH, "by": name}
        try:
            weight.grad_stale = False  # type: ignore[attr-defined]
            with choice.forced(forced, "grouped", "grouped_gradient"):
                ms = milliseconds(all_three, device, samples, graph=forced == choice.AUTO)
            record |= {"ms": ms, "tflops": 3 * flops / ms / 1e9}
        except Exception as error_met:
            record |= {"reason": reason(error_met)}
        records.append(record)
    for record in records:
        print(" ".join(f"{k}={v:.4g}" if isinstance(v, float) else f"{k}={v}" for k, v in record.items()), flush=True)
    return records


def faults(record: dict[str, Any]) -> list[str]:
    """What is wrong with a rung, or with a product, if anything is; NaN too."""
    if record.get("status") == "failed":
        return [record["reason"]]
    within = EIGHT_BIT_WITHIN if record.get("eight_bit") else BF16_WITHIN
    found = dict(record.get("gradients", {}))
    if record.get("eight_bit"):
        found["output"] = record["relative_error"]
    elif record.get("product") == "dW" and "relative_error" in record:
        found["dW"] = record["relative_error"]
    wrong = [f"{name} off by {error:.2g}" for name, error in found.items() if not error <= within]
    if not (record.get("eight_bit", True) or record["ulps"] <= MOST_ULPS):
        wrong.append(f"off by {record['ulps']:.1f} ULP")
    return wrong


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path, help="Default: docs/experts.md.")
    parser.add_argument("--experts", type=int, action="append", help="How many; repeat it. Default: 32, 48, 64, 96.")
    parser.add_argument("--tokens", type=int, action="append", help="Of a step; repeat it. Default: 2048, 32768.")
    parser.add_argument("--quick", action="store_true", help="Few samples.")
    parser.add_argument("--page", action="store_true", help="Measure nothing.")
    parser.add_argument("--smoke", action="store_true")
    args = parser.parse_args()
    args.output = place(args.output, "docs/experts.md", not (args.page or torch.cuda.is_available()) or args.smoke)
    source = data_path(args.output)

    def write(data: dict[str, Any] | None, drawn: bool) -> None:
        shown = draw(data, args.output.with_suffix(".png")) if data and drawn else None
        beside = read(data_path(args.output.with_name("precision.md")))
        text = page(data, beside, os.path.relpath(source, args.output.parent), shown)
        if data is None or args.page:  # the JSON may be that of a run, which goes on
            write_bytes(args.output, text.encode())
        else:
            write_table(args.output, data, text)

    if args.page:
        write(read(source), drawn=True)
        return 0
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    layer = Layer(tokens=96, d_model=64, width=32, k=2, sequences=2) if args.smoke else Layer()
    samples = 3 if args.quick or args.smoke else 15
    shared = {name: value for name, value in vars(layer).items() if name != "tokens"}
    of_tokens = args.tokens or ([96] if args.smoke else [2048, 32768])
    sizes = [(tokens, n) for tokens in of_tokens for n in args.experts or ([4] if args.smoke else [32, 48, 64, 96])]
    data: dict[str, Any] = {"machine": describe(device.type == "cuda"), "layer": shared, "rungs": [], "products": []}
    for taken, (tokens, n_experts) in enumerate(sizes, 1):
        inputs = Inputs(dataclasses.replace(layer, tokens=tokens), n_experts, device)
        data["rungs"] += rung_records(inputs, n_experts, samples)
        data["products"] += product_records(inputs, n_experts, samples)
        data["missing"] = len(sizes) - taken
        write(data, drawn=False)
        del inputs
    write(data, drawn=not args.smoke)
    wrong = [
        f"{r.get('rung') or r['by']}, {r['experts']} experts, {r['tokens']} tokens: {what}"
        for r in data["rungs"] + data["products"] for what in faults(r)
    ]  # fmt: skip
    print(f"WRONG: {'; '.join(wrong)}" if wrong else "all rungs as they should be")
    return int(bool(wrong))


if __name__ == "__main__":
    sys.exit(main())
