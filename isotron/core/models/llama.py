"""LLaMA: pre-norm blocks of rotary grouped-query attention and SwiGLU. Configuration and layout in `llama_config.py`.

Legend: B batch, S sequence, D hidden.
"""

from __future__ import annotations

from isotron.core.models.llama_config import LlamaConfig
from isotron.core.nn.attention import Attention
from isotron.core.nn.block import PreNormBlock
from isotron.core.nn.decoder import Decoder
from isotron.core.nn.dropout import Dropout
from isotron.core.nn.mlp import GatedMLP
from isotron.core.nn.norm import RMSNorm
from isotron.core.nn.rotary import rotary_decoder


def block(cfg: LlamaConfig, layer: int) -> PreNormBlock:
    """Block number `layer`."""
    d, name = cfg.hidden_size, f"layers.{layer}"
    probabilities = Dropout(cfg.attention_dropout, f"{name}.attention.core")
    heads = cfg.num_attention_heads, cfg.kv_heads
    attention = Attention(
        d, *heads, cfg.head_size, probabilities, bias=cfg.attention_bias, softmax_type=cfg.softmax_type
    )
    norms = RMSNorm(d, cfg.norm_epsilon), RMSNorm(d, cfg.norm_epsilon)
    return PreNormBlock(norms, attention, GatedMLP(d, cfg.ffn, bias=cfg.mlp_bias), cfg.hidden_dropout, name)


def build(cfg: LlamaConfig, layers: range, first: bool, last: bool, padded_vocab: int) -> Decoder:
    """The decoder for a range of layers, with the embedding on the first and the head on the last stage."""
    return rotary_decoder(cfg, {i: block(cfg, i) for i in layers}, RMSNorm, first, last, padded_vocab)
