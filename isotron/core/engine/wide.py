"""Modules of an engine that stay in float32 when the rest is cast to 16 bits, by patterns of parameter names.

A module with such a parameter keeps all of its own parameters and buffers wide. What it is given is widened, and what
it returns has the type that the rest works in.
"""

from __future__ import annotations

from collections.abc import Sequence
from fnmatch import fnmatchcase
from typing import Any

import torch
import torch.nn as nn
from torch import Tensor

from isotron.core.errors import refuse


def cast(module: nn.Module, dtype: torch.dtype, keep_float32: Sequence[str] = ()) -> None:
    """Cast all of `module` to `dtype` but for the submodules that own a parameter or buffer of a matching name."""
    chosen = {id(x) for pattern in keep_float32 for x in _matching(module, pattern)}
    kept = {n for n, part in module.named_modules() if any(id(x) in chosen for x in _own(part))}
    wide = torch.promote_types(dtype, torch.float32)
    for name, part in module.named_modules():
        to = wide if name in kept else dtype
        for own in _own(part):
            if own.is_floating_point():
                own.data = own.data.to(to)
        if name in kept and wide != dtype:
            part.register_forward_pre_hook(lambda _m, x, kw: (_to(x, wide), _to(kw, wide)), with_kwargs=True)
            part.register_forward_hook(lambda _m, _x, y: _to(y, dtype))


def _own(part: nn.Module) -> list[Tensor]:
    return [*part.parameters(recurse=False), *part.buffers(recurse=False)]


def _matching(module: nn.Module, pattern: str) -> list[Tensor]:
    """Tied parameters under each of their names."""
    named = [*module.named_parameters(remove_duplicate=False), *module.named_buffers()]
    found = [x for name, x in named if fnmatchcase(name, pattern)]
    if not found:
        names = [name for name, _ in named]
        case = f"no parameter has such a name; there are {', '.join(names[:8])}{', ...' if len(names) > 8 else ''}"
        raise refuse(f"keep_float32 {pattern!r}", case, f"keep_float32=({names[0]!r},)" if names else "leave it out")
    return found


def _to(value: Any, dtype: torch.dtype) -> Any:
    """Floating-point tensors in nested tuples, lists and dicts as `dtype`."""
    if isinstance(value, Tensor):
        return value.to(dtype) if value.is_floating_point() else value
    if isinstance(value, (tuple, list)) and type(value) in (tuple, list):
        return type(value)(_to(x, dtype) for x in value)
    if isinstance(value, dict):
        return {key: _to(x, dtype) for key, x in value.items()}
    return value
