"""T5 in Hugging Face's spelling: config.json both ways, names of tensors. PURE.

Older libraries say with `tie_word_embeddings` false that the output layer is apart and its input not scaled (v1.1);
newer ones say it with `scale_decoder_outputs` false, and `tie_word_embeddings` then means nothing. Both are written.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from isotron.core.models.hf_fields import Fields
from isotron.core.models.hf_names import Mapped, same, stacked
from isotron.core.models.t5_config import T5Config

CONFIG = T5Config
MODEL_TYPE = "t5"
ARCHITECTURE = "T5ForConditionalGeneration"
PREFIX = ""
HEAD, EMBEDDING = "lm_head.weight", "shared.weight"
# copies of the embedding, and a bias that the first published files have and that nothing reads
IGNORED = ("*coder.embed_tokens.weight", "decoder.block.0.layer.1.EncDecAttention.relative_attention_bias.weight")


def read_config(values: Mapping[str, Any], where: str) -> T5Config:
    """The model config that a config.json describes; what is not understood is refused, all of it at once."""
    fields = Fields(values, where)
    fields.need("is_encoder_decoder", True)
    scaled, tied = fields.take("scale_decoder_outputs", None), fields.take("tie_word_embeddings", True)
    for derived in ("dense_act_fn", "is_gated_act"):
        fields.take(derived, None)
    dropout, layers = float(fields.take("dropout_rate", 0.1)), fields.take("num_layers", 6, "num_hidden_layers")
    config = T5Config(
        encoder_num_layers=layers,
        decoder_num_layers=fields.take("num_decoder_layers", layers),
        hidden_size=fields.take("d_model", 512, "hidden_size"),
        num_attention_heads=fields.take("num_heads", 8, "num_attention_heads"),
        head_dim=fields.take("d_kv", 64, "head_dim"),
        ffn_hidden_size=fields.take("d_ff", 2048),
        vocab_size=fields.take("vocab_size", 32128),
        max_position_embeddings=fields.take("n_positions", 512),
        decoder_start_token_id=fields.take("decoder_start_token_id", 0),
        norm_epsilon=float(fields.take("layer_norm_epsilon", 1e-6)),
        feed_forward_proj=fields.choose("feed_forward_proj", "relu", {"relu": "relu", "gated-gelu": "gated-gelu"}),
        tie_embeddings=bool(tied if scaled is None else scaled),
        hidden_dropout=dropout,
        attention_dropout=dropout,
        relative_attention_num_buckets=fields.take("relative_attention_num_buckets", 32),
        relative_attention_max_distance=fields.take("relative_attention_max_distance", 128),
        initializer_factor=float(fields.take("initializer_factor", 1.0)),
    )
    fields.finish(encoder_decoder=True)
    return config


def write_config(cfg: T5Config) -> dict[str, Any]:
    """The fields of config.json that say what the weights compute."""
    return {
        "is_encoder_decoder": True,
        "num_layers": cfg.encoder_num_layers,
        "num_decoder_layers": cfg.decoder_layers,
        "d_model": cfg.hidden_size,
        "num_heads": cfg.num_attention_heads,
        "d_kv": cfg.head_size,
        "d_ff": cfg.ffn,
        "vocab_size": cfg.vocab_size,
        "n_positions": cfg.max_position_embeddings,
        "decoder_start_token_id": cfg.decoder_start_token_id,
        "layer_norm_epsilon": cfg.norm_epsilon,
        "feed_forward_proj": cfg.feed_forward_proj,
        "dropout_rate": cfg.hidden_dropout,
        "relative_attention_num_buckets": cfg.relative_attention_num_buckets,
        "relative_attention_max_distance": cfg.relative_attention_max_distance,
        "initializer_factor": cfg.initializer_factor,
        "tie_word_embeddings": cfg.tie_embeddings,
        "scale_decoder_outputs": cfg.tie_embeddings,
    }


def tensors(cfg: T5Config) -> list[Mapped]:
    """Every tensor of the model, ours and theirs."""
    v, d, buckets = cfg.vocab_size, cfg.hidden_size, cfg.relative_attention_num_buckets
    found = [same("embed.weight", EMBEDDING, v)]
    for side, norm in (("encoder", "encoder_norm"), ("decoder", "norm")):
        bias = f"{side}.block.0.layer.0.SelfAttention.relative_attention_bias.weight"
        found.append(same(f"{side}_bias.weight", bias, buckets))
        found.append(same(f"{norm}.weight", f"{side}.final_layer_norm.weight", d))
    found += [] if cfg.tie_embeddings else [same("head.weight", HEAD, v)]
    return [*found, *(m for i in range(cfg.num_layers) for m in _layer(cfg, i))]


def _layer(cfg: T5Config, i: int) -> list[Mapped]:
    d, inner, middle, ours = cfg.hidden_size, cfg.num_attention_heads * cfg.head_size, cfg.encoder_num_layers, i
    decodes = i >= middle
    theirs = f"decoder.block.{i - middle}.layer" if decodes else f"encoder.block.{i}.layer"
    attention, mlp = f"{theirs}.0.SelfAttention", f"{theirs}.{1 + decodes}.DenseReluDense"
    up = [(f"{mlp}.wi_{k}.weight", cfg.ffn) for k in (0, 1)] if cfg.gated else [(f"{mlp}.wi.weight", cfg.ffn)]
    found = [
        same(f"layers.{ours}.attention_norm.weight", f"{theirs}.0.layer_norm.weight", d),
        stacked(f"layers.{ours}.attention.qkv.weight", ((f"{attention}.{x}.weight", inner) for x in "qkv")),
        same(f"layers.{ours}.attention.out.weight", f"{attention}.o.weight", d),
        same(f"layers.{ours}.mlp_norm.weight", f"{theirs}.{1 + decodes}.layer_norm.weight", d),
        stacked(f"layers.{ours}.mlp.{'gate_up' if cfg.gated else 'up'}.weight", up),
        same(f"layers.{ours}.mlp.down.weight", f"{mlp}.wo.weight", d),
    ]
    if not decodes:
        return found
    cross = f"{theirs}.1.EncDecAttention"
    return [
        *found,
        same(f"layers.{ours}.cross_norm.weight", f"{theirs}.1.layer_norm.weight", d),
        same(f"layers.{ours}.cross.q.weight", f"{cross}.q.weight", inner),
        stacked(f"layers.{ours}.cross.kv.weight", ((f"{cross}.{x}.weight", inner) for x in "kv")),
        same(f"layers.{ours}.cross.out.weight", f"{cross}.o.weight", d),
    ]
