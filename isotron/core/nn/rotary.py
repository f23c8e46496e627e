"""What families with rotary positions share: angles once per pass, an embedding before and a head after the blocks.

Legend: B batch, S sequence, D hidden.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
import torch.nn as nn

from isotron.core.batch import Batch
from isotron.core.nn.context import Context
from isotron.core.nn.decoder import Decoder
from isotron.core.nn.dropout import Dropout
from isotron.core.nn.embedding import Embedding
from isotron.core.nn.loss import Head
from isotron.core.nn.rope import angles as plain_angles
from isotron.core.nn.rope import stretched_angles


def rotary_decoder(
    cfg: Any,
    blocks: Mapping[int, nn.Module],
    norm: Callable[[int, float], nn.Module],
    first: bool,
    last: bool,
    padded_vocab: int,
) -> Decoder:
    """Blocks with the embedding on the first stage, and the final norm and the head on the last one.

    Where the config says so: another base for blocks with a window, a factor of the embedding, a bound on logits.
    """

    ends: dict[str, nn.Module] = {}
    if first:
        ends["embed"] = Embedding(padded_vocab, cfg.hidden_size, getattr(cfg, "embedding_scale", 1.0))
        ends["dropout"] = Dropout(cfg.hidden_dropout, "embed")
    if last:
        ends["norm"] = norm(cfg.hidden_size, cfg.norm_epsilon)
        ends["head"] = Head(cfg.hidden_size, padded_vocab, getattr(cfg, "final_logit_softcapping", 0.0))
    return Decoder(blocks, rotary_context(cfg), ends)


def rotary_context(cfg: Any) -> Callable[[Batch, Any], Context]:
    """What makes the context of a pass: the angles of its positions."""

    def context(batch: Batch, dtype: torch.dtype) -> Context:
        longest, turned = cfg.max_position_embeddings, getattr(cfg, "rope_size", cfg.head_size)
        angles = stretched_angles(batch.positions, cfg, turned, longest, dtype, lambda: batch.longest)
        local = getattr(cfg, "rope_local_theta", 0.0)
        if not local:
            return Context(batch, angles)
        return Context(batch, angles, local_rope=plain_angles(batch.positions, turned, local, dtype))

    return context
