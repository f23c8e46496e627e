"""OLMo 2: norms after attention and MLP, and over all heads of queries and of keys.

Configuration and layout in `olmo2_config.py`. Legend: B batch, S sequence, D hidden, H query heads, K key/value heads,
N head size.
"""

from __future__ import annotations

from isotron.core.models.olmo2_config import Olmo2Config
from isotron.core.nn.attention import Attention
from isotron.core.nn.block import PostNormBlock
from isotron.core.nn.decoder import Decoder
from isotron.core.nn.dropout import Dropout
from isotron.core.nn.mlp import GatedMLP
from isotron.core.nn.norm import RMSNorm
from isotron.core.nn.rotary import rotary_decoder


def block(cfg: Olmo2Config, layer: int) -> PostNormBlock:
    """Block number `layer`."""
    d, n, eps, name = cfg.hidden_size, cfg.head_size, cfg.norm_epsilon, f"layers.{layer}"
    heads = cfg.num_attention_heads, cfg.kv_heads
    qk_norms = RMSNorm(heads[0] * n, eps), RMSNorm(heads[1] * n, eps)
    probabilities = Dropout(cfg.attention_dropout, f"{name}.attention.core")
    attention = Attention(d, *heads, n, probabilities, bias=False, qk_norms=qk_norms, over_heads=True)
    return PostNormBlock((RMSNorm(d, eps), RMSNorm(d, eps)), attention, GatedMLP(d, cfg.ffn), cfg.hidden_dropout, name)


def build(cfg: Olmo2Config, layers: range, first: bool, last: bool, padded_vocab: int) -> Decoder:
    """The decoder for a range of layers, with the embedding on the first and the head on the last stage."""
    return rotary_decoder(cfg, {i: block(cfg, i) for i in layers}, RMSNorm, first, last, padded_vocab)
