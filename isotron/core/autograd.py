"""`torch.autograd.backward` from roots whose gradients are given, without what torch imports to compare shapes.

It does so with sympy, which takes a second of every process that has not loaded it; the engine below it compares the
shapes by itself.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.autograd import graph
from torch.autograd.graph import GradientEdge


def backward_from(roots: Sequence[Tensor | GradientEdge], gradients: Sequence[Tensor]) -> None:
    """Gradients of all leaves that the roots depend on, added to what they have; the graph is freed."""
    run = getattr(graph, "_engine_run_backward", None)  # private: without it the public way, and the second
    if run is None:
        torch.autograd.backward(tuple(roots), tuple(gradients))  # type: ignore[arg-type]
        return
    run(tuple(roots), tuple(gradients), False, False, (), allow_unreachable=True, accumulate_grad=True)
