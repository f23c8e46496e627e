"""BERT: an encoder that fills in masked words. Configuration and layout in `bert_config.py`."""

from __future__ import annotations

from collections.abc import Callable

import torch.nn as nn

from isotron.core.models.bert_config import BertConfig
from isotron.core.nn.attention import Attention, Causal
from isotron.core.nn.block import PreNormBlock, SumNormBlock
from isotron.core.nn.dropout import Dropout
from isotron.core.nn.embedding import Embedding, Positions
from isotron.core.nn.encoder import Encoder
from isotron.core.nn.linear import Linear
from isotron.core.nn.loss import Head
from isotron.core.nn.mlp import MLP
from isotron.core.nn.norm import LayerNorm


def block(cfg: BertConfig, layer: int) -> PreNormBlock:
    """Block number `layer`."""
    d, name = cfg.hidden_size, f"layers.{layer}"
    probabilities = Dropout(cfg.attention_dropout, f"{name}.attention.core")
    attention = Attention(d, cfg.num_attention_heads, cfg.kv_heads, cfg.head_size, probabilities, bias=True)
    attention.core = Causal(probabilities, causal=False)
    norms = LayerNorm(d, cfg.norm_epsilon), LayerNorm(d, cfg.norm_epsilon)
    kind = SumNormBlock if cfg.norms_of_sums else PreNormBlock
    return kind(norms, attention, MLP(d, cfg.ffn, cfg.activation, bias=True), cfg.hidden_dropout, name)


def build(cfg: BertConfig, layers: range, first: bool, last: bool, padded_vocab: int) -> Encoder:
    """The encoder for a range of layers, with the embeddings on the first and what predicts on the last stage."""
    d, eps = cfg.hidden_size, cfg.norm_epsilon
    make: dict[str, Callable[[], nn.Module]] = {
        "embed": lambda: Embedding(padded_vocab, d),
        "positions": lambda: Positions(cfg.max_position_embeddings, d),
        "types": lambda: Positions(cfg.type_vocab_size, d),
        "embed_norm": lambda: LayerNorm(d, eps),
        "dropout": lambda: Dropout(cfg.hidden_dropout, "embed"),
        "final_norm": lambda: LayerNorm(d, eps),
        "transform": lambda: Linear(d, d, bias=True),
        "norm": lambda: LayerNorm(d, eps),
        "head": lambda: Head(d, padded_vocab, bias=True),
    }
    ends = {name: make[name]() for name in cfg.ends_of(layers, first, last)}
    return Encoder({i: block(cfg, i) for i in layers}, ends, cfg.activation)
