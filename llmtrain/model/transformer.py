"""The transformer: pre-norm blocks of rotary grouped-query attention and SwiGLU or routed experts, tied or untied head.

Weights are FP32 masters; activations run in `compute_dtype`. The last matmul of each branch adds into the residual
stream, of which the norm in front of the branch hands on a copy.

What the backward needs is kept, or made again in it, as `checkpoint_activations` says: "none" keeps all, "selective"
all but what is cheap for its bytes, "full" only each block's input: the block runs again, all but its last matmul.
"""

import hashlib
from collections.abc import Iterable
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn

from llmtrain.kernels.attention import attention
from llmtrain.kernels.cross_entropy import IGNORED, head_loss
from llmtrain.kernels.embedding import embedding
from llmtrain.kernels.experts import routed_experts
from llmtrain.kernels.feed_forward import eight_bit_feed_forward, feed_forward_add
from llmtrain.kernels.linear import Remake, linear, linear_add
from llmtrain.kernels.rerun import rerun
from llmtrain.kernels.rmsnorm import rmsnorm, rmsnorm_fork
from llmtrain.kernels.rotary import rotary_qkv, rotary_tables
from llmtrain.kernels.routing import Balance
from llmtrain.kernels.swiglu import swiglu
from llmtrain.model.config import CheckpointActivations, ModelConfig


@dataclass
class LossSums:
    """FP32 scalars on the device, sums over the targets of a batch: nothing is divided until the optimizer step."""

    lm: Tensor
    """Cross-entropy, in nats."""
    aux: Tensor
    """z-loss and, with experts, the routers' losses, already weighted. Of the latter it is a number alone: their
    gradient is added in the backward of the experts."""
    n_targets: Tensor
    """Targets that count, int64."""


class KVCache:
    """Keys and values of the tokens seen so far, in the compute dtype: of each layer (2, B, n, n_kv_heads, head_dim),
    with n the max_len, or what a window lets the next token see of those before it."""

    def __init__(self, config: ModelConfig, batch: int, max_len: int, dtype: torch.dtype, device: torch.device) -> None:
        self.windows = config.windows
        self.layers = [
            torch.zeros(2, batch, max_len if window is None else min(max_len, window - 1), config.n_kv_heads,
                        config.head_dim, dtype=dtype, device=device)
            for window in config.windows
        ]  # fmt: skip
        self.length = 0

    def extend(self, layer: int, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor, int]:
        """Stores k, v (B, T, Hkv, D) behind what is there. Returns all of both that any of the T tokens sees,
        (B, kept + T, Hkv, D), and kept."""
        held, t = self.layers[layer], k.shape[1]
        if self.windows[layer] is None:
            end = self.length + t
            held[0, :, self.length : end] = k
            held[1, :, self.length : end] = v
            return held[0, :, :end], held[1, :, :end], self.length
        room = held.shape[2]
        kept = min(self.length, room)
        both = torch.cat([held[:, :, :kept], torch.stack([k, v])], 2)
        last = both[:, :, max(0, kept + t - room) :]
        held[:, :, : last.shape[2]] = last
        return both[0], both[1], kept


class Linear(nn.Module):
    """A matrix (n_out, n_in) without bias."""

    def __init__(self, n_in: int, n_out: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(n_out, n_in))

    def forward(self, x: Tensor, remake: Remake | None = None) -> Tensor:
        return linear(x, self.weight, remake)

    def add(self, x: Tensor, into: Tensor, remake: Remake | None = None, result: bool = True) -> Tensor:
        """into + the product, in the memory of `into`."""
        return linear_add(x, self.weight, into, remake, result)


class RMSNorm(nn.Module):
    """The weight (width,) of a root mean square norm."""

    def __init__(self, width: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(width))
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        return rmsnorm(x, self.weight, self.eps)

    def fork(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """(norm of x, a copy of x to add to)."""
        return rmsnorm_fork(x, self.weight, self.eps)


class Embedding(nn.Module):
    """The embedding matrix (vocab_size, d_model)."""

    def __init__(self, vocab_size: int, d_model: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(vocab_size, d_model))

    def forward(self, ids: Tensor, dtype: torch.dtype) -> Tensor:
        return embedding(ids, self.weight, dtype)


# What "selective" does not keep. With q, kv, d and f the widths of queries, keys, stream and feed-forward, a token has
# in each layer, in numbers of 2 bytes: 4 d of stream and normed rows, q + 2 kv of qkv and q + kv rotated, q of
# attention's result, 2 f of gate and up and f of their product. Of that a millisecond frees, at 4.3 TB/s and q = 3 kv,
#   8.6 GB by copying v (2 kv moved), the view that holds on to the q + kv which the rotation has used up;
#   2.2 GB by making the normed rows again (4 d moved for 2 d);
#   1.4 GB by making SwiGLU's product again (3 f moved for f);
#   0.8 GB at d = 768, 0.3 GB at d = 2048, by making gate and up again (a matmul at 640 TFLOP/s for 2 f).
# The last buys no more than running the whole block again does, 0.9 and 0.4 GB: selective ends before it.


@dataclass
class Context:
    """What every block of one forward pass shares."""

    cos: Tensor
    sin: Tensor
    doc_start: Tensor | None
    cache: KVCache | None
    checkpoint_activations: CheckpointActivations
    balance: Balance | None = None
    """What the routers' losses are made with, where they are wanted."""
    losses: list[Tensor] = field(default_factory=list)
    """Of the routed layers up to now."""

    def remade(self, remake: Remake) -> Remake | None:
        """`remake`, where such rows are not kept."""
        return remake if self.checkpoint_activations == "selective" else None


class Attention(nn.Module):
    """Rotary grouped-query attention; q, k and v come from one matrix, rows in that order, heads within."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.config = config
        self.qkv = Linear(config.d_model, config.qkv_width)
        self.out = Linear(config.n_heads * config.head_dim, config.d_model)
        self.q_norm = RMSNorm(config.head_dim, config.norm_eps) if config.qk_norm else None
        self.k_norm = RMSNorm(config.head_dim, config.norm_eps) if config.qk_norm else None

    def forward(self, x: Tensor, h: Tensor, layer: int, context: Context, remake: Remake | None) -> Tensor:
        """x: the normed stream (B, T, d_model), h: the stream, overwritten with what is returned: h + attention(x)."""
        c = self.config
        q_norm = None if self.q_norm is None else self.q_norm.weight
        k_norm = None if self.k_norm is None else self.k_norm.weight
        q, k, v = rotary_qkv(
            self.qkv(x, remake), context.cos, context.sin, c.n_heads, c.n_kv_heads, q_norm, k_norm, c.norm_eps
        )
        if context.checkpoint_activations == "selective" and q_norm is None:
            v = v.contiguous()  # and with that lets go of qkv, which QK-norm's backward needs
        offset, doc_start = 0, context.doc_start
        if context.cache is not None:
            k, v, offset = context.cache.extend(layer, k, v)
            if doc_start is not None:  # in columns of what the cache still holds
                doc_start = (doc_start - (context.cache.length - offset)).clamp_min(0)
        y = attention(q, k, v, offset=offset, doc_start=doc_start, window=c.windows[layer])  # (B, T, H, D)
        rows = y.reshape(*x.shape[:-1], -1)
        return self.out.add(rows, h, context.remade(lambda: rows))  # attention keeps it anyway


class FeedForward(nn.Module):
    """SwiGLU; gate and up come from one matrix, gate's rows first."""

    def __init__(self, d_model: int, width: int) -> None:
        super().__init__()
        self.gate_up = Linear(d_model, 2 * width)
        self.down = Linear(width, d_model)

    def forward(self, x: Tensor, h: Tensor, context: Context, remake: Remake | None, result: bool) -> Tensor:
        """x: the normed stream (B, T, d_model), h: the stream, overwritten with what is returned: h + SwiGLU(x)."""
        if operands := eight_bit_feed_forward(self.gate_up.weight, self.down.weight, x):
            keep_product = context.checkpoint_activations != "selective"
            weights = self.gate_up.weight, self.down.weight
            return feed_forward_add(x, *weights, h, operands, remake, keep_product, result)
        gate_up = self.gate_up(x, remake)  # (B, T, 2 d_ff)
        return self.down.add(swiglu(gate_up), h, context.remade(lambda: swiglu(gate_up)), result)


class Experts(nn.Module):
    """The matrices (n_experts, n_out, n_in) of all experts of a layer."""

    def __init__(self, n_experts: int, n_in: int, n_out: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(n_experts, n_out, n_in))


class RoutedFeedForward(nn.Module):
    """SwiGLU experts, of which a router picks each token's, and perhaps one that every token meets."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.k = config.experts_per_token
        self.router = Linear(config.d_model, config.n_experts)
        self.gate_up = Experts(config.n_experts, config.d_model, 2 * config.expert_width)
        self.down = Experts(config.n_experts, config.expert_width, config.d_model)
        self.shared = FeedForward(config.d_model, config.shared_width) if config.n_shared_experts else None

    def forward(self, x: Tensor, h: Tensor, context: Context, remake: Remake | None, result: bool) -> Tensor:
        """As FeedForward's. Without `result` it runs again, and the losses are counted already."""
        if self.shared is not None:
            h = self.shared(x, h, context, remake, result)
        h, loss = routed_experts(
            x, self.router.weight, self.gate_up.weight, self.down.weight, h, self.k, context.balance,
            remake=remake, keep_product=context.checkpoint_activations != "selective", result=result,
        )  # fmt: skip
        if loss is not None and result:
            context.losses.append(loss)
        return h


class Block(nn.Module):
    def __init__(self, config: ModelConfig, layer: int) -> None:
        super().__init__()
        self.attention_norm = RMSNorm(config.d_model, config.norm_eps)
        self.attention = Attention(config)
        self.feed_forward_norm = RMSNorm(config.d_model, config.norm_eps)
        routed = config.is_routed(layer)
        self.feed_forward = RoutedFeedForward(config) if routed else FeedForward(config.d_model, config.d_ff)

    def forward(self, h: Tensor, layer: int, context: Context) -> Tensor:
        """h: the residual stream (B, T, d_model) -> the stream after this block."""
        if context.checkpoint_activations == "full" and h.requires_grad:
            return rerun(lambda x, again: self.run(x, layer, context, result=not again), h)
        return self.run(h, layer, context)

    def run(self, x: Tensor, layer: int, context: Context, result: bool = True) -> Tensor:
        """As forward; without `result` only its gradient is right."""
        y, h = self.attention_norm.fork(x)
        h = mid = self.attention(y, h, layer, context, context.remade(lambda: self.attention_norm(x)))
        y, h = self.feed_forward_norm.fork(h)
        return self.feed_forward(y, h, context, context.remade(lambda: self.feed_forward_norm(mid)), result)


class Transformer(nn.Module):
    """Blocks `layers` of a model, with or without its embedding and its head: a stage of a pipeline is the same class.

    Parameters carry the names and initial values they have in the whole model.
    """

    cos: Tensor
    sin: Tensor

    def __init__(
        self,
        config: ModelConfig,
        layers: Iterable[int] | None = None,
        embedding: bool = True,
        head: bool = True,
        device: torch.device | str = "cpu",
    ) -> None:
        super().__init__()
        assert config.vocab_size > 0 and config.max_seq_len > 0, "vocab_size and max_seq_len must be resolved"
        self.config = config
        self.compute_dtype = torch.float32
        self.checkpoint_activations: CheckpointActivations = "none"
        with torch.device(device):
            tied_head = head and config.tie_embeddings
            self.embedding = Embedding(config.vocab_size, config.d_model) if embedding or tied_head else None
            self.reads_ids = embedding
            stage = range(config.n_layers) if layers is None else layers
            self.layers = nn.ModuleDict({str(i): Block(config, i) for i in stage})
            self.norm = RMSNorm(config.d_model, config.norm_eps) if head else None
            self.head = Linear(config.d_model, config.vocab_size) if head and not config.tie_embeddings else None
        cos, sin = rotary_tables(config.max_seq_len, config.head_dim, config.rope_theta, device)
        self.register_buffer("cos", cos, persistent=False)
        self.register_buffer("sin", sin, persistent=False)

    @torch.no_grad()
    def init_weights(self, seed: int) -> None:
        """Gives all parameters their `initial_values`."""
        for name, parameter in self.named_parameters():
            parameter.copy_(self.initial_values(name, parameter.shape, seed))

    def initial_values(self, name: str, shape: torch.Size, seed: int) -> Tensor:
        """Normal matrices, norms of 1, on the CPU in FP32. Each tensor has its own stream, from the seed and its name:
        so a stage, a shard, another device and the whole model start from the same bits."""
        if len(shape) == 1:
            return torch.ones(shape, device="cpu")
        into_residual = name.endswith(("attention.out.weight", ".down.weight"))
        std = self.config.init_std / ((2 * self.config.n_layers) ** 0.5 if into_residual else 1.0)
        digest = hashlib.sha256(f"{seed}/{name}".encode()).digest()
        generator = torch.Generator().manual_seed(int.from_bytes(digest[:8], "little") >> 1)
        return torch.empty(shape, device="cpu").normal_(0.0, std, generator=generator)

    @property
    def head_weight(self) -> Tensor:
        """The matrix (vocab_size, d_model) that makes logits."""
        matrix = self.head or self.embedding
        assert matrix is not None, "this stage has no head"
        return matrix.weight

    def forward(
        self,
        x: Tensor,
        *,
        positions: Tensor | None = None,
        doc_start: Tensor | None = None,
        cache: KVCache | None = None,
        balance: Balance | None = None,
        losses: list[Tensor] | None = None,
    ) -> Tensor:
        """x: ids (B, T) int64, or hidden states (B, T, d_model) where the stage has no embedding.

        Returns the hidden states (B, T, d_model), normalised where the stage has the head. positions (T,) or (B, T):
        default the columns, behind the cache's. doc_start (B, T): the first column each token may attend to. balance:
        what the routers' losses are made with, which are then appended to `losses`, one a routed layer.
        """
        offset = 0 if cache is None else cache.length
        end = offset + x.shape[1]
        if end > self.config.max_seq_len:
            raise ValueError(f"{end} positions, but the model's max_seq_len is {self.config.max_seq_len}")
        if positions is None:
            cos, sin = self.cos[offset:end], self.sin[offset:end]
        else:
            cos, sin = self.cos[positions], self.sin[positions]
        losses = [] if losses is None else losses
        context = Context(cos, sin, doc_start, cache, self.checkpoint_activations, balance, losses)

        h = x
        if self.reads_ids:
            assert self.embedding is not None
            h = self.embedding(x, self.compute_dtype)
        for layer, block in self.layers.items():
            h = block(h, int(layer), context)
        if cache is not None:
            cache.length = end
        return h if self.norm is None else self.norm(h)

    def logits(self, hidden: Tensor) -> Tensor:
        """hidden: (B, T, d_model) -> (B, T, vocab_size) in the compute dtype. For decoding; training uses `loss`."""
        return linear(hidden, self.head_weight)

    def balance(self, targets: Tensor) -> Balance | None:
        """What the routers' losses of a batch are made with, targets (B, T) as in `loss`; None without experts."""
        c = self.config
        return Balance((targets != IGNORED).sum(1), c.balance_loss, c.router_z_loss) if c.moe else None

    def loss(self, x: Tensor, targets: Tensor, doc_start: Tensor | None = None) -> LossSums:
        """x as in forward, targets (B, T) int64 with IGNORED where nothing is to be predicted."""
        losses: list[Tensor] = []
        hidden = self.forward(x, doc_start=doc_start, balance=self.balance(targets), losses=losses)
        rows = hidden.reshape(-1, hidden.shape[-1])  # (B T, d_model)
        flat = targets.reshape(-1)
        lm, aux = head_loss(rows, self.head_weight, flat, self.config.z_loss)
        for loss in losses:
            aux = aux + loss
        return LossSums(lm, aux, (flat != IGNORED).sum())
