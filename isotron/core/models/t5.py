"""T5: an encoder, and a decoder that looks at it. Configuration and layout in `t5_config.py`.

Legend: B batch, S sequence, D hidden.
"""

from __future__ import annotations

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
    """A range of blocks with the ends that belong to it: the encoder's norm stands behind its last block, the decoder's
    tokens are embedded before its first.
    """
    middle, d, eps = cfg.encoder_num_layers, cfg.hidden_size, cfg.norm_epsilon
    encodes, begins, decodes = layers.start < middle and bool(layers), middle in layers, layers.stop > middle
    ends: dict[str, nn.Module] = {}
    if first or begins:
        ends["embed"] = Embedding(padded_vocab, d)
    if first:
        ends["dropout"] = Dropout(cfg.hidden_dropout, "embed")
    if encodes:
        ends["encoder_bias"] = _bias(cfg, causal=False)
    if middle - 1 in layers:
        ends["encoder_norm"] = RMSNorm(d, eps)
    if begins:
        ends["decoder_dropout"] = Dropout(cfg.hidden_dropout, "decoder_embed")
    if decodes and layers:
        ends["decoder_bias"] = _bias(cfg, causal=True)
    if last:
        ends["norm"] = OutputNorm(d, eps, cfg.output_factor)
        ends["head"] = Head(d, padded_vocab)
    blocks = {i: block(cfg, i) for i in layers}
    return EncoderDecoder(blocks, ends, (middle, cfg.num_layers), layers, first)


def _bias(cfg: T5Config, causal: bool) -> RelativeBias:
    buckets, farthest = cfg.relative_attention_num_buckets, cfg.relative_attention_max_distance
    return RelativeBias(buckets, cfg.num_attention_heads, farthest, causal)
