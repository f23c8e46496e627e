"""Gemma 2: LLaMA's projections between norms before and after, GeGLU, bounded scores.

Configuration and layout in `gemma2_config.py`. Legend: B batch, S sequence, D hidden, N head size.
"""

from __future__ import annotations

from functools import partial

from isotron.core.models.gemma2_config import Gemma2Config
from isotron.core.nn.attention import Attention
from isotron.core.nn.block import SandwichBlock
from isotron.core.nn.decoder import Decoder
from isotron.core.nn.dropout import Dropout
from isotron.core.nn.mlp import GatedMLP
from isotron.core.nn.norm import RMSNorm
from isotron.core.nn.rotary import rotary_decoder

OneCentred = partial(RMSNorm, offset=1.0)


def block(cfg: Gemma2Config, layer: int) -> SandwichBlock:
    """Block number `layer`."""
    probabilities = Dropout(cfg.attention_dropout, f"layers.{layer}.attention.core")
    attention = Attention(
        cfg.hidden_size, cfg.num_attention_heads, cfg.kv_heads, cfg.head_size, probabilities, bias=False,
        window=cfg.window(layer), scale=cfg.score_scale, softcap=cfg.attn_logit_softcapping,
    )  # fmt: skip
    return sandwich(cfg, layer, attention)


def sandwich(cfg: Gemma2Config, layer: int, attention: Attention) -> SandwichBlock:
    """A block around an attention layer."""
    before, after = (
        (OneCentred(cfg.hidden_size, cfg.norm_epsilon), OneCentred(cfg.hidden_size, cfg.norm_epsilon)) for _ in range(2)
    )
    mlp = GatedMLP(cfg.hidden_size, cfg.ffn, "gelu_tanh")
    return SandwichBlock(before, after, attention, mlp, cfg.hidden_dropout, f"layers.{layer}")


def build(cfg: Gemma2Config, layers: range, first: bool, last: bool, padded_vocab: int) -> Decoder:
    """The decoder for a range of layers, with the embedding on the first and the head on the last stage."""
    return rotary_decoder(cfg, {i: block(cfg, i) for i in layers}, OneCentred, first, last, padded_vocab)
