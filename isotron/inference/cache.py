"""Keys and values of earlier tokens, kept per layer, and the attention core that reads them.

Legend: B rows (prompts), S new tokens per row, H query heads, K key/value heads (H and K local), T slots, N head size.

Slot t of a row holds the key and value of the row's token at position t. Rows of different lengths lie left-aligned:
in the first pass padding follows the prompt, and its slots are overwritten as the row grows. A query at position p
sees slots 0..p only, all of them the row's own, so a row never sees padding or another row.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager

import torch
import torch.nn as nn
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from isotron.core.nn.attention import Attention
from isotron.core.nn.context import Context


class Cache:
    """What all layers of a stage share: B x T slots, and which of them the present pass looks at."""

    def __init__(self, rows: int, slots: int) -> None:
        self.rows, self.slots = rows, slots
        self.empty, self.long = True, False
        self.used = 0
        self.positions_BS: Tensor | None = None

    def begin_anew_if(self, long: bool) -> None:
        """Under LongRoPE keys are turned otherwise once a row is long; then the next pass takes all tokens again."""
        self.empty, self.long = self.empty or long != self.long, long

    def begin(self, positions_BS: Tensor, used: int) -> None:
        """A pass over tokens at `positions_BS`, all below `used`; on an empty cache they are 0..S-1 in every row."""
        self.used, self.positions_BS = used, positions_BS

    def visible(self, window: int) -> Tensor:
        """[B, 1, S, T]: the slots that each query sees; `window` above 0 limits how far back."""
        if self.positions_BS is None:
            raise RuntimeError("no pass has begun on this cache")
        slots, at = torch.arange(self.used, device=self.positions_BS.device), self.positions_BS[..., None]
        seen = slots <= at
        if window:
            seen &= slots > at - window
        return seen[:, None]

    def end(self) -> None:
        """The pass has gone through all layers."""
        self.empty = False


class CachedCore(nn.Module):
    """The attention core of generation for one layer: keeps new keys and values, attends to all that are kept."""

    def __init__(self, plain: nn.Module, cache: Cache, kv_heads: int, head_size: int, like: Tensor) -> None:
        super().__init__()
        self.plain, self.cache = plain, cache
        self.window: int = getattr(plain, "window", 0)
        # zeros, not whatever the memory held: a hidden slot has weight 0, and 0 x NaN would be NaN
        shape = (2, cache.rows, kv_heads, cache.slots, head_size)
        self.k_BKTN, self.v_BKTN = torch.zeros(shape, dtype=like.dtype, device=like.device)

    def forward(self, q_BHSN: Tensor, k_BKSN: Tensor, v_BKSN: Tensor, ctx: Context) -> Tensor:
        """o_BHSN."""
        cache = self.cache
        at = ctx.batch.positions[:, None, :, None].expand(k_BKSN.shape)
        self.k_BKTN.scatter_(2, at, k_BKSN)
        self.v_BKTN.scatter_(2, at, v_BKSN)
        if cache.empty:  # nothing earlier to see: the plain causal core is the same and needs no mask
            o_BHSN: Tensor = self.plain(q_BHSN, k_BKSN, v_BKSN, ctx)
            return o_BHSN
        k, v = self.k_BKTN[:, :, : cache.used], self.v_BKTN[:, :, : cache.used]
        grouped = q_BHSN.shape[1] != k.shape[1]
        return scaled_dot_product_attention(q_BHSN, k, v, attn_mask=cache.visible(self.window), enable_gqa=grouped)


@contextmanager
def cached(module: nn.Module, rows: int, slots: int) -> Iterator[Cache]:
    """Inside, `module` is in evaluation mode and its attention layers keep a new, empty cache of `rows` x `slots`.

    Afterwards the module is what it was before, so that training can go on.
    """
    cache = Cache(rows, slots)
    layers = [layer for layer in module.modules() if isinstance(layer, Attention)]
    before = [(layer, layer.core) for layer in layers]
    modes = [(part, part.training) for part in module.modules()]
    module.eval()
    try:
        for layer in layers:
            layer.core = _core(layer, cache)  # type: ignore[assignment]
        yield cache
    finally:
        _restore(before, modes)


def _core(layer: Attention, cache: Cache) -> CachedCore:
    n, weight = layer.head_size, layer.qkv.weight
    heads = layer.out.weight.shape[1] // n
    return CachedCore(layer.core, cache, (weight.shape[0] // n - heads) // 2, n, weight)


def _restore(cores: Iterable[tuple[Attention, nn.Module]], modes: Iterable[tuple[nn.Module, bool]]) -> None:
    for layer, core in cores:
        layer.core = core  # type: ignore[assignment]
    for part, training in modes:
        part.training = training
