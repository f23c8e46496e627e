"""GPT-NeoX: attention and MLP side by side behind LayerNorms. Configuration and layout in `neox_config.py`.

Legend: B batch, S sequence, D hidden.
"""

from __future__ import annotations

from isotron.core.models.neox_config import NeoXConfig
from isotron.core.nn.attention import Attention
from isotron.core.nn.block import ParallelBlock, PreNormBlock
from isotron.core.nn.decoder import Decoder
from isotron.core.nn.dropout import Dropout
from isotron.core.nn.mlp import MLP
from isotron.core.nn.norm import LayerNorm
from isotron.core.nn.rotary import rotary_decoder


def block(cfg: NeoXConfig, layer: int) -> PreNormBlock:
    """Block number `layer`."""
    d, name = cfg.hidden_size, f"layers.{layer}"
    probabilities = Dropout(cfg.attention_dropout, f"{name}.attention.core")
    attention = Attention(d, cfg.num_attention_heads, cfg.kv_heads, cfg.head_size, probabilities, bias=True)
    norms = LayerNorm(d, cfg.norm_epsilon), LayerNorm(d, cfg.norm_epsilon)
    kind = ParallelBlock if cfg.parallel_residual else PreNormBlock
    return kind(norms, attention, MLP(d, cfg.ffn, cfg.activation, bias=True), cfg.hidden_dropout, name)


def build(cfg: NeoXConfig, layers: range, first: bool, last: bool, padded_vocab: int) -> Decoder:
    """The decoder for a range of layers, with the embedding on the first and the head on the last stage."""
    return rotary_decoder(cfg, {i: block(cfg, i) for i in layers}, LayerNorm, first, last, padded_vocab)
