"""What llmtrain.kernels.cudnn_attention uses of the module `cudnn`, computed by torch from the very dimensions, strides
and offsets that it is told: a graph that reads or writes the wrong place gives wrong numbers."""

import enum
from typing import Any

import torch
from torch import Tensor

data_type = enum.Enum("data_type", "BFLOAT16 HALF FLOAT INT32 INT64")
heur_mode = enum.Enum("heur_mode", "A FALLBACK")
TYPES = {torch.bfloat16: "BFLOAT16", torch.float16: "HALF", torch.float32: "FLOAT", torch.int32: "INT32"}
TYPES[torch.int64] = "INT64"


def backend_version() -> int:
    return 91900


def create_handle() -> int:
    return 7


def set_stream(handle: int, stream: int) -> None:
    assert handle == 7


class Node:
    def __init__(self, **said: Any) -> None:
        self.__dict__.update({"ragged_offset": None} | said)

    def _set(self, **said: Any) -> "Node":
        self.__dict__.update(said)
        return self

    def set_output(self, output: bool) -> "Node":
        return self._set(is_output=output)

    def set_dim(self, dim: list[int]) -> "Node":
        return self._set(dim=dim)

    def set_stride(self, stride: list[int]) -> "Node":
        return self._set(stride=stride)

    def set_data_type(self, value: Any) -> "Node":
        return self._set(data_type=value)

    def set_ragged_offset(self, node: "Node") -> "Node":
        return self._set(ragged_offset=node)


class pygraph:
    def __init__(self, **_: Any) -> None:
        self.said: dict[str, Any] = {}
        self.done: list[str] = []

    def tensor(self, **said: Any) -> Node:
        return Node(**said)

    def sdpa(self, **said: Any) -> tuple[Node, Node]:
        self.said, self.outputs = said, (Node(), Node())
        return self.outputs

    def sdpa_backward(self, **said: Any) -> tuple[Node, Node, Node]:
        self.said, self.outputs = said, (Node(), Node(), Node())
        return self.outputs

    def __getattr__(self, name: str) -> Any:
        assert name in ("validate", "build_operation_graph", "create_execution_plans", "check_support", "build_plans")
        return lambda *_: self.done.append(name)

    def get_workspace_size(self) -> int:
        return 100

    def execute(self, buffers: dict[Node, Tensor], workspace: Tensor, handle: int) -> None:
        assert self.done[-1] == "build_plans" and workspace.numel() >= 100 and handle == 7
        for node, buffer in buffers.items():
            assert TYPES[buffer.dtype] == node.data_type.name, (node, buffer.dtype)

        def of(node: Node, i: int, length: int) -> Tensor:
            """(heads, length, width) of sequence i, a view of the buffer."""
            _, heads, _, width = node.dim
            base = i * node.stride[0]
            if node.ragged_offset is not None:
                base = int(buffers[node.ragged_offset].flatten()[i])
            buffer = buffers[node]
            return buffer.as_strided((heads, length, width), node.stride[1:], buffer.storage_offset() + base)

        said = self.said
        for i in range(said["q"].dim[0]):
            length = said["q"].dim[2]
            if said.get("use_padding_mask"):
                length = int(buffers[said["seq_len_q"]][i])
                assert length <= said["q"].dim[2], "longer than the graph says"
            if length == 0:
                continue
            token = torch.arange(length)
            assert said["diagonal_band_right_bound"] == 0
            seen = token <= token[:, None]
            if said.get("diagonal_band_left_bound"):
                seen &= token + said["diagonal_band_left_bound"] > token[:, None]
            q, k, v = (of(said[name], i, length).double() for name in "qkv")
            kv_heads, scale = len(k), said["attn_scale"]
            k, v = (x.repeat_interleave(len(q) // kv_heads, 0) for x in (k, v))
            scores = (q @ k.transpose(1, 2) * scale).masked_fill(~seen, float("-inf"))
            weights, lse = scores.softmax(-1), scores.logsumexp(-1, keepdim=True)
            y = weights @ v
            results = (y, lse)
            if "dO" in said:
                torch.testing.assert_close(of(said["o"], i, length).double(), y, rtol=1e-2, atol=1e-2)
                torch.testing.assert_close(of(said["stats"], i, length).double(), lse, rtol=1e-4, atol=1e-4)
                dy = of(said["dO"], i, length).double()
                of_weights = dy @ v.transpose(1, 2)
                of_scores = weights * (of_weights - (dy * y).sum(-1, keepdim=True)) * scale
                by_head = of_scores.transpose(1, 2) @ q, weights.transpose(1, 2) @ dy
                results = (of_scores @ k, *(x.unflatten(0, (kv_heads, -1)).sum(1) for x in by_head))
            for node, result in zip(self.outputs, results, strict=True):
                assert node.is_output
                of(node, i, length).copy_(result)
