"""The orthogonal factor of a matrix by Newton-Schulz iteration, and Muon's length of an update.

Source: Jordan et al. 2024 (Muon): a quintic iteration that is steep at zero, so that singular values end between about
0.7 and 1.2 after five rounds.
"""

from __future__ import annotations

from math import sqrt

import torch
from torch import Tensor

COEFFICIENTS = (3.4445, -4.7750, 2.0315)


def orthogonalised(x_MN: Tensor, steps: int) -> Tensor:
    """U S' V^T of x = U S V^T with S' near one; in the type of x, so that float64 stays float64."""
    wide = x_MN.shape[0] <= x_MN.shape[1]
    x = x_MN if wide else x_MN.t()
    x = x / torch.linalg.vector_norm(x).clamp_min(1e-7 if x.dtype != torch.float64 else 1e-30)
    a, b, c = COEFFICIENTS
    for _ in range(steps):
        gram = x @ x.t()
        x = torch.addmm(x, torch.addmm(gram, gram, gram, beta=b, alpha=c), x, beta=a)
    return x if wide else x.t()


def length(mode: str, rows: int, columns: int) -> float:
    """What an orthogonal matrix of this shape is multiplied with."""
    match mode:
        case "spectral":
            return sqrt(max(rows, columns))
        case "unit_rms_norm":
            return sqrt(rows / columns)
    return sqrt(max(1.0, rows / columns))
