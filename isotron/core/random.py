"""Random numbers as a function of (seed, name, global coordinate), so that no layout can change them.

Weights are drawn in tiles of 256 x 256 over the last two dimensions, one key per tile, on the CPU in float32; a rank
draws the tiles it holds. Dropout masks are a counter hash of the logical coordinate. No generator state exists or is
saved.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable
from itertools import product

import torch
from torch import Tensor

from isotron.core.layout import Box, Piece, whole

TILE = 256
_MASK = 0xFFFFFFFF


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


def _mix(h: Tensor) -> Tensor:
    """One round of a 32-bit finaliser on non-negative int64 values, in place."""
    h ^= h >> 16
    h.mul_(0x7FEB352D).bitwise_and_(_MASK)
    h ^= h >> 15
    h.mul_(0x846CA68B - (1 << 32)).bitwise_and_(_MASK)
    h ^= h >> 16
    return h


def _hash(salt: int, *coordinates: Tensor) -> Tensor:
    """32-bit numbers over the broadcast shape of int64 `coordinates`; each depends on (salt, its coordinates) only."""
    h = torch.full((), salt & _MASK, dtype=torch.int64, device=coordinates[0].device)
    for c in coordinates:
        h = _mix(((h + 0x9E3779B9) * 5 + c * 0x9E3779B1) & _MASK)
    return h


def keep_mask(p: float, salt: int, *coordinates: Tensor) -> Tensor:
    """Where dropout of probability `p` keeps: a bool mask over the broadcast shape of int64 `coordinates`.

    The mask at a place depends on (salt, its coordinates) only, on any device.
    """
    return _hash(salt, *coordinates) >= int(p * (1 << 32))


def uniform(salt: int, *coordinates: Tensor) -> Tensor:
    """Numbers in [0, 1), float32, by the same rule."""
    return (_hash(salt, *coordinates) >> 8).float() / (1 << 24)
