"""What a transport keeps alive: the tensors of a communication, until nobody waits for it any more.

What is said to each rank of a group by itself costs a fake communication for each of them: hundreds for every bucket of
gradients. Those that neither make tensors nor end anything are left out.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any
from unittest.mock import patch

import torch.distributed as dist
from torch import Tensor

from isotron.core import comm
from isotron.core.mesh import Group

_CALLS = (
    *("all_reduce", "all_to_all_single", "all_gather_single", "all_gather_into_tensor"),
    *("reduce_scatter_single", "reduce_scatter_tensor"),
)


class _Work:
    """A communication of the fake process group with the tensors that a real one would hold; none, where it is left
    out.
    """

    def __init__(self, work: Any, tensors: Sequence[Tensor]) -> None:
        self._work, self._tensors = work, tensors

    def wait(self) -> None:
        """Nothing is under way."""
        if self._work is not None:
            self._work.wait()

    def is_completed(self) -> bool:
        """As the fake one says."""
        return self._work is None or bool(self._work.is_completed())


@contextmanager
def holding() -> Iterator[None]:
    """Communications hold their tensors, as real ones do."""
    with ExitStack() as stack:
        for name in _CALLS:
            if hasattr(dist, name):  # names differ between releases of torch
                stack.enter_context(patch.object(dist, name, _held(getattr(dist, name))))
        stack.enter_context(patch.object(dist, "batch_isend_irecv", _held_batch))
        stack.enter_context(patch.object(comm, "start_gather_flat", _gathered))
        stack.enter_context(patch.object(comm, "_put_sum", _summed(comm._put_sum)))
        yield


def _held(real: Callable[..., Any]) -> Callable[..., Any]:
    def call(*args: Any, **kwargs: Any) -> Any:
        return _Work(real(*args, **kwargs), [x for x in args if isinstance(x, Tensor)])

    return call


def _held_batch(ops: Sequence[Any]) -> list[_Work]:
    return [_Work(None, [op.tensor]) for op in ops]


def _gathered(flat: Tensor, cuts: Sequence[int], group: Group) -> comm.Pending:
    """Runs of one buffer to and from everybody, in place."""
    return comm.done(flat) if group.size == 1 else comm.Pending([_Work(None, [flat])], lambda: flat)


def _summed(real: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """Of parts that are added one by one, all but the first three."""

    def put_sum(parts: Sequence[Tensor] | Tensor, into: Tensor, add: bool) -> Tensor:
        return real(parts[:3], into, add)

    return put_sum
