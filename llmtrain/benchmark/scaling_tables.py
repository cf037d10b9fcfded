"""docs/scaling.md out of the JSON that scripts/bench/parallel.py wrote."""

import statistics
from typing import Any

from llmtrain.benchmark.config import Shape, shape_from
from llmtrain.benchmark.machine import headline
from llmtrain.benchmark.scaling import (
    Cluster,
    Link,
    SumPoint,
    bubble,
    data_parallel_s,
    fit_link,
    fsdp_s,
    hop_bytes,
    pipeline_s,
    pipelines_s,
    ring,
)
from llmtrain.benchmark.tables import percent, table
from llmtrain.model.flops import parameter_counts
from llmtrain.training.stages import STAGES_A_RANK, cut, of_rank

# Assumed of what is not here, and said so in the page: eight cards a box on NVLink, 400 Gb/s of network a card, and
# boxes without NVLink over PCIe 5.
FAR = Link(10e-6, 50e9)
PCIE = Link(10e-6, 25e9)
CARDS_OF_BOX = 8
SIZES = (8, 64, 1024)
BEFORE = {
    "parallel": "ddp", "schedule": "1f1b", "precision": None, "checkpoint_activations": "none", "step_spread": None,
    "reshard_after_forward": True,
}  # fmt: skip
"""What rows lack that were measured before there were others than data parallel, or of FSDP another than this."""
MICRO_BATCHES = 16
"""Of a step of a pipeline of eight."""


def dearest_share(shape: Shape, row: dict[str, Any]) -> float:
    """The largest share of a step's work that a rank of the row's pipeline has, by the computed cut."""
    schedule, ranks = row["schedule"], row["ranks"]
    stages = cut(shape.model, shape.seq_len, row["checkpoint_activations"], ranks * STAGES_A_RANK[schedule])
    return max(sum(s.cost for s in of_rank(stages, rank, ranks, schedule)) for rank in range(ranks))


def prediction(row: dict[str, Any], link: Link) -> float:
    """The model's step. Of data parallel: that of the ranks without their sum, and the sum; of the others: from one
    card's, which is timed captured in CUDA graphs."""
    shape, one = shape_from(row["shape"]), statistics.mean(row["one_step_s"])
    if row["parallel"] == "ddp":
        return float(row["apart_s"]) + ring(row["ranks"], 4 * row["parameters"], link)
    if row["parallel"] == "fsdp":
        cluster = Cluster(row["ranks"], CARDS_OF_BOX, link, FAR)
        reshard = row["reshard_after_forward"]
        return fsdp_s(one, row["parameters"], shape.model.n_layers, shape.accumulate, cluster, reshard)
    width = 4 if row["precision"] == "fp32" else 2
    hop = link.latency_s + hop_bytes(shape.batch_size * shape.seq_len, shape.model.d_model, width) / link.bytes_per_s
    return pipeline_s(one, row["ranks"], shape.accumulate, row["schedule"], dearest_share(shape, row), hop)


def words(row: dict[str, Any]) -> str:
    """How a row's ranks share the work."""
    if row["parallel"] == "pipeline":
        return f"pipeline, {row['schedule']}"
    return str(row["parallel"]) + ", kept" * (not row["reshard_after_forward"])


ROW_HEADER = (
    "row", "scaling", "by", "ranks", "of a rank", "parameters", "one, ms", "mean, ms", "spread", "step spread", "tok/s",
    "times one", "floor", "must", "model, ms", "model off",
)  # fmt: skip


def row_cells(row: dict[str, Any], link: Link) -> list[str]:
    shape, predicted = row["shape"], prediction(row, link)
    return [
        row["name"], "strong" if row["strong"] else "weak", words(row), str(row["ranks"]),
        f"{shape['batch_size']} x {shape['seq_len']} x {shape['accumulate']}", f"{row['parameters'] / 1e6:,.1f}M",
        f"{1e3 * statistics.mean(row['one_step_s']):.2f}", f"{1e3 * row['mean_s']:.2f}", f"{row['spread']:.1%}",
        percent(row["step_spread"]), f"{row['tok_per_s']:,.0f}", f"{row['times_one']:.3f}", f"{row['floor']:.2%}",
        row["target"], f"{1e3 * predicted:.2f}", f"{predicted / row['median_s'] - 1:+.1%}",
    ]  # fmt: skip


def side_by_side(rows: list[dict[str, Any]]) -> list[str]:
    """Pipelines against data parallel on the same step: what both were given is the same but for the way to share."""
    pairs: dict[tuple, dict[str, dict]] = {}
    for row in rows:
        if row["strong"]:
            key = (
                row["ranks"], row["parameters"], row["tokens_per_step"], row["precision"], row["checkpoint_activations"]
            )  # fmt: skip
            pairs.setdefault(key, {})[words(row)] = row
    cells = []
    for (ranks, parameters, tokens, precision, activations), by in pairs.items():
        for kind, row in by.items() if len(by) > 1 else ():
            ddp = by.get("ddp")
            cells.append([
                f"{parameters / 1e6:,.1f}M, {tokens:,} tokens", precision, activations, kind, str(ranks),
                f"{1e3 * row['mean_s']:.2f}", percent(row["step_spread"]), f"{row['tok_per_s']:,.0f}",
                f"{row['tok_per_s'] / ddp['tok_per_s']:.3f}" if ddp else "",
            ])  # fmt: skip
    if not cells:
        return []
    header = (
        "step", "precision", "run again", "by", "ranks", "mean, ms", "step spread", "tok/s", "times data parallel"
    )  # fmt: skip
    return ["## Pipelines against data parallel", "", "The same step, the same recomputation. `step spread` is the "
            "range of single steps.", "", *table(header, cells, numbers_from=4), ""]  # fmt: skip


def modelled(rows: list[dict[str, Any]], link: Link) -> list[list[str]]:
    """Lines of the table of clusters that there are not."""
    lines = []
    # Of a row that was taken on several numbers of ranks, the most: what one rank takes is the same measurement.
    by_name = {row["name"]: row for row in sorted(rows, key=lambda row: row["ranks"])}
    for row in by_name.values():
        if row["strong"] or row["parallel"] != "ddp":
            continue
        shape, one = shape_from(row["one_shape"]), statistics.mean(row["one_step_s"])
        parameters = parameter_counts(shape.model).total
        stages = min(8, shape.model.n_layers)
        hop = hop_bytes(shape.batch_size * shape.seq_len, shape.model.d_model)
        for cards in SIZES:
            near = Cluster(cards, CARDS_OF_BOX, link, FAR)
            pcie = Cluster(cards, CARDS_OF_BOX, PCIE, FAR)
            shares = [one / data_parallel_s(one, parameters, cluster) for cluster in (near, pcie)]
            for reshard in (True, False):
                taken = fsdp_s(one, parameters, shape.model.n_layers, shape.accumulate, near, reshard)
                shares.append(one / taken)
            work = MICRO_BATCHES * one / shape.accumulate
            for cluster in (near, pcie):
                way = cluster.slowest()
                hop_s = way.latency_s + hop / way.bytes_per_s
                pipeline = pipeline_s(work, stages, MICRO_BATCHES, "1f1b", hop_s=hop_s)
                shares.append(work / stages / pipelines_s(pipeline, parameters, stages, cluster))
            rate = cards * shares[0] * shape.tokens_per_step / one
            lines.append([row["name"], str(cards), *[f"{share:.1%}" for share in shares], f"{rate:,.0f}"])
    return lines


def markdown(data: dict[str, Any], source: str) -> str:
    """The page."""
    rows, points = [BEFORE | row for row in data["rows"]], [SumPoint(**p) for p in data["sums"]]
    link = fit_link(points)
    lines = [
        "# One card and many", "",
        "**A tiny model over gloo on a CPU: what stands here shows that the script works.**\n" * data["smoke"],
        f"Made by `scripts/bench/parallel.py` from [{source}]({source}). {headline(data['machine'])}", "",
        "With `ddp` each rank has the whole model and its part of every step; between the last micro-batch and the "
        "update the FP32 gradients are summed over the ranks. With `fsdp` the ranks share the weights too; `kept`: "
        "what is gathered stays until the update (`--no-reshard-after-forward`). In a "
        "pipeline each has some of the layers and sees all of the step's micro-batches. `times one` compares tokens a "
        "second with one rank's. `floor` is what one rank, measured before and after, differs by.", "",
    ]  # fmt: skip
    lines += table(ROW_HEADER, [row_cells(row, link) for row in rows])
    lines += ["", *side_by_side(rows), "A sum over the ranks alone:", ""]
    lines += table(
        ("ranks", "MB", "ms", "GB/s a rank sends", "model, ms"),
        [
            [
                str(p.ranks), f"{p.bytes / 1e6:,.1f}", f"{1e3 * p.seconds:.3f}",
                f"{2 * (p.ranks - 1) / p.ranks * p.bytes / p.seconds / 1e9:.1f}",
                f"{1e3 * ring(p.ranks, p.bytes, link):.3f}",
            ]
            for p in points
        ],
        numbers_from=0,
    )  # fmt: skip
    lines += [
        "", "## The model", "",
        "A step of data parallel is the step of one card and the sum, which hides behind nothing: of S bytes over n "
        "cards of a box it takes 2 (n - 1) (latency + S / n / bandwidth). Between boxes each card sums its share of "
        "the box's result: 2 (b - 1) / b of it over its network, and a tree's latency. FSDP moves, for each "
        "micro-batch, 8 bytes a parameter beside the computation, so it takes the longer of the two; where gathered "
        "weights are kept, 4 for each micro-batch and 2 a step.", "",
        "A pipeline of p ranks takes the dearest rank's share of one card's step, and (p - 1) / m of that longer with "
        "m micro-batches in 1F1B, half of it interleaved by two, a third with zero-bubble. A micro-batch's activations "
        "go to the next stage and their gradient comes back, 2 bytes a number: 1F1B waits for both, the other two "
        "exchange twice as often beside the computation. Several pipelines add up their stages' gradients in the end; "
        "cards with the same stages are neighbours, stages may be in different boxes.", "",
        f"Fitted here: latency {1e6 * link.latency_s:.0f} us, {link.bytes_per_s / 1e9:.1f} GB/s. Assumed: boxes of "
        f"{CARDS_OF_BOX}, a network of {FAR.bytes_per_s / 1e9:.0f} GB/s a card with {1e6 * FAR.latency_s:.0f} us, PCIe "
        f"at {PCIE.bytes_per_s / 1e9:.0f} GB/s. Shares of a perfect n times one card, each card with the batch of the "
        f"row; pipelines of 8 in 1F1B, a step of {MICRO_BATCHES} micro-batches each:", "",
    ]  # fmt: skip
    lines += table(
        (
            "row", "cards", "data parallel", "without NVLink", "FSDP", "FSDP, kept", "pipelines",
            "pipelines without NVLink", "tok/s of data parallel",
        ),
        modelled(rows, link),
    )  # fmt: skip
    lines += [
        "", f"A pipeline's bubble with 8 ranks and {MICRO_BATCHES} micro-batches: 1F1B "
        f"{bubble(8, MICRO_BATCHES, '1f1b'):.1%}, interleaved by 2 {bubble(8, MICRO_BATCHES, 'interleaved'):.1%}, "
        f"zero-bubble {bubble(8, MICRO_BATCHES, 'zero-bubble'):.1%}.", "",
    ]  # fmt: skip
    if checks := data.get("checks"):
        lines += [f"## Runs on one and on {data['check_ranks']}", ""]
        lines += table(("check", "holds"), [[k, "yes" if v else "**no**"] for k, v in checks["checks"].items()])
        lines += [""]
    if data.get("topology"):
        lines += ["## Topology", "", "```", data["topology"].rstrip(), "```", ""]
    return "\n".join(lines)
