"""DeepSeek-V3 and R1: configuration, presets and layout table. PURE; the modules are in `deepseek_v3.py`.

Notable: latent attention; the first blocks have an MLP, the others 256 finely cut experts in 8 groups, of which a token
visits 8 from the best 4 groups, chosen by sigmoid score plus a bias that keeps the load even without a loss, and one
expert that every token visits; rotary positions stretched by YaRN, which also scales the scores. Source: DeepSeek-AI
2024b (DeepSeek-V3), sections 2.1 and 4.2.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase

from isotron.core.layout import Part, Rule, Split, Table
from isotron.core.models.llama_shapes import LlamaShapes
from isotron.core.nn.moe_config import MoEConfig, with_experts
from isotron.core.options import option


@dataclass(frozen=True)
class DeepseekV3Config(MoEConfig, LlamaShapes):
    """Everything that changes the function of the weights. Sizes are global, never divided by a layout."""

    family = "deepseek_v3"

    q_lora_rank: int = option(0, "width of the latent vector of queries; 0 means queries are projected at once")
    kv_lora_rank: int = option(32, "width of the latent vector that keys and values unfold from")
    qk_head_dim: int = option(128, "unrotated elements of a query or key head")
    qk_pos_emb_head_dim: int = option(64, "rotated elements of a query or key head")
    v_head_dim: int = option(128, "elements of a value head")

    mtp_num_layers: int = option(0, "modules that each predict one token further, trained with a loss of their own")
    mtp_loss_scaling_factor: float = option(0.1, "factor of the mean of their losses")

    @property
    def aux_terms(self) -> dict[str, int]:
        """What the blocks with experts report, and the losses of tokens further ahead."""
        depths = range(self.mtp_num_layers)
        labels = [f"layers.{i}" for i in self.moe_layers]
        labels += [f"mtp.{k}" for k in depths if self.has_experts(self.num_layers - 1)]
        return {**self.terms_of(labels), **{f"mtp/{k}": 1 for k in depths}}

    @property
    def head_size(self) -> int:
        """Elements of a query or key head, unrotated and rotated."""
        return self.qk_head_dim + self.qk_pos_emb_head_dim

    @property
    def rope_size(self) -> int:
        """Elements of a head that are rotated."""
        return self.qk_pos_emb_head_dim

    @property
    def kv_heads(self) -> int:
        """Every query head has a key and a value of its own."""
        return self.num_attention_heads

    @property
    def score_scale(self) -> float:
        """Factor of the scores: stretched positions make them sharper."""
        scale: float = self.head_size**-0.5
        if self.rope_scaling == "yarn" and self.rope_mscale_all_dim and self.rope_factor > 1:
            scale *= (0.1 * self.rope_mscale_all_dim * math.log(self.rope_factor) + 1) ** 2
        return scale

    def layout(self, padded_vocab: int) -> Table:
        """Parameter names -> placement. `padded_vocab` >= vocab_size rows are held for the vocabulary."""
        table = super().layout(padded_vocab)
        kept = tuple(rule for rule in table.rules if ".attention." not in rule.pattern)
        found = with_experts(self, replace(table, rules=(*latent_rules(self, "layers.*.attention"), *kept)))
        if not self.mtp_num_layers:
            return found
        last = f"layers.{self.num_layers - 1}"
        own = [r for r in found.rules if fnmatchcase(last, ".".join(r.pattern.split(".")[:2]))]
        rules = [
            replace(rule, pattern=f"mtp.{k}.block.{rule.pattern.split('.', 2)[2]}")
            for k in range(self.mtp_num_layers)
            for rule in own
        ]
        d = self.hidden_size
        rules += [
            Rule(f"mtp.{k}.join.weight", (d, 2 * d), std=self.init_method_std) for k in range(self.mtp_num_layers)
        ]
        return replace(found, rules=(*rules, *found.rules), ties=(*found.ties, ("mtp_embed.weight", "embed.weight")))


def latent_rules(cfg: DeepseekV3Config, name: str) -> tuple[Rule, ...]:
    """The projections and norms of latent attention."""
    d, h, q, r = cfg.hidden_size, cfg.num_attention_heads, cfg.q_lora_rank, cfg.kv_lora_rank
    n, v, p, std = cfg.head_size, cfg.v_head_dim, cfg.qk_pos_emb_head_dim, cfg.init_method_std
    unfolded, out_std = cfg.qk_head_dim + v, std / (2 * cfg.num_layers) ** 0.5
    query = (
        Rule(f"{name}.q_down.weight", (q, d), std=std),
        Rule(f"{name}.q_norm.weight", (q,), init="ones", decay=False),
    )
    return (
        *(query if q else ()),
        Rule(f"{name}.q_up.weight", (h * n, q or d), Split(0, (Part(h, n),)), "heads", std=std),
        Rule(f"{name}.kv_down.weight", (r + p, d), std=std),
        Rule(f"{name}.kv_norm.weight", (r,), init="ones", decay=False),
        Rule(f"{name}.kv_up.weight", (h * unfolded, r), Split(0, (Part(h, unfolded),)), "heads", std=std),
        Rule(f"{name}.out.weight", (d, h * v), Split(1, (Part(h, v),)), std=out_std),
    )


PRESETS: dict[str, DeepseekV3Config] = {
    "deepseek-v3-tiny": DeepseekV3Config(
        4, 64, 4, 4, ffn_hidden_size=128, q_lora_rank=32, kv_lora_rank=24, qk_head_dim=16, qk_pos_emb_head_dim=8,
        v_head_dim=16, num_experts=8, moe_router_topk=2, moe_ffn_hidden_size=32, moe_layer_freq="[0]*1+[1]*3",
        moe_router_score_function="sigmoid", moe_router_enable_expert_bias=True, moe_router_num_groups=4,
        moe_router_group_topk=2, moe_router_group_scores=2, moe_router_topk_scaling_factor=2.5,
        moe_shared_expert_intermediate_size=32,
        moe_aux_loss_coeff=1e-4,
    ),
    "deepseek-v3": DeepseekV3Config(
        61, 7168, 128, 128, 0, 18432, 129280, 163840, 1e-6, rope_theta=10000.0, rope_scaling="yarn", rope_factor=40.0,
        rope_original_positions=4096, rope_mscale=1.0, rope_mscale_all_dim=1.0, q_lora_rank=1536, kv_lora_rank=512,
        num_experts=256, moe_router_topk=8, moe_ffn_hidden_size=2048, moe_layer_freq="[0]*3+[1]*58",
        moe_router_score_function="sigmoid", moe_router_enable_expert_bias=True, moe_router_num_groups=8,
        moe_router_group_topk=4, moe_router_group_scores=2, moe_router_topk_scaling_factor=2.5,
        moe_shared_expert_intermediate_size=2048, moe_aux_loss_coeff=1e-4,
    ),
}  # fmt: skip
