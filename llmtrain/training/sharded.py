"""A model whose matrices are shared out among ranks by FSDP2 (torch's `fully_shard`), each rank with some rows of all.

The FP32 masters, gradients and moments of these rows lie in the same flat buffers as everything else, so the optimizer
and checkpoints work on them as ever. A block's matrices are gathered in the compute dtype when it runs, forward and
backward, and freed behind it; the embedding and the head, which are the root's, stay from the forward to the end of the
backward. Without `reshard_after_forward` all of them stay until the update, which alone changes them. Gradients come in
FP32 and are summed in FP32 over the ranks, micro-batch by micro-batch, as sums: nothing is divided here. Vectors are a
thousandth of a model and FP32 in the forward too: each rank has them whole, and their gradients are added up once a
step.
"""

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard, register_fsdp_forward_method
from torch.distributed.tensor import DTensor, Shard

from llmtrain.model.transformer import Transformer
from llmtrain.training.flat import FlatParameters

Waiting = Callable[[], AbstractContextManager[None]]
# Each under its newer name where torch has that: it warns of the other.
_all_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
_reduce_scatter = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor


class ShardedParameters(FlatParameters):
    """Takes over the parameters of `model`, on the meta device: afterwards this rank's rows are on `device`, zero, and
    the model is FSDP's. mesh: one-dimensional, the ranks that have the model together. waiting: the block in which this
    rank waits for the others, as `World.waiting`. reshard_after_forward: as RunConfig has it."""

    keeps_narrow = False  # FSDP makes its own where it gathers

    def __init__(
        self,
        model: Transformer,
        device: torch.device | str,
        compute_dtype: torch.dtype,
        mesh: DeviceMesh,
        master_dtype: torch.dtype = torch.float32,
        waiting: Waiting = nullcontext,
        reshard_after_forward: bool = True,
    ) -> None:
        self.mesh, self._waiting = mesh, waiting
        self.group = mesh.get_group()
        self._shapes = {name: parameter.shape for name, parameter in model.named_parameters()}
        policy = MixedPrecisionPolicy(
            param_dtype=compute_dtype, reduce_dtype=master_dtype, cast_forward_inputs=False
        )
        vectors = {parameter for parameter in model.parameters() if parameter.dim() < 2}
        reshard = None if reshard_after_forward else False  # None: of all but the root
        roots = self._roots(model)
        for root in roots:
            for module in (*root.layers.values(), root):
                fully_shard(module, mesh=mesh, reshard_after_forward=reshard, mp_policy=policy, ignored_params=vectors)
            for method in ("loss", "logits"):
                register_fsdp_forward_method(root, method)
        self._units = [module for root in roots for module in root.modules() if isinstance(module, FSDPModule)]
        gather: Any = _Exchange(_all_gather, waiting)
        reduce_scatter: Any = _Exchange(_reduce_scatter, waiting)
        for unit in self._units:
            unit.set_reshard_after_backward(reshard_after_forward, recurse=False)
            unit.set_custom_all_gather(gather)
            unit.set_custom_reduce_scatter(reduce_scatter)
            unit.set_gradient_divide_factor(1.0)
            unit.set_force_sum_reduction_for_comms(True)
        super().__init__(model, device, compute_dtype, master_dtype, shard=(mesh.get_local_rank(), mesh.size()))
        self.n_sharded = self.n_decayed
        for root in roots if compute_dtype != master_dtype else ():
            within: dict[nn.Module, nn.Module] = {block: block for block in root.layers.values()}
            # What the root has to run before the head's product; of a stage with the head that is the norm alone.
            within |= {module: root for module in (root.embedding, root.norm) if module is not None}
            for module, of in within.items():
                module.register_forward_pre_hook(lambda _, __, of=of: _widen_gradients(of, master_dtype))

    def _roots(self, model: Transformer) -> Sequence[Transformer]:
        """What is run of the model, each by itself; they have its modules."""
        return [model]

    @property
    def whole(self) -> list[str]:
        """The parameters that every rank has whole; they lie behind the others, from `n_decayed` on."""
        return [name for name, span in self.spans.items() if span.begin >= self.n_decayed]

    def _parameter(self, name: str) -> nn.Parameter:
        span, shape = self.spans[name], self._shapes[name]
        if len(shape) < 2:
            return super()._parameter(name)
        assert self.grad is not None
        # FSDP gathers parts of equal size: the buffer has room for the rows that the last ranks lack.
        rows = -(-shape[0] // self.mesh.size())
        padded = self.master[span.begin : span.begin + rows * shape[1:].numel()].view(rows, *shape[1:])
        parameter = nn.Parameter(self._as_shard(padded, shape))
        parameter.grad = self._as_shard(self.view(self.grad, name), shape)  # to which FSDP adds
        return parameter

    def _as_shard(self, local: Tensor, shape: torch.Size) -> DTensor:
        stride = torch.empty(shape, device="meta").stride()
        return DTensor.from_local(local, self.mesh, [Shard(0)], run_check=False, shape=shape, stride=stride)

    def refresh_narrow(self) -> None:
        self.free_gathered()

    def free_gathered(self) -> None:
        for unit in self._units:
            unit.reshard()

    def grad_norm(self) -> Tensor:
        assert self.grad is not None
        squares = torch.linalg.vector_norm(self.grad[: self.n_decayed]).double().square()
        with self._waiting():
            dist.all_reduce(squares, group=self.group)
        return (squares + torch.linalg.vector_norm(self.grad[self.n_decayed :]).double().square()).sqrt()

    def gather(self, flat: Tensor, names: list[str], dtype: torch.dtype) -> dict[str, Tensor]:
        """The whole of matrices (rows, columns) whose rows lie side by side in a flat buffer, in `dtype`."""
        begin, shards = self.spans[names[0]].begin, self.mesh.size()
        last = self._shapes[names[-1]]
        end = self.spans[names[-1]].begin + -(-last[0] // shards) * last[1:].numel()
        mine = flat[begin:end].to(dtype)
        parts = torch.empty((shards, len(mine)), dtype=dtype, device=mine.device)
        with self._waiting():
            _all_gather(parts.view(-1), mine, group=self.group)
        found = {}
        for name in names:
            shape, at = self._shapes[name], self.spans[name].begin - begin
            rows = -(-shape[0] // shards)
            found[name] = parts[:, at : at + rows * shape[1]].reshape(shards * rows, shape[1])[: shape[0]]
        return found

    def mark_gradients_stale(self) -> None:
        assert self.grad is not None
        self.grad[: self.n_decayed].zero_()
        for name in self.whole:
            self.parameters[name].grad_stale = True  # type: ignore[attr-defined]

    def clear_unwritten_gradients(self) -> None:
        pass  # vectors always have one


def _widen_gradients(module: nn.Module, dtype: torch.dtype) -> None:
    """Gathered copies, which are narrow, get gradients in `dtype`: before the graph that makes them is built."""
    for parameter in module.parameters():
        if parameter.requires_grad and not isinstance(parameter, DTensor) and parameter.dtype != dtype:
            wide: Any = parameter
            wide.grad_dtype = dtype


class _Exchange:
    """An exchange of FSDP, as it makes it by itself, in a block of `waiting`."""

    def __init__(self, make: Callable[..., Any], waiting: Waiting) -> None:
        self._make, self._waiting = make, waiting

    def allocate(self, size: Sequence[int], *, dtype: torch.dtype, device: torch.device) -> Tensor:
        return torch.empty(*size, dtype=dtype, device=device)

    def __call__(self, output_tensor: Tensor, input_tensor: Tensor, **named: Any) -> Any:
        with self._waiting():
            return self._make(output_tensor, input_tensor, **named)
