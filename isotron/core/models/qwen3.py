"""Qwen3 (dense): LLaMA blocks with norms on each head of queries and keys.

Configuration and layout in `qwen3_config.py`. Legend: B batch, S sequence, D hidden, N head size.
"""

from __future__ import annotations

from isotron.core.models.qwen3_config import Qwen3Config
from isotron.core.nn.attention import Attention
from isotron.core.nn.block import PreNormBlock
from isotron.core.nn.decoder import Decoder
from isotron.core.nn.dropout import Dropout
from isotron.core.nn.mlp import GatedMLP
from isotron.core.nn.norm import RMSNorm
from isotron.core.nn.rotary import rotary_decoder


def attention(cfg: Qwen3Config, layer: int) -> Attention:
    """The attention of block number `layer`."""
    n = cfg.head_size
    probabilities = Dropout(cfg.attention_dropout, f"layers.{layer}.attention.core")
    heads = cfg.num_attention_heads, cfg.kv_heads
    qk_norms = RMSNorm(n, cfg.norm_epsilon), RMSNorm(n, cfg.norm_epsilon)
    return Attention(cfg.hidden_size, *heads, n, probabilities, bias=False, qk_norms=qk_norms, window=cfg.window(layer))


def block(cfg: Qwen3Config, layer: int) -> PreNormBlock:
    """Block number `layer`."""
    d, name = cfg.hidden_size, f"layers.{layer}"
    norms = RMSNorm(d, cfg.norm_epsilon), RMSNorm(d, cfg.norm_epsilon)
    return PreNormBlock(norms, attention(cfg, layer), GatedMLP(d, cfg.ffn), cfg.hidden_dropout, name)


def build(cfg: Qwen3Config, layers: range, first: bool, last: bool, padded_vocab: int) -> Decoder:
    """The decoder for a range of layers, with the embedding on the first and the head on the last stage."""
    return rotary_decoder(cfg, {i: block(cfg, i) for i in layers}, RMSNorm, first, last, padded_vocab)
