"""Qwen3 with experts in place of MLPs.

Configuration and layout in `qwen3_moe_config.py`. Legend: B batch, S sequence, D hidden.
"""

from __future__ import annotations

from isotron.core.models.qwen3 import attention
from isotron.core.models.qwen3_moe_config import Qwen3MoeConfig
from isotron.core.nn.block import PreNormBlock
from isotron.core.nn.decoder import Decoder
from isotron.core.nn.moe import expert_block
from isotron.core.nn.norm import RMSNorm
from isotron.core.nn.rotary import rotary_decoder


def block(cfg: Qwen3MoeConfig, layer: int) -> PreNormBlock:
    """Block number `layer`."""
    return expert_block(cfg, layer, attention(cfg, layer))


def build(cfg: Qwen3MoeConfig, layers: range, first: bool, last: bool, padded_vocab: int) -> Decoder:
    """The decoder for a range of layers, with the embedding on the first and the head on the last stage."""
    return rotary_decoder(cfg, {i: block(cfg, i) for i in layers}, RMSNorm, first, last, padded_vocab)
