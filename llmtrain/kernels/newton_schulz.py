"""The nearest matrix with orthonormal rows, by a Newton-Schulz iteration over a stack of matrices: matmuls alone.

Muon's update (Jordan et al. 2024, kellerjordan.github.io/posts/muon). The polynomials are those of Polar Express
(Amsel, Persson, Musco and Gower 2025, arXiv 2505.16932, algorithm 1, degree 5, for singular values from 1e-3 on): each
is the best one for the interval that the ones before leave, where Jordan's is the same five times.
"""

import torch
from torch import Tensor

SAFETY = 1.01
"""Singular values that rounding has pushed above 1 by less than this are still brought down, not up."""
POLYNOMIALS = [
    (a / SAFETY, b / SAFETY**3, c / SAFETY**5)
    for a, b, c in (
        (8.28721201814563, -23.595886519098837, 17.300387312530933),
        (4.107059111542203, -2.9478499167379106, 0.5448431082926601),
        (3.9486908534822946, -2.908902115962949, 0.5518191394370137),
        (3.3184196573706015, -2.488488024314874, 0.51004894012372),
        (2.300652019954817, -1.6689039845747493, 0.4188073119525673),
    )
]
"""a, b, c of x -> a x + b x^3 + c x^5, one after the other."""

SMALLEST = 1e-3
"""Singular values below this share of the matrix' Frobenius norm stay below BOUND."""
BOUND = (0.83, 1.13)
"""What the singular values become in exact arithmetic, from SMALLEST on; five of Jordan's give 0.47 to 1.21."""
TINY = 1e-18
"""A norm below this counts as this: its square would leave FP32."""


BATCH = 1 << 27
"""Elements of a stack that is worked on at once: enough to fill a card, little enough beside a model."""


def batch_size(rows: int, columns: int) -> int:
    """Matrices of a stack, at most."""
    return max(1, BATCH // (rows * columns))


def work_elements(count: int, rows: int, columns: int) -> int:
    """Numbers of the stack's dtype that `orthogonalise` holds at its peak, the stack itself and its result included."""
    return count * (2 * rows * columns + 2 * rows * rows)


def orthogonalise(x: Tensor) -> Tensor:
    """x: (count, rows, columns), rows <= columns, of any scale; overwritten. Returns U V^T for each matrix U S V^T, but
    for singular values in BOUND where they should be 1; zero stays zero. In x's dtype: bf16 on a card, where rounding
    widens the bound by a few hundredths; sums are FP32."""
    assert x.dim() == 3 and x.shape[1] <= x.shape[2]
    norms = torch.linalg.vector_norm(x, dim=(1, 2), keepdim=True, dtype=torch.promote_types(x.dtype, torch.float32))
    x.mul_(norms.clamp_(min=TINY).reciprocal_())
    for a, b, c in POLYNOMIALS:
        gram = torch.bmm(x, x.mT)
        x = torch.baddbmm(x, torch.baddbmm(gram, gram, gram, beta=b, alpha=c), x, beta=a)
    return x
