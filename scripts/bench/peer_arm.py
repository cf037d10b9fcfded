"""One arm of the peers' table, in a process of its own: `python peer_arm.py REQUEST` with REQUEST as JSON.

It builds the model, takes `steps` steps on the common data and answers with the loss of each. Then it obeys lines on
stdin: `burst` times steps for about `seconds`, `quit` ends it. Every answer is one line of JSON on stdout; whatever
libraries print goes to stderr. An arm that runs out of memory says {"event": "oom"} and ends.
"""

import contextlib
import json
import os
import sys
import time
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

sys.path.insert(0, os.path.dirname(os.path.abspath(__file__)))

from plain_model import PlainLlama  # noqa: E402

from llmtrain.benchmark.config import Shape, TimingConfig, shape_from  # noqa: E402
from llmtrain.benchmark.data import random_batches  # noqa: E402
from llmtrain.benchmark.machine import installed  # noqa: E402
from llmtrain.benchmark.step import LEARNING_RATE, TimedSteps, distinct_steps, peak_memory  # noqa: E402
from llmtrain.benchmark.timing import burst, steps_for  # noqa: E402
from llmtrain.model.config import ModelConfig  # noqa: E402
from llmtrain.model.transformer import Transformer  # noqa: E402
from llmtrain.training.config import OptimizerConfig  # noqa: E402
from llmtrain.training.devices import device_name, pick_device  # noqa: E402
from llmtrain.training.fit import out_of_memory  # noqa: E402
from llmtrain.training.step import make_deterministic  # noqa: E402

SEED = 0
ROUNDING = 2.0**-9
"""Half a bf16 ulp, relative: how far the copy's weights are moved, so that its losses show what rounding does."""


class Ours:
    """This project's step; the copy starts from weights moved within their bf16 rounding."""

    def __init__(
        self, shape: Shape, precision: str, device: torch.device, moved: bool = False, deterministic: bool = False
    ) -> None:
        if deterministic:
            make_deterministic()
        self.steps = TimedSteps(shape, TimingConfig(precision=precision), device, SEED)
        if moved:
            flat = self.steps.step.flat
            generator = torch.Generator(device).manual_seed(SEED)
            noise = torch.rand(flat.master.shape, generator=generator, device=device)
            flat.master.mul_(1 + ROUNDING * (2 * noise - 1))
            flat.refresh_narrow()

    def __call__(self) -> None:
        self.steps()

    def loss(self) -> float:
        return self.steps.step.metrics()["lm_loss"]


class Torch:
    """A training step in plain torch: autocast, clipping, fused AdamW on FP32 weights, decay on matrices only.

    `captured` runs it from CUDA graphs: the whole step as one, or micro-step and update where it accumulates.
    """

    UNCAPTURED = 3
    """Real steps before the capture, as warm-up on the stream that will be captured."""

    def __init__(
        self, model: nn.Module, mean_loss: Callable[[Tensor, Tensor], Tensor], shape: Shape, precision: str,
        device: torch.device, captured: bool = False,
    ) -> None:  # fmt: skip
        c = OptimizerConfig()
        self.shape, self.precision, self.device, self.captured = shape, precision, device, captured
        self.mean_loss = mean_loss
        self.parameters = list(model.parameters())
        groups = [
            {"params": [p for p in self.parameters if p.dim() >= 2], "weight_decay": c.weight_decay},
            {"params": [p for p in self.parameters if p.dim() < 2], "weight_decay": 0.0},
        ]
        self.optimizer = torch.optim.AdamW(
            groups, lr=LEARNING_RATE, betas=(c.beta1, c.beta2), eps=c.adam_eps, fused=True, capturable=captured
        )
        self.clip = c.grad_clip
        count = distinct_steps(shape.accumulate) * shape.accumulate
        self.batches = random_batches(shape.model.vocab_size, count, shape.batch_size, shape.seq_len, device, SEED)
        self.ids, self.targets = (torch.empty_like(t) for t in self.batches[0])
        self.sum = torch.zeros((), device=device)
        self.last = torch.zeros((), device=device)
        self.taken = self.steps = 0
        self.graphs: list[torch.cuda.CUDAGraph] = []
        self.stream = torch.cuda.Stream() if captured else None

    def micro(self) -> None:
        cast = self.precision == "bf16"
        with torch.autocast(self.device.type, torch.bfloat16) if cast else contextlib.nullcontext():
            loss = self.mean_loss(self.ids, self.targets) / self.shape.accumulate
        loss.backward()
        self.sum += loss.detach()

    def update(self) -> None:
        nn.utils.clip_grad_norm_(self.parameters, self.clip)
        self.optimizer.step()
        self.last.copy_(self.sum)
        self.sum.zero_()

    def capture(self) -> None:
        torch.cuda.synchronize()
        torch.cuda.empty_cache()
        whole = self.shape.accumulate == 1
        if whole:
            # The gradients then live in the graph's pool and are written, not added to.
            self.optimizer.zero_grad(set_to_none=True)
        pool = torch.cuda.graph_pool_handle()
        parts: list[Callable[[], None]] = [self.whole] if whole else [self.micro, self.update_and_clear]
        for part in parts:
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph, pool=pool, stream=self.stream):
                part()
            self.graphs.append(graph)

    def whole(self) -> None:
        self.micro()
        self.update()

    def update_and_clear(self) -> None:
        self.update()
        torch._foreach_zero_([p.grad for p in self.parameters])

    def eager(self) -> None:
        for _ in range(self.shape.accumulate):
            self.load()
            self.micro()
        if self.captured and self.shape.accumulate > 1:
            self.update_and_clear()
        else:
            self.update()
            self.optimizer.zero_grad(set_to_none=True)

    def load(self) -> None:
        ids, targets = self.batches[self.taken % len(self.batches)]
        self.ids.copy_(ids)
        self.targets.copy_(targets)
        self.taken += 1

    def __call__(self) -> None:
        self.steps += 1
        if not self.captured:
            self.eager()
        elif self.steps <= self.UNCAPTURED:
            assert self.stream is not None
            self.stream.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(self.stream):
                self.eager()
            torch.cuda.current_stream().wait_stream(self.stream)
        else:
            if not self.graphs:
                self.capture()
            for _ in range(self.shape.accumulate):
                self.load()
                self.graphs[0].replay()
            for graph in self.graphs[1:]:
                graph.replay()

    def loss(self) -> float:
        return self.last.item()


def initial_weights(config: ModelConfig) -> dict[str, Tensor]:
    """llmtrain's initial weights: every arm starts from these bits."""
    model = Transformer(config)
    model.init_weights(SEED)
    return {name: p.detach() for name, p in model.named_parameters()}


def plain(
    shape: Shape, precision: str, device: torch.device, *, compiled: bool, captured: bool, float8: bool = False
) -> Torch:
    model = PlainLlama(shape.model, torch.bfloat16 if precision == "bf16" else torch.float32)
    model.load_state_dict(initial_weights(shape.model))
    model.to(device)
    if float8:
        from torchao.float8 import Float8LinearConfig, convert_to_float8_training

        # Its default is a scale a tensor, of the tensor's own values. The head is no nn.Linear, and so stays in bf16.
        convert_to_float8_training(model, config=Float8LinearConfig(emulate=device.type != "cuda"))
    mean_loss: Callable[[Tensor, Tensor], Tensor] = torch.compile(model, dynamic=False) if compiled else model
    return Torch(model, mean_loss, shape, precision, device, captured)


def llama_names(weights: dict[str, Tensor], c: ModelConfig) -> dict[str, Tensor]:
    """llmtrain's parameters under the names of LlamaForCausalLM, the fused matrices split."""
    parts = {
        "attention_norm": [("input_layernorm", None)],
        "attention.qkv": [
            ("self_attn.q_proj", c.n_heads * c.head_dim),
            ("self_attn.k_proj", c.n_kv_heads * c.head_dim),
            ("self_attn.v_proj", c.n_kv_heads * c.head_dim),
        ],
        "attention.out": [("self_attn.o_proj", None)],
        "feed_forward_norm": [("post_attention_layernorm", None)],
        "feed_forward.gate_up": [("mlp.gate_proj", c.d_ff), ("mlp.up_proj", c.d_ff)],
        "feed_forward.down": [("mlp.down_proj", None)],
    }
    named = {"model.embed_tokens.weight": weights["embedding.weight"], "model.norm.weight": weights["norm.weight"]}
    for i in range(c.n_layers):
        for ours, theirs in parts.items():
            tensor = weights[f"layers.{i}.{ours}.weight"]
            pieces = tensor.split([rows or tensor.shape[0] for _, rows in theirs])
            named |= {f"model.layers.{i}.{name}.weight": p for (name, _), p in zip(theirs, pieces, strict=True)}
    return named


def transformers_llama(shape: Shape, precision: str, device: torch.device, *, compiled: bool, liger: bool) -> Torch:
    if liger:
        from liger_kernel.transformers import apply_liger_kernel_to_llama

        apply_liger_kernel_to_llama()
    from transformers import LlamaConfig, LlamaForCausalLM

    c = shape.model
    config = LlamaConfig(
        vocab_size=c.vocab_size,
        hidden_size=c.d_model,
        intermediate_size=c.d_ff,
        num_hidden_layers=c.n_layers,
        num_attention_heads=c.n_heads,
        num_key_value_heads=c.n_kv_heads,
        head_dim=c.head_dim,
        max_position_embeddings=c.max_seq_len,
        rms_norm_eps=c.norm_eps,
        rope_parameters={"rope_type": "default", "rope_theta": c.rope_theta},
        tie_word_embeddings=c.tie_embeddings,
        attn_implementation="sdpa",
    )
    with device:
        model = LlamaForCausalLM(config)
    missing, unexpected = model.load_state_dict(llama_names(initial_weights(c), c), strict=False)
    assert not unexpected and set(missing) <= {"lm_head.weight"}, (missing, unexpected)
    model.train()
    run = torch.compile(model, dynamic=False) if compiled else model

    def mean_loss(ids: Tensor, targets: Tensor) -> Tensor:
        return run(input_ids=ids, labels=targets, shift_labels=targets, use_cache=False).loss

    return Torch(model, mean_loss, shape, precision, device)


TORCHAO_ARM = "plain, compiled, torchao float8"
ARMS: dict[str, Callable[..., Any]] = {
    "llmtrain": Ours,
    "llmtrain (copy)": lambda *a: Ours(*a, moved=True),
    "llmtrain, deterministic": lambda *a: Ours(*a, deterministic=True),
    "plain": lambda *a: plain(*a, compiled=False, captured=False),
    "plain, compiled": lambda *a: plain(*a, compiled=True, captured=False),
    "plain, compiled, CUDA graphs": lambda *a: plain(*a, compiled=True, captured=True),
    TORCHAO_ARM: lambda *a: plain(*a, compiled=a[2].type == "cuda", captured=False, float8=True),
    "transformers": lambda *a: transformers_llama(*a, compiled=False, liger=False),
    "transformers, compiled": lambda *a: transformers_llama(*a, compiled=True, liger=False),
    "transformers, Liger": lambda *a: transformers_llama(*a, compiled=False, liger=True),
}
NEEDS = {
    TORCHAO_ARM: "torchao",
    "transformers": "transformers",
    "transformers, compiled": "transformers",
    "transformers, Liger": "liger_kernel",
}
"""Package without which an arm is absent."""


def serve(request: dict[str, Any], answer: Callable[[dict[str, Any]], None]) -> None:
    device = pick_device(request["device"])
    shape = shape_from(request["shape"])
    if device.type == "cuda":
        # cuDNN's attention is the fastest that torch has here; the others stay for shapes it refuses.
        order = [torch.nn.attention.SDPBackend.CUDNN_ATTENTION, torch.nn.attention.SDPBackend.FLASH_ATTENTION]
        attention: Any = torch.nn.attention.sdpa_kernel(order, set_priority=True)
        if request["arm"].startswith("transformers"):
            attention = contextlib.nullcontext()
    else:
        attention = contextlib.nullcontext()
    with attention:
        step = ARMS[request["arm"]](shape, request["precision"], device)
        losses = []
        first_step_s = None
        for _ in range(request["steps"]):
            step()
            losses.append(step.loss())
            first_step_s = first_step_s or time.time() - request["spawned"]
        count = steps_for(step, request["seconds"], device, warmup=3)
        why = step.steps.step.why_not_captured if isinstance(step, Ours) else None
        skipped = int(step.steps.step.optimizer.skipped) if isinstance(step, Ours) else None
        answer(
            {
                "event": "ready",
                "losses": losses,
                "first_step_s": first_step_s,
                "device_name": device_name(device),
                "not_captured": why,
                "skipped_updates": skipped,
                "versions": {name: installed(name) for name in ("transformers", "liger_kernel", "torchao")},
                **peak_memory(device),
            }
        )
        for line in sys.stdin:
            if line.strip() == "quit":
                break
            for _ in range(2):
                step()
            taken = burst(step, count, device)
            if device.type == "cuda":
                torch.cuda.empty_cache()  # the next arm's activations need the place
            answer({"event": "burst", "steps": taken.steps, "wall_s": taken.wall_s, "device_s": taken.device_s})


def main() -> None:
    protocol = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)

    def answer(message: dict[str, Any]) -> None:
        protocol.write(json.dumps(message) + "\n")
        protocol.flush()

    try:
        serve(json.loads(sys.argv[1]), answer)
    except (RuntimeError, MemoryError) as error:
        if not out_of_memory(error):
            raise
        answer({"event": "oom", "reason": str(error).split("\n")[0]})


if __name__ == "__main__":
    main()
