"""A model cut into the stages of a pipeline: which layers each has, which rank runs it, what that costs.

The cut follows from the model's shape alone, so all ranks find the same, and no measurement moves it from one start of
a run to the next.
"""

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate

from llmtrain.model.config import CheckpointActivations, ModelConfig
from llmtrain.model.flops import causal_pairs, parameter_counts
from llmtrain.model.memory import MemoryPlan, gathered_bytes
from llmtrain.model.transformer import Transformer
from llmtrain.storage.errors import UsageError
from llmtrain.training.config import PipelineSchedule, TrainConfig

STAGES_A_RANK: dict[PipelineSchedule, int] = {"1f1b": 1, "interleaved": 2, "zero-bubble": 2}

BYTE = 150
"""FLOPs that a matmul makes while a byte goes to or from memory: 640 TFLOP/s by 4.3 TB/s on an H200."""
PAIR = 3
"""A FLOP of attention takes as long as so many of a matmul (docs/attention.md)."""
SHARP = 16
"""The cut with the smallest sum of the stages' costs to this power is the one whose dearest stage is cheapest, but for
differences of a few percent; and of such cuts one whose other stages are even."""


@dataclass(frozen=True)
class Stage:
    """A stretch of the model. Stage 0 has the embedding, the last one the head."""

    index: int
    count: int
    """Of all stages."""
    layers: range
    cost: float
    """Share of a step's work."""

    @property
    def first(self) -> bool:
        return self.index == 0

    @property
    def last(self) -> bool:
        return self.index == self.count - 1

    def words(self) -> str:
        """What it has, for a person."""
        names = ["embedding"] * self.first
        if self.layers:
            one, other = self.layers[0], self.layers[-1]
            names.append(f"layers {one}-{other}" if other > one else f"layer {one}")
        return " + ".join(names + ["head"] * self.last)


def costs(
    c: ModelConfig, seq_len: int, checkpoint_activations: CheckpointActivations = "none"
) -> tuple[float, list[float], float]:
    """What a token costs in the embedding, in each block and in the head, forward and backward, in FLOPs of a matmul:
    of passes over memory and of attention, what a matmul would have made in their time."""
    q, kv, d = c.n_heads * c.head_dim, c.n_kv_heads * c.head_dim, c.d_model
    blocks = []
    for layer, window in enumerate(c.windows):
        routed = c.is_routed(layer)
        f = c.experts_per_token * c.expert_width + c.shared_width if routed else c.d_ff  # that a token meets
        of_router = c.n_experts * d + 2 * BYTE * 2 * c.experts_per_token * d if routed else 0  # copies there and back
        pairs = causal_pairs(seq_len, window) / seq_len
        matmuls = 2 * (d * c.qkv_width + q * d + 3 * d * f) + of_router
        # two norms that hand on a copy, the rotation, SwiGLU; numbers of two bytes
        passes = BYTE * 2 * (6 * d + 2 * (q + 2 * kv) + 3 * f)
        forward = matmuls + passes + PAIR * 4 * q * pairs
        again = forward - 2 * d * f if checkpoint_activations == "full" else 0
        blocks.append(3 * forward + again)
    embedding = BYTE * (2 + 2 + 2 + 4 + 4) * d  # read, written; the gradient is read and added to what is there
    head = 3 * 2 * c.vocab_size * d + BYTE * (4 * c.vocab_size + 3 * 2 * 3 * d)
    return float(embedding), blocks, float(head)


def cut(c: ModelConfig, seq_len: int, checkpoint_activations: CheckpointActivations, count: int) -> list[Stage]:
    """The model in `count` stages of about the same cost, none without a block but perhaps the last. Raises UsageError
    where there are too few blocks."""
    if count > c.n_layers + 1:
        raise UsageError(
            f"--parallel pipeline: {count} stages are more than the model's {c.n_layers} layers and its head: start "
            "fewer ranks, or give --pipeline-ranks or --pipeline-schedule 1f1b"
        )
    embedding, blocks, head = costs(c, seq_len, checkpoint_activations)
    before = [0.0, *accumulate(blocks)]  # of block i what all before it cost
    whole = embedding + before[-1] + head

    def cost(begin: int, end: int, stage: int) -> float:
        return before[end] - before[begin] + embedding * (stage == 0) + head * (stage == count - 1)

    # best[i]: of the first stages that have i blocks together, the smallest sum of powers, and where the last begins
    n = c.n_layers
    best = {0: (0.0, [0])}
    for stage in range(count):
        last = stage == count - 1
        found: dict[int, tuple[float, list[int]]] = {}
        for end in [n] if last else range(stage + 1, n + 1):
            found[end] = min(
                (total + (cost(begin, end, stage) / whole * count) ** SHARP, [*begins, end])
                for begin, (total, begins) in best.items()
                if begin < end or begin == end and last and count > 1
            )
        best = found
    borders = best[n][1]
    return [
        Stage(i, count, range(begin, end), cost(begin, end, i) / whole)
        for i, (begin, end) in enumerate(zip(borders, borders[1:], strict=False))
    ]


def of_rank(stages: Sequence[Stage], rank: int, ranks: int, schedule: PipelineSchedule) -> list[Stage]:
    """Those that rank `rank` of the `ranks` of a pipeline runs: in turn, with zero-bubble there and back."""
    if schedule == "zero-bubble":
        return [stages[rank], stages[2 * ranks - 1 - rank]]
    return list(stages[rank::ranks])


def check_micro_batches(count: int, ranks: int, schedule: PipelineSchedule) -> None:
    """Raises UsageError for so many micro-batches of a step as the schedule cannot run."""
    advice = "change --batch-size, --accumulate or --global-batch-size"
    if schedule == "1f1b" and count < ranks:
        raise UsageError(
            f"--pipeline-schedule 1f1b: a step of {count} micro-batches does not fill {ranks} stages, it needs as "
            f"many: {advice}"
        )
    rounds = max(1, count // ranks)
    if schedule == "interleaved" and count % rounds:
        raise UsageError(
            f"--pipeline-schedule interleaved: a step of {count} micro-batches is not {rounds} equal rounds over "
            f"{ranks} ranks, {count // ranks * ranks} would be: {advice}"
        )


def in_flight(rank: int, ranks: int, count: int, schedule: PipelineSchedule) -> float:
    """Micro-batches of a step of `count` whose activations rank `rank` of a pipeline keeps at once, at most; of two
    stages each counts for half."""
    if schedule == "1f1b":
        return min(count, ranks - rank)
    if schedule == "interleaved":
        return min(2 * count, ranks + 2 * (ranks - 1 - rank) + 1) / 2
    return min(count, ranks)


def memory_of_rank(
    whole: MemoryPlan, config: TrainConfig, batch_size: int, width: int, ranks: int, copies: int
) -> MemoryPlan:
    """The plan of that rank of a pipeline of `ranks` stages that needs most, from the `whole` model's, or a shard's of
    it, for one micro-batch of `batch_size` sequences, with numbers of `width` bytes; copies: that share the data,
    shards included. An estimate: layers count as equal."""
    c, run, seq_len = config.model, config.run, config.data.seq_len
    count = math.ceil(run.sequences_per_step / (batch_size * copies))
    stages = stages_of(config, ranks)
    row = batch_size * seq_len * c.d_model * width
    plans = []
    for rank in range(ranks):
        own = of_rank(stages, rank, ranks, run.pipeline_schedule)
        first, last, layers = own[0].first, own[-1].last, [layer for stage in own for layer in stage.layers]
        part = Transformer(c, layers, embedding=first, head=last, device="meta")
        share = sum(parameter.numel() for parameter in part.parameters()) / parameter_counts(c).total
        kept = len(layers) / c.n_layers * in_flight(rank, ranks, count, run.pipeline_schedule)
        fixed = {name: size if name == "workspace" else int(size * share) for name, size in whole.fixed.items()}
        if "gathered" in fixed:
            matrices = {name: one.numel() for name, one in part.named_parameters() if one.dim() > 1}
            root = sum(size for name, size in matrices.items() if not name.startswith("layers."))
            blocks = sum(matrices.values()) - root
            fixed["gathered"] = gathered_bytes(c, width, run.reshard_after_forward, (root, blocks))
        fixed["batch and tables"] = count * whole.fixed["batch and tables"]
        # Of each micro-batch what is received, in the forward, in the backward and in an evaluation.
        fixed["exchange"] = row * count * sum(2 * (not stage.first) + (not stage.last) for stage in own)
        activations = {name: int(size * kept) for name, size in whole.activations.items()}
        passing = {name: size for name, size in whole.passing.items() if (last if name == "head" else layers)}
        plans.append(MemoryPlan(fixed, activations, passing, whole.evaluation))
    return max(plans, key=lambda plan: plan.held)


def stages_of(config: TrainConfig, ranks: int) -> list[Stage]:
    """The cut of a run's model for a pipeline of so many ranks. Raises UsageError."""
    run = config.run
    count = ranks * STAGES_A_RANK[run.pipeline_schedule]
    return cut(config.model, config.data.seq_len, run.checkpoint_activations, count)


def layers_alike(c: ModelConfig) -> list[int]:
    """Those of the kind that the model has most of: whichever ranks have them, they are equally dear."""
    kinds = [(window, c.is_routed(layer)) for layer, window in enumerate(c.windows)]
    most, _ = Counter(kinds).most_common(1)[0]
    return [layer for layer, kind in enumerate(kinds) if kind == most]


def words(stages: Sequence[Stage], ranks: int, schedule: PipelineSchedule) -> str:
    """The cut, for the plan: a rank and its stages each, with their share of the work."""
    found = [of_rank(stages, rank, ranks, schedule) for rank in range(ranks)]
    shares = [sum(stage.cost for stage in own) for own in found]
    told = "; ".join(
        f"rank {rank} {', '.join(stage.words() for stage in own)}: {share:.1%}"
        for rank, (own, share) in enumerate(zip(found, shares, strict=True))
    )
    return f"{told}; the dearest has {max(shares) * ranks - 1:.1%} more than an even share"
