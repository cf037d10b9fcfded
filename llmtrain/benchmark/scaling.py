"""What a step costs on many cards: arithmetic from a few measured figures, for sizes that cannot be measured here."""

import math
from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class Link:
    """A way between ranks."""

    latency_s: float
    """Seconds that one exchange of no bytes takes."""
    bytes_per_s: float
    """What a rank sends and, at the same time, receives."""


@dataclass(frozen=True)
class SumPoint:
    """A sum over ranks that was timed."""

    ranks: int
    bytes: int
    """Of the buffer on each rank."""
    seconds: float


def ring(ranks: int, size: float, link: Link) -> float:
    """Seconds of a sum of `size` bytes around a ring: each rank sends 2 (n - 1) pieces of a n-th."""
    return 2 * (ranks - 1) * (link.latency_s + size / ranks / link.bytes_per_s)


def fit_link(points: Sequence[SumPoint]) -> Link:
    """The link that explains timed sums best, by relative error. With a latency of 0 where the best were below it."""
    assert points and all(p.ranks > 1 for p in points)
    rows = [(2 * (p.ranks - 1) / p.seconds, 2 * (p.ranks - 1) / p.ranks * p.bytes / p.seconds) for p in points]
    aa, ab, bb = (sum(x[i] * x[j] for x in rows) for i, j in ((0, 0), (0, 1), (1, 1)))
    a, b = sum(x[0] for x in rows), sum(x[1] for x in rows)
    determinant = aa * bb - ab * ab
    if determinant > 1e-12 * aa * bb:
        latency, per_byte = (bb * a - ab * b) / determinant, (aa * b - ab * a) / determinant
        if latency >= 0 and per_byte > 0:
            return Link(latency, 1 / per_byte)
    return Link(0.0, bb / b)


@dataclass(frozen=True)
class Cluster:
    """Boxes of cards: `near` is the way within a box, `far` that of each card to other boxes."""

    cards: int
    cards_of_box: int
    near: Link
    far: Link

    @property
    def boxes(self) -> int:
        return math.ceil(self.cards / self.cards_of_box)

    def sum_s(self, size: float) -> float:
        """Seconds of a sum of `size` bytes over all cards: within the boxes, then each card its share between them,
        where a tree's latency counts and a ring's bytes do."""
        within = min(self.cards, self.cards_of_box)
        seconds = ring(within, size, self.near)
        if self.boxes > 1:
            share = size / within
            seconds += 2 * (self.boxes - 1) / self.boxes * share / self.far.bytes_per_s
            seconds += 2 * math.ceil(math.log2(self.boxes)) * self.far.latency_s
        return seconds

    def slowest(self) -> Link:
        """The way that bounds an exchange of all with all."""
        return self.far if self.boxes > 1 else self.near


def data_parallel_s(compute_s: float, parameters: int, cluster: Cluster) -> float:
    """A step: the sum of the FP32 gradients comes after the last micro-batch and hides behind nothing."""
    return compute_s + (cluster.sum_s(4 * parameters) if cluster.cards > 1 else 0.0)


def fsdp_s(
    compute_s: float, parameters: int, layers: int, micro_batches: int, cluster: Cluster,
    reshard_after_forward: bool = True,
) -> float:  # fmt: skip
    """A step of FSDP: in each micro-batch the weights are gathered twice in two bytes, or once a step where they stay,
    the gradients scattered once in four, all beside the computation but for a layer's gather before and a layer's
    scatter behind it."""
    n, link = cluster.cards, cluster.slowest()
    if n == 1:
        return compute_s
    of_byte = (n - 1) / n * parameters / layers / link.bytes_per_s
    gather, scatter = (link.latency_s + size * of_byte for size in (2, 4))  # of a layer
    gathers, begins = (2 * micro_batches, micro_batches) if reshard_after_forward else (1, 1)
    exchange = layers * (gathers * gather + micro_batches * scatter)
    return max(compute_s, exchange) + begins * gather + micro_batches * scatter


def bubble(stages: int, micro_batches: int, schedule: str, chunks: int = 2) -> float:
    """The share by which a pipeline's step is longer than its work: (p - 1) / m; of `chunks` stages a rank, so many
    times less; with the weights' gradients moved into the gaps, a third."""
    share = (stages - 1) / micro_batches
    return {"1f1b": share, "interleaved": share / chunks, "zero-bubble": share / 3}[schedule]


def pipeline_s(
    compute_s: float, ranks: int, micro_batches: int, schedule: str = "1f1b", dearest: float | None = None,
    hop_s: float = 0.0,
) -> float:  # fmt: skip
    """A step of `compute_s` on one card, shared by the `ranks` of a pipeline; `dearest`: the largest share of one, an
    even one by default; `hop_s`: seconds that a micro-batch's activations take to the next stage.

    In 1F1B a rank waits for what it exchanges, there and back for each micro-batch; the other schedules exchange
    twice as often, beside the computation.
    """
    compute = compute_s * (1 / ranks if dearest is None else dearest) * (1 + bubble(ranks, micro_batches, schedule))
    hops = 2 * (micro_batches + ranks - 1) * hop_s
    return compute + hops if schedule == "1f1b" else max(compute, 2 * hops)


def hop_bytes(rows: int, d_model: int, itemsize: int = 2) -> int:
    """Of a micro-batch of so many tokens on its way from a stage to the next, or of their gradient on its way back."""
    return rows * d_model * itemsize


def pipelines_s(pipeline: float, parameters: int, ranks: int, cluster: Cluster) -> float:
    """A step of several pipelines of `ranks` cards that take `pipeline` seconds each: then every card adds up its
    stages' gradients with the cards that have the same. Those are neighbours, the next stage may be in another box."""
    copies = cluster.cards // ranks
    if copies == 1:
        return pipeline
    of_stage = Cluster(copies, min(cluster.cards_of_box, copies), cluster.near, cluster.far)
    return pipeline + of_stage.sum_s(4 * parameters / ranks)
