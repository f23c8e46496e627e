"""GPT-OSS: rotary attention with sinks and biases, and experts with a clipped gate.

Configuration and layout in `gpt_oss_config.py`. Legend: B batch, S sequence, D hidden, N rows, F feed-forward.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from isotron.core.models.gpt_oss_config import GptOssConfig
from isotron.core.nn.attention import Attention
from isotron.core.nn.block import PreNormBlock
from isotron.core.nn.decoder import Decoder
from isotron.core.nn.dropout import Dropout
from isotron.core.nn.moe import expert_block
from isotron.core.nn.norm import RMSNorm
from isotron.core.nn.rotary import rotary_decoder


@dataclass(frozen=True)
class ClippedSwiGLU:
    """(up + 1) * gate * sigmoid(alpha * gate), of a gate at most `limit` and an up between -limit and limit."""

    alpha: float
    limit: float

    def forward(self, gate_up: Tensor, out: Tensor) -> None:
        """[N, F]."""
        gate, up = self._clipped(gate_up)
        torch.mul(gate, torch.sigmoid(gate * self.alpha), out=out)
        out.mul_(up.add_(1))

    def backward(self, gate_up: Tensor, dy: Tensor, out: Tensor) -> None:
        """[N, 2F]."""
        gate, up = self._clipped(gate_up)
        dgate, dup = out.chunk(2, -1)
        s = torch.sigmoid(gate * self.alpha)
        torch.mul(gate, s, out=dup)
        torch.mul(s, (1 - s).mul_(gate).mul_(self.alpha).add_(1), out=dgate)
        dgate.mul_(up.add_(1)).mul_(dy)
        dup.mul_(dy)
        whole_gate, whole_up = gate_up.chunk(2, -1)
        dgate.masked_fill_(whole_gate > self.limit, 0)
        dup.masked_fill_(whole_up.abs() > self.limit, 0)

    def _clipped(self, gate_up: Tensor) -> tuple[Tensor, Tensor]:
        gate, up = gate_up.chunk(2, -1)
        return gate.clamp(max=self.limit), up.clamp(-self.limit, self.limit)


def block(cfg: GptOssConfig, layer: int) -> PreNormBlock:
    """Block number `layer`."""
    heads = cfg.num_attention_heads, cfg.kv_heads
    probabilities = Dropout(cfg.attention_dropout, f"layers.{layer}.attention.core")
    attention = Attention(
        cfg.hidden_size, *heads, cfg.head_size, probabilities, bias=True, window=cfg.window(layer),
        softmax_type=cfg.softmax_type,
    )  # fmt: skip
    return expert_block(cfg, layer, attention, ClippedSwiGLU(cfg.swiglu_alpha, cfg.swiglu_limit), bias=True)


def build(cfg: GptOssConfig, layers: range, first: bool, last: bool, padded_vocab: int) -> Decoder:
    """The decoder for a range of layers, with the embedding on the first and the head on the last stage."""
    return rotary_decoder(cfg, {i: block(cfg, i) for i in layers}, RMSNorm, first, last, padded_vocab)
