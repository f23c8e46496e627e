"""How many bytes are alive beside a rank's state, and how many there were at most."""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from typing import Any

from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

NUMBER = 16  # bytes


class LiveBytes(TorchDispatchMode):
    """Storages that operations make while it is entered, each once, from its making to the death of its last tensor.
    Single numbers do not count.

    `state`: tensors whose storages do not count. `gathered`: tensors whose memory comes and goes (weights that are
    gathered for a moment); what they have counts.
    """

    def __init__(self, state: Sequence[Tensor], gathered: Sequence[Tensor] = ()) -> None:
        super().__init__()
        self._passing = [x.untyped_storage() for x in gathered]
        self._own = {x.untyped_storage()._cdata for x in (*state, *gathered)}
        self._alive: dict[int, tuple[int, Any]] = {}
        self.now = self.peak = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        for x in out if isinstance(out, (tuple, list)) else (out,):
            if isinstance(x, Tensor):
                self._note(x)
        passing = sum(storage.nbytes() for storage in self._passing)
        self.peak = max(self.peak, self.now + passing)
        return out

    def _note(self, x: Tensor) -> None:
        storage = x.untyped_storage()
        at, size = storage._cdata, storage.nbytes()
        if size <= NUMBER or at in self._alive or at in self._own:
            return

        def gone(_: Any) -> None:
            self._alive.pop(at)
            self.now -= size

        self._alive[at] = size, weakref.ref(storage, gone)
        self.now += size

    def counted(self, tensors: Sequence[Tensor]) -> int:
        """Bytes of these that count, each storage once."""
        storages = {x.untyped_storage()._cdata: x.untyped_storage() for x in tensors}
        return sum(storage.nbytes() for at, storage in storages.items() if at in self._alive)

    def restart(self) -> None:
        """Forget the peak so far."""
        self.peak = self.now
