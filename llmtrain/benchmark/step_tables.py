"""Markdown of `bench step` and `bench profile`."""

from typing import Any

from llmtrain.benchmark.config import shape_from
from llmtrain.benchmark.machine import headline
from llmtrain.benchmark.statistics import NOISY_SPREAD
from llmtrain.benchmark.tables import figure, percent, table

SHOWN_KERNELS = 40
NAME_WIDTH = 90


def title(data: dict[str, Any], what: str) -> list[str]:
    shape = shape_from(data["shape"])
    m = shape.model
    files = " and ".join(one["file"] for one in data.get("corpus") or ())
    return [
        f"# {what}",
        "",
        f"d_model {m.d_model}, {m.n_layers} layers, {m.n_heads} heads and {m.n_kv_heads} kv heads of {m.head_dim}, "
        f"{m.feed_forward_words()}, vocabulary {m.vocab_size}: {data['parameters'] / 1e6:.1f}M parameters, "
        f"{data['active_parameters'] / 1e6:.1f}M active; batch {shape}"
        f"{f' of {files}' if files else ''}, "
        f"{data['precision']}, on {data['device']}.",
        "",
        headline(data["machine"]),
        "",
    ]


def step_markdown(data: dict[str, Any]) -> str:
    """What `measure_step` returned, with the machine."""
    noisy = " ~" if data["spread"] > NOISY_SPREAD else ""
    rows = [
        ["tokens a second", f"{data['tok_per_s']:,.0f}{noisy}"],
        ["step, ms", f"{data['step_ms']:.3f}"],
        ["spread of the bursts", percent(data["spread"])],
        ["device time of a step, ms", figure(data["device_step_ms"], ".3f")],
        ["host time to issue a step, ms", figure(data["issue_step_ms"], ".3f")],
        *([["not captured in CUDA graphs", why]] if (why := data["not_captured"]) else []),
        ["FLOPs a token, exact", f"{data['flops_per_token'] / 1e6:.1f} M"],
        ["FLOPs a token, classic", f"{data['classic_flops_per_token'] / 1e6:.1f} M"],
        ["TFLOP/s", f"{data['tflops']:.4g}"],
        ["MFU", percent(data["mfu"])],
        ["HFU", percent(data["hfu"])],
        ["MFU, classic", percent(data["classic_mfu"])],
        ["attention", data["attention"]],
        ["activations made again in the backward", data["checkpoint_activations"]],
        ["peak of tensors, GiB", figure(data["allocated_gib"], ".2f")],
        ["the same as planned, GiB", figure(data["predicted_gib"], ".2f")],
        ["peak held by the allocator, GiB", figure(data["reserved_gib"], ".2f")],
        ["used on the card at the end, GiB", figure(data["device_used_gib"], ".2f")],
        ["peak of host memory, GiB", figure(data["host_rss_gib"], ".2f")],
        ["build and first step, s", f"{data['first_step_s']:.1f}"],
        ["loss, first and last step", f"{data['first_loss']:.4f}, {data['last_loss']:.4f}"],
    ]
    return "\n".join([*title(data, "A training step"), *table(["", "value"], rows), ""])


def part_cells(row: dict[str, Any]) -> list[str]:
    seconds = row["ms"] / 1e3
    if row["flops"]:
        work, rate = f"{row['flops'] / 1e12:.3g} TFLOP", f"{row['flops'] / seconds / 1e12:.3g} TFLOP/s"
    elif row["bytes"]:
        work, rate = f"{row['bytes'] / 1e9:.3g} GB", f"{row['bytes'] / seconds / 1e12:.3g} TB/s"
    else:
        work = rate = ""
    floor = row["floor_ms"]
    times = "" if floor is None else f"{row['ms'] / floor:.2f}"
    return [
        row["part"], f"{row['ms']:.3f}", percent(row["share"]), work, rate,
        "" if floor is None else f"{floor:.3f}", times,
    ]  # fmt: skip


def profile_markdown(data: dict[str, Any]) -> str:
    """What `profile_step` returned, with the machine."""
    copies, ceilings = data["copies"], data["ceilings"]
    kernels = [
        [
            row["name"][:NAME_WIDTH].replace("|", "\\|"), row["part"], f"{row['instances']:g}", f"{row['ms']:.3f}",
            percent(row["share"]),
        ]
        for row in data["kernels"][:SHOWN_KERNELS]
    ]  # fmt: skip
    rest = data["kernels"][SHOWN_KERNELS:]
    if rest:
        instances, ms = sum(r["instances"] for r in rest), sum(r["ms"] for r in rest)
        kernels.append([f"{len(rest)} more", "", f"{instances:g}", f"{ms:.3f}", percent(sum(r["share"] for r in rest))])
    if data["device"] == "cpu":
        taken = f"Below is the self time of its ops under the profiler, {data['busy_ms']:.3f} ms."
    else:
        idle = data["span_ms"] - data["busy_ms"]
        taken = (
            f"Under the profiler, whose few steps leave the card cooler and its clock higher, kernels ran "
            f"{data['busy_ms']:.3f} ms a step and {idle:.3f} ms passed between them. Copies a step: {copies['htod']:g} "
            f"host to device, {copies['dtoh']:g} device to host, {copies['dtod']:g} on the device; the host waits "
            f"{data['waits']:g} times."
        )
    lines = [
        *title(data, "A training step by kernel"),
        f"A step takes {data['wall_ms']:.3f} ms without the profiler ({data['tok_per_s']:,.0f} tok/s, MFU "
        f"{percent(data['mfu'])}). {taken}",
        "",
        f"Ceilings of the same run: {ceilings['bytes_per_s'] / 1e12:.3g} TB/s (one read and one write), "
        f"{ceilings['flops'] / 1e12:.3g} TFLOP/s (matrix product). The floor of a part is its least FLOPs or bytes "
        "at these.",
        "",
    ]
    if data["not_captured"]:
        lines += [f"Not captured in CUDA graphs: {data['not_captured']}", ""]
    lines += table(
        ["part", "ms", "share", "needs", "rate", "floor ms", "times the floor"], [part_cells(r) for r in data["parts"]]
    )
    lines += ["", *table(["kernel", "part", "instances", "ms", "share"], kernels, numbers_from=2), ""]
    return "\n".join(lines)
