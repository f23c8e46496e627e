"""LLaVA: a tower that looks at pictures, and LLaMA. Configuration and layout in `llava_config.py`.

Legend: V width of the tower, D hidden.
"""

from __future__ import annotations

from collections.abc import Callable

import torch.nn as nn

from isotron.core.models import llama
from isotron.core.models.llava_config import LlavaConfig
from isotron.core.nn.attention import Attention, Causal
from isotron.core.nn.block import PreNormBlock
from isotron.core.nn.dropout import Dropout
from isotron.core.nn.embedding import Embedding
from isotron.core.nn.image_decoder import ImageDecoder
from isotron.core.nn.loss import Head
from isotron.core.nn.mlp import MLP
from isotron.core.nn.norm import LayerNorm, RMSNorm
from isotron.core.nn.rotary import rotary_context
from isotron.core.nn.vision import Patches, Projector


def block(cfg: LlavaConfig, layer: int) -> PreNormBlock:
    """Block number `layer`: of the tower first, then of the decoder."""
    if layer >= cfg.vision_num_layers:
        return llama.block(cfg, layer)
    v, heads, name = cfg.vision_hidden_size, cfg.vision_num_attention_heads, f"layers.{layer}"
    probabilities = Dropout(0.0, f"{name}.attention.core")
    attention = Attention(v, heads, heads, v // heads, probabilities, bias=True)
    attention.core = Causal(probabilities, causal=False)
    norms = LayerNorm(v, cfg.vision_norm_epsilon), LayerNorm(v, cfg.vision_norm_epsilon)
    return PreNormBlock(norms, attention, MLP(v, cfg.vision_ffn_hidden_size, "quick_gelu", bias=True), 0.0, name)


def build(cfg: LlavaConfig, layers: range, first: bool, last: bool, padded_vocab: int) -> ImageDecoder:
    """A range of blocks with the ends that belong to it."""
    d, v = cfg.hidden_size, cfg.vision_hidden_size
    make: dict[str, Callable[[], nn.Module]] = {
        "vision": lambda: Patches(cfg.pixels, cfg.patches, v, cfg.vision_norm_epsilon),
        "projector": lambda: Projector(v, d),
        "embed": lambda: Embedding(padded_vocab, d),
        "norm": lambda: RMSNorm(d, cfg.norm_epsilon),
        "head": lambda: Head(d, padded_vocab),
    }
    ends = {name: make[name]() for name in cfg.ends_of(layers, first, last)}
    blocks = {i: block(cfg, i) for i in layers}
    split, sizes = (cfg.vision_num_layers, cfg.num_layers), (cfg.patches, v, d)
    return ImageDecoder(blocks, rotary_context(cfg), ends, split, layers, first, sizes, cfg.image_token_id)
