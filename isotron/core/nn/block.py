"""Residual blocks of attention and MLP, one after the other or side by side, with norms before them, after them or
both, and dropout on both branches.

Legend: B batch, S sequence, D hidden. Families choose the norm, the attention and the MLP.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from typing import Any

import torch
import torch.nn as nn
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from isotron.core.nn.attention import Attention
from isotron.core.nn.context import Context
from isotron.core.nn.dropout import Dropout
from isotron.core.nn.mlp import MLP, GatedMLP


class PreNormBlock(nn.Module):
    """`recompute` keeps the inputs of norms only and computes their results again in the backward, `recompute_mlp`
    the input of the whole MLP, which `mlp_chunks` above 1 computes in so many parts of the sequence.
    """

    def __init__(
        self, norms: tuple[nn.Module, nn.Module], attention: Attention, mlp: nn.Module, dropout: float, name: str
    ) -> None:
        super().__init__()
        self.attention_norm, self.attention, self.mlp_norm, self.mlp = norms[0], attention, norms[1], mlp
        self.attention_dropout = Dropout(dropout, f"{name}.attention")
        self.mlp_dropout = Dropout(dropout, f"{name}.mlp")
        self.recompute = self.recompute_mlp = False
        self.mlp_chunks = 1
        self.halves: tuple[str, ...] = ("attention", "mlp")

    def keep_half(self, half: str) -> None:
        """Be the "attention" or the "mlp" half alone; the other one is a pipeline stage's before or behind."""
        self.halves = (half,)
        for name in [name for name, _ in self.named_children() if not name.startswith(half)]:
            delattr(self, name)

    def set_recompute(self, modules: Collection[str]) -> None:
        """Selective recompute: layernorm, moe_act (the activation), core_attn (probabilities), mlp (all of it)."""
        self.recompute, self.recompute_mlp = "layernorm" in modules, "mlp" in modules
        if "mlp" in self.halves:
            self.mlp.recompute = "moe_act" in modules  # type: ignore[assignment]
        if "attention" in self.halves:
            self.attention.core.recompute = "core_attn" in modules
            for p in self.attention_norm.parameters() if self.recompute else ():
                p.writes = getattr(self.attention, "readers", 1)  # type: ignore[attr-defined]

    def set_mlp_chunks(self, chunks: int) -> None:
        """Compute the MLP in so many parts of the sequence; each adds to the gradients of what it goes through."""
        self.mlp_chunks = chunks
        for module in self._in_chunks() if chunks > 1 and "mlp" in self.halves else ():
            for p in module.parameters():
                p.writes = chunks  # type: ignore[attr-defined]

    def _in_chunks(self) -> tuple[nn.Module, ...]:
        return self.mlp, self.mlp_norm

    @contextmanager
    def unasked(self, shape: torch.Size) -> Iterator[None]:
        """Around a second forward, which ends where nothing more is kept: what the MLP's last layer gives, of `shape`,
        is read by nothing, and the layer computes and communicates nothing.
        """
        last = self._last()
        if last is not None:
            last.unasked = shape
        try:
            yield
        finally:
            if last is not None:
                last.unasked = None

    def _last(self) -> Any:
        """What need not compute what nothing reads."""
        mlp = getattr(self, "mlp", None)
        return mlp.down if isinstance(mlp, (MLP, GatedMLP)) else None

    def _mlp(self, x_BSD: Tensor, *context: Context) -> Tensor:
        """The MLP with its norm; `context` for one that sees the batch."""
        if self.recompute_mlp or self.mlp_chunks > 1:
            return self._mlp_again(x_BSD, *context)
        return self.mlp(x_BSD, *context, self.mlp_norm) if self.recompute else self._mlp_of(x_BSD, *context)

    def _mlp_again(self, x_BSD: Tensor, *context: Context) -> Tensor:
        """Only the input is kept; chunk by chunk, so that what stands between is there for one chunk at a time."""
        parts = [
            checkpoint(self._mlp_of, x, *context, use_reentrant=False, preserve_rng_state=False,
                       context_fn=partial(_twice, self, x))
            for x in x_BSD.chunk(self.mlp_chunks, 1)
        ]  # fmt: skip
        return parts[0] if len(parts) == 1 else torch.cat(parts, 1)

    def _mlp_of(self, x_BSD: Tensor, *context: Context) -> Tensor:
        return self.mlp(self.mlp_norm(x_BSD), *context)

    def forward(self, x_BSD: Tensor, ctx: Context) -> Tensor:
        """x_BSD."""
        x = self._with_attention(x_BSD, ctx) if "attention" in self.halves else x_BSD
        return self._with_mlp(x, ctx) if "mlp" in self.halves else x

    def _with_attention(self, x_BSD: Tensor, ctx: Context) -> Tensor:
        return x_BSD + self.attention_dropout(self._attend(x_BSD, ctx), ctx.batch.places)

    def _with_mlp(self, x_BSD: Tensor, ctx: Context) -> Tensor:
        return x_BSD + self.mlp_dropout(self._mlp(x_BSD), ctx.batch.places)

    def _attend(self, x_BSD: Tensor, ctx: Context) -> Tensor:
        """Attention with its norm."""
        if self.recompute:
            return self.attention(x_BSD, ctx, self.attention_norm)
        return self.attention(self.attention_norm(x_BSD), ctx)


Contexts = tuple[AbstractContextManager[Any], AbstractContextManager[Any]]


def _twice(block: PreNormBlock, x: Tensor) -> Contexts:
    """For `checkpoint`: contexts of the first and of the second forward of an MLP of x."""
    return nullcontext(), block.unasked(x.shape)


def again(block: nn.Module, x: Tensor) -> Contexts:
    """The same of blocks of which this is the last; an MLP that is computed again on its own ends by itself."""
    by_itself = isinstance(block, PreNormBlock) and (block.recompute_mlp or block.mlp_chunks > 1)
    return _twice(block, x) if isinstance(block, PreNormBlock) and not by_itself else (nullcontext(), nullcontext())


class ParallelBlock(PreNormBlock):
    """x + attention(norm(x)) + mlp(norm'(x)): both branches read the same residual stream."""

    def forward(self, x_BSD: Tensor, ctx: Context) -> Tensor:
        """x_BSD."""
        ids = ctx.batch.places
        a, m = self._attend(x_BSD, ctx), self._mlp(x_BSD)
        return x_BSD + self.attention_dropout(a, ids) + self.mlp_dropout(m, ids)


class PostNormBlock(PreNormBlock):
    """x + norm(attention(x)), then x + norm(mlp(x)): the norms stand after what the others have them before."""

    @contextmanager
    def unasked(self, shape: torch.Size) -> Iterator[None]:
        """The norm reads what the MLP gives."""
        yield

    def _attend(self, x_BSD: Tensor, ctx: Context) -> Tensor:
        return self.attention_norm(self.attention(_narrow(x_BSD, self.attention_norm), ctx))

    def _mlp(self, x_BSD: Tensor, *context: Context) -> Tensor:
        again = self.recompute_mlp or self.mlp_chunks > 1
        return self._mlp_again(x_BSD, *context) if again else self._mlp_of(x_BSD, *context)

    def _mlp_of(self, x_BSD: Tensor, *context: Context) -> Tensor:
        return self.mlp_norm(self.mlp(_narrow(x_BSD, self.mlp_norm), *context))


class SumNormBlock(PreNormBlock):
    """norm(x + attention(x)), then norm(x + mlp(x)): the norms stand on the residual stream. Source: Vaswani et al.
    2017, section 3.1.
    """

    @contextmanager
    def unasked(self, shape: torch.Size) -> Iterator[None]:
        """The norm behind it reads what the MLP gives, unless the MLP is computed again on its own."""
        alone = self.recompute_mlp or self.mlp_chunks > 1
        with super().unasked(shape) if alone else nullcontext():
            yield

    def _in_chunks(self) -> tuple[nn.Module, ...]:
        return (self.mlp,)

    def _with_attention(self, x_BSD: Tensor, ctx: Context) -> Tensor:
        y = self.attention(x_BSD, ctx)
        return self.attention_norm(x_BSD + self.attention_dropout(y, ctx.batch.places))

    def _with_mlp(self, x_BSD: Tensor, ctx: Context) -> Tensor:
        return self.mlp_norm(super()._with_mlp(x_BSD, ctx))

    def _mlp(self, x_BSD: Tensor, *context: Context) -> Tensor:
        again = self.recompute_mlp or self.mlp_chunks > 1
        return self._mlp_again(x_BSD, *context) if again else self._mlp_of(x_BSD, *context)

    def _mlp_of(self, x_BSD: Tensor, *context: Context) -> Tensor:
        return self.mlp(x_BSD, *context)


class SandwichBlock(PreNormBlock):
    """Norms before attention and MLP, and norms of their results (`after`) before these are added."""

    def __init__(
        self,
        norms: tuple[nn.Module, nn.Module],
        after: tuple[nn.Module, nn.Module],
        attention: Attention,
        mlp: nn.Module,
        dropout: float,
        name: str,
    ) -> None:
        super().__init__(norms, attention, mlp, dropout, name)
        self.attention_post_norm, self.mlp_post_norm = after

    @contextmanager
    def unasked(self, shape: torch.Size) -> Iterator[None]:
        """The norm behind it reads what the MLP gives."""
        yield

    def _attend(self, x_BSD: Tensor, ctx: Context) -> Tensor:
        return self.attention_post_norm(super()._attend(x_BSD, ctx))

    def _mlp(self, x_BSD: Tensor, *context: Context) -> Tensor:
        return self.mlp_post_norm(super()._mlp(x_BSD, *context))


class ExpertBlock(PreNormBlock):
    """The MLP is a choice of experts, which sees the batch too."""

    def _with_mlp(self, x_BSD: Tensor, ctx: Context) -> Tensor:
        y = self._mlp(x_BSD, ctx) if self.recompute_mlp else self.mlp(x_BSD, ctx, self.mlp_norm)
        return x_BSD + self.mlp_dropout(y, ctx.batch.places)

    def _last(self) -> Any:
        return getattr(self, "mlp", None)


def _narrow(x_BSD: Tensor, norm: nn.Module) -> Tensor:
    """x_BSD in the type of the weights; the residual stream may be wider."""
    return x_BSD.to(norm.weight.dtype)  # type: ignore[arg-type]
