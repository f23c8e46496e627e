"""What a transport keeps alive: the tensors of a communication, until nobody waits for it any more."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any
from unittest.mock import patch

import torch.distributed as dist
from torch import Tensor

_CALLS = (
    *("all_reduce", "all_to_all_single", "all_gather_single", "all_gather_into_tensor"),
    *("reduce_scatter_single", "reduce_scatter_tensor"),
)


class _Work:
    """A communication of the fake process group with the tensors that a real one would hold."""

    def __init__(self, work: Any, tensors: Sequence[Tensor]) -> None:
        self._work, self._tensors = work, tensors

    def wait(self) -> None:
        """Nothing is under way."""
        self._work.wait()

    def is_completed(self) -> bool:
        """As the fake one says."""
        return bool(self._work.is_completed())


@contextmanager
def holding() -> Iterator[None]:
    """Communications hold their tensors, as real ones do."""
    with ExitStack() as stack:
        for name in _CALLS:
            if hasattr(dist, name):  # names differ between releases of torch
                stack.enter_context(patch.object(dist, name, _held(getattr(dist, name))))
        stack.enter_context(patch.object(dist, "batch_isend_irecv", _held_batch(dist.batch_isend_irecv)))
        yield


def _held(real: Callable[..., Any]) -> Callable[..., Any]:
    def call(*args: Any, **kwargs: Any) -> Any:
        return _Work(real(*args, **kwargs), [x for x in args if isinstance(x, Tensor)])

    return call


def _held_batch(real: Callable[..., Any]) -> Callable[..., Any]:
    def call(ops: Sequence[Any]) -> list[Any]:
        works = real(ops)
        if len(works) != len(ops):
            return [_Work(works[0], [op.tensor for op in ops])] if works else []
        return [_Work(work, [op.tensor]) for work, op in zip(works, ops, strict=True)]

    return call
