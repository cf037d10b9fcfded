"""Where a training step's time goes: by kernel, and by part against the floor that its bytes or FLOPs set."""

import re
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch.autograd import DeviceType
from torch.profiler import ProfilerActivity, profile

from llmtrain.benchmark.ceilings import measure_ceilings
from llmtrain.benchmark.config import Shape, TimingConfig
from llmtrain.benchmark.step import TimedSteps, model_figures, throughput
from llmtrain.benchmark.timing import burst, steps_for
from llmtrain.corpus.order import SampleOrder
from llmtrain.model.config import ModelConfig
from llmtrain.model.flops import attention_flops, parameter_counts
from llmtrain.training.devices import pick_device

PROFILED_STEPS = 3

PARTS = [
    ("copies", r"^memcpy|^memset"),
    ("attention", r"flash|fmha|sdpa|attention|fprop|bprop|cudnn::fusion"),
    ("routing", r"expert_(gather|combine)|_route|_places|sort|searchsorted|arange"),
    ("matmul", r"grouped|gemm|nvjet|xmma|cutlass|cublas|splitk|\bmm\b|addmm|bmm|matmul|linear"),
    ("optimizer", r"adam|multi_tensor|normtwoops|update_scalars"),
    ("eight-bit casts", r"fp8_(quantise|round)"),
    ("rmsnorm backward", r"rms_?norm_?(backward|bwd)|partial_sums"),
    ("rmsnorm forward", r"rms_?norm"),
    ("swiglu backward", r"(swiglu|silu)_?(backward|bwd)"),
    ("swiglu forward", r"swiglu|silu"),
    ("rotary backward", r"rotary(_?qkv)?_?(backward|bwd)"),
    ("rotary forward", r"rotary|rotate"),
    ("head softmax", r"cross_entropy|softmax|nll"),
    ("embedding", r"embedding"),
]
"""Part of a step -> what the names of its kernels hold; the first that fits."""

WAITS = re.compile(r"^(cuda|cu)(Stream|Event|Device|Ctx)Synchronize")


def part_of(name: str) -> str:
    """The part of a step that a kernel or an op belongs to, by its name; "other" where none fits."""
    lower = name.removeprefix("aten::").lower()
    return next((part for part, pattern in PARTS if re.search(pattern, lower)), "other")


def covered(spans: Iterable[tuple[float, float]]) -> float:
    """The length of the union of (begin, end) spans: time with at least one kernel on the device."""
    total, reach = 0.0, float("-inf")
    for begin, end in sorted(spans):
        total += max(0.0, end - max(begin, reach))
        reach = max(reach, end)
    return total


@dataclass(frozen=True)
class Needed:
    """The least work that a part of a step can be done with."""

    flops: float = 0.0
    bytes: float = 0.0


def needed(shape: Shape, precision: str) -> dict[str, Needed]:
    """By part, for one step. Each tensor of a part is read once and written once; what a kernel can take from its
    neighbours by fusion is not deducted."""
    c, n = shape.model, shape.tokens_per_step
    wide = 4 if precision == "fp32" else 2
    row = c.d_model * n * wide
    turned = (c.n_heads + c.n_kv_heads) * c.head_dim * n * wide
    packed = c.qkv_width * n * wide
    sequences = shape.batch_size * shape.accumulate
    parameters = parameter_counts(c)
    dense, routed = c.n_layers - c.n_routed, c.experts_per_token * c.expert_width + c.shared_width
    met = dense * c.d_ff + c.n_routed * routed  # widths of all feed-forwards that a token meets
    copies = c.n_routed * c.experts_per_token
    return {
        "matmul": Needed(flops=6.0 * parameters.in_matmuls * n),
        "attention": Needed(flops=attention_flops(c, [shape.seq_len] * sequences)),
        # x -> y and, but for the last norm, a copy
        "rmsnorm forward": Needed(bytes=(2 * c.n_layers * 3 + 2) * row),
        # dy, x and, but for the last norm, the copy's gradient -> dx
        "rmsnorm backward": Needed(bytes=(2 * c.n_layers * 4 + 3) * row),
        # gate, up -> y
        "swiglu forward": Needed(bytes=3 * met * n * wide),
        # dy, gate, up -> d_gate, d_up
        "swiglu backward": Needed(bytes=5 * met * n * wide),
        # a row to its copies, and those back into the stream; of the gradient the same
        "routing": Needed(bytes=2 * (2 * copies + 2 * c.n_routed + c.n_routed) * row),
        **(eight_bit_casts(c, n) if precision == "fp8" else {}),
        # queries and keys in and out
        "rotary forward": Needed(bytes=c.n_layers * 2 * turned),
        # gradients of queries, keys and values in and, packed, out; under a norm queries and keys too
        "rotary backward": Needed(bytes=c.n_layers * (2 * packed + (turned if c.qk_norm else 0))),
        # logits in, their gradient out
        "head softmax": Needed(bytes=2 * c.vocab_size * n * wide),
        # forward: FP32 rows in, narrow rows out; backward: narrow rows in, FP32 rows in and out
        "embedding": Needed(bytes=c.d_model * n * (4 + wide + wide + 8)),
        # gradient twice (its norm needs it first), weight and two moments in and out, the narrow copy out
        "optimizer": Needed(bytes=parameters.total * (32 + (2 if wide == 2 else 0))),
    }


def eight_bit_casts(c: ModelConfig, n: int) -> dict[str, Needed]:
    """Of n tokens, weights aside: each operand in bf16 in and, both ways round, in eight bits out."""
    attention = c.d_model + c.qkv_width + c.n_heads * c.head_dim + c.d_model  # inputs and gradients of qkv and out
    dense = (c.n_layers - c.n_routed) * (2 * c.d_model + 3 * c.d_ff)
    shared = c.n_routed * (2 * c.d_model + 3 * c.shared_width) if c.n_shared_experts else 0
    return {"eight-bit casts": Needed(bytes=4 * n * (c.n_layers * attention + dense + shared))}


def by_name(rows: Iterable[tuple[str, float]], steps: int) -> list[dict[str, Any]]:
    """(name, ms) of single calls -> a row for each name, the longest first: instances and ms a step, and share."""
    counts: dict[str, int] = {}
    times: dict[str, float] = {}
    for name, ms in rows:
        counts[name] = counts.get(name, 0) + 1
        times[name] = times.get(name, 0.0) + ms
    total = sum(times.values())
    return [
        {
            "name": name,
            "part": part_of(name),
            "instances": counts[name] / steps,
            "ms": times[name] / steps,
            "share": times[name] / total,
        }
        for name in sorted(times, key=lambda name: -times[name])
    ]


def by_part(kernels: list[dict[str, Any]], work: dict[str, Needed], ceilings: dict[str, float]) -> list[dict[str, Any]]:
    """A row for each part, the longest first: ms a step, share, FLOPs or bytes and the rate they pass at, floor."""
    parts: dict[str, float] = {}
    for kernel in kernels:
        parts[kernel["part"]] = parts.get(kernel["part"], 0.0) + kernel["ms"]
    total = sum(parts.values())
    rows = []
    for part, ms in sorted(parts.items(), key=lambda item: -item[1]):
        least = work.get(part, Needed())
        floor = 1e3 * max(least.flops / ceilings["flops"], least.bytes / ceilings["bytes_per_s"])
        rows.append({"part": part, "ms": ms, "share": ms / total, **asdict(least), "floor_ms": floor or None})
    return rows


def profile_step(shape: Shape, timing: TimingConfig, order: SampleOrder | None = None) -> dict[str, Any]:
    """One step by kernel (on a CPU by op, self time), beside the same step's time without the profiler. `order`: as of
    `TimedSteps`."""
    device = pick_device(timing.device)
    on_card = device.type == "cuda"
    ceilings = measure_ceilings(device).as_dict()
    steps = TimedSteps(shape, timing, device, order=order)
    count = steps_for(steps, timing.seconds, device, warmup=timing.warmup)
    plain = burst(steps, count, device)
    activities = [ProfilerActivity.CPU, ProfilerActivity.CUDA] if on_card else [ProfilerActivity.CPU]
    with profile(activities=activities) as profiler:
        for _ in range(PROFILED_STEPS):
            steps()
        if on_card:
            torch.cuda.synchronize(device)
    events = list(profiler.events() or [])
    if on_card:
        # Ranges that mark regions of the program lie on the device's time line too, and are no kernels.
        taken = [e for e in events if e.device_type == DeviceType.CUDA and not e.is_user_annotation]
        calls = [(e.name, e.time_range.elapsed_us() / 1e3) for e in taken]
        times = [(e.time_range.start, e.time_range.end) for e in taken]
        busy = covered(times) / 1e3 / PROFILED_STEPS
        span = (max(end for _, end in times) - min(start for start, _ in times)) / 1e3 / PROFILED_STEPS
    else:
        calls = [(e.name, e.self_cpu_time_total / 1e3) for e in events]
        busy = span = sum(ms for _, ms in calls) / PROFILED_STEPS
    kernels = by_name(calls, PROFILED_STEPS)
    figures = model_figures(shape, timing.checkpoint_activations)
    wall_ms = plain.wall_s / plain.steps * 1e3
    tok_per_s = shape.tokens_per_step / wall_ms * 1e3
    return {
        "kind": "profile",
        "shape": asdict(shape),
        **steps.read,
        "device": str(device),
        "precision": timing.precision,
        "profiled_steps": PROFILED_STEPS,
        "ceilings": ceilings,
        "wall_ms": wall_ms,
        "busy_ms": busy,
        "span_ms": span,
        "tok_per_s": tok_per_s,
        "not_captured": steps.step.why_not_captured,
        "copies": {
            kind: sum(f"memcpy {kind}" in name.lower() for name, _ in calls) / PROFILED_STEPS
            for kind in ("htod", "dtoh", "dtod")
        },
        "waits": sum(bool(WAITS.match(e.name)) for e in events) / PROFILED_STEPS,
        "kernels": kernels,
        "parts": by_part(kernels, needed(shape, timing.precision), ceilings),
        **figures,
        **throughput(tok_per_s, figures, device),
    }
