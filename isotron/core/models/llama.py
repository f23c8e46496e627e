"""LLaMA: pre-norm blocks of rotary grouped-query attention and SwiGLU. Configuration and layout in `llama_config.py`.

Legend: B batch, S sequence, D hidden.
"""

from __future__ import annotations

import torch
import torch.nn as nn

from isotron.core.batch import Batch
from isotron.core.models.llama_config import LlamaConfig
from isotron.core.nn.attention import Attention
from isotron.core.nn.block import PreNormBlock
from isotron.core.nn.context import Context
from isotron.core.nn.decoder import Decoder
from isotron.core.nn.dropout import Dropout
from isotron.core.nn.embedding import Embedding
from isotron.core.nn.loss import Head
from isotron.core.nn.mlp import GatedMLP
from isotron.core.nn.norm import RMSNorm
from isotron.core.nn.rope import angles


def block(cfg: LlamaConfig, layer: int) -> PreNormBlock:
    """Block number `layer`."""
    d, name = cfg.hidden_size, f"layers.{layer}"
    probabilities = Dropout(cfg.attention_dropout, f"{name}.attention.core")
    attention = Attention(d, cfg.num_attention_heads, cfg.kv_heads, cfg.head_size, probabilities, bias=False)
    norms = RMSNorm(d, cfg.norm_epsilon), RMSNorm(d, cfg.norm_epsilon)
    return PreNormBlock(norms, attention, GatedMLP(d, cfg.ffn), cfg.hidden_dropout, name)


def build(cfg: LlamaConfig, layers: range, first: bool, last: bool, padded_vocab: int) -> Decoder:
    """The decoder for a range of layers, with the embedding on the first and the head on the last stage."""

    def context(batch: Batch, dtype: torch.dtype) -> Context:
        return Context(batch, angles(batch.positions, cfg.head_size, cfg.rope_theta, dtype))

    ends: dict[str, nn.Module] = {}
    if first:
        ends["embed"] = Embedding(padded_vocab, cfg.hidden_size)
        ends["dropout"] = Dropout(cfg.hidden_dropout, "embed")
    if last:
        ends["norm"] = RMSNorm(cfg.hidden_size, cfg.norm_epsilon)
        ends["head"] = Head(cfg.hidden_size, padded_vocab)
    return Decoder({i: block(cfg, i) for i in layers}, context, ends)
