"""One training step: micro-batches that add up sums, then one update that divides them.

On CUDA the micro-step (forward and backward) and the update are captured once in CUDA graphs and replayed, so that the
host only copies a batch and launches. The captures share one memory pool: they never run at the same time, and what
outlives a replay (parameters, gradients, moments, inputs, sums) is allocated outside it.
"""

import os
from collections.abc import Callable, Iterable

import torch
from torch import Tensor

from llmtrain.kernels.cross_entropy import IGNORED
from llmtrain.kernels.partials import in_one_launch
from llmtrain.model.config import CheckpointActivations, ModelConfig
from llmtrain.model.evaluation import EvaluationSums, evaluate
from llmtrain.model.transformer import Transformer
from llmtrain.training.config import Fp8Scaling, OptimizerConfig
from llmtrain.training.fit import out_of_memory
from llmtrain.training.flat import FlatParameters
from llmtrain.training.muon import optimizer_of
from llmtrain.training.optimizer import AdamW

COMPUTE_DTYPES = {
    "bf16": torch.bfloat16, "fp8": torch.bfloat16, "mxfp8": torch.bfloat16, "fp32": torch.float32,
    "fp64": torch.float64,
}  # fmt: skip
"""Type of activations; with fp8 and mxfp8 the operands of most matmuls are narrower."""


WORKSPACE, NO_WORKSPACE = "CUBLAS_WORKSPACE_CONFIG", ":0:0"
"""Torch's variable for what it gives to cuBLAS, and its word for nothing. Deterministic algorithms want it fixed."""


def make_deterministic() -> None:
    """Nothing is chosen by timing or summed in an order that varies. Before the first use of CUDA."""
    if os.environ.setdefault(WORKSPACE, ":4096:8") == NO_WORKSPACE:
        os.environ[WORKSPACE] = ":4096:8"
        if torch.cuda.is_initialized():
            # Torch reads the size before each product, but keeps what a stream has: those of no bytes would overflow.
            torch._C._cuda_clearCublasWorkspaces()
    torch.use_deterministic_algorithms(True)
    # The mode would otherwise fill every fresh tensor, which costs a memory pass an allocation.
    torch.utils.deterministic.fill_uninitialized_memory = False  # type: ignore[attr-defined]


FEW_TOKENS, NARROW = 16_384, 1024
"""Up to these a micro-batch in bf16 is faster without a workspace for cuBLAS (measured at d_model 768)."""


def spare_workspace(tokens: int, d_model: int, dtype: torch.dtype, eight_bit: bool) -> None:
    """Has cuBLAS do without a workspace for micro-batches of few tokens, before the process' first product on a card.
    Then it splits no sums, and asks for no counters, each set by a launch before its product: in four of 16 x 1024 that
    is 1.1 to 1.8% of a step, at 64 x 1024 splitting is 0.7% faster. What the environment says already stays. Only for
    bf16, the one that was measured: products in eight bits have their workspace out of the same, and torch warns of it.
    """
    if dtype == torch.bfloat16 and not eight_bit and tokens <= FEW_TOKENS and d_model <= NARROW:
        os.environ.setdefault(WORKSPACE, NO_WORKSPACE)


class TrainStep:
    """`micro_step` as often as the step has micro-batches, then `optimizer_step`. Neither waits for the device."""

    in_one_go = False
    """Whether the micro-batches are computed in `optimizer_step`, rather than each as it comes."""

    def __init__(
        self,
        model: Transformer,
        flat: FlatParameters,
        optimizer: AdamW,
        batch_size: int,
        seq_len: int,
        capture: bool | None = None,
        document_mask: bool = False,
    ) -> None:
        self.model = model
        self.flat = flat
        self.optimizer = optimizer
        device = flat.master.device
        if device.type == "cuda":
            spare_workspace(batch_size * seq_len, model.config.d_model, model.compute_dtype, bool(flat.eight_bit))
        self.ids = torch.zeros(batch_size, seq_len, dtype=torch.int64, device=device)
        self.targets = torch.zeros_like(self.ids)
        self.doc_start = torch.zeros_like(self.ids, dtype=torch.int32) if document_mask else None
        # FP64, so that sums over any number of targets stay exact where the FP32 parts were.
        self.sums = torch.zeros(3, dtype=torch.float64, device=device)
        self.last = torch.zeros(4, dtype=torch.float64, device=device)
        self.graphs: dict[str, torch.cuda.CUDAGraph] = {}
        self.why_not_captured: str | None = None
        self.wants_capture = device.type == "cuda" if capture is None else capture
        if flat.n_sharded and self.wants_capture:
            self.wants_capture, self.why_not_captured = False, "weights that are shared out are gathered as it goes"
        self.add_up: Callable[[Tensor, Tensor], None] | None = None
        """Adds the gradients and the sums up over the ranks of a run, in place, where there are several."""
        self.take_highest: Callable[[Tensor], None] | None = None
        """Raises each number to the highest of all ranks, in place, where there are several."""
        self.previous: torch.cuda.Event | None = None
        self.reader: torch.cuda.Event | None = None
        """The end of a copy of weights and moments on another stream; the next update waits for it."""
        self.held: tuple[torch.cuda.Event, torch.cuda.Event] | None = None
        """Before and after that wait."""

    @classmethod
    def build(
        cls,
        model_config: ModelConfig,
        optimizer_config: OptimizerConfig,
        *,
        batch_size: int,
        seq_len: int,
        precision: str = "bf16",
        fp8_scaling: Fp8Scaling = "tensorwise",
        device: torch.device | str = "cpu",
        deterministic: bool = False,
        seed: int = 0,
        capture: bool | None = None,
        checkpoint_activations: CheckpointActivations = "none",
        document_mask: bool = False,
    ) -> "TrainStep":
        """A step on freshly initialised weights. precision: "bf16", "fp8", "mxfp8", "fp32" or (to check them) "fp64";
        fp8_scaling: as in RunConfig.

        capture: None means on CUDA only.
        """
        if deterministic:
            make_deterministic()
        dtype = COMPUTE_DTYPES[precision]
        model = Transformer(model_config, device="meta")
        model.checkpoint_activations = checkpoint_activations
        master = torch.float64 if precision == "fp64" else torch.float32
        flat = FlatParameters(
            model, device, dtype, master_dtype=master,
            eight_bit=fp8_scaling if precision == "fp8" else None, mx=precision == "mxfp8",
        )  # fmt: skip
        flat.init_weights(model, seed)
        flat.refresh_narrow()
        optimizer = optimizer_of(flat, optimizer_config, model_config)
        return cls(model, flat, optimizer, batch_size, seq_len, capture, document_mask)

    def micro_step(self, ids: Tensor, targets: Tensor, first: bool, doc_start: Tensor | None = None) -> None:
        """Adds the gradients and losses of one micro-batch, ids and targets (batch_size, seq_len) int64; `first` starts
        the sums of a new step. doc_start, of that shape in int32, is read with a document mask only. Tensors in pinned
        memory may be reused once the copy is done on the current stream."""
        self.ids.copy_(ids, non_blocking=True)
        self.targets.copy_(targets, non_blocking=True)
        if self.doc_start is not None:
            assert doc_start is not None
            self.doc_start.copy_(doc_start, non_blocking=True)
        self.run_micro(first)

    def run_micro(self, first: bool) -> None:
        """The micro-step on what is in the inputs."""
        if self.wants_capture and not self.graphs:
            self._capture()
        if first and self.flat.scaling is not None and self.flat.scaling.fresh:
            if self.graphs:
                self.graphs["calibrate"].replay()
            else:
                self._calibrate()
            self._share_magnitudes()
            self.flat.scaling.push()
            self.flat.scaling.fresh = False
        if self.graphs:
            self.graphs["first" if first else "further"].replay()
        else:
            self._micro(first)

    def optimizer_step(self, lr: float) -> None:
        """Divides the sums by the number of targets and updates the weights at rate `lr`."""
        if self.add_up is not None:
            assert self.flat.grad is not None
            self.add_up(self.flat.grad, self.sums)  # between the last micro-step's graph and the update's
        self._share_magnitudes()
        self.wait_for_reader()
        self.optimizer.lr.fill_(lr)
        if self.graphs:
            self.graphs["update"].replay()
        else:
            self._update()
        if self.flat.master.is_cuda:
            # At most one step ahead: further would only grow the queue, and delay every signal by it.
            if self.previous is not None:
                self.previous.synchronize()
            self.previous = torch.cuda.Event()
            self.previous.record()

    def wait_for_reader(self) -> None:
        """Holds the device, not the host, until nobody copies weights and moments any more: before they are written."""
        if self.reader is None:
            return
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        torch.cuda.current_stream().wait_event(self.reader)
        end.record()
        self.reader, self.held = None, (begin, end)

    def take_held(self) -> float | None:
        """Milliseconds that the last such wait took, which it waits for; None where there was none since asked."""
        if self.held is None:
            return None
        (begin, end), self.held = self.held, None
        end.synchronize()
        return begin.elapsed_time(end)

    def try_out(self, evaluates: bool = False) -> None:
        """A step of each kind at the run's shapes, captured where it will be, that shows whether they fit: before the
        first, and before the weights are there. Nothing counts in it but the memory; with `evaluates` an evaluation's
        too. Raises what its lack raises."""
        # Ids as spread as a text's: summing the gradients of one and the same row is slow.
        self.ids.view(-1).copy_(torch.arange(self.ids.numel(), device=self.ids.device) % self.model.config.vocab_size)
        self.targets.fill_(IGNORED)
        if self.wants_capture:
            self._capture()
        else:
            self._warm_up()
        if evaluates:
            self._try_evaluation()
        self.sums.zero_()
        self.last.zero_()

    def _try_evaluation(self) -> None:
        self.evaluate([(self.ids, self.targets, self.doc_start)])

    def evaluate(
        self, batches: Iterable[tuple[Tensor, Tensor, Tensor | None]], token_bytes: Tensor | None = None
    ) -> EvaluationSums:
        """As `model.evaluation.evaluate`, between two steps."""
        return evaluate(self.model, batches, token_bytes)

    def metrics(self) -> dict[str, float]:
        """Figures of the last step, and the only wait for the device. Losses are means over its targets, in nats;
        skipped: updates that were not applied, up to now."""
        lm, aux, grad_norm, n_targets, skipped = torch.cat([self.last, self.optimizer.skipped.view(1)]).tolist()
        figures = {"lm_loss": lm, "aux_loss": aux, "grad_norm": grad_norm, "n_targets": n_targets}
        return {**figures, "skipped": int(skipped)}

    def _micro(self, first: bool) -> None:
        if first:
            self.flat.mark_gradients_stale()
            self.sums.zero_()
        loss = self.model.loss(self.ids, self.targets, self.doc_start)
        with in_one_launch():
            (loss.lm + loss.aux).backward()
        if first:
            self.flat.clear_unwritten_gradients()
        self.sums.add_(torch.stack([loss.lm.detach().double(), loss.aux.detach().double(), loss.n_targets.double()]))

    def _calibrate(self) -> None:
        """A micro-step in which every eight-bit operand is scaled by its own values, for the magnitudes it finds: what
        else it leaves, the first micro-step overwrites."""
        scaling = self.flat.scaling
        assert scaling is not None
        scaling.calibrating = True
        try:
            self._micro(first=True)
        finally:
            scaling.calibrating = False

    def _share_magnitudes(self) -> None:
        if self.flat.scaling is not None and self.take_highest is not None:
            self.take_highest(self.flat.scaling.largest)

    def _update(self) -> None:
        self.flat.free_gathered()
        self.last.copy_(self.optimizer.update(self.sums))
        if self.flat.scaling is not None:
            self.flat.scaling.push()
        self.flat.refresh_eight_bit()
        self.flat.refresh_mx()

    def _warm_up(self) -> None:
        """All that a step does, once, without a trace. Zero targets make the update divide by zero, find a norm that is
        not finite, and change nothing."""
        if self.flat.scaling is not None:
            self._calibrate()
        self._micro(first=True)
        self._micro(first=False)
        self.sums.zero_()
        before = [buffer.clone() for buffer in self.optimizer.small]
        self._update()
        for buffer, value in zip(self.optimizer.small, before, strict=True):
            buffer.copy_(value)
        if self.flat.scaling is not None:
            self.flat.scaling.rescale()

    def _capture(self) -> None:
        """Captures the three graphs; what cannot be captured runs uncaptured, and `why_not_captured` says why."""
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        saved = self.sums.clone()
        try:
            with torch.cuda.stream(stream):
                self._warm_up()  # kernels are compiled and workspaces made before the capture
            torch.cuda.current_stream().wait_stream(stream)
            torch.cuda.synchronize()
            torch.cuda.empty_cache()
            pool = torch.cuda.graph_pool_handle()
            graphs = {}
            bodies = {"first": lambda: self._micro(True), "further": lambda: self._micro(False), "update": self._update}
            if self.flat.scaling is not None and self.flat.scaling.fresh:
                bodies["calibrate"] = self._calibrate
            for name, body in bodies.items():
                graphs[name] = torch.cuda.CUDAGraph()
                # thread_local: the prefetch thread allocates pinned memory meanwhile, which is none of our business.
                with torch.cuda.graph(graphs[name], pool=pool, stream=stream, capture_error_mode="thread_local"):
                    body()
            self.graphs = graphs
        except RuntimeError as error:
            if out_of_memory(error):
                raise
            self.graphs = {}
            self.wants_capture = False
            self.why_not_captured = str(error).splitlines()[0]
            torch.cuda.synchronize()
        self.sums.copy_(saved)
