"""Optimizer state from a checkpoint of any layout, whatever form it is kept in here."""

from __future__ import annotations

from torch import Tensor

from isotron.core.checkpoint.load import TensorSource, Wanted, load_tensors
from isotron.core.optim.method import Shared
from isotron.core.optim.optimizer import Optimizer, Slot


def load_slots(optimizer: Optimizer, source: TensorSource, kind: str = "") -> None:
    """Fill all state, or that whose name begins with `kind`; names and shapes are checked before any copy.

    Masters that the source lacks are its weights. State that is packed here is unpacked one tensor at a time.
    """
    names, slots = set(source.names()), [s for s in optimizer.slots() if s.name.startswith(kind)]

    def wanted(slot: Slot | Shared, tensor: Tensor | None) -> Wanted:
        name = slot.name if slot.name in names else slot.name.removeprefix("master/")
        return Wanted(name, [] if tensor is None else slot.pieces(tensor, owned=False), slot.shape)

    at_once = [wanted(slot, None if slot.kept.packed else slot.kept.stored()) for slot in slots]
    load_tensors(source, at_once, ignore=lambda name: True)
    for slot in slots:
        if slot.kept.packed:
            wide = slot.kept.stored()
            load_tensors(source, [wanted(slot, wide)], ignore=lambda name: True)
            slot.kept.write(wide)
