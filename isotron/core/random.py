"""Random numbers as a function of (seed, name, global coordinate), so that no layout can change them.

Weights are drawn in tiles of 256 x 256 over the last two dimensions, one key per tile, on the CPU in float32; a rank
draws the tiles it holds. Dropout masks are a counter hash of the logical coordinate. No generator state exists or is
saved.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Iterator, Sequence
from itertools import product

import torch
from torch import Tensor

from isotron.core.layout import Box, Piece, whole

TILE = 256
_MASK = 0xFFFFFFFF
_HIGHEST = (1 << 31) - 1
_BLOCK = 1 << 16  # numbers hashed at a time on a CPU


def key(seed: int, name: str, *numbers: int) -> int:
    """A 63-bit key, the same on every machine."""
    text = f"{seed}/{name}/{'/'.join(map(str, numbers))}"
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "little") >> 1


def normal_pieces(
    out: Tensor, pieces: Iterable[Piece], shape: tuple[int, ...], seed: int, name: str, std: float = 1.0
) -> None:
    """Fill the pieces of a local tensor with normal numbers of the global tensor `name` of `shape`, tile by tile."""
    generator = torch.Generator()
    for piece in pieces:
        box = piece.global_box
        spans = [range(o, o + n) for o, n in zip(box.offset[:-2], box.shape[:-2], strict=True)]
        tiled = list(zip(box.offset, box.shape, shape, strict=True))[-2:]
        spans += [range(o // TILE, -(-(o + n) // TILE)) for o, n, _ in tiled]
        for index in product(*spans):
            lead, tile = index[: len(shape) - len(tiled)], index[len(shape) - len(tiled) :]
            corner = (*lead, *(t * TILE for t in tile))
            size = (1,) * len(lead) + tuple(min(TILE, s - t * TILE) for t, (_, _, s) in zip(tile, tiled, strict=True))
            generator.manual_seed(key(seed, name, *index))
            numbers = torch.randn(size, generator=generator)
            common = Box(corner, size).overlap(box)
            if common is None:
                continue
            target = common.relative_to(box).shifted(piece.local_box.offset)
            out[target.slices()] = (numbers[common.relative_to(Box(corner, size)).slices()] * std).to(out)


def normal(shape: tuple[int, ...], seed: int, name: str) -> Tensor:
    """A whole tensor of standard normal numbers, float32 on the CPU."""
    out = torch.empty(shape)
    normal_pieces(out, [Piece(whole(shape), whole(shape))], shape, seed, name)
    return out


def keep_mask(p: float, salt: int, *coordinates: Tensor) -> Tensor:
    """Where dropout of probability `p` keeps: a bool mask over the broadcast shape of int64 `coordinates`.

    The mask at a place depends on (salt, its coordinates) only, on any device.
    """
    least = int(p * (1 << 32)) - (1 << 31)  # among signed numbers
    shape = _common_shape(coordinates)
    mask = torch.empty(shape, dtype=torch.bool, device=coordinates[0].device)
    if least > _HIGHEST:
        return mask.fill_(False)
    for rows, h in _hashes(shape, salt, *coordinates):
        torch.ge(h.bitwise_xor_(-1 << 31), least, out=mask.view(-1, shape[-1])[rows])
    return mask


def uniform(salt: int, *coordinates: Tensor) -> Tensor:
    """Numbers in [0, 1), float32, by the same rule."""
    shape = _common_shape(coordinates)
    numbers = torch.empty(shape, device=coordinates[0].device)
    for rows, h in _hashes(shape, salt, *coordinates):
        numbers.view(-1, shape[-1])[rows] = (h >> 8 & 0xFFFFFF).float() / (1 << 24)
    return numbers


def _common_shape(coordinates: Sequence[Tensor]) -> torch.Size:
    """The broadcast shape; `torch.broadcast_shapes` would load sympy to say it, a second of every process."""
    return torch.broadcast_tensors(*coordinates)[0].shape  # type: ignore[no-any-return]


def _hashes(shape: torch.Size, salt: int, *coordinates: Tensor) -> Iterator[tuple[slice, Tensor]]:
    """32-bit numbers over the broadcast `shape` of int64 `coordinates`, as the bits of an int32; each depends on (salt,
    its coordinates) only. In blocks of rows of the last dimension, which on a CPU stay in its cache.
    """
    *few, last = coordinates
    h = torch.full((), salt & _MASK, dtype=torch.int64, device=last.device)
    for c in few:
        h = _mix(_low((h + 0x9E3779B9) * 5 + c * 0x9E3779B1)).long() & _MASK
    a, b = (_rows(_low(x), shape) for x in ((h + 0x9E3779B9) * 5, last * 0x9E3779B1))
    count = shape[:-1].numel()
    step = max(1, _BLOCK // max(shape[-1], 1)) if last.device.type == "cpu" else count
    for start in range(0, count, step):
        rows = slice(start, start + step)
        yield rows, _mix((a if len(a) == 1 else a[rows]) + (b if len(b) == 1 else b[rows]))


def _rows(x: Tensor, shape: torch.Size) -> Tensor:
    """x for every row of `shape`, or one row if they are all alike; one number per row if those are alike."""
    x = x.reshape(1) if x.ndim == 0 else x
    return x.reshape(1, -1) if x.numel() == x.shape[-1] else x.expand(*shape[:-1], x.shape[-1]).reshape(-1, x.shape[-1])


def _low(x: Tensor) -> Tensor:
    """The lower 32 bits of int64 numbers, as an int32."""
    return (((x + (1 << 31)) & _MASK) - (1 << 31)).int()


def _mix(h: Tensor) -> Tensor:
    """One round of a 32-bit finaliser on the bits of an int32, in place; products wrap around."""
    aside = h >> 16
    h ^= aside.bitwise_and_(0xFFFF)
    h *= 0x7FEB352D
    h ^= torch.bitwise_right_shift(h, 15, out=aside).bitwise_and_(0x1FFFF)
    h *= 0x846CA68B - (1 << 32)
    h ^= torch.bitwise_right_shift(h, 16, out=aside).bitwise_and_(0xFFFF)
    return h
