"""One op a file: reference, fast kernel, autograd function and the choice between them.

What is named here is for use by itself: plain tensors under autograd, ValueError where an argument does not fit. Two of
them have the names of their modules, so import those as `from llmtrain.kernels.rmsnorm import ...`.
"""

from llmtrain.kernels.head import linear_cross_entropy
from llmtrain.kernels.packed import packed_attention
from llmtrain.kernels.rmsnorm import rmsnorm, rmsnorm_backward, rmsnorm_forward
from llmtrain.kernels.rotary import rotary_qkv, rotary_tables
from llmtrain.kernels.swiglu import swiglu

__all__ = [
    "linear_cross_entropy", "packed_attention", "rmsnorm", "rmsnorm_backward", "rmsnorm_forward", "rotary_qkv",
    "rotary_tables", "swiglu",
]  # fmt: skip
