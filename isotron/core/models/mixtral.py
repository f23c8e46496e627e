"""Mixtral: Mistral's blocks with experts in place of MLPs.

Configuration and layout in `mixtral_config.py`. Legend: B batch, S sequence, D hidden, N head size.
"""

from __future__ import annotations

from isotron.core.models.mixtral_config import MixtralConfig
from isotron.core.nn.attention import Attention
from isotron.core.nn.block import PreNormBlock
from isotron.core.nn.decoder import Decoder
from isotron.core.nn.dropout import Dropout
from isotron.core.nn.moe import expert_block
from isotron.core.nn.norm import RMSNorm
from isotron.core.nn.rotary import rotary_decoder


def block(cfg: MixtralConfig, layer: int) -> PreNormBlock:
    """Block number `layer`."""
    d, n = cfg.hidden_size, cfg.head_size
    probabilities = Dropout(cfg.attention_dropout, f"layers.{layer}.attention.core")
    attention = Attention(
        d, cfg.num_attention_heads, cfg.kv_heads, n, probabilities, bias=False, window=cfg.sliding_window
    )
    return expert_block(cfg, layer, attention)


def build(cfg: MixtralConfig, layers: range, first: bool, last: bool, padded_vocab: int) -> Decoder:
    """The decoder for a range of layers, with the embedding on the first and the head on the last stage."""
    return rotary_decoder(cfg, {i: block(cfg, i) for i in layers}, RMSNorm, first, last, padded_vocab)
