"""An op's benchmark as a whole: the machine, its ceilings, the rows, and the Markdown of them."""

import time
from collections.abc import Callable, Sequence
from dataclasses import asdict
from typing import Any

import torch

from llmtrain.benchmark import config
from llmtrain.benchmark.ceilings import dtype_of_products, measure_ceilings
from llmtrain.benchmark.machine import describe, headline, installed
from llmtrain.benchmark.op import Case, measure_cases
from llmtrain.benchmark.op_tables import LEGEND, LEGEND_ON_CPU, ceilings_line, method_line, op_lines
from llmtrain.benchmark.timing import Method
from llmtrain.storage.errors import UsageError
from llmtrain.training.devices import pick_device

DTYPE_WORDS = {torch.bfloat16: "bf16", torch.float32: "fp32"}
PEER_PACKAGES = ("nvidia-cudnn-frontend", "liger-kernel", "quack-kernels", "transformer-engine")


def rmsnorm_cases(shapes: config.NormShapesConfig, device: torch.device) -> list[Case]:
    from llmtrain.benchmark import rmsnorm

    return [
        rmsnorm.make_case(rmsnorm.Shape(t, width, shapes.heads, bool(shapes.heads), shapes.residual), device)
        for width in shapes.width
        for t in shapes.tokens
    ]


def swiglu_cases(shapes: config.SwiGLUShapesConfig, device: torch.device) -> list[Case]:
    from llmtrain.benchmark import swiglu

    heads = (shapes.n_heads, shapes.n_kv_heads, shapes.head_dim)
    return [swiglu.swiglu_case(t, shapes.d_ff, device) for t in shapes.tokens] + [
        swiglu.rotary_case(1, t, *heads, device) for t in shapes.tokens
    ]


def gemm_cases(shapes: config.GemmShapesConfig, device: torch.device) -> list[Case]:
    from llmtrain.benchmark import gemm

    pairs = zip(shapes.inputs, shapes.outputs, strict=True)
    return [gemm.make_case(shapes.tokens, k, n, device) for k, n in pairs]


def attention_cases(shapes: config.AttentionShapesConfig, device: torch.device) -> list[Case]:
    from llmtrain.benchmark import attention

    count = max(1, round(shapes.tokens / (shapes.shortest + shapes.longest) * 2))
    lengths = attention.uniform_lengths(count, shapes.shortest, shapes.longest)
    if shapes.slots and shapes.slots < count:
        raise UsageError(f"--slots {shapes.slots} are fewer than the {count} documents: raise it, or leave it out")
    spread = f"{shapes.shortest} to {shapes.longest}" if shapes.shortest < shapes.longest else str(shapes.longest)
    shape = attention.Shape(
        f"{count} of {spread}", lengths, shapes.n_heads, shapes.n_kv_heads, shapes.head_dim, shapes.window or None,
        shapes.slots or None,
    )  # fmt: skip
    return [attention.make_case(shape, device)]


def head_cases(shapes: config.HeadShapesConfig, device: torch.device) -> list[Case]:
    from llmtrain.benchmark import head

    return [head.make_case(head.Shape(t, shapes.width, shapes.vocabulary), device) for t in shapes.tokens]


def dtype_of(op: str, device: torch.device) -> torch.dtype:
    """What an op's rows are measured in: those that are bound by memory in what a model trains in, on a CPU too."""
    return dtype_of_products(device) if op in ("attention", "head", "gemm") else torch.bfloat16


def measure_op(
    kind: str, cases: Sequence[Case], timing: config.OpTimingConfig, tell: Callable[[str], None] | None = None,
    keep: Callable[[dict[str, Any]], None] | None = None,
) -> dict[str, Any]:  # fmt: skip
    """All rows of the cases, as JSON: what docs/ops.md is made from. `keep` gets what there is of it after each case,
    so that what ends the process leaves that."""
    begin = time.perf_counter()
    device = pick_device(timing.device)
    machine = describe(device.type == "cuda")
    machine["versions"] |= {name: installed(name) for name in PEER_PACKAGES}
    ceilings = measure_ceilings(device)
    dtypes = sorted({DTYPE_WORDS[dtype_of(case.op, device)] for case in cases})
    method = Method(timing.sessions, timing.rounds, timing.samples, timing.turn_seconds)

    def so_far(rows: list[dict[str, Any]], missing: int) -> dict[str, Any]:
        return {
            "kind": kind,
            "dtype": " and ".join(dtypes),
            "machine": machine,
            "ceilings": ceilings.as_dict(),
            "method": asdict(method),
            "seconds": time.perf_counter() - begin,
            "missing": missing,
            "rows": rows,
        }

    rows = measure_cases(
        cases, device=device, method=method, ceilings=ceilings, compiled=timing.compile, tell=tell,
        keep=(lambda rows, missing: keep(so_far(rows, missing))) if keep else None,
    )  # fmt: skip
    return so_far(rows, 0)


def on_card(data: dict[str, Any]) -> bool:
    """Whether what `measure_op` returned was taken on one."""
    return data["machine"]["card"] is not None


def section_lines(data: dict[str, Any]) -> list[str]:
    """What `measure_op` returned, without a heading."""
    told = f"{headline(data['machine'])} {ceilings_line(data['ceilings'])} {method_line(data['method'], on_card(data))}"
    if "dtype" in data:
        told += f" Measured in {data['dtype']}."
    unfinished = f" **Unfinished**: {data['missing']} more cases were to come." if data.get("missing") else ""
    return [f"{told} It took {data['seconds']:.0f} s.{unfinished}", "", *op_lines(data["rows"])]


def op_markdown(data: dict[str, Any]) -> str:
    """A page of one benchmark."""
    legend = LEGEND if on_card(data) else LEGEND_ON_CPU
    return "\n".join([f"# {data['kind']}", "", legend, "", *section_lines(data)])
