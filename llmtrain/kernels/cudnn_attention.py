"""cuDNN's attention through its graph API: what torch's call into cuDNN cannot do. Documents laid end to end, sliding
windows, and a backward that adds in a fixed order.

It needs the package nvidia-cudnn-frontend (the extra `cudnn`), which is imported at the first use. A plan is made once
for each shape, in 50 to 100 ms, so a first call cannot be captured in a CUDA graph; later ones can.
"""

import importlib
from dataclasses import dataclass
from functools import cache, lru_cache
from typing import Any, NamedTuple

import torch
from torch import Tensor

MOST_HEAD_DIM = 128


@cache
def unavailable() -> str | None:
    """Why there is no such library here, as half a sentence; None where there is."""
    try:
        version = importlib.import_module("cudnn").backend_version()
    except ImportError:
        return "needs the package nvidia-cudnn-frontend (pip install 'llmtrain[cudnn]')"
    except RuntimeError as error:
        return f"finds no cuDNN ({str(error).splitlines()[0]})"
    return None if version >= 90600 else f"needs cuDNN 9.6 for documents, this one is {version}"


@dataclass(frozen=True)
class Shape:
    """What a plan is made for. Strides are those of (token, head), in elements; heads themselves are dense."""

    batch: int
    """Sequences: rows, or slots for documents."""
    longest: int
    """Tokens of the longest sequence."""
    total: int
    """Tokens in all, where documents lie end to end; 0: `batch` rows of `longest` tokens."""
    heads: int
    kv_heads: int
    head_dim: int
    dtype: torch.dtype
    strides: tuple[tuple[int, int], tuple[int, int], tuple[int, int]]
    """Of q, k and v."""
    window: int | None
    deterministic: bool
    device: int
    capability: tuple[int, int]
    """Of the device."""

    @property
    def dense(self) -> tuple[tuple[int, int], tuple[int, int]]:
        """Strides of what is contiguous: by query head, by key head."""
        d = self.head_dim
        return (self.heads * d, d), (self.kv_heads * d, d)

    @property
    def token_strides(self) -> tuple[int, ...]:
        """One for each row of `offsets`: those of q, k, v, of what is contiguous and of the statistics."""
        return (*(token for token, _ in self.strides), *(token for token, _ in self.dense), self.heads)

    @property
    def offset_dtype(self) -> torch.dtype:
        return torch.int64 if self.total * max(self.token_strides) >= 1 << 31 else torch.int32


def shape_of(
    q: Tensor, k: Tensor, v: Tensor, slots: int | None, longest: int, window: int | None, deterministic: bool
) -> Shape:
    """q, k, v: (total, H, D) with `slots` for documents, or (B, T, H, D) where that is None. Windows that hide nothing
    are none."""
    return Shape(
        batch=q.shape[0] if slots is None else slots,
        longest=longest,
        total=0 if slots is None else q.shape[0],
        heads=q.shape[-2],
        kv_heads=k.shape[-2],
        head_dim=q.shape[-1],
        dtype=q.dtype,
        strides=tuple((x.stride(-3), x.stride(-2)) for x in (q, k, v)),  # type: ignore[arg-type]
        window=window if window is not None and window < longest else None,
        deterministic=deterministic,
        device=q.device.index or 0,
        # A graph can be described on a CPU, for a card that is not there.
        capability=torch.cuda.get_device_capability(q.device) if q.is_cuda else (9, 0),
    )


def offsets(cu_seqlens: Tensor, shape: Shape) -> Tensor:
    """Element offsets of documents, a row for each of the shape's token strides; rows begin at whole 256 bytes."""
    n = len(cu_seqlens)
    index = torch.empty(len(shape.token_strides), -(-n // 64) * 64, dtype=shape.offset_dtype, device=cu_seqlens.device)
    strides = _on_device(shape.token_strides, shape.offset_dtype, cu_seqlens.device)
    index[:, :n] = cu_seqlens * strides[:, None]
    return index


@lru_cache(maxsize=64)
def _on_device(values: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
    """A constant that is copied to the device once, and so not within a capture."""
    return torch.tensor(values, dtype=dtype, device=device)


class Documents(NamedTuple):
    """Where documents lie."""

    offsets: Tensor
    """As from `offsets`."""
    lengths: Tensor
    """(slots,) int32."""


class _Graph:
    """One of cuDNN's graphs and the tensors that it is given, by name."""

    def __init__(self, shape: Shape) -> None:
        self.cudnn = importlib.import_module("cudnn")
        types = self.cudnn.data_type
        self.io = types.BFLOAT16 if shape.dtype == torch.bfloat16 else types.HALF
        self.index = types.INT64 if shape.offset_dtype == torch.int64 else types.INT32
        self.shape = shape
        self.graph = self.cudnn.pygraph(
            io_data_type=self.io, intermediate_data_type=types.FLOAT, compute_data_type=types.FLOAT,
            sm_version=100 * shape.capability[0] + 10 * shape.capability[1],
        )  # fmt: skip
        self.tensors: dict[str, Any] = {}
        self.ragged: dict[int, Any] = {}
        self.workspace = 0
        if shape.total:
            for stride in set(shape.token_strides):
                self.ragged[stride] = self._index(f"offsets{stride}", shape.batch + 1, self.index)
            self.tensors["lengths"] = self._index("lengths", shape.batch, types.INT32)

    def _index(self, name: str, size: int, data_type: Any) -> Any:
        tensor = self.graph.tensor(name=name, dim=[size, 1, 1, 1], stride=[1, 1, 1, 1], data_type=data_type)
        self.tensors[name] = tensor
        return tensor

    def _layout(self, heads: int, width: int, token: int, head: int) -> tuple[list[int], list[int]]:
        batch, longest = self.shape.batch, self.shape.longest
        return [batch, heads, longest, width], [max(longest * token, heads * head), head, token, 1]

    def input(self, name: str, heads: int, strides: tuple[int, int]) -> Any:
        dim, stride = self._layout(heads, self.shape.head_dim, *strides)
        self.tensors[name] = self.graph.tensor(
            name=name, dim=dim, stride=stride, data_type=self.io, ragged_offset=self.ragged.get(strides[0])
        )
        return self.tensors[name]

    def _statistics_layout(self) -> tuple[list[int], list[int]]:
        """(total, H) with documents, (B, H, T) without."""
        heads = self.shape.heads
        return self._layout(heads, 1, *((heads, 1) if self.shape.total else (1, self.shape.longest)))

    def statistics(self) -> Any:
        dim, stride = self._statistics_layout()
        self.tensors["stats"] = self.graph.tensor(
            name="stats", dim=dim, stride=stride, data_type=self.cudnn.data_type.FLOAT,
            ragged_offset=self.ragged.get(self.shape.heads),
        )  # fmt: skip
        return self.tensors["stats"]

    def output(self, name: str, tensor: Any, heads: int, strides: tuple[int, int]) -> None:
        dim, stride = self._layout(heads, self.shape.head_dim, *strides)
        tensor.set_output(True).set_dim(dim).set_stride(stride).set_data_type(self.io)
        if self.shape.total:
            tensor.set_ragged_offset(self.ragged[strides[0]])
        self.tensors[name] = tensor

    def output_statistics(self, tensor: Any) -> None:
        dim, stride = self._statistics_layout()
        tensor.set_output(True).set_dim(dim).set_stride(stride).set_data_type(self.cudnn.data_type.FLOAT)
        if self.shape.total:
            tensor.set_ragged_offset(self.ragged[self.shape.heads])
        self.tensors["stats"] = tensor

    def masks(self) -> dict[str, Any]:
        """What forward and backward are told of who sees what."""
        told: dict[str, Any] = {"attn_scale": self.shape.head_dim**-0.5, "diagonal_band_right_bound": 0}
        if self.shape.window is not None:
            told["diagonal_band_left_bound"] = self.shape.window
        if self.shape.total:
            lengths = self.tensors["lengths"]
            told |= {"use_padding_mask": True, "seq_len_q": lengths, "seq_len_kv": lengths}
        return told

    def described(self) -> "_Graph":
        """Checked as far as that goes without a card."""
        self.graph.validate()
        self.graph.build_operation_graph()
        return self

    def planned(self) -> "_Graph":
        """Ready to run on the current device."""
        modes = [self.cudnn.heur_mode.A, self.cudnn.heur_mode.FALLBACK]
        self.graph.create_execution_plans(modes)
        self.graph.check_support()
        self.graph.build_plans()
        self.workspace = self.graph.get_workspace_size()
        return self

    def run(self, given: dict[str, Tensor], documents: "Documents | None") -> None:
        """`given`: what is read and written, by name."""
        buffers = {self.tensors[name]: tensor for name, tensor in given.items()}
        if documents is not None:
            buffers[self.tensors["lengths"]] = documents.lengths
            for row, stride in zip(documents.offsets, self.shape.token_strides, strict=True):
                buffers[self.ragged[stride]] = row
        handle = _handle(self.shape.device)
        self.cudnn.set_stream(handle=handle, stream=_stream(self.shape.device))
        workspace = torch.empty(max(1, self.workspace), dtype=torch.uint8, device=given["q"].device)
        self.graph.execute(buffers, workspace, handle=handle)


def _stream(device: int) -> int:
    return torch.cuda.current_stream(device).cuda_stream


@cache
def _handle(device: int) -> Any:
    with torch.cuda.device(device):
        return importlib.import_module("cudnn").create_handle()


def forward_graph(shape: Shape) -> _Graph:
    """Writes out and stats from q, k and v."""
    graph = _Graph(shape)
    by_query, _ = shape.dense
    q = graph.input("q", shape.heads, shape.strides[0])
    k = graph.input("k", shape.kv_heads, shape.strides[1])
    v = graph.input("v", shape.kv_heads, shape.strides[2])
    out, stats = graph.graph.sdpa(q=q, k=k, v=v, generate_stats=True, name="forward", **graph.masks())
    graph.output("out", out, shape.heads, by_query)
    graph.output_statistics(stats)
    return graph.described()


def backward_graph(shape: Shape) -> _Graph:
    """Writes dq, dk and dv from what the forward read and wrote and from dy."""
    graph = _Graph(shape)
    by_query, by_key = shape.dense
    q = graph.input("q", shape.heads, shape.strides[0])
    k = graph.input("k", shape.kv_heads, shape.strides[1])
    v = graph.input("v", shape.kv_heads, shape.strides[2])
    out, dy = graph.input("out", shape.heads, by_query), graph.input("dy", shape.heads, by_query)
    # With the number of tokens the workspaces are of that size, and not of `batch` times the longest document's.
    totals = dict(max_total_seq_len_q=shape.total, max_total_seq_len_kv=shape.total) if shape.total else {}
    gradients = graph.graph.sdpa_backward(
        q=q, k=k, v=v, o=out, dO=dy, stats=graph.statistics(), use_deterministic_algorithm=shape.deterministic,
        name="backward", **totals, **graph.masks(),
    )  # fmt: skip
    graph.output("dq", gradients[0], shape.heads, by_query)
    graph.output("dk", gradients[1], shape.kv_heads, by_key)
    graph.output("dv", gradients[2], shape.kv_heads, by_key)
    return graph.described()


@lru_cache(maxsize=64)
def _planned(shape: Shape, backward: bool) -> _Graph:
    with torch.cuda.device(shape.device):
        return (backward_graph if backward else forward_graph)(shape).planned()


def forward_cudnn(
    q: Tensor, k: Tensor, v: Tensor, shape: Shape, documents: Documents | None = None
) -> tuple[Tensor, Tensor]:
    """(out, stats): out as q but contiguous, stats FP32. What lies behind the last document is not written."""
    out = torch.empty(q.shape, dtype=q.dtype, device=q.device)
    by_head = q.shape[:-1] if documents is not None else (q.shape[0], q.shape[2], q.shape[1])
    stats = torch.empty(by_head, dtype=torch.float32, device=q.device)
    _planned(shape, False).run({"q": q, "k": k, "v": v, "out": out, "stats": stats}, documents)
    return out, stats


def backward_cudnn(
    q: Tensor, k: Tensor, v: Tensor, out: Tensor, stats: Tensor, dy: Tensor, shape: Shape,
    documents: Documents | None = None,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """(dq, dk, dv), contiguous; out and stats as from `forward_cudnn`."""
    dq = torch.empty_like(out)
    dk, dv = (torch.empty(x.shape, dtype=x.dtype, device=x.device) for x in (k, v))
    given = {"q": q, "k": k, "v": v, "out": out, "dy": dy.contiguous(), "stats": stats, "dq": dq, "dk": dk, "dv": dv}
    _planned(shape, True).run(given, documents)
    return dq, dk, dv


class _CudnnAttention(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, shape: Shape) -> Tensor:
        out, stats = forward_cudnn(q, k, v, shape)
        ctx.shape = shape
        ctx.save_for_backward(q, k, v, out, stats)
        return out

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> Any:
        q, k, v, out, stats = ctx.saved_tensors
        return *backward_cudnn(q, k, v, out, stats, dy, ctx.shape), None


def cudnn_attention(q: Tensor, k: Tensor, v: Tensor, window: int | None = None) -> Tensor:
    """q: (B, T, H, D), k, v: (B, T, Hkv, D) in 16 bits -> (B, T, H, D): causal, `window` keys at most. Adds in a fixed
    order where torch's deterministic algorithms are asked for."""
    deterministic = torch.are_deterministic_algorithms_enabled()
    return _CudnnAttention.apply(q, k, v, shape_of(q, k, v, None, q.shape[1], window, deterministic))
