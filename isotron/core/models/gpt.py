"""GPT-2 and GPT-3: pre-norm blocks with LayerNorm, GELU and biases. Configuration and layout in `gpt_config.py`.

Legend: B batch, S sequence, D hidden.
"""

from __future__ import annotations

import torch
import torch.nn as nn

from isotron.core.batch import Batch
from isotron.core.models.gpt_config import GPTConfig
from isotron.core.nn.attention import Attention
from isotron.core.nn.block import PreNormBlock
from isotron.core.nn.context import Context
from isotron.core.nn.decoder import Decoder
from isotron.core.nn.dropout import Dropout
from isotron.core.nn.embedding import Embedding, Positions
from isotron.core.nn.loss import Head
from isotron.core.nn.mlp import MLP
from isotron.core.nn.norm import LayerNorm


def block(cfg: GPTConfig, layer: int) -> PreNormBlock:
    """Block number `layer`."""
    d, name = cfg.hidden_size, f"layers.{layer}"
    probabilities = Dropout(cfg.attention_dropout, f"{name}.attention.core")
    attention = Attention(d, cfg.num_attention_heads, cfg.kv_heads, cfg.head_size, probabilities, bias=True)
    norms = LayerNorm(d, cfg.norm_epsilon), LayerNorm(d, cfg.norm_epsilon)
    return PreNormBlock(norms, attention, MLP(d, cfg.ffn, cfg.activation, bias=True), cfg.hidden_dropout, name)


def build(cfg: GPTConfig, layers: range, first: bool, last: bool, padded_vocab: int) -> Decoder:
    """The decoder for a range of layers, with the embeddings on the first and the head on the last stage."""

    def context(batch: Batch, dtype: torch.dtype) -> Context:
        return Context(batch)

    ends: dict[str, nn.Module] = {}
    if first:
        ends["embed"] = Embedding(padded_vocab, cfg.hidden_size)
        ends["positions"] = Positions(cfg.max_position_embeddings, cfg.hidden_size)
        ends["dropout"] = Dropout(cfg.hidden_dropout, "embed")
    if last:
        ends["norm"] = LayerNorm(cfg.hidden_size, cfg.norm_epsilon)
        ends["head"] = Head(cfg.hidden_size, padded_vocab)
    return Decoder({i: block(cfg, i) for i in layers}, context, ends)
