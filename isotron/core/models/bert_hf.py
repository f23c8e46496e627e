"""BERT in Hugging Face's spelling: config.json both ways, names of tensors. PURE.

Models of pairs of sentences have two more parts, which predict whether one follows the other: they are left out.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from isotron.core.models.bert_config import BertConfig
from isotron.core.models.gpt_hf import ACTIVATIONS
from isotron.core.models.hf_fields import Fields, written_only_if
from isotron.core.models.hf_names import Mapped, same, stacked

CONFIG = BertConfig
MODEL_TYPE = "bert"
ARCHITECTURE = "BertForMaskedLM"
PREFIX = "bert."
HEAD, EMBEDDING = "cls.predictions.decoder.weight", "bert.embeddings.word_embeddings.weight"
# numbers that follow from their places, the output layer's bias once more, and what is for pairs of sentences
IGNORED = ("*embeddings.position_ids", "cls.predictions.bias", "cls.predictions.decoder.bias", "*pooler.dense.*",
           "cls.seq_relationship.*")  # fmt: skip
OLDER = {"LayerNorm.gamma": "LayerNorm.weight", "LayerNorm.beta": "LayerNorm.bias"}  # in the first published files


def read_config(values: Mapping[str, Any], where: str) -> BertConfig:
    """The model config that a config.json describes; what is not understood is refused, all of it at once."""
    fields = Fields(values, where)
    fields.need("position_embedding_type", "absolute")
    fields.need("is_decoder", False)
    d = fields.take("hidden_size", 768)
    config = BertConfig(
        num_layers=fields.take("num_hidden_layers", 12),
        hidden_size=d,
        num_attention_heads=fields.take("num_attention_heads", 12),
        ffn_hidden_size=fields.take("intermediate_size", 3072),
        vocab_size=fields.take("vocab_size", 30522),
        max_position_embeddings=fields.take("max_position_embeddings", 512),
        type_vocab_size=fields.take("type_vocab_size", 2),
        norm_epsilon=float(fields.take("layer_norm_eps", 1e-12)),
        activation=fields.choose("hidden_act", "gelu", ACTIVATIONS),
        tie_embeddings=fields.take("tie_word_embeddings", True),
        hidden_dropout=float(fields.take("hidden_dropout_prob", 0.1)),
        attention_dropout=float(fields.take("attention_probs_dropout_prob", 0.1)),
        init_method_std=float(fields.take("initializer_range", 0.02)),
    )
    fields.finish()
    return config


def write_config(cfg: BertConfig) -> dict[str, Any]:
    """The fields of config.json that say what the weights compute."""
    _has_place(cfg)
    return {
        "num_hidden_layers": cfg.num_layers,
        "hidden_size": cfg.hidden_size,
        "num_attention_heads": cfg.num_attention_heads,
        "intermediate_size": cfg.ffn,
        "vocab_size": cfg.vocab_size,
        "max_position_embeddings": cfg.max_position_embeddings,
        "type_vocab_size": cfg.type_vocab_size,
        "layer_norm_eps": cfg.norm_epsilon,
        "hidden_act": {"gelu": "gelu", "gelu_tanh": "gelu_new"}[cfg.activation],
        "hidden_dropout_prob": cfg.hidden_dropout,
        "attention_probs_dropout_prob": cfg.attention_dropout,
        "initializer_range": cfg.init_method_std,
        "position_embedding_type": "absolute",
        "is_decoder": False,
        "tie_word_embeddings": cfg.tie_embeddings,
    }


def _has_place(cfg: BertConfig) -> None:
    written_only_if(cfg, MODEL_TYPE, norm_placement="post")


def tensors(cfg: BertConfig) -> list[Mapped]:
    """Every tensor of the model, ours and theirs; refused where theirs has no such model."""
    _has_place(cfg)
    v, d, cls = cfg.vocab_size, cfg.hidden_size, "cls.predictions"
    found = [
        same("embed.weight", EMBEDDING, v),
        same("positions.weight", "bert.embeddings.position_embeddings.weight", cfg.max_position_embeddings),
        same("types.weight", "bert.embeddings.token_type_embeddings.weight", cfg.type_vocab_size),
        *_both("embed_norm", "bert.embeddings.LayerNorm", d),
        *_both("transform", f"{cls}.transform.dense", d),
        *_both("norm", f"{cls}.transform.LayerNorm", d),
        same("head.bias", f"{cls}.bias" if cfg.tie_embeddings else f"{cls}.decoder.bias", v),
    ]
    found += [] if cfg.tie_embeddings else [same("head.weight", HEAD, v)]
    return [*found, *(m for i in range(cfg.num_layers) for m in _layer(cfg, i))]


def _both(ours: str, theirs: str, rows: int) -> list[Mapped]:
    return [same(f"{ours}.{leaf}", f"{theirs}.{leaf}", rows) for leaf in ("weight", "bias")]


def _layer(cfg: BertConfig, i: int) -> list[Mapped]:
    ours, theirs, d = f"layers.{i}", f"bert.encoder.layer.{i}", cfg.hidden_size
    heads = [f"{theirs}.attention.self.{x}" for x in ("query", "key", "value")]
    return [
        *(stacked(f"{ours}.attention.qkv.{leaf}", ((f"{x}.{leaf}", d) for x in heads)) for leaf in ("weight", "bias")),
        *_both(f"{ours}.attention.out", f"{theirs}.attention.output.dense", d),
        *_both(f"{ours}.attention_norm", f"{theirs}.attention.output.LayerNorm", d),
        *_both(f"{ours}.mlp.up", f"{theirs}.intermediate.dense", cfg.ffn),
        *_both(f"{ours}.mlp.down", f"{theirs}.output.dense", d),
        *_both(f"{ours}.mlp_norm", f"{theirs}.output.LayerNorm", d),
    ]
