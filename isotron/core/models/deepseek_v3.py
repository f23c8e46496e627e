"""DeepSeek-V3: latent attention, an MLP in the first blocks and experts in the others.

Configuration and layout in `deepseek_v3_config.py`. Legend: B batch, S sequence, D hidden.
"""

from __future__ import annotations

from isotron.core.models.deepseek_v3_config import DeepseekV3Config
from isotron.core.nn.block import PreNormBlock
from isotron.core.nn.decoder import Decoder
from isotron.core.nn.dropout import Dropout
from isotron.core.nn.embedding import Embedding
from isotron.core.nn.mla import LatentAttention, LatentSizes
from isotron.core.nn.moe import expert_block
from isotron.core.nn.mtp import Depth, Predictions
from isotron.core.nn.norm import RMSNorm
from isotron.core.nn.rotary import rotary_decoder

LATENT_EPSILON = 1e-6  # of the norms inside attention, whatever the model's


def block(cfg: DeepseekV3Config, layer: int, name: str = "") -> PreNormBlock:
    """Block number `layer`, or one like it called `name`."""
    name = name or f"layers.{layer}"
    probabilities = Dropout(cfg.attention_dropout, f"{name}.attention.core")
    sizes = LatentSizes(cfg.q_lora_rank, cfg.kv_lora_rank, cfg.qk_head_dim, cfg.qk_pos_emb_head_dim, cfg.v_head_dim)
    attention = LatentAttention(
        cfg.hidden_size, cfg.num_attention_heads, sizes, probabilities, cfg.score_scale, LATENT_EPSILON
    )
    return expert_block(cfg, layer, attention, name=name)


def predictions(cfg: DeepseekV3Config) -> Predictions:
    """Modules for tokens further ahead, each with a block like the last one."""
    depths = [
        Depth(cfg.hidden_size, cfg.norm_epsilon, block(cfg, cfg.num_layers - 1, f"mtp.{k}"))
        for k in range(cfg.mtp_num_layers)
    ]
    return Predictions(depths, cfg.mtp_loss_scaling_factor)


def build(cfg: DeepseekV3Config, layers: range, first: bool, last: bool, padded_vocab: int) -> Decoder:
    """The decoder for a range of layers, with the embedding on the first and the head on the last stage."""
    made = rotary_decoder(cfg, {i: block(cfg, i) for i in layers}, RMSNorm, first, last, padded_vocab)
    if last and cfg.mtp_num_layers:
        made.add_ends({"mtp_embed": Embedding(padded_vocab, cfg.hidden_size), "mtp": predictions(cfg)})
    return made
