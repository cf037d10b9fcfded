"""What a training step takes of the device's memory, in bytes, from its configuration alone.

Derived from what each autograd function saves (`save_for_backward` in kernels/) and from the order of the backward.
n tokens of a micro-batch, numbers of `width` bytes; d, q, kv and f are the widths of the stream, of queries, of keys
(and of values) and of the feed-forward, or of all experts that a token meets. What is small beside a row of d (loss
sums, partial sums of the norms' weights) is left out. On a CPU the references of some ops take more for a moment, in
FP32; of that the head's is counted, which is by far the most.
"""

import functools
from collections import Counter
from dataclasses import dataclass

import torch

from llmtrain.kernels.attention import CUDNN, EFFICIENT, FLASH, GRAPH
from llmtrain.kernels.choice import TRITON
from llmtrain.kernels.cross_entropy import chunk_rows
from llmtrain.kernels.fp8 import MULTIPLE
from llmtrain.kernels.fp8_fine import BLOCK, SIDE, multiple_for
from llmtrain.kernels.mxfp8 import BLOCK as MX_BLOCK
from llmtrain.kernels.mxfp8 import rounding_bytes
from llmtrain.kernels.newton_schulz import batch_size as matrices_at_once
from llmtrain.kernels.newton_schulz import work_elements
from llmtrain.model.config import CheckpointActivations, ModelConfig
from llmtrain.model.flops import parameter_counts
from llmtrain.model.matrices import hidden_shapes
from llmtrain.model.transformer import Transformer

CUBLAS_WORKSPACE = 32 << 20
"""What torch hands to cuBLAS for a stream on Hopper; less elsewhere."""


@dataclass(frozen=True)
class MemoryPlan:
    """Bytes by part. At the peak there are `fixed`, `activations` and the largest of `passing`."""

    fixed: dict[str, int]
    """What lives as long as the run."""
    activations: dict[str, int]
    """What the forward keeps for the backward, by what it is, over all layers."""
    passing: dict[str, int]
    """By phase of the step: what there is then beside the two above, less what is freed of them by then."""
    evaluation: int = 0
    """What an evaluation takes beside all that; 0 where it comes after the step's own is given back."""

    @property
    def peak_phase(self) -> str:
        return max(self.passing, key=self.passing.__getitem__)

    @property
    def peak(self) -> int:
        """Of a step."""
        return sum(self.fixed.values()) + sum(self.activations.values()) + self.passing[self.peak_phase]

    @property
    def held(self) -> int:
        """What a run comes to hold."""
        return self.peak + self.evaluation


def state_bytes(
    config: ModelConfig, optimizer: str = "adamw", average: bool = False, shards: int = 1
) -> dict[str, int]:
    """What a checkpoint holds, by what it is: FP32 weights, the optimizer's moments, and with `average` their mean; of
    several shards one's part."""
    total = parameter_counts(config).total
    two = total - (hidden_elements(config) if optimizer == "muon" else 0)  # that have two moments, the others have one
    whole = {"weights": 4 * total, "moments": 4 * (total + two), **({"average": 4 * total} if average else {})}
    return {name: _of_shard(config, size, shards) for name, size in whole.items()}


def _of_shard(config: ModelConfig, size: int, shards: int) -> int:
    """Of so many bytes, as many for each parameter, those that one shard has: its rows of matrices, and all vectors."""
    if shards == 1:
        return size
    total, vectors = parameter_counts(config).total, matrices_gathered(config)[2]
    return size * (-(-(total - vectors) // shards) + vectors) // total


@functools.lru_cache(maxsize=16)
def matrices_gathered(config: ModelConfig) -> tuple[int, int, int]:
    """Numbers in the matrices outside of the blocks, in those of the largest block, and in all vectors."""
    counts: Counter[str] = Counter()
    for name, parameter in Transformer(config, device="meta").named_parameters():
        block = name.split(".")[1] if name.startswith("layers.") else "root"
        counts["vectors" if parameter.dim() < 2 else block] += parameter.numel()
    blocks = [count for name, count in counts.items() if name not in ("root", "vectors")]
    return counts["root"], max(blocks), counts["vectors"]


def gathered_bytes(
    config: ModelConfig, width: int, reshard_after_forward: bool = True, of_stage: tuple[int, int] | None = None
) -> int:
    """What a shard holds of the others' weights and gradients at its peak, as `training/sharded.py` has it: operands
    of the root and two blocks, or of all blocks without `reshard_after_forward`, and gradients in FP32 on their way to
    where they are added up. of_stage: numbers in the matrices outside of the blocks and in those of all blocks, where
    they are a stage's; by default the whole model's. An estimate."""
    root, block, vectors = matrices_gathered(config)
    root, blocks = of_stage or (root, parameter_counts(config).total - root - vectors)
    operands = 2 * block if reshard_after_forward else max(2 * block, blocks)
    return width * (root + operands) + 4 * root + 4 * max(2 * block, root)


def hidden_elements(config: ModelConfig) -> int:
    """Parameters that Muon updates."""
    return sum(count * short * long for (short, long), count in hidden_shapes(config).items())


def update_bytes(config: ModelConfig, width: int) -> int:
    """What Muon's update takes for a moment, with numbers of `width` bytes: stacks of matrices and their products."""
    shapes = hidden_shapes(config).items()
    return width * max(work_elements(min(count, matrices_at_once(*sides)), *sides) for sides, count in shapes)


def kept_by_layer(
    c: ModelConfig, n: int, width: int, checkpoint_activations: CheckpointActivations, attention: str, seq_len: int,
    document_mask: bool = False, routed: bool = False, eight_bit: str | None = None, windowed: bool = False,
) -> dict[str, int]:  # fmt: skip
    """What one block keeps for its backward; `routed`: with experts, `eight_bit`: by which scales, `windowed`: with a
    sliding window."""
    d, q, kv = c.d_model, c.n_heads * c.head_dim, c.n_kv_heads * c.head_dim
    f = c.experts_per_token * c.expert_width + c.shared_width if routed else c.d_ff  # that a token meets
    if checkpoint_activations == "full":
        return {"stream": d * n * width}
    selective = checkpoint_activations == "selective"
    kept = {
        "stream": 2 * d * n * width,
        "normed rows": 0 if selective else 2 * d * n * width,
        "statistics": 2 * 4 * n,
        "qkv": (q + 2 * kv) * n * width,  # whole, because v is a view of it
        "rotated q and k": (q + kv) * n * width,
        "attention": q * n * width,
        "gate and up": 2 * f * n * width,
        "SwiGLU": 0 if selective else f * n * width,
        "routing": routing_bytes(c, n, seq_len) if routed else 0,
    }
    if eight_bit:
        # What a linear keeps is a copy in eight bits; the op that made it keeps what it wants besides.
        if not selective:
            kept["attention in 8 bits"] = eight_bit_bytes(q * n, eight_bit) if in_eight_bits(d, q, eight_bit) else 0

            def input_of(out: int, n_in: int) -> int:
                return eight_bit_bytes(n_in * n, eight_bit) if in_eight_bits(out, n_in, eight_bit) else width * n_in * n

            kept["normed rows"] = input_of(c.qkv_width, d)
            if routed:  # the router and the experts have the rows as they are
                shared = c.shared_width and in_eight_bits(2 * c.shared_width, d, eight_bit)
                kept["normed rows"] += width * d * n + (input_of(2 * c.shared_width, d) if shared else 0)
                kept["SwiGLU"] = input_of(d, c.shared_width) + width * c.experts_per_token * c.expert_width * n
            else:
                kept["normed rows"] += input_of(2 * f, d)
                kept["SwiGLU"] = input_of(d, f)
    if selective and not c.qk_norm:
        kept["qkv"] = kv * n * width  # a copy of v
    if attention == EFFICIENT:
        kept["statistics"] += 4 * c.n_heads * n // seq_len * (-(-seq_len // 32) * 32)
        if q != kv:  # it takes keys and values repeated for every query head, and lets go of the rest
            kept["rotated q and k"] = 2 * q * n * width
            kept["qkv"] = q * n * width + (kept["qkv"] if c.qk_norm else 0)
    else:
        kept["statistics"] += 4 * c.n_heads * n
    if attention == TRITON and (windowed or not document_mask):
        kept["statistics"] += 4 * n  # the first key each query sees: with a mask alone that is the batch's own
    return kept


def routing_bytes(c: ModelConfig, n: int, seq_len: int) -> int:
    """Logits in FP32, and of each choice its expert, weight and three indices; ends and the losses' shares."""
    indices = (4 * c.n_experts + (1 + 4 + 3 * 4) * c.experts_per_token) * n
    return indices + 4 * c.n_experts + 4 * (c.n_experts + 1) * (n // seq_len)


def linears(c: ModelConfig) -> Counter[tuple[int, int]]:
    """(out, in) of the blocks' matrices -> how many of them there are; routers and experts apart."""
    found: Counter[tuple[int, int]] = Counter()
    found[c.qkv_width, c.d_model] += c.n_layers
    found[c.d_model, c.n_heads * c.head_dim] += c.n_layers
    for width, layers in ((c.d_ff, c.n_layers - c.n_routed), (c.shared_width, c.n_routed)):
        if width and layers:
            found[2 * width, c.d_model] += layers
            found[c.d_model, width] += layers
    return found


def numbers_in_linears(c: ModelConfig, multiple: int) -> int:
    """Of those matrices whose sides are multiples of it."""
    return sum(
        count * out * n_in for (out, n_in), count in linears(c).items() if not (out % multiple or n_in % multiple)
    )


def numbers_in_experts(c: ModelConfig) -> int:
    """Where eight-bit products can take them, else 0."""
    taken = not (c.d_model % MULTIPLE or c.expert_width % MULTIPLE)
    return taken * c.n_routed * c.n_experts * 3 * c.d_model * c.expert_width


def in_eight_bits(out: int, n_in: int, scaling: str) -> bool:
    """Whether a matrix of these sides has eight-bit operands, scaled so."""
    return not (out % multiple_for(scaling) or n_in % multiple_for(scaling))


def eight_bit_bytes(numbers: int, scaling: str | None) -> int:
    """Of a linear's operand in eight bits; a scale a row is not counted."""
    return numbers + (4 * numbers // SIDE if scaling == BLOCK else 0)


def feed_forward_backward(
    c: ModelConfig, n: int, width: int, selective: bool, routed: bool, eight_bit: str | None = None, mx: bool = False,
    references: bool = False,
) -> int:  # fmt: skip
    """The most bytes that there are, beside what is kept and the stream's gradient, in the backward of such a layer.

    Negative terms are what had been kept and is gone by then.
    """

    def in_bf16(f: int) -> int:
        # the product's gradient, and with that either the product made again or the gradient of gate and up, by when
        # the product has gone
        return f * n * width + max(f * n if selective else 0, 2 * f * n - (0 if selective else f * n)) * width

    def of_eight_bits(f: int) -> int:
        if not in_eight_bits(c.d_model, f, eight_bit or ""):
            return in_bf16(f)
        narrow = functools.partial(eight_bit_bytes, scaling=eight_bit)
        d, product = c.d_model * n, 0 if selective else narrow(f * n)
        matrix = 4 * c.d_model * f  # dW on its way to its buffer
        # the stream's gradient in eight bits, both ways round, and the product's
        first = 2 * narrow(d) + width * f * n
        # the input's gradient, or that and the input made again, beside what is left of that of gate and up
        last = 2 * narrow(f * n) + width * d + (width * d + narrow(d) if selective else 0) + 2 * matrix - product
        if eight_bit == "tensorwise":  # one op, in which neither the product nor the gradient of gate and up is in bf16
            return max(
                first,
                narrow(d) + width * f * n + (narrow(f * n) if selective else 0) + matrix,
                width * f * n + 4 * narrow(f * n) - product,  # the gradient of gate and up, both ways round
                4 * narrow(f * n) + width * d - product - 2 * width * f * n,  # gate and up are gone
                last - 2 * width * f * n,
            )
        return max(
            first,
            # the product made again
            narrow(d) + width * f * n + (width * f * n + narrow(f * n) if selective else 0) + matrix,
            3 * width * f * n - product,  # the gradients of the product, and of gate and up
            # the latter in eight bits, both ways round, and the input's; gate and up are gone
            2 * width * f * n + 4 * narrow(f * n) + width * d - product - 2 * width * f * n,
            last,
        )

    def in_mx(f: int) -> int:
        d, product, most = c.d_model * n * width, 0 if selective else f * n * width, in_bf16(f)
        if not (c.d_model % MX_BLOCK or f % MX_BLOCK):
            # the product's gradient, the product made again, and both operands of dW rounded
            of_product = (2 if selective else 1) * f * n * width + d + rounding_bytes(n, f, references)
            most = max(most, of_product)
        if not (c.d_model % MX_BLOCK or 2 * f % MX_BLOCK):
            # the input's gradient, the input made again, and both operands of dW rounded; gate and up went for theirs
            most = max(most, (3 if selective else 2) * d + rounding_bytes(n, 2 * f, references) - product)
        return most

    dense = of_eight_bits if eight_bit else in_mx if mx else in_bf16
    if not routed:
        return dense(c.d_ff)
    copies = c.experts_per_token * n
    row, sums, hidden = c.d_model * copies * width, c.d_model * n * width, c.expert_width * copies * width
    product = 0 if selective else hidden
    of_router = 4 * copies  # gradients of the weights
    operand, of_d_hidden = (row // width, 2 * c.expert_width * copies) if eight_bit else (row, 0)
    most = max(
        operand + hidden,  # copies of the stream's gradient, and the product's gradient
        hidden + (hidden if selective else 0),  # the product made again
        of_router + hidden + 2 * hidden - product,  # the gradient of gate and up
        of_router + (sums if selective else 0) - product,  # the input made again; gate and up went for their gradient
        # the gradient of the input's copies and its sum, or that of gate and up in eight bits
        of_router + c.n_experts * n * width + row + max(sums, of_d_hidden) - product,
    )
    if c.shared_width:  # the sum stays, and all that the experts kept is gone
        most = max(most, sums - 2 * hidden - product - routing_bytes(c, n, n) + dense(c.shared_width))
    return most


def attention_backward(c: ModelConfig, n: int, width: int, attention: str) -> int:
    """What attention's backward takes beside what is kept and the gradient of its result."""
    q, kv = c.n_heads * c.head_dim, c.n_kv_heads * c.head_dim
    gradients = (q + 2 * kv) * n * width
    if attention in (CUDNN, GRAPH, FLASH, EFFICIENT):
        # dq is summed in FP32, dk and dv by query head before they are added up, and dy * out needs a sum a row.
        by_query_head = 2 * q * n * width if q != kv else 0
        return gradients + 4 * q * n + by_query_head + 4 * c.n_heads * n
    return gradients + 4 * c.n_heads * n


def windowed_backend(attention: str) -> str:
    """That of layers with a window where the others have `attention`. cuDNN's graph API keeps 4 bytes a token less than
    our kernel, which is left out."""
    return TRITON if attention in (CUDNN, FLASH, GRAPH) else attention


def training_memory(
    config: ModelConfig,
    batch_size: int,
    seq_len: int,
    *,
    precision: str = "bf16",
    fp8_scaling: str = "tensorwise",
    checkpoint_activations: CheckpointActivations = "none",
    attention: str = CUDNN,
    device: torch.device | str = "cuda",
    document_mask: bool = False,
    verify: bool = False,
    optimizer: str = "adamw",
    average: bool = False,
    references: bool = False,
    shards: int = 1,
    reshard_after_forward: bool = True,
) -> MemoryPlan:
    """The plan of a micro-batch of batch_size x seq_len tokens; `attention`: the backend that runs; `verify`: with the
    copy of the state from which a step is run again; `average`: with one of the weights;
    `references`: the other ops run as such rather than as kernels; `shards`: ranks that have the model together;
    `reshard_after_forward`: as RunConfig has it."""
    c, n = config, batch_size * seq_len
    d, q = c.d_model, c.n_heads * c.head_dim
    eight_bit, mx = fp8_scaling if precision == "fp8" else None, precision == "mxfp8"
    dtype = torch.float32 if precision == "fp32" else torch.bfloat16
    width = dtype.itemsize
    device = torch.device(device)
    parameters = parameter_counts(c).total
    state = state_bytes(c, optimizer, average, shards)
    saved = sum(state.values())
    operands = 0 if precision == "fp32" else width * parameters
    if eight_bit:
        operands += 2 * (numbers_in_linears(c, multiple_for(eight_bit)) + numbers_in_experts(c))
    if mx:
        operands += 4 * numbers_in_linears(c, MX_BLOCK)
    fixed = {
        "weights": state.pop("weights"),
        "gradients": _of_shard(c, 4 * parameters, shards),
        **state,
        "operands": operands if shards == 1 else 0,
        **({"gathered": gathered_bytes(c, width, reshard_after_forward)} if shards > 1 else {}),
        "copy to verify": saved if verify else 0,
        "batch and tables": (2 * 8 + 4 * document_mask) * n + 4 * c.max_seq_len * c.head_dim,
        "workspace": CUBLAS_WORKSPACE if device.type == "cuda" else 0,
    }

    def layer_keeps(mode: CheckpointActivations, routed: bool, windowed: bool = False) -> dict[str, int]:
        backend = windowed_backend(attention) if windowed else attention
        return kept_by_layer(c, n, width, mode, backend, seq_len, document_mask, routed, eight_bit, windowed)

    kinds = Counter((c.is_routed(i), window is not None and window < seq_len) for i, window in enumerate(c.windows))
    activations: dict[str, int] = {}
    for (routed, windowed), layers in kinds.items():
        for name, size in layer_keeps(checkpoint_activations, routed, windowed).items():
            if size:
                activations[name] = activations.get(name, 0) + layers * size
    layer = layer_keeps("none" if checkpoint_activations == "full" else checkpoint_activations, c.moe)  # the last one
    row = d * n * width
    activations["stream"] += row  # the last norm's
    activations["statistics"] = activations.get("statistics", 0) + 4 * n

    chunk = chunk_rows(n, c.vocab_size, dtype, device)
    logits = chunk * (-(-c.vocab_size // 64) * 64) * width
    if references:  # logits in FP32 where they are not, two steps of their gradient
        logits += (3 if width < 4 else 2) * chunk * c.vocab_size * 4
    final = row + 4 * n  # what the last norm keeps, gone when the blocks' backward begins
    # In a block that runs again its input is there already, but the result that nobody reads takes as much.
    again = sum(layer.values()) if checkpoint_activations == "full" else 0
    of_feed_forward = layer["gate and up"] + layer["SwiGLU"] + layer["normed rows"] // 2 + row + 4 * n
    of_feed_forward += layer["routing"]
    selective = checkpoint_activations == "selective"
    passing = {
        # the last norm's rows and their gradient, a chunk of logits, two losses a token
        "head": 2 * row + logits + 8 * n,
        "feed-forward's backward": again - final + row + feed_forward_backward(
            c, n, width, selective, c.moe, eight_bit, mx, references
        ),
        # the stream's gradient, twice in a block that runs again, and that of attention's result
        "attention's backward": again - final - of_feed_forward + (2 if again else 1) * row + q * n * width
        + attention_backward(c, n, width, attention),
    }  # fmt: skip
    if mx:  # before attention's own both operands of the last product's dW are rounded, after it those of the first's
        gone = layer["rotated q and k"] + layer["qkv"] + layer["attention"]
        before = q * n * width + row + rounding_bytes(n, q, references)
        after = c.qkv_width * n * width + rounding_bytes(n, c.qkv_width, references) - gone
        after += (3 if selective else 2) * row
        of_kernel = q * n * width + attention_backward(c, n, width, attention)
        passing["attention's backward"] += max(before, after, of_kernel) - of_kernel
    if optimizer == "muon":  # the activations have gone by then
        of_update = update_bytes(c, 2 if device.type == "cuda" else 4)
        passing["update"] = of_update - sum(activations.values())
    return MemoryPlan(fixed, activations, passing)


def evaluation_memory(
    config: ModelConfig,
    batch_size: int,
    seq_len: int,
    *,
    precision: str = "bf16",
    attention: str = CUDNN,
    device: torch.device | str = "cuda",
) -> int:
    """Bytes that a forward without gradients takes at its peak, by kernels, for batch_size x seq_len tokens."""
    c, n = config, batch_size * seq_len
    d, f, q, kv = c.d_model, c.d_ff, c.n_heads * c.head_dim, c.n_kv_heads * c.head_dim
    dtype = torch.float32 if precision == "fp32" else torch.bfloat16
    repeated = 2 * q if attention == EFFICIENT and q != kv else 0
    chunk = chunk_rows(n, c.vocab_size, dtype, torch.device(device))
    # A block's input, its two norms' rows and the stream; then what is made of them.
    of_attention = (3 * d + q + 2 * kv + q + kv + q + repeated) * n
    dense = 0 if c.n_routed == c.n_layers else 3 * f
    routed = c.experts_per_token * (3 * c.expert_width + d) if c.moe else 0
    of_feed_forward = (4 * d + max(dense, routed, 3 * c.shared_width if c.moe else 0)) * n
    of_head = d * n + chunk * (-(-c.vocab_size // 64) * 64)
    return dtype.itemsize * max(of_attention, of_feed_forward, of_head) + 8 * n
