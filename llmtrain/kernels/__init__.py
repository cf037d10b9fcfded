"""One op a file: reference, fast kernel, autograd function and the choice between them.

What is named here is for use by itself: plain tensors under autograd, ValueError where an argument does not fit.
"""

from llmtrain.kernels.head import linear_cross_entropy
from llmtrain.kernels.packed import packed_attention

__all__ = ["linear_cross_entropy", "packed_attention"]
