"""Gemma 3, the text model: Gemma 2's blocks with norms on heads, and a rotation of their own in blocks with a window.

Configuration and layout in `gemma3_config.py`. Legend: B batch, S sequence, D hidden, N head size.
"""

from __future__ import annotations

from isotron.core.models.gemma2 import OneCentred, sandwich
from isotron.core.models.gemma3_config import Gemma3Config
from isotron.core.nn.attention import Attention
from isotron.core.nn.block import SandwichBlock
from isotron.core.nn.decoder import Decoder
from isotron.core.nn.dropout import Dropout
from isotron.core.nn.rotary import rotary_decoder


def block(cfg: Gemma3Config, layer: int) -> SandwichBlock:
    """Block number `layer`."""
    n = cfg.head_size
    probabilities = Dropout(cfg.attention_dropout, f"layers.{layer}.attention.core")
    qk_norms = OneCentred(n, cfg.norm_epsilon), OneCentred(n, cfg.norm_epsilon)
    attention = Attention(
        cfg.hidden_size, cfg.num_attention_heads, cfg.kv_heads, n, probabilities, bias=False, qk_norms=qk_norms,
        window=cfg.window(layer), scale=cfg.score_scale, softcap=cfg.attn_logit_softcapping, local=cfg.is_local(layer),
    )  # fmt: skip
    return sandwich(cfg, layer, attention)


def build(cfg: Gemma3Config, layers: range, first: bool, last: bool, padded_vocab: int) -> Decoder:
    """The decoder for a range of layers, with the embedding on the first and the head on the last stage."""
    return rotary_decoder(cfg, {i: block(cfg, i) for i in layers}, OneCentred, first, last, padded_vocab)
