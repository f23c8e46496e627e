"""Memory seen operation by operation."""

from __future__ import annotations

import weakref
from collections.abc import Hashable, Sequence
from typing import Any

from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode


class Live(TorchDispatchMode):
    """Every storage that an operation makes: the largest, and the most bytes alive at once; those of `own` aside."""

    def __init__(self, own: Sequence[Tensor] = ()) -> None:
        super().__init__()
        self.alive: dict[int, Any] = {}  # weak references to storages, which may change their size
        self.own = {x.untyped_storage()._cdata for x in own}
        self.largest = self.peak = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        for x in out if isinstance(out, (tuple, list)) else (out,):
            if isinstance(x, Tensor) and x.device.type != "meta":
                self._note(x)
        return out

    def _note(self, x: Tensor) -> None:
        storage = x.untyped_storage()
        at, size = storage._cdata, storage.nbytes()
        if at not in self.alive and at not in self.own:
            self.alive[at] = weakref.ref(storage)
            now = sum(kept.nbytes() for kept in (ref() for ref in self.alive.values()) if kept is not None)
            self.largest, self.peak = max(self.largest, size), max(self.peak, now)
            weakref.finalize(storage, self.alive.pop, at, None)


class Gathered(TorchDispatchMode):
    """Most bytes that some tensors take at any operation: their storages grow and shrink."""

    def __init__(self, tensors: Sequence[Tensor]) -> None:
        super().__init__()
        self._storages = [x.untyped_storage() for x in tensors]
        self.peak = 0

    @property
    def bytes(self) -> int:
        """Now."""
        return sum(storage.nbytes() for storage in self._storages)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.peak = max(self.peak, self.bytes)
        return func(*args, **(kwargs or {}))


class Noted(TorchDispatchMode):
    """Most bytes that noted tensors take at any operation, from `note` to `forget`."""

    def __init__(self) -> None:
        super().__init__()
        self._noted: dict[Hashable, int] = {}
        self.peak = 0

    def note(self, name: Hashable, x: Tensor) -> None:
        """Count its storage from now on, under a name: a place in memory may be another storage's soon."""
        self._noted[name] = x.untyped_storage().nbytes()

    def forget(self, name: Hashable) -> None:
        """It is free."""
        del self._noted[name]

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.peak = max(self.peak, sum(self._noted.values()))
        return func(*args, **(kwargs or {}))
