"""How an optimizer keeps a tensor: as it is, or rounded to fewer bits between steps.

`read` gives wide numbers, `write` takes them back. What a checkpoint holds is `stored`: the tensor itself, or the wide
numbers where the form in memory depends on how tensors are cut.

int8 is block-wise: 128 neighbours in a row share the largest magnitude, and a number is a power law of its code, so
that small ones keep their size. Writing what was read changes no bit. Source of the idea: Dettmers et al. 2022 (8-bit
optimizers by block-wise quantization); the code here is a square for signed and a fourth power for positive numbers.

A moment that changes by less than half a step of its type would never change if it were rounded to the nearest number
(0.999 x in bfloat16 is x again). So the threshold of rounding moves from update to update, over equal parts of the
step: on average over updates nothing is lost, and the numbers do not depend on the layout.
"""

from __future__ import annotations

from collections.abc import Callable
from math import prod
from typing import Protocol

import torch
from torch import Tensor

BLOCK = 128
Zeros = Callable[[tuple[int, ...], torch.dtype], Tensor]


class Kept(Protocol):
    """One tensor of optimizer state. `direct`: reading gives the tensor itself, not a copy; `packed`: storing gives a
    copy.
    """

    direct: bool
    packed: bool

    def read(self) -> Tensor:
        """Wide numbers."""
        ...

    def write(self, wide: Tensor, turn: int | None = None) -> None:
        """Take over wide numbers; `turn`, the number of an update, moves the threshold of rounding from nearest."""
        ...

    def stored(self) -> Tensor:
        """What a checkpoint holds."""
        ...

    def nbytes(self) -> int:
        """Bytes that it takes beside the weights."""
        ...


class Whole:
    """The tensor as it is."""

    direct, packed = True, False

    def __init__(self, tensor: Tensor, own: bool = True) -> None:
        self.tensor, self.own = tensor, own

    def read(self) -> Tensor:
        """The tensor itself."""
        return self.tensor

    def write(self, wide: Tensor, turn: int | None = None) -> None:
        """Nothing, where `wide` is the tensor itself."""
        if wide is not self.tensor:
            self.tensor.copy_(wide)

    def stored(self) -> Tensor:
        """The tensor itself."""
        return self.tensor

    def nbytes(self) -> int:
        """0 where it is the weight."""
        return self.tensor.nbytes if self.own else 0


class Rounded:
    """A bfloat16 tensor; `wide` is the type that it is read in."""

    direct, packed = False, False

    def __init__(self, tensor: Tensor, wide: torch.dtype) -> None:
        self.tensor, self.wide = tensor, wide

    def read(self) -> Tensor:
        """A wide copy."""
        return self.tensor.to(self.wide)

    def write(self, wide: Tensor, turn: int | None = None) -> None:
        """bfloat16 is the upper half of float32: a number below 2^16 added to the lower half rounds the magnitude."""
        if turn is None:
            self.tensor.copy_(wide)
            return
        bits = wide.float().view(torch.int32) + int(threshold(turn) * 0x10000)
        self.tensor.view(torch.int16).copy_(bits >> 16)

    def stored(self) -> Tensor:
        """The bfloat16 tensor itself."""
        return self.tensor

    def nbytes(self) -> int:
        """Two per element."""
        return self.tensor.nbytes


class Blocks:
    """Eight bits per element and one float32 per block of `BLOCK` neighbours in a row of `shape`."""

    direct, packed = False, True

    def __init__(self, shape: tuple[int, ...], wide: torch.dtype, zeros: Zeros, signed: bool) -> None:
        self.shape, self.wide, self.signed = shape, wide, signed
        width = shape[-1]
        rows, blocks = (torch.Size(shape).numel() // width if width else 0), -(-width // BLOCK)
        self.codes = zeros((rows, width), torch.int8 if signed else torch.uint8)
        self.largest = zeros((rows, blocks), torch.float32)

    def read(self) -> Tensor:
        """A flat wide tensor."""
        share = self.codes.to(self.wide) / (127 if self.signed else 255)
        power = share * share.abs() if self.signed else share.square().square()
        return power.mul_(self._spread(self.largest)).view(-1)

    def write(self, wide: Tensor, turn: int | None = None) -> None:
        """What is not zero never becomes zero."""
        x = wide.view(self.codes.shape)
        padded = torch.nn.functional.pad(x.abs(), (0, -x.shape[-1] % BLOCK))
        self.largest.copy_(padded.unflatten(-1, (-1, BLOCK)).amax(-1))
        share = (x.abs() / self._spread(self.largest).clamp_min(torch.finfo(torch.float32).tiny)).sqrt_()
        root = share if self.signed else share.sqrt_()
        top = 127 if self.signed else 255
        code = root.mul_(top).add_(0.5 if turn is None else threshold(turn)).floor_().clamp_(1.0, top)
        self.codes.copy_(code.mul_(x.sign()))

    def _spread(self, per_block: Tensor) -> Tensor:
        """A number per block -> one per element."""
        return per_block.to(self.wide).repeat_interleave(BLOCK, -1)[:, : self.codes.shape[-1]]

    def stored(self) -> Tensor:
        """Wide numbers: another cut has other blocks."""
        return self.read()

    def nbytes(self) -> int:
        """One per element, four per block."""
        return self.codes.nbytes + self.largest.nbytes


class Remainder:
    """A float32 master as its bfloat16 weight and the 16 bits that the weight lacks; `write` sets the weight too.

    The weight is the nearest bfloat16; of two equally near ones that with the larger magnitude.
    """

    direct, packed = False, True

    def __init__(self, weight: Tensor) -> None:
        self.weight = weight
        self.low = torch.zeros(weight.shape, dtype=torch.int16, device=weight.device)

    def read(self) -> Tensor:
        """The master, exactly."""
        high = self.weight.view(torch.int16).to(torch.int32) << 16
        return (high + self.low).view(torch.float32)

    def write(self, wide: Tensor, turn: int | None = None) -> None:
        """Cut the master in two."""
        bits = wide.contiguous().view(torch.int32)
        high = (bits + 0x8000) >> 16
        self.low.copy_(bits - (high << 16))
        self.weight.view(torch.int16).copy_(high)

    def stored(self) -> Tensor:
        """The master: checkpoints do not depend on how it is kept."""
        return self.read()

    def nbytes(self) -> int:
        """Two per element."""
        return self.low.nbytes


def zeros_on(device: torch.device) -> Zeros:
    """Where state is kept that is not offloaded."""
    return lambda shape, dtype: torch.zeros(shape, dtype=dtype, device=device)


def threshold(turn: int) -> float:
    """The part of a step that is rounded up in this turn: multiples of the golden ratio spread evenly over (0, 1)."""
    return 0.001 + 0.998 * ((turn + 1) * 0.6180339887498949 % 1.0)


def kept(shape: tuple[int, ...], wide: torch.dtype, dtype: str, signed: bool, zeros: Zeros) -> Kept:
    """Zeros for one state of a parameter of `shape`, flat, read in the type `wide`; `zeros` says where.

    Vectors stay wide under int8: their blocks would depend on the layout, and they are small.
    """
    if dtype == "float32" or (dtype == "int8" and len(shape) < 2):
        return Whole(zeros((prod(shape),), wide))
    if dtype == "int8":
        return Blocks(shape, wide, zeros, signed)
    return Rounded(zeros((prod(shape),), torch.bfloat16), wide)
