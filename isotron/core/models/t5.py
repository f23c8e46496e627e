"""T5: an encoder, and a decoder that looks at it. Configuration and layout in `t5_config.py`.

Legend: B batch, S sequence, D hidden.
"""

from __future__ import annotations

from collections.abc import Callable

import torch.nn as nn
from torch import Tensor

from isotron.core.models.t5_config import T5Config
from isotron.core.nn.attention import Attention
from isotron.core.nn.block import PreNormBlock
from isotron.core.nn.cross import CrossAttention, CrossBlock, Scored
from isotron.core.nn.dropout import Dropout
from isotron.core.nn.embedding import Embedding
from isotron.core.nn.encoder_decoder import EncoderDecoder
from isotron.core.nn.loss import Head
from isotron.core.nn.mlp import MLP, GatedMLP
from isotron.core.nn.norm import RMSNorm
from isotron.core.nn.relative import RelativeBias


class OutputNorm(RMSNorm):
    """The norm before the output layer, and the factor of what it gives."""

    def __init__(self, size: int, eps: float, factor: float) -> None:
        super().__init__(size, eps)
        self.factor = factor

    def forward(self, x: Tensor) -> Tensor:
        """Shape of x kept."""
        y = super().forward(x)
        return y if self.factor == 1.0 else y * self.factor


def block(cfg: T5Config, layer: int) -> PreNormBlock:
    """Block number `layer`: of the encoder first, then of the decoder."""
    d, name, size = cfg.hidden_size, f"layers.{layer}", (cfg.num_attention_heads, cfg.head_size)
    decodes = layer >= cfg.encoder_num_layers
    probabilities = Dropout(cfg.attention_dropout, f"{name}.attention.core")
    attention = Attention(d, size[0], size[0], size[1], probabilities, bias=False)
    attention.core = Scored(probabilities, causal=decodes, biased=True, padded=not decodes)  # type: ignore[assignment]
    norms = [RMSNorm(d, cfg.norm_epsilon) for _ in range(2 + decodes)]
    mlp = GatedMLP(d, cfg.ffn, "gelu_tanh") if cfg.gated else MLP(d, cfg.ffn, "relu", bias=False)
    if not decodes:
        return PreNormBlock((norms[0], norms[1]), attention, mlp, cfg.hidden_dropout, name)
    cross = CrossAttention(d, *size, Dropout(cfg.attention_dropout, f"{name}.cross.core"))
    return CrossBlock((norms[0], norms[1], norms[2]), attention, cross, mlp, cfg.hidden_dropout, name)


def build(cfg: T5Config, layers: range, first: bool, last: bool, padded_vocab: int) -> EncoderDecoder:
    """A range of blocks with the ends that belong to it."""
    d, eps, dropout = cfg.hidden_size, cfg.norm_epsilon, cfg.hidden_dropout
    make: dict[str, Callable[[], nn.Module]] = {
        "embed": lambda: Embedding(padded_vocab, d),
        "dropout": lambda: Dropout(dropout, "embed"),
        "encoder_bias": lambda: _bias(cfg, causal=False),
        "encoder_norm": lambda: RMSNorm(d, eps),
        "decoder_dropout": lambda: Dropout(dropout, "decoder_embed"),
        "decoder_bias": lambda: _bias(cfg, causal=True),
        "norm": lambda: OutputNorm(d, eps, cfg.output_factor),
        "head": lambda: Head(d, padded_vocab),
    }
    ends = {name: make[name]() for name in cfg.ends_of(layers, first, last)}
    blocks = {i: block(cfg, i) for i in layers}
    return EncoderDecoder(blocks, ends, (cfg.encoder_num_layers, cfg.num_layers), layers, first)


def _bias(cfg: T5Config, causal: bool) -> RelativeBias:
    buckets, farthest = cfg.relative_attention_num_buckets, cfg.relative_attention_max_distance
    return RelativeBias(buckets, cfg.num_attention_heads, farthest, causal)
