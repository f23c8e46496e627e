"""Mixtral 8x7B and 8x22B: configuration, presets and layout table. PURE; the modules are in `mixtral.py`.

Notable: Mistral's attention; every MLP is a choice of experts, two per token, weighted by a softmax over the two.
Source: Jiang et al. 2024 (Mixtral of Experts), section 2.
"""

from __future__ import annotations

from dataclasses import dataclass

from isotron.core.layout import Table
from isotron.core.models.mistral_config import MistralConfig
from isotron.core.nn.moe_config import MoEConfig, with_experts


@dataclass(frozen=True)
class MixtralConfig(MoEConfig, MistralConfig):
    """Everything that changes the function of the weights. Sizes are global, never divided by a layout."""

    family = "mixtral"

    def layout(self, padded_vocab: int) -> Table:
        """Parameter names -> placement. `padded_vocab` >= vocab_size rows are held for the vocabulary."""
        return with_experts(self, super().layout(padded_vocab))


PRESETS: dict[str, MixtralConfig] = {
    "tiny-moe": MixtralConfig(4, 64, 4, 2, ffn_hidden_size=128, moe_aux_loss_coeff=0.01),
    "mixtral-8x7b": MixtralConfig(
        32, 4096, 32, 8, 128, 14336, 32000, 32768, rope_theta=1000000.0, moe_aux_loss_coeff=0.02
    ),
    "mixtral-8x22b": MixtralConfig(
        56, 6144, 48, 8, 128, 16384, 32768, 65536, rope_theta=1000000.0, moe_aux_loss_coeff=0.001
    ),
}
