"""Tensors without memory, and the few values of theirs that decide about shapes.

Under `without_memory` every tensor is fake: a shape, a type, a place in the graph. Where a program asks one for its
values, it gets those of integers that follow from shapes (positions, counts, orders), of filled scalars, and of the
choice of a maximum, which is assumed to fall on every entry equally often: tokens visit all experts alike. Any other
number is taken to be 1.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode, unset_fake_temporarily
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_map_only

MOST = 1 << 22  # elements of a tensor whose values are followed
_aten = torch.ops.aten
_SCALAR = _aten._local_scalar_dense.default
_CHOICE = _aten.argmax.default
_FILLED = {_aten.full_like.default, _aten.ones_like.default, _aten.zeros_like.default}
_INTEGERS = {torch.int64, torch.int32, torch.bool}


@contextmanager
def without_memory() -> Iterator[None]:
    """No tensor that is made inside has memory."""
    with FakeTensorMode(), Values():
        yield


class Values(TorchDispatchMode):
    """Follows values beside the fake tensors: each fake one that has any carries a real one."""

    def __init__(self) -> None:
        super().__init__()
        self._choices = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func is _SCALAR:
            return _scalar(args[0])
        known = self._known(func, args, kwargs)
        if known is not None and func in (_aten.repeat_interleave.Tensor, _aten.bincount.default):
            out = args[0].new_empty(known.shape, dtype=known.dtype)  # a shape that only the values know
        else:
            out = func(*args, **kwargs)
        if known is not None:
            _attach(out, known)
        return out

    def _known(self, func: Any, args: Any, kwargs: Any) -> Any:
        """What the operation gives on the real tensors; None where it is not known or of no use."""
        if func is _CHOICE:
            self._choices += 1
            return _choice(*args, turn=self._choices, **kwargs)
        if func in _FILLED and args[0].numel() == 1:
            with unset_fake_temporarily():
                return func(torch.zeros(args[0].shape, dtype=args[0].dtype), *args[1:], **kwargs)
        if func is _aten.bincount.default and _real(args[0]) is None:
            return _even(args[0].numel(), kwargs.get("minlength", args[-1]))
        tensors = list(_tensors((*args, *kwargs.values())))
        if any(_real(x) is None for x in tensors) or not (tensors or _makes_integers(func, args, kwargs)):
            if tensors and _real(tensors[0]) is not None and func._schema.is_mutable:
                _forget(tensors[0])
            return None
        real_args, real_kwargs = tree_map_only(Tensor, _real, (args, kwargs))
        with unset_fake_temporarily():
            return func(*real_args, **real_kwargs)


def _even(count: int, bins: int) -> Tensor:
    """So many entries over all bins but the last, which stands for none."""
    with unset_fake_temporarily():
        return torch.bincount(torch.arange(count) % max(bins - 1, 1), minlength=bins)


def _tensors(values: Iterable[Any]) -> Iterator[Tensor]:
    """Those among the arguments of an operation."""
    for value in values:
        if isinstance(value, Tensor):
            yield value
        elif isinstance(value, (tuple, list)):
            yield from (x for x in value if isinstance(x, Tensor))


def _scalar(x: Tensor) -> Any:
    real = _real(x)
    if real is not None:
        with unset_fake_temporarily():
            return real.item()
    return 1.0 if x.is_floating_point() else 1


def _real(x: Tensor) -> Tensor | None:
    return getattr(x, "_known_values", None)


def _forget(x: Tensor) -> None:
    x.__dict__.pop("_known_values", None)


def _attach(out: Any, known: Any) -> None:
    """Real values to each fake result: integers, and single numbers."""
    if isinstance(out, (tuple, list)):
        for one, real in zip(out, known, strict=True):
            _attach(one, real)
    elif isinstance(out, Tensor) and isinstance(known, Tensor) and _is_followed(known):
        out._known_values = known  # type: ignore[attr-defined]


def _is_followed(known: Tensor) -> bool:
    return known.numel() <= MOST and (known.dtype in _INTEGERS or known.numel() == 1)


def _choice(x: Tensor, dim: int | None = None, keepdim: bool = False, *, turn: int = 0) -> Tensor | None:
    """The place of the maximum, in turn every entry of the dimension; another one when it is asked again."""
    if dim is None or x.numel() // max(x.shape[dim], 1) > MOST:
        return None
    shape = [1 if i == dim % x.dim() else n for i, n in enumerate(x.shape)]
    with unset_fake_temporarily():
        places = (torch.arange(torch.Size(shape).numel()) + turn).remainder(x.shape[dim]).view(shape)
        return places if keepdim else places.squeeze(dim)


_MAKERS = {_aten.arange.default, _aten.arange.start, _aten.arange.start_step, _aten.full.default, _aten.zeros.default}


def _makes_integers(func: Any, args: Any, kwargs: Any) -> bool:
    """Whether an operation without tensors makes integers that are worth following."""
    if func not in _MAKERS or kwargs.get("dtype") not in _INTEGERS:
        return func in _MAKERS and "arange" in func.__name__ and all(isinstance(a, int) for a in args)
    size = args[0] if isinstance(args[0], (list, tuple)) else ()
    return torch.Size(size).numel() <= MOST
