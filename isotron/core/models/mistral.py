"""Mistral: LLaMA blocks whose attention looks back over a window.

Configuration and layout in `mistral_config.py`. Legend: B batch, S sequence, D hidden, N head size.
"""

from __future__ import annotations

from isotron.core.models.mistral_config import MistralConfig
from isotron.core.nn.attention import Attention
from isotron.core.nn.block import PreNormBlock
from isotron.core.nn.decoder import Decoder
from isotron.core.nn.dropout import Dropout
from isotron.core.nn.mlp import GatedMLP
from isotron.core.nn.norm import RMSNorm
from isotron.core.nn.rotary import rotary_decoder


def block(cfg: MistralConfig, layer: int) -> PreNormBlock:
    """Block number `layer`."""
    d, n, name = cfg.hidden_size, cfg.head_size, f"layers.{layer}"
    probabilities = Dropout(cfg.attention_dropout, f"{name}.attention.core")
    attention = Attention(
        d, cfg.num_attention_heads, cfg.kv_heads, n, probabilities, bias=False, window=cfg.sliding_window
    )
    norms = RMSNorm(d, cfg.norm_epsilon), RMSNorm(d, cfg.norm_epsilon)
    return PreNormBlock(norms, attention, GatedMLP(d, cfg.ffn), cfg.hidden_dropout, name)


def build(cfg: MistralConfig, layers: range, first: bool, last: bool, padded_vocab: int) -> Decoder:
    """The decoder for a range of layers, with the embedding on the first and the head on the last stage."""
    return rotary_decoder(cfg, {i: block(cfg, i) for i in layers}, RMSNorm, first, last, padded_vocab)
