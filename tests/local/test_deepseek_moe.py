"""DeepSeekMoE-16B as it was published: `transformers` has no such model, so its blocks are written down here, plainly,
and stand in for LLaMA's MLPs.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn as nn
from safetensors.torch import load_file, save_file
from torch import Tensor
from torch.nn.functional import silu

from isotron.core.batch import Batch
from isotron.core.models.deepseek_moe_config import PRESETS
from isotron.core.parallel.plan import Layout
from isotron.hub.folder import open_folder
from isotron.hub.live import from_hf, to_hf
from isotron.planner.parameters import count_parameters

transformers = pytest.importorskip("transformers")

PUBLISHED: dict[str, Any] = {
    "architectures": ["DeepseekForCausalLM"], "model_type": "deepseek", "attention_bias": False,
    "attention_dropout": 0.0, "aux_loss_alpha": 0.001, "bos_token_id": 100000, "eos_token_id": 100001,
    "first_k_dense_replace": 1, "hidden_act": "silu", "hidden_size": 2048, "initializer_range": 0.02,
    "intermediate_size": 10944, "max_position_embeddings": 4096, "moe_intermediate_size": 1408, "moe_layer_freq": 1,
    "n_routed_experts": 64, "n_shared_experts": 2, "norm_topk_prob": False, "num_attention_heads": 16,
    "num_experts_per_tok": 6, "num_hidden_layers": 28, "num_key_value_heads": 16, "pretraining_tp": 1,
    "rms_norm_eps": 1e-06, "rope_scaling": None, "rope_theta": 10000.0, "scoring_func": "softmax", "seq_aux": True,
    "tie_word_embeddings": False, "torch_dtype": "bfloat16", "use_cache": True, "vocab_size": 102400,
}  # fmt: skip
SMALL = {
    **PUBLISHED, "hidden_size": 48, "intermediate_size": 72, "moe_intermediate_size": 20, "n_routed_experts": 8,
    "num_attention_heads": 4, "num_key_value_heads": 4, "num_experts_per_tok": 3, "num_hidden_layers": 3,
    "vocab_size": 131, "max_position_embeddings": 64, "torch_dtype": "float32",
}  # fmt: skip


class Gated(nn.Module):
    """An MLP with the published names."""

    def __init__(self, hidden: int, width: int) -> None:
        super().__init__()
        self.gate_proj, self.up_proj = (nn.Linear(hidden, width, bias=False) for _ in range(2))
        self.down_proj = nn.Linear(width, hidden, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.down_proj(silu(self.gate_proj(x)) * self.up_proj(x))


class Block(nn.Module):
    """Softmax over all experts, the best k weighted by it as they are, and the shared experts as one MLP."""

    def __init__(self, c: dict[str, Any]) -> None:
        super().__init__()
        d, width = c["hidden_size"], c["moe_intermediate_size"]
        self.k = c["num_experts_per_tok"]
        self.gate = nn.Linear(d, c["n_routed_experts"], bias=False)
        self.experts = nn.ModuleList(Gated(d, width) for _ in range(c["n_routed_experts"]))
        self.shared_experts = Gated(d, width * c["n_shared_experts"])

    def forward(self, x: Tensor) -> Tensor:
        weights, chosen = self.gate(x).softmax(-1).topk(self.k, -1)
        share = torch.zeros_like(self.gate(x)).scatter(-1, chosen, weights)
        return self.shared_experts(x) + sum(share[..., i : i + 1] * expert(x) for i, expert in enumerate(self.experts))


def twin() -> Any:
    """A small model of the published form with random weights."""
    names = ("hidden_size", "intermediate_size", "num_attention_heads", "num_key_value_heads", "num_hidden_layers",
             "vocab_size", "max_position_embeddings", "rms_norm_eps", "tie_word_embeddings")  # fmt: skip
    model = transformers.LlamaForCausalLM(transformers.LlamaConfig(**{n: SMALL[n] for n in names}))
    for layer in model.model.layers[SMALL["first_k_dense_replace"] :]:
        layer.mlp = Block(SMALL)
    generator = torch.Generator().manual_seed(5)
    with torch.no_grad():
        for p in model.parameters():
            p.copy_(torch.randn(p.shape, generator=generator) * 0.15 + (1.0 if p.ndim == 1 else 0.0))
    return model.eval()


def test_the_published_config_is_the_preset(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(PUBLISHED))
    found = open_folder(tmp_path).model
    assert found == PRESETS["deepseek-moe-16b"]
    assert count_parameters(found) == 16_375_728_128


def test_logits_and_the_way_back(tmp_path: Path) -> None:
    model = twin()
    (tmp_path / "a").mkdir()
    (tmp_path / "a" / "config.json").write_text(json.dumps(SMALL))
    save_file({n: p.detach().contiguous() for n, p in model.named_parameters()}, tmp_path / "a" / "model.safetensors")
    ours = from_hf(tmp_path / "a", Layout(dp=1, make_vocab_size_divisible_by=1))
    rows = torch.randint(0, 131, (2, 40), generator=torch.Generator().manual_seed(3))
    batch = Batch(rows, rows, torch.ones(2, 40), torch.arange(40).expand(2, -1), torch.arange(2))
    (stage,) = ours.stages.values()
    with torch.no_grad():
        _, found = stage.module.eval().logits(batch, {})
        wanted = model(rows).logits
    assert (found - wanted).abs().max() <= 1e-5 * wanted.abs().max()
    to_hf(ours, tmp_path / "b", like=tmp_path / "a")
    old, new = (load_file(tmp_path / d / "model.safetensors") for d in "ab")
    assert old.keys() == new.keys() and all(torch.equal(old[n], new[n]) for n in old)
    assert open_folder(tmp_path / "b").model == open_folder(tmp_path / "a").model
