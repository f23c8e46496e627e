"""DeepSeekMoE: LLaMA's attention, an MLP in the first block and experts in the others.

Configuration and layout in `deepseek_moe_config.py`. Legend: B batch, S sequence, D hidden.
"""

from __future__ import annotations

from isotron.core.models.deepseek_moe_config import DeepseekMoEConfig
from isotron.core.nn.attention import Attention
from isotron.core.nn.block import PreNormBlock
from isotron.core.nn.decoder import Decoder
from isotron.core.nn.dropout import Dropout
from isotron.core.nn.moe import expert_block
from isotron.core.nn.norm import RMSNorm
from isotron.core.nn.rotary import rotary_decoder


def block(cfg: DeepseekMoEConfig, layer: int) -> PreNormBlock:
    """Block number `layer`."""
    probabilities = Dropout(cfg.attention_dropout, f"layers.{layer}.attention.core")
    heads = cfg.num_attention_heads, cfg.kv_heads, cfg.head_size
    return expert_block(cfg, layer, Attention(cfg.hidden_size, *heads, probabilities, bias=False))


def build(cfg: DeepseekMoEConfig, layers: range, first: bool, last: bool, padded_vocab: int) -> Decoder:
    """The decoder for a range of layers, with the embedding on the first and the head on the last stage."""
    return rotary_decoder(cfg, {i: block(cfg, i) for i in layers}, RMSNorm, first, last, padded_vocab)
