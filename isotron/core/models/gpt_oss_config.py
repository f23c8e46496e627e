"""GPT-OSS 20B and 120B: configuration, presets and layout table. PURE; the modules are in `gpt_oss.py`.

Notable: every MLP is a choice of experts, four per token, weighted by a softmax over the four; router, experts and
attention have biases; the gate is clipped; attention has a sink, a learned score per head; every other block attends
over a window; YaRN to 131,072 positions. Source: OpenAI 2025 (gpt-oss model card), section 2.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from isotron.core.layout import Part, Rule, Split, Table
from isotron.core.models.llama_shapes import LlamaShapes
from isotron.core.nn.moe_config import MoEConfig, with_experts
from isotron.core.nn.softmax_config import SoftmaxConfig
from isotron.core.options import option


@dataclass(frozen=True)
class GptOssConfig(SoftmaxConfig, MoEConfig, LlamaShapes):
    """Everything that changes the function of the weights. Sizes are global, never divided by a layout."""

    family = "gpt_oss"

    sliding_window: int = option(0, "positions a query attends to, itself included; 0 means all", unit="tokens")
    window_attn_skip_freq: int = option(2, "every how-manieth block attends to all positions; 0 means none does")
    swiglu_alpha: float = option(1.702, "the gate of an expert is gate x sigmoid(this x gate)")
    swiglu_limit: float = option(7.0, "bound on an expert's gate, from above, and on what it multiplies, both ways")

    def window(self, layer: int) -> int:
        """Positions that a query of this layer attends to; 0 means all."""
        every = self.window_attn_skip_freq
        return self.sliding_window if not every or (layer + 1) % every else 0

    def layout(self, padded_vocab: int) -> Table:
        """Parameter names -> placement. `padded_vocab` >= vocab_size rows are held for the vocabulary."""
        table = with_experts(self, super().layout(padded_vocab))
        d, n, f, e = self.hidden_size, self.head_size, self.expert_width, self.num_experts
        q, kv, one = Part(self.num_attention_heads, n), Part(self.kv_heads, n), Part(f)
        rows = (self.num_attention_heads + 2 * self.kv_heads) * n
        a, mlp = "layers.*.attention", "layers.*.mlp"
        biases = (
            Rule(f"{a}.qkv.bias", (rows,), Split(0, (q, kv, kv)), "heads", "zeros", decay=False),
            Rule(f"{a}.out.bias", (d,), init="zeros", decay=False),
            Rule(f"{mlp}.router.bias", (e,), init="zeros", decay=False),
            Rule(
                f"{mlp}.experts.gate_up.bias", (2 * e * f,), Split(0, (one, one) * e, "etp"), init="zeros", decay=False,
                experts=e,
            ),
            # split by outputs where the matrices are split by inputs, since the ranks' results are added up
            Rule(
                f"{mlp}.experts.down.bias", (e * d,), Split(0, (Part(d),) * e, "etp"), init="zeros", decay=False,
                experts=e,
            ),
        )  # fmt: skip
        return replace(table, rules=(*biases, *self.sink_rules(self.num_attention_heads), *table.rules))


def _published(layers: int, experts: int) -> GptOssConfig:
    return GptOssConfig(
        layers, 2880, 64, 8, 64, 2880, 201088, 131072, rope_theta=150000.0, rope_scaling="yarn", rope_factor=32.0,
        rope_original_positions=4096, rope_truncate=False, num_experts=experts, moe_router_topk=4,
        moe_aux_loss_coeff=0.9, sliding_window=128, softmax_type="learnable",
    )  # fmt: skip


PRESETS: dict[str, GptOssConfig] = {
    "gpt-oss-tiny": GptOssConfig(4, 64, 4, 2, 16, 96, sliding_window=64, softmax_type="learnable"),
    "gpt-oss-20b": _published(24, 32),
    "gpt-oss-120b": _published(36, 128),
}
