"""A step whose model is cut into stages, one or two on each rank, that hand micro-batches on to one another by one of
torch's schedules (torch.distributed.pipelining).

Each rank has a part of the model as if it were a model of its own: flat buffers, gradients that the ops deliver in
place, an optimizer. What the ranks of a step agree on goes through sums: losses and targets, and the squares of the
gradient, so all of them clip alike and skip alike. The losses come from the last stage and, those of routers, from
wherever they arise; targets are counted in the last stage.

Zero-bubble runs the gradients of weights later than those of activations. torch would split the graph for that, and run
the part towards the weights a second time; our ops deliver a weight's gradient from the first run already, whatever
was asked of it, so all would be delivered twice. Instead the products themselves are put off (`kernels.weight.put_off`)
and made in their slot of the schedule. That covers all that costs arithmetic: linears and experts; the norms' weights
and the embedding get their gradients at once, and the head in its forward, as ever.
"""

import logging
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.pipelining import (
    PipelineStage,
    Schedule1F1B,
    ScheduleInterleaved1F1B,
    ScheduleZBVZeroBubble,
)

from llmtrain.kernels.cross_entropy import IGNORED
from llmtrain.kernels.weight import make_up, put_off
from llmtrain.model.config import CheckpointActivations, ModelConfig
from llmtrain.model.evaluation import EvaluationSums
from llmtrain.model.transformer import Transformer
from llmtrain.training.config import Fp8Scaling, OptimizerConfig, PipelineSchedule
from llmtrain.training.flat import FlatParameters
from llmtrain.training.muon import optimizer_of
from llmtrain.training.optimizer import AdamW
from llmtrain.training.parallel import World
from llmtrain.training.sharded import ShardedParameters
from llmtrain.training.stages import STAGES_A_RANK, Stage, check_micro_batches, cut, of_rank
from llmtrain.training.step import COMPUTE_DTYPES, TrainStep

TIED = "embedding.weight"
"""The matrix that the first and the last stage may share."""
WHY = "stages of a pipeline wait for one another"


def model_of(stage: Stage, part: Transformer) -> Transformer:
    """The model of one stage, whose modules are those of the rank's."""
    model = Transformer(part.config, stage.layers, stage.first, stage.last, device="meta")
    for layer in model.layers:
        model.layers[layer] = part.layers[layer]
    for name in ("embedding", "norm", "head"):
        if getattr(model, name) is not None:
            setattr(model, name, getattr(part, name))
    return model


class _Module(nn.Module):
    """What torch runs of a stage: ids or hidden states (B, T, d_model) in, hidden states or the loss out. Adds the
    losses and targets of each micro-batch to `sums`."""

    def __init__(self, model: Transformer, sums: Tensor) -> None:
        super().__init__()
        self.model, self.sums = model, sums

    def forward(self, x: Tensor, *, targets: Tensor, doc_start: Tensor | None = None) -> Tensor:
        if self.model.norm is not None:
            loss = self.model.loss(x, targets, doc_start)
            self.sums.add_(torch.stack([n.detach().double() for n in (loss.lm, loss.aux, loss.n_targets)]))
            return loss.lm + loss.aux
        losses: list[Tensor] = []
        y = self.model(x, doc_start=doc_start, balance=self.model.balance(targets), losses=losses)
        for loss_of_layer in losses:
            self.sums[1].add_(loss_of_layer)
        return y


class _Stage(PipelineStage):
    """A stage whose weights' gradients may come later than those of its input. `world` is told when it computes, so
    that of ranks that wait for one another the one can be named that does not."""

    world: World

    def forward_one_chunk(self, *arguments: Any, **named: Any) -> Any:
        with self.world.waiting(False):
            return super().forward_one_chunk(*arguments, **named)

    def backward_one_chunk(
        self, bwd_chunk_id: int, loss: Any = None, full_backward: bool = True, last_backward: bool = False
    ) -> None:
        with self.world.waiting(False):
            if full_backward or not self.has_backward:
                super().backward_one_chunk(bwd_chunk_id, loss=loss, last_backward=last_backward)
                return
            with put_off() as products:
                super().backward_one_chunk(bwd_chunk_id, loss=loss, last_backward=last_backward)

        self.dw_runner[bwd_chunk_id] = lambda: make_up(products)

    def backward_weight_one_chunk(self, bwd_chunk_id: int, last_backward: bool = False) -> None:
        if not self.has_backward:
            return
        with self.world.waiting(False):
            try:
                self.dw_runner.pop(bwd_chunk_id)()
            except RuntimeError as error:  # as torch tells what the other two raise from an exchange that fails
                raise RuntimeError(str(error)) from error

    def _post_metadata_inference_cleanup(self) -> None:
        """Nothing to clean: shapes are given. torch would take the matrices of shards their gradient buffers."""

    # Where two neighbours are on one rank, torch 2.11 makes a connection between them, which gloo cannot; and torch
    # hands gradients over in an evaluation too, where there are none.

    def _get_init_p2p_neighbors_ops(self) -> list[dist.P2POp]:
        return [op for op in super()._get_init_p2p_neighbors_ops() if op.group_peer != self.group_rank]

    def get_local_bwd_output(self, mb_index: int) -> Any:
        return super().get_local_bwd_output(mb_index) if self.has_backward else ()

    def set_local_bwd_input(self, next_stage_bwd_outputs: Any, mb_index: int) -> None:
        if self.has_backward:
            super().set_local_bwd_input(next_stage_bwd_outputs, mb_index)


@dataclass(frozen=True)
class Place:
    """What a rank has of a pipeline, and whom it exchanges with."""

    world: World
    own: list[Stage]
    schedule: PipelineSchedule
    micro_batches: int
    """Of a step, most."""
    ends: dist.ProcessGroup | None
    """The first and the last rank of the pipeline, on these two, where they share a matrix."""
    reshard_after_forward: bool = True
    """As RunConfig has it."""

    @classmethod
    def of(
        cls, world: World, config: ModelConfig, seq_len: int, checkpoint_activations: CheckpointActivations,
        schedule: PipelineSchedule, micro_batches: int, reshard_after_forward: bool = True,
    ) -> "Place":  # fmt: skip
        """Of this rank among those of world.grid; all ask for theirs at once. Raises UsageError where a model cannot be
        cut so, or a step of so many micro-batches not be run."""
        ranks = world.grid.stages
        check_micro_batches(micro_batches, ranks, schedule)
        stages = cut(config, seq_len, checkpoint_activations, ranks * STAGES_A_RANK[schedule])
        own = of_rank(stages, world.grid.place(world.rank)[0], ranks, schedule)
        apart = config.tie_embeddings and schedule != "zero-bubble"
        ends = world.first_and_last() if apart else None
        return cls(world, own, schedule, micro_batches, ends, reshard_after_forward)

    def part(self, config: ModelConfig) -> Transformer:
        """The model of this rank: all that its stages have, on the meta device."""
        layers = [layer for stage in self.own for layer in stage.layers]
        first, last = self.own[0].first, self.own[-1].last
        return Transformer(config, layers, embedding=first, head=last, device="meta")

    def parameters(
        self, part: Transformer, device: torch.device | str, dtype: torch.dtype,
        master_dtype: torch.dtype = torch.float32, **eight_bit: Any,
    ) -> "StageParameters":  # fmt: skip
        """As `FlatParameters`; of shards, which have nothing in eight bits, this rank's."""
        if self.world.grid.shards == 1:
            return StageParameters(part, self, device, dtype, master_dtype, **eight_bit)
        assert self.world.mesh is not None
        mesh, waiting = self.world.mesh["shard"], self.world.waiting
        return ShardedStageParameters(
            part, self, device, dtype, mesh, master_dtype, waiting, self.reshard_after_forward
        )

    def step(self, *arguments: Any, **named: Any) -> "PipelineStep":
        return PipelineStep(self, *arguments, **named)


class StageParameters(FlatParameters):
    """Those of a rank's stages, whose gradient is a part of the model's."""

    of_all_layers = False

    def __init__(self, part: Transformer, place: Place, *arguments: Any, **named: Any) -> None:
        self.models = [model_of(stage, part) for stage in place.own]
        """Of the stages."""
        super().__init__(part, *arguments, **named)
        for model in self.models:
            model.cos, model.sin, model.compute_dtype = part.cos, part.sin, part.compute_dtype
            model.checkpoint_activations = part.checkpoint_activations
        self.copies = place.world.grid.copies
        if place.ends is not None and place.own[-1].last:
            self.saved_elsewhere.add(TIED)

    def grad_norm(self) -> Tensor:
        """What several ranks of a copy have counts once."""
        assert self.grad is not None
        parts, begin = [], 0
        for name, span in self.spans.items():
            if name in self.saved_elsewhere:
                parts.append(self.grad[begin : span.begin])
                begin = span.end
        parts.append(self.grad[begin:])
        square = torch.stack([torch.linalg.vector_norm(part).double().square() for part in parts]).sum()
        dist.all_reduce(square)  # over all ranks, which so have the same bits and decide alike
        return (square / self.copies).sqrt()


class ShardedStageParameters(StageParameters, ShardedParameters):
    """Those of a rank's stages whose matrices are shared out, each stage by itself."""

    def _roots(self, model: Transformer) -> Sequence[Transformer]:
        return self.models


class PipelineStep(TrainStep):
    """The step of a rank that has some stages of the model. `micro_step` keeps a micro-batch, `optimizer_step` runs the
    schedule over those of the step, of which there may be fewer than `micro_batches`: the others are without targets.

    part: as `place.part` gives it.
    """

    in_one_go = True

    def __init__(
        self,
        place: Place,
        part: Transformer,
        flat: StageParameters,
        optimizer: AdamW,
        batch_size: int,
        seq_len: int,
        document_mask: bool = False,
    ) -> None:
        super().__init__(part, flat, optimizer, place.micro_batches * batch_size, seq_len, False, document_mask)
        self.why_not_captured = WHY if self.ids.is_cuda else None
        self.place, self.own = place, place.own
        self._rows, self._kept = batch_size, 0
        self._calibrated = False
        self._schedule, self._evaluation = self._build(flat.models), self._build(flat.models)
        self.add_up, self.take_highest = self._add_up, place.world.take_highest

    def _build(self, models: list[Transformer]) -> Any:
        # What torch says of an exchange that fails is its whole schedule, on stderr.
        logging.getLogger("torch.distributed.pipelining.schedules").setLevel(logging.CRITICAL)
        config, dtype = self.model.config, self.model.compute_dtype
        stages: list[Any] = []
        for stage, model in zip(self.own, models, strict=True):
            shape = self._rows, self.ids.shape[1]
            ids = torch.empty(shape, dtype=torch.int64, device="meta")
            hidden = torch.empty((*shape, config.d_model), dtype=dtype, device="meta", requires_grad=True)
            of_loss = torch.float64 if dtype == torch.float64 else torch.float32
            loss = torch.empty((), dtype=of_loss, device="meta", requires_grad=True)
            stages.append(
                made := _Stage(
                    _Module(model, self.sums), stage.index, stage.count, self.ids.device,
                    input_args=ids if stage.first else hidden, output_args=loss if stage.last else hidden,
                    group=self.place.world.group("stage"),
                )  # fmt: skip
            )
            made.world = self.place.world
        # The loss is the last stage's own result; sums are not divided by the number of micro-batches.
        settings: dict[str, Any] = {"loss_fn": lambda loss, target: loss, "scale_grads": False}
        schedule, count = self.place.schedule, self.place.micro_batches
        if schedule == "1f1b":
            return Schedule1F1B(stages[0], count, **settings)
        kind = {"interleaved": ScheduleInterleaved1F1B, "zero-bubble": ScheduleZBVZeroBubble}[schedule]
        return kind(stages, count, **settings)

    # The step.

    def micro_step(self, ids: Tensor, targets: Tensor, first: bool, doc_start: Tensor | None = None) -> None:
        if first:
            self._kept = 0
        self._keep(ids, targets, doc_start)

    def optimizer_step(self, lr: float) -> None:
        self._fill_up()
        with self.place.world.waiting():
            self.run_micro(first=True)
            super().optimizer_step(lr)

    def _update(self) -> None:
        with self.place.world.exchange():  # for the norm
            super()._update()

    def run_micro(self, first: bool) -> None:
        # A rank without a block has no history to tell from, and calibrates when all others do.
        if self.flat.scaling is not None and not len(self.flat.scaling.limits):
            self.flat.scaling.fresh = not self._calibrated
        super().run_micro(first)
        self._calibrated = True

    def _keep(self, ids: Tensor, targets: Tensor, doc_start: Tensor | None) -> None:
        rows = slice(self._kept * self._rows, (self._kept + 1) * self._rows)
        self.ids[rows].copy_(ids, non_blocking=True)
        self.targets[rows].copy_(targets, non_blocking=True)
        if self.doc_start is not None:
            assert doc_start is not None
            self.doc_start[rows].copy_(doc_start, non_blocking=True)
        self._kept += 1

    def _fill_up(self) -> None:
        self.ids[self._kept * self._rows :] = 0
        self.targets[self._kept * self._rows :] = IGNORED
        if self.doc_start is not None:
            self.doc_start[self._kept * self._rows :] = 0

    def _micro(self, first: bool) -> None:
        """All micro-batches of the step."""
        if first:
            self.flat.mark_gradients_stale()
            self.sums.zero_()
        self._run(self._schedule.step)
        if first:
            self.flat.clear_unwritten_gradients()

    def _run(self, run: Callable[..., Any]) -> None:
        documents = {} if self.doc_start is None else {"doc_start": self.doc_start}
        ids = [self.ids] if self.own[0].first else []
        with self.place.world.exchange():
            run(*ids, target=self.targets, return_outputs=False, targets=self.targets, **documents)

    def _add_up(self, grad: Tensor, sums: Tensor) -> None:
        """Over copies of the stages first, then over the two ends: two numbers are added up alike in either order, so
        the copies of a tied matrix stay the same to the bit."""
        world = self.place.world
        world.add_gradients(grad, sums, sharded=self.flat.n_sharded)
        with world.exchange():
            if self.place.ends is not None:
                dist.all_reduce(self.flat.view(grad, TIED), group=self.place.ends)
            dist.all_reduce(sums, group=world.group("stage"))

    # Evaluation.

    @torch.no_grad()
    def _try_evaluation(self) -> None:
        self._run(self._evaluation.eval)

    @torch.no_grad()
    def evaluate(
        self, batches: Iterable[tuple[Tensor, Tensor, Tensor | None]], token_bytes: Tensor | None = None
    ) -> EvaluationSums:
        """Of this rank's stages; only those with the last have something to add up."""
        counts_here = self.own[-1].last
        of_bytes = torch.zeros((), dtype=torch.int64, device=self.ids.device)
        self.sums.zero_()
        left = iter(batches)
        while group := list(islice(left, self.place.micro_batches)):
            self._kept = 0
            for batch in group:
                self._keep(*batch)
            self._fill_up()
            self._run(self._evaluation.eval)
            if token_bytes is not None and counts_here:
                of_bytes += (token_bytes[self.targets.clamp_min(0)] * (self.targets != IGNORED)).sum()
        nats, _, targets = self.sums.tolist()
        return EvaluationSums(nats, int(targets), int(of_bytes))


def build_step(
    world: World,
    schedule: PipelineSchedule,
    micro_batches: int,
    model_config: ModelConfig,
    optimizer_config: OptimizerConfig,
    *,
    batch_size: int,
    seq_len: int,
    precision: str = "bf16",
    fp8_scaling: Fp8Scaling = "tensorwise",
    device: torch.device | str = "cpu",
    seed: int = 0,
    checkpoint_activations: CheckpointActivations = "none",
    document_mask: bool = False,
) -> PipelineStep:
    """As `TrainStep.build`, of this rank's stages among those of world.grid."""
    place = Place.of(world, model_config, seq_len, checkpoint_activations, schedule, micro_batches)
    part = place.part(model_config)
    part.checkpoint_activations = checkpoint_activations
    flat = place.parameters(
        part, device, COMPUTE_DTYPES[precision],
        master_dtype=torch.float64 if precision == "fp64" else torch.float32,
        eight_bit=fp8_scaling if precision == "fp8" else None, mx=precision == "mxfp8",
    )  # fmt: skip
    flat.init_weights(part, seed)
    flat.refresh_narrow()
    optimizer = optimizer_of(flat, optimizer_config, model_config)
    return PipelineStep(place, part, flat, optimizer, batch_size, seq_len, document_mask)
